// Which of the compiled variants runs on this processor.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace zs {
namespace {

const Kernels& choose() {
#if defined(__x86_64__)
  const char* wish = std::getenv("ZERO_STRATEGY_CPU");
  const bool portable = wish && std::strcmp(wish, "portable") == 0;
  const bool at_most_avx2 = wish && std::strcmp(wish, "avx2") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!portable && !at_most_avx2 && avx512) return kernels_avx512;
  if (!portable && avx2) return kernels_avx2;
#endif
  return kernels_portable;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace zs
