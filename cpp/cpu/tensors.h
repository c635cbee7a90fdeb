// Tensors of the stable ABI as the kernels' plain buffers. What is checked here keeps memory safe; messages for users
// come from the Python signatures.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "kernels.h"

namespace zs {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

inline Type type_of(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "expected float32, bfloat16 or float16");
  return type == ScalarType::Float ? Type::f32 : type == ScalarType::BFloat16 ? Type::bf16 : Type::f16;
}

inline Buffer buffer_of(const Tensor& tensor, int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "expected a contiguous tensor on the CPU");
  STD_TORCH_CHECK(tensor.numel() == numel, "expected ", numel, " elements, not ", tensor.numel());
  return {const_cast<void*>(tensor.const_data_ptr()), type_of(tensor)};
}

// Entry `index` of a list that has one tensor per item, or none at all.
inline Buffer entry_of(const Tensors& list, size_t index, size_t items, int64_t numel) {
  if (list.empty()) return {};
  STD_TORCH_CHECK(list.size() == items, "expected a list of ", items, " tensors, not ", list.size());
  return buffer_of(list[index], numel);
}

inline float* floats_of(const Tensor& tensor) {
  const Buffer buffer = buffer_of(tensor, tensor.numel());
  STD_TORCH_CHECK(buffer.type == Type::f32, "expected float32");
  return static_cast<float*>(buffer.data);
}

// A table of float64 on the CPU, `columns` wide, one row per item.
inline const double* rows_of(const Tensor& table, size_t items, int64_t columns) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Double &&
                      table.dim() == 2 && table.size(0) == int64_t(items) && table.size(1) == columns,
                  "expected hyper-parameters as a contiguous float64 table of ", items, " x ", columns, " on the CPU");
  return static_cast<const double*>(table.const_data_ptr());
}

}  // namespace zs
