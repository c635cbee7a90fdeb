// The CUDA kernels of the layer ops that zero_strategy/ops defines, as binding.cpp for the others: normalisation, gelu,
// dropout and softmax over rows of a tensor.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "layers.h"
#include "random.cuh"
#include "tensors.cuh"

namespace zs {
namespace {

using MaybeTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

int64_t rows_of_length(const Tensor& tensor, int64_t columns) {
  STD_TORCH_CHECK(columns > 0 && tensor.numel() % columns == 0, "expected rows of ", columns, " elements");
  return tensor.numel() / columns;
}

int64_t last_columns(const Tensor& tensor) {
  return tensor.dim() ? std::max<int64_t>(1, tensor.size(tensor.dim() - 1)) : 1;
}

// One value per column, or nothing; what has no rows has no use for them.
Buffer column_values(const OnDevice& device, const MaybeTensor& tensor, int64_t rows, int64_t columns) {
  return tensor && rows ? device.buffer_of(*tensor, columns) : Buffer{};
}

// Sums over rows as tensors of the shape and dtype of parameters: room for the partial ones, then the second pass.
class ColumnSums {
 public:
  ColumnSums(const OnDevice& device, const Tensor& rows_of, int64_t rows, int64_t columns,
             std::vector<MaybeTensor> parameters)
      : device_(device), like_(rows_of), rows_(rows), columns_(columns), parameters_(std::move(parameters)) {
    const int kinds = int(parameters_.size());
    for (const MaybeTensor& parameter : parameters_) wanted_ |= parameter.has_value();
    if (wanted_) partial_ = new_doubles(rows_of, {partial_sums(rows, columns, kinds)});
  }

  // Null if there is nothing to add up.
  double* partial() const { return wanted_ ? static_cast<double*>(partial_->mutable_data_ptr()) : nullptr; }

  // One tensor per parameter; an empty one for a missing one.
  std::vector<Tensor> finish() const {
    std::vector<Tensor> results;
    std::vector<Buffer> targets;
    for (const MaybeTensor& parameter : parameters_) {
      results.push_back(parameter ? torch::stable::empty_like(*parameter) : torch::stable::new_empty(like_, {0}));
      const bool has_sums = parameter && parameter->numel() > 0;
      targets.push_back(has_sums ? device_.buffer_of(results.back(), columns_) : Buffer{});
    }
    if (wanted_) {
      const int kinds = int(targets.size());
      STD_CUDA_CHECK(finish_columns(rows_, columns_, kinds, partial(), targets.data(), device_.stream));
    }
    return results;
  }

