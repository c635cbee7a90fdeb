// The kernels, compiled for processors with AVX2 and FMA.
#define ZS_TARGET_LEVEL 2
#define ZS_TARGET_NAME "avx2"
#define ZS_TABLE kernels_avx2
#if defined(__x86_64__)
#include "kernels_body.h"
#endif
