// Block quantisation; schemas and formulas are in zero_strategy/ops/quantization.py.
#pragma once

#include <tuple>

#include "tensors.h"

namespace zs {

using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor> quantize_blocks(Tensor input, int64_t bits, int64_t block_size, ScalarType scale_dtype);
Tensor dequantize_blocks(Tensor codes, Tensor scales, int64_t numel, int64_t block_size, ScalarType dtype);
Tensor dequantize_reduce(Tensors codes, Tensors scales, int64_t numel, int64_t block_size);

}  // namespace zs
