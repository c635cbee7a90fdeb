// Layer norm and RMS norm; schemas and formulas are in zero_strategy/ops/normalization.py.
#pragma once

#include <tuple>

#include "rows.h"

namespace zs {

std::tuple<Tensor, Tensor, Tensor> norm_forward(Tensor input, MaybeTensor weight, MaybeTensor bias, int64_t columns,
                                                double eps, bool centered, bool invertible);
std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor gradient, Tensor saved, Tensor mean, Tensor rstd,
                                                 MaybeTensor weight, MaybeTensor bias, int64_t columns,
                                                 bool centered, bool invertible);

}  // namespace zs
