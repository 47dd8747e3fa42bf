// Runs independent pieces of work on XLA's own threads; shared by the C++ kernels.

#ifndef PALLAS_KERNELS_NATIVE_PARALLEL_H_
#define PALLAS_KERNELS_NATIVE_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace pallas_kernels {

// Calls work(i) once for every i in [0, count), on the calling thread and the pool's, and returns when all are done.
// Threads take pieces in rising order as they become free. The caller works too and waits only for pieces that some
// thread has already begun, so a pool without a free thread costs time, never a deadlock. `work` must not throw.
template <typename Work>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  const int64_t helpers = std::min<int64_t>(pool.num_threads() - 1, count - 1);
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count;
    const Work* work;  // lives on the caller's stack: touched only by who holds a piece, and the caller waits for those
    void Run() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        (*work)(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>();  // a helper may begin after the caller has returned
  shared->count = count;
  shared->work = &work;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([shared] { shared->Run(); });
  shared->Run();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

}  // namespace pallas_kernels

#endif  // PALLAS_KERNELS_NATIVE_PARALLEL_H_