 private:
  const OnDevice& device_;
  Tensor like_;
  int64_t rows_, columns_;
  std::vector<MaybeTensor> parameters_;
  bool wanted_ = false;
  MaybeTensor partial_;
};

// Below this a weight cannot be divided by: what the output lost in rounding would be 1024 times as large in x_hat.
constexpr float kSmallestWeight = 1.0f / 1024;

// The weights go to the host, since the op promises an error that names the index: such a forward waits for the device.
void check_invertible(const OnDevice& device, const Tensor& weight, int64_t columns) {
  const Type type = device.buffer_of(weight, columns).type;
  const Tensor here = torch::stable::to(weight, torch::stable::Device(torch::headeronly::DeviceType::CPU));
  const void* const values = here.const_data_ptr();
  for (int64_t i = 0; i < columns; ++i) {
    const float value = type == Type::f32 ? static_cast<const float*>(values)[i]
                                          : from_half(static_cast<const uint16_t*>(values)[i], type);
    STD_TORCH_CHECK(!(std::fabs(value) < kSmallestWeight), "weight[", i, "] is ", value,
                    ", too near to zero for invertible=True, which divides by it: 1/1024 is the least");
  }
}

std::tuple<Tensor, Tensor, Tensor> norm_forward(Tensor input, MaybeTensor weight, MaybeTensor bias, int64_t columns,
                                                double eps, bool centered, bool invertible) {
  const OnDevice device(input);
  NormRows rows;
  rows.rows = rows_of_length(input, columns);
  rows.columns = columns;
  rows.weight = column_values(device, weight, rows.rows, columns);
  rows.bias = column_values(device, bias, rows.rows, columns);
  if (invertible && rows.weight.data != nullptr) check_invertible(device, *weight, columns);
  Tensor output = torch::stable::empty_like(input);
  Tensor mean = torch::stable::new_empty(input, {centered ? rows.rows : 0}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(input, {rows.rows}, ScalarType::Float);
  rows.saved = device.buffer_of(input, input.numel());
  rows.result = device.buffer_of(output, input.numel());
  rows.mean = centered ? device.floats_of(mean) : nullptr;
  rows.rstd = device.floats_of(rstd);
  rows.eps = eps;
  STD_CUDA_CHECK(normalize(rows, device.stream));
  return {output, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor gradient, Tensor saved, Tensor mean, Tensor rstd,
                                                 MaybeTensor weight, MaybeTensor bias, int64_t columns, bool centered,
                                                 bool invertible) {
  const OnDevice device(saved);
  NormRows rows;
  rows.rows = rows_of_length(saved, columns);
  rows.columns = columns;
  STD_TORCH_CHECK(rstd.numel() == rows.rows && mean.numel() == (centered ? rows.rows : 0), "expected one per row");
  Tensor result = torch::stable::empty_like(saved);
  rows.saved = device.buffer_of(saved, saved.numel());
  rows.gradient = device.buffer_of(gradient, saved.numel());
  rows.result = device.buffer_of(result, saved.numel());
  rows.weight = column_values(device, weight, rows.rows, columns);
  rows.bias = column_values(device, bias, rows.rows, columns);
  rows.mean = centered ? device.floats_of(mean) : nullptr;
  rows.rstd = device.floats_of(rstd);
  rows.inverted = invertible;
  STD_CUDA_CHECK(normalize_backward(rows, device.stream));
  const ColumnSums sums(device, saved, rows.rows, columns, {weight, bias});
  if (sums.partial() != nullptr) STD_CUDA_CHECK(normalize_sums(rows, sums.partial(), device.stream));
  const std::vector<Tensor> found = sums.finish();
  return {result, found[0], found[1]};
}

BiasRows bias_rows(const OnDevice& device, const Tensor& input, const MaybeTensor& bias) {
  BiasRows rows;
  rows.columns = last_columns(input);
  rows.rows = rows_of_length(input, rows.columns);
  rows.input = device.buffer_of(input, input.numel());
  rows.bias = column_values(device, bias, rows.rows, rows.columns);
  return rows;
}

Tensor bias_gelu_forward(Tensor input, MaybeTensor bias, bool tanh) {
  const OnDevice device(input);
  Tensor result = torch::stable::empty_like(input);
  BiasRows rows = bias_rows(device, input, bias);
  rows.result = device.buffer_of(result, input.numel());
  rows.tanh = tanh;
  STD_CUDA_CHECK(bias_gelu(rows, device.stream));
  return result;
}

std::tuple<Tensor, Tensor> bias_gelu_derivative(Tensor gradient, Tensor input, MaybeTensor bias, bool tanh) {
  const OnDevice device(input);
  Tensor result = torch::stable::empty_like(input);
  BiasRows rows = bias_rows(device, input, bias);
  rows.other = device.buffer_of(gradient, input.numel());
  rows.result = device.buffer_of(result, input.numel());
  rows.tanh = tanh;
  const ColumnSums sums(device, input, rows.rows, rows.columns, {bias});
  STD_CUDA_CHECK(bias_gelu_backward(rows, sums.partial(), device.stream));
  return {result, sums.finish()[0]};
}

// `state`: int64 (seed, offset) on the CPU.
Random random_of(const Tensor& state, double probability) {
  STD_TORCH_CHECK(state.is_cpu() && state.is_contiguous() && state.numel() == 2 &&
                      state.scalar_type() == ScalarType::Long,
                  "expected seed and offset as two int64 on the CPU");
  const int64_t* const numbers = static_cast<const int64_t*>(state.const_data_ptr());
  return {uint64_t(numbers[0]), uint64_t(numbers[1]), drop_threshold(probability), keep_scale(probability)};
}

Tensor bias_dropout_residual(Tensor input, MaybeTensor bias, Tensor residual, Tensor state, double p) {
  const OnDevice device(input);
  Tensor result = torch::stable::empty_like(residual);
  BiasRows rows = bias_rows(device, input, bias);
  rows.other = device.buffer_of(residual, input.numel());
  rows.result = device.buffer_of(result, input.numel());
  rows.random = random_of(state, p);
  STD_CUDA_CHECK(bias_dropout(rows, device.stream));
  return result;
}

std::tuple<Tensor, Tensor> bias_dropout_residual_backward(Tensor gradient, MaybeTensor bias, Tensor state, double p,
                                                          ScalarType dtype) {
  const OnDevice device(gradient);
  Tensor result = torch::stable::new_empty(gradient, gradient.sizes(), dtype);
  BiasRows rows = bias_rows(device, gradient, {});
  rows.result = device.buffer_of(result, gradient.numel());
  rows.random = random_of(state, p);
  const ColumnSums sums(device, gradient, rows.rows, rows.columns, {bias});
  STD_CUDA_CHECK(bias_dropout_backward(rows, sums.partial(), device.stream));
  return {result, sums.finish()[0]};
}

// Where in a mask, whose dimensions are aligned with the input's last ones, each row's elements begin.
void mask_dimensions(const Tensor& input, const Tensor& mask, SoftmaxRows& rows) {
  const int64_t missing = input.dim() - mask.dim();
  STD_TORCH_CHECK(missing >= 0, "expected a mask of no more dimensions than the input");
  int64_t stride = mask.dim() ? mask.size(mask.dim() - 1) : 1, repeated = 1;
  bool joined = false;  // the dimension after this one has elements of its own: one division serves both
  for (int64_t dim = input.dim() - 2; dim >= 0; --dim) {
    const int64_t length = input.size(dim), own = dim >= missing ? mask.size(dim - missing) : 1;
    STD_TORCH_CHECK(own == 1 || own == length, "expected a mask that broadcasts to the input");
    if (length == 1) continue;
    if (own != 1 && joined) {
      rows.dimension[rows.dimensions - 1].length *= length;
    } else if (own != 1) {
      STD_TORCH_CHECK(rows.dimensions < kMaskDimensions, "expected a mask of fewer dimensions");
      rows.dimension[rows.dimensions++] = {repeated, length, stride};
    }
    joined = own != 1;
    stride *= own;
    repeated *= length;
  }
}

std::tuple<Tensor, Tensor> masked_softmax_dropout(Tensor input, MaybeTensor mask, Tensor state, bool causal,
                                                  double p) {
  const OnDevice device(input);
  Tensor result = torch::stable::empty_like(input);
  Tensor probabilities = p > 0 ? torch::stable::empty_like(input) : torch::stable::new_empty(input, {0});
  SoftmaxRows rows;
  rows.columns = last_columns(input);
  rows.rows = rows_of_length(input, rows.columns);
  rows.input = device.buffer_of(input, input.numel());
  rows.result = device.buffer_of(result, input.numel());
  if (p > 0) rows.probabilities = device.buffer_of(probabilities, input.numel());
  STD_TORCH_CHECK(!causal || input.dim() >= 2, "expected at least 2 dimensions");
  rows.queries = causal ? input.size(input.dim() - 2) : 0;
  rows.random = random_of(state, p);
  if (mask && rows.rows) {
    const int64_t step = mask->dim() ? mask->size(mask->dim() - 1) : 1;
    STD_TORCH_CHECK(step == 1 || step == rows.columns, "expected a mask that broadcasts to the input");
    rows.mask = device.buffer_of(*mask, mask->numel());
    rows.one_for_all = step == 1;
    mask_dimensions(input, *mask, rows);
  }
  STD_CUDA_CHECK(softmax(rows, device.stream));
  return {result, probabilities};
}

Tensor masked_softmax_dropout_backward(Tensor gradient, Tensor probabilities, Tensor state, double p) {
  const OnDevice device(gradient);
  Tensor result = torch::stable::empty_like(gradient);
  SoftmaxRows rows;
  rows.columns = last_columns(gradient);
  rows.rows = rows_of_length(gradient, rows.columns);
  rows.input = device.buffer_of(probabilities, gradient.numel());
  rows.gradient = device.buffer_of(gradient, gradient.numel());
  rows.result = device.buffer_of(result, gradient.numel());
  rows.random = random_of(state, p);
  STD_CUDA_CHECK(softmax_backward(rows, device.stream));
  return result;
}

}  // namespace
}  // namespace zs

STABLE_TORCH_LIBRARY_IMPL(zero_strategy, CUDA, library) {
  library.impl("norm_forward", TORCH_BOX(&zs::norm_forward));
  library.impl("norm_backward", TORCH_BOX(&zs::norm_backward));
  library.impl("bias_gelu", TORCH_BOX(&zs::bias_gelu_forward));
  library.impl("bias_gelu_backward", TORCH_BOX(&zs::bias_gelu_derivative));
  library.impl("bias_dropout_residual", TORCH_BOX(&zs::bias_dropout_residual));
  library.impl("bias_dropout_residual_backward", TORCH_BOX(&zs::bias_dropout_residual_backward));
  library.impl("masked_softmax_dropout", TORCH_BOX(&zs::masked_softmax_dropout));
  library.impl("masked_softmax_dropout_backward", TORCH_BOX(&zs::masked_softmax_dropout_backward));
}
