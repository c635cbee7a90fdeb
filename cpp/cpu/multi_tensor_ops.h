// Statistics, copies and sums over lists of tensors; schemas and formulas are in zero_strategy/ops.
#pragma once

#include <tuple>

#include "tensors.h"

namespace zs {

std::tuple<Tensor, Tensor> grad_stats(Tensors tensors, double order);
std::tuple<Tensor, Tensor> exact_sums(Tensors tensors, double order, Tensor factors);
Tensor scale(Tensors inputs, Tensors outputs, double factor);
Tensor axpby(Tensors x, Tensors y, Tensors outputs, double a, double b);
void accumulate(Tensors targets, Tensors sources, double factor);
void flatten(Tensors tensors, Tensor flat, std::vector<int64_t> offsets, double factor, bool add);
void unflatten(Tensor flat, Tensors tensors, std::vector<int64_t> offsets);

}  // namespace zs
