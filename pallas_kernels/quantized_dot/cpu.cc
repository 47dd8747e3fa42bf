// quantized_dot on CPUs: weights stay packed in memory and are widened to float32 on their way into the product.
// The packing is described in packed.py; the loops are in cpu_kernel.h, and in cpu_int8.h where x is rounded to 8 bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pallas_kernels/native/parallel.h"
#include "pallas_kernels/native/processor.h"
#include "xla/ffi/api/ffi.h"

namespace {

using pallas_kernels::InstructionSet;

constexpr long kGroup = 16;  // outputs whose codes lie side by side
constexpr long kBlock = 32;  // weights along `in` with one scale
constexpr long kQuad = 4;    // weights of one output that lie side by side, in 4-bit codes

enum class Format : int32_t { kQ4_0, kQ4_1, kQ8_0, kInt8 };

// Bytes of one block of one output.
constexpr long code_bytes(Format format) { return format == Format::kQ4_0 || format == Format::kQ4_1 ? 16 : 32; }

// y[rows, out] = x[rows, in] times the weights of one layer; rows that are padding are not among these.
struct Job {
  const uint8_t* codes;
  const void* scales;  // float16, or float32 with kInt8
  const uint16_t* mins;
  const float* x;
  float* y;
  long rows, in, out;
  long blocks() const { return in / kBlock; }
};

using Int4 = int32_t __attribute__((vector_size(16)));
using Kernel = void (*)(const Job&, long first, long last);

constexpr float kSmallest = 1e-30f;  // blocks of x below it are zero

// x in 8 bits: numbers [rows, in], and of each block its step and the sum of its numbers times the step.
struct Rounded {
  int8_t* numbers;
  float *steps, *totals;
};

using RoundedKernel = void (*)(const Job&, const Rounded&, long first, long last);

namespace plain {
#define ISA_TARGET
#define LANES 4
#define TILE_ROWS 3
using Vector = float __attribute__((vector_size(4 * LANES)));
using Int = int32_t __attribute__((vector_size(4 * LANES)));
ISA_TARGET inline Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
ISA_TARGET inline Vector nearest(Vector a) {
  for (int i = 0; i < LANES; ++i) a[i] = std::nearbyint(a[i]);
  return a;
}
ISA_TARGET inline void narrow(const Int* block, int8_t* to) {
  for (int i = 0; i < kBlock; ++i) to[i] = static_cast<int8_t>(block[i / LANES][i % LANES]);
}
ISA_TARGET inline Int bytes(const uint8_t* from) { return Int{from[0], from[1], from[2], from[3]}; }
ISA_TARGET inline Int bytes(const int8_t* from) { return Int{from[0], from[1], from[2], from[3]}; }
ISA_TARGET inline Vector half(const uint16_t* from) {
  Vector values;
  for (int i = 0; i < LANES; ++i) {
    const uint32_t sign = (from[i] & 0x8000u) << 16, rest = from[i] & 0x7fffu;
    uint32_t bits = (rest << 13) + (112u << 23);
    if (rest >= 0x7c00) bits += 112u << 23;  // infinite or not a number
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (rest < 0x400) value = static_cast<float>(rest) * 0x1p-24f;  // below the normal numbers
    std::memcpy(&bits, &value, sizeof value);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    values[i] = value;
  }
  return values;
}
#include "cpu_kernel.h"
#include "cpu_int8.h"
#undef UNROLL
#undef LANES
#undef TILE_ROWS
#undef ISA_TARGET
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
#define ISA_TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define TILE_ROWS 6
#define HAS_MADDUBS
using Vector = float __attribute__((vector_size(4 * LANES)));
using Int = int32_t __attribute__((vector_size(4 * LANES)));
ISA_TARGET inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
ISA_TARGET inline Vector nearest(Vector a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
ISA_TARGET inline void narrow(const Int* block, int8_t* to) {
  const __m256i a = _mm256_packs_epi32((__m256i)block[0], (__m256i)block[1]);
  const __m256i b = _mm256_packs_epi32((__m256i)block[2], (__m256i)block[3]);
  const __m256i mixed = _mm256_packs_epi16(a, b), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(mixed, order));
}
ISA_TARGET inline Int bytes(const uint8_t* from) {
  return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
ISA_TARGET inline Int bytes(const int8_t* from) {
  return (Int)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
ISA_TARGET inline Vector half(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#include "cpu_kernel.h"
#include "cpu_int8.h"
#undef UNROLL
#undef LANES
#undef TILE_ROWS
#undef ISA_TARGET
#undef HAS_MADDUBS
}  // namespace avx2

namespace avx512 {
#define ISA_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define LANES 16
#define TILE_ROWS 12
using Vector = float __attribute__((vector_size(4 * LANES)));
using Int = int32_t __attribute__((vector_size(4 * LANES)));
ISA_TARGET inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
ISA_TARGET inline Int bytes(const uint8_t* from) {
  return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
ISA_TARGET inline Int bytes(const int8_t* from) {
  return (Int)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
ISA_TARGET inline Vector half(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
#include "cpu_kernel.h"
#undef UNROLL
#undef LANES
#undef TILE_ROWS
#undef ISA_TARGET
}  // namespace avx512
#endif

Kernel kernel_for(Format format, InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return avx512::kernel(format);
  if (set == InstructionSet::kAvx2) return avx2::kernel(format);
#endif
  return plain::kernel(format);
}

struct RoundedKernels {
  void (*round)(const Job&, const Rounded&, long first_row, long last_row);
  RoundedKernel multiply;
};

RoundedKernels rounded_kernels_for(Format format, InstructionSet set) {
#if defined(__x86_64__)
  if (set != InstructionSet::kPlain) return {avx2::round_rows, avx2::rounded_kernel(format)};
#endif
  return {plain::round_rows, plain::rounded_kernel(format)};
}

namespace ffi = xla::ffi;

// Calls work(first, last) for pieces of [0, count) of at least `least`, enough to keep the pool's threads equally busy.
template <class Work>
void in_pieces(ffi::ThreadPool& pool, long count, long least, const Work& work) {
  const long size = std::max(count / (16 * std::max<long>(pool.num_threads(), 1)), least);
  pallas_kernels::ParallelFor(pool, (count + size - 1) / size, [&](int64_t piece) {
    work(piece * size, std::min(count, (piece + 1) * size));
  });
}

ffi::Error quantized_dot(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer codes, ffi::AnyBuffer scales,
                         ffi::Buffer<ffi::F16> mins, ffi::Buffer<ffi::S32> layer, ffi::Buffer<ffi::S32> live,
                         ffi::Result<ffi::Buffer<ffi::F32>> y,
                         int32_t format, bool round, std::string_view isa) {
  const long index = layer.typed_data()[0], layers = codes.dimensions()[0];
  if (index < 0 || index >= layers) {
    return ffi::Error::InvalidArgument("layer " + std::to_string(index) + " of " + std::to_string(layers));
  }
  const auto of_layer = [=](const auto& buffer) {
    return static_cast<const uint8_t*>(buffer.untyped_data()) + buffer.size_bytes() / layers * index;
  };
  const long all = x.dimensions()[0], rows = std::clamp<long>(live.typed_data()[0], 0, all);
  const Job job{of_layer(codes), of_layer(scales), reinterpret_cast<const uint16_t*>(of_layer(mins)),
                x.typed_data(), y->typed_data(), rows, x.dimensions()[1], y->dimensions()[1]};
  std::fill(job.y + rows * job.out, job.y + all * job.out, 0.0f);
  if (rows == 0) return ffi::Error::Success();
  const Format kind = static_cast<Format>(format);
  const InstructionSet set = pallas_kernels::Choose(isa);
  const long groups = codes.dimensions()[1];
  if (!round) {
    const Kernel kernel = kernel_for(kind, set);
    in_pieces(pool, groups, 2, [&](long first, long last) { kernel(job, first, last); });
    return ffi::Error::Success();
  }
  if (code_bytes(kind) != 16) return ffi::Error::InvalidArgument("x is rounded for 4-bit weights only");
  const long places = job.rows * job.blocks();
  const std::unique_ptr<int8_t[]> numbers(new int8_t[places * kBlock]);
  const std::unique_ptr<float[]> floats(new float[2 * places]);
  const Rounded rounded{numbers.get(), floats.get(), floats.get() + places};
  const RoundedKernels kernels = rounded_kernels_for(kind, set);
  in_pieces(pool, job.rows, 32, [&](long first, long last) { kernels.round(job, rounded, first, last); });
  in_pieces(pool, groups, 2, [&](long first, long last) { kernels.multiply(job, rounded, first, last); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_kernels_quantized_dot, quantized_dot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()   // x [rows, in]
                                  .Arg<ffi::AnyBuffer>()          // codes
                                  .Arg<ffi::AnyBuffer>()          // scales
                                  .Arg<ffi::Buffer<ffi::F16>>()   // mins
                                  .Arg<ffi::Buffer<ffi::S32>>()   // layer
                                  .Arg<ffi::Buffer<ffi::S32>>()   // live: rows before it are computed
                                  .Ret<ffi::Buffer<ffi::F32>>()   // y [rows, out]
                                  .Attr<int32_t>("format")
                                  .Attr<bool>("round")  // x to 8 bits
                                  .Attr<std::string_view>("isa"));
