// What this processor runs; shared by the C++ kernels, each compiled for every set of instructions.

#ifndef PALLAS_KERNELS_NATIVE_PROCESSOR_H_
#define PALLAS_KERNELS_NATIVE_PROCESSOR_H_

#include <string_view>

namespace pallas_kernels {

enum class InstructionSet { kPlain, kAvx2, kAvx512 };  // kAvx2: with FMA and F16C; kAvx512: F, BW, DQ and VL

// The best that the processor has, or at most what `name` says: "avx512", "avx2", "plain" or "" for no limit.
inline InstructionSet Choose(std::string_view name) {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx512 && (name.empty() || name == "avx512")) return InstructionSet::kAvx512;
  if (has_avx2 && name != "plain") return InstructionSet::kAvx2;
#endif
  return InstructionSet::kPlain;
}

}  // namespace pallas_kernels

#endif  // PALLAS_KERNELS_NATIVE_PROCESSOR_H_
