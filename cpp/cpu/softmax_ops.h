// Softmax with mask and dropout; schemas and formulas are in zero_strategy/ops/fused_layers.py.
#pragma once

#include <tuple>

#include "rows.h"

namespace zs {

std::tuple<Tensor, Tensor> masked_softmax_dropout(Tensor input, MaybeTensor mask, Tensor state, bool causal, double p);
Tensor masked_softmax_dropout_backward(Tensor gradient, Tensor probabilities, Tensor state, double p);

}  // namespace zs
