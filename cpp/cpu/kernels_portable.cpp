// The kernels, compiled for any processor.
#define ZS_TARGET_LEVEL 0
#define ZS_TARGET_NAME "portable"
#define ZS_TABLE kernels_portable
#include "kernels_body.h"
