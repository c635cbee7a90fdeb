// A bias with gelu, or with dropout and a residual; schemas and formulas are in zero_strategy/ops.
#pragma once

#include <tuple>

#include "rows.h"

namespace zs {

using torch::headeronly::ScalarType;

Tensor bias_gelu(Tensor input, MaybeTensor bias, bool tanh);
std::tuple<Tensor, Tensor> bias_gelu_backward(Tensor gradient, Tensor input, MaybeTensor bias, bool tanh);
Tensor bias_dropout_residual(Tensor input, MaybeTensor bias, Tensor residual, Tensor state, double p);
std::tuple<Tensor, Tensor> bias_dropout_residual_backward(Tensor gradient, MaybeTensor bias, Tensor state, double p,
                                                          ScalarType dtype);

}  // namespace zs
