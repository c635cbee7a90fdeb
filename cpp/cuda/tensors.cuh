// Tensors of the stable ABI as the kernels' plain buffers, and where they lie. What is checked here keeps memory safe;
// messages for users come from the Python signatures.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "elements.cuh"

namespace zs {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// For the time of a call, the device of its tensors is the current one, and `stream` is torch's current stream there.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& leader) : index_(leader.get_device_index()), guard_(index_) {
    STD_TORCH_CHECK(leader.is_cuda(), "expected a CUDA tensor");
    // The guard speaks to torch's CUDA runtime; this library may have one of its own, with its own current device.
    STD_CUDA_CHECK(cudaSetDevice(index_));
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(index_, &current));
    stream = static_cast<cudaStream_t>(current);
  }

  // Whether a tensor of any dtype is here, and contiguous.
  bool holds(const Tensor& tensor) const {
    return tensor.is_cuda() && tensor.get_device_index() == index_ && tensor.is_contiguous();
  }

  Buffer buffer_of(const Tensor& tensor, int64_t numel) const {
    STD_TORCH_CHECK(holds(tensor), "expected a contiguous tensor on CUDA device ", index_);
    STD_TORCH_CHECK(tensor.numel() == numel, "expected ", numel, " elements, not ", tensor.numel());
    return {const_cast<void*>(tensor.const_data_ptr()), type_of(tensor)};
  }

  // Entry `index` of a list that has one tensor per item, or none at all.
  Buffer entry_of(const Tensors& list, size_t index, size_t items, int64_t numel) const {
    if (list.empty()) return {};
    STD_TORCH_CHECK(list.size() == items, "expected a list of ", items, " tensors, not ", list.size());
    return buffer_of(list[index], numel);
  }

  float* floats_of(const Tensor& tensor) const {
    const Buffer buffer = buffer_of(tensor, tensor.numel());
    STD_TORCH_CHECK(buffer.type == Type::f32, "expected float32");
    return static_cast<float*>(buffer.data);
  }

  // Elements [offset, offset + numel) of a contiguous tensor.
  Buffer part_of(const Tensor& flat, int64_t offset, int64_t numel) const {
    Buffer buffer = buffer_of(flat, flat.numel());
    STD_TORCH_CHECK(offset >= 0 && offset <= flat.numel() - numel, "a tensor lies outside of the flat buffer");
    buffer.data = static_cast<char*>(buffer.data) + offset * bytes_of(buffer.type);
    return buffer;
  }

  cudaStream_t stream = nullptr;

 private:
  static Type type_of(const Tensor& tensor) {
    using torch::headeronly::ScalarType;
    const ScalarType type = tensor.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                    "expected float32, bfloat16 or float16");
    return type == ScalarType::Float ? Type::f32 : type == ScalarType::BFloat16 ? Type::bf16 : Type::f16;
  }

  torch::stable::accelerator::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
};

// A table of float64 on the CPU, `columns` wide, one row per item.
inline const double* rows_of(const Tensor& table, size_t items, int64_t columns) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(table.is_cpu() && table.is_contiguous() && table.scalar_type() == ScalarType::Double &&
                      table.dim() == 2 && table.size(0) == int64_t(items) && table.size(1) == columns,
                  "expected hyper-parameters as a contiguous float64 table of ", items, " x ", columns, " on the CPU");
  return static_cast<const double*>(table.const_data_ptr());
}

// A tensor without values, beside `like`: the caching allocator's memory of the current stream, so that it may be let
// go of as soon as the work on it is enqueued.
inline Tensor new_doubles(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_empty(like, shape, torch::headeronly::ScalarType::Double);
}

inline Tensor new_counts(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_zeros(like, shape, torch::headeronly::ScalarType::Long);
}

}  // namespace zs
