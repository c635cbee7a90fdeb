// The kernels, compiled for processors with AVX-512.
#define ZS_TARGET_LEVEL 512
#define ZS_TARGET_NAME "avx512"
#define ZS_TABLE kernels_avx512
#if defined(__x86_64__)
#include "kernels_body.h"
#endif
