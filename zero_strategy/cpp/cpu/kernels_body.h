// One variant of all kernels; included once by each kernels_<target>.cpp.
#include <math.h>
#include <cstddef>
#include <cstring>

#include "kernels.h"

#include "target_begin.h"

namespace zs {
namespace {

#include "numbers.h"
#include "optimizers.h"
#include "moves.h"
#include "statistics.h"

}  // namespace

extern const Kernels ZS_TABLE = {
    ZS_TARGET_NAME, adam, lion, adagrad, sgd, lamb_direction, lamb_apply, convert, axpby, statistics,
};

}  // namespace zs

#include "target_end.h"
