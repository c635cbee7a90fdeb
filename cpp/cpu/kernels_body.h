// One variant of all kernels; included once by each kernels_<target>.cpp.
#include <math.h>
#if ZS_TARGET_LEVEL != 0
#include <immintrin.h>
#endif
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../dynamic_map.h"
#include "kernels.h"

#include "target_begin.h"

namespace zs {
namespace {

#include "../functions.h"
#include "../philox.h"
#include "numbers.h"
#include "streaming.h"
#include "codes.h"
#include "optimizers.h"
#include "moves.h"
#include "statistics.h"
#include "exact_sums.h"
#include "normalization.h"
#include "activation.h"
#include "dropout.h"
#include "softmax.h"
#include "quantization.h"

}  // namespace

extern const Kernels ZS_TABLE = {
    ZS_TARGET_NAME, adam, lion, adagrad, sgd, lamb_direction, lamb_apply, convert, axpby, statistics, exact_sum,
    normalize, normalize_backward,
    bias_gelu, bias_gelu_backward, bias_dropout, bias_dropout_backward,
    softmax, softmax_backward, quantize, dequantize,
};

}  // namespace zs

#include "target_end.h"
