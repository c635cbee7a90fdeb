#include "bias_ops.h"

#include "random.h"

namespace zs {

Tensor bias_gelu(Tensor input, MaybeTensor bias, bool tanh) {
  const Rows size = last_rows(input);
  const ColumnValues biases(bias, size);
  Tensor result = torch::stable::empty_like(input);
  BiasRows rows;
  rows.input = buffer_of(input, input.numel());
  rows.result = buffer_of(result, input.numel());
  rows.bias = biases.data();
  rows.columns = size.columns;
  rows.tanh = tanh;
  for_each_rows(size, [&](int64_t begin, int64_t end) { kernels().bias_gelu(rows, begin, end, nullptr); });
  return result;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(Tensor gradient, Tensor input, MaybeTensor bias, bool tanh) {
  const Rows size = last_rows(input);
  const ColumnValues biases(bias, size);
  Tensor result = torch::stable::empty_like(input);
  BiasRows rows;
  rows.input = buffer_of(input, input.numel());
  rows.other = buffer_of(gradient, input.numel());
  rows.result = buffer_of(result, input.numel());
  rows.bias = biases.data();
  rows.columns = size.columns;
  rows.tanh = tanh;
  ColumnSums sums(size, 1);
  sums.run([&](int64_t begin, int64_t end, double* part) { kernels().bias_gelu_backward(rows, begin, end, part); });
  return {result, sums.result(0, bias, input)};
}

Tensor bias_dropout_residual(Tensor input, MaybeTensor bias, Tensor residual, Tensor state, double p) {
  const Rows size = last_rows(input);
  const ColumnValues biases(bias, size);
  Tensor result = torch::stable::empty_like(residual);
  BiasRows rows;
  rows.input = buffer_of(input, input.numel());
  rows.other = buffer_of(residual, input.numel());
  rows.result = buffer_of(result, input.numel());
  rows.bias = biases.data();
  rows.columns = size.columns;
  rows.random = random_of(state, p);
  for_each_rows(size, [&](int64_t begin, int64_t end) { kernels().bias_dropout(rows, begin, end, nullptr); });
  return result;
}

std::tuple<Tensor, Tensor> bias_dropout_residual_backward(Tensor gradient, MaybeTensor bias, Tensor state, double p,
                                                          ScalarType dtype) {
  const Rows size = last_rows(gradient);
  Tensor result = torch::stable::empty_like(gradient);
  if (dtype != gradient.scalar_type()) result = torch::stable::new_empty(gradient, gradient.sizes(), dtype);
  BiasRows rows;
  rows.input = buffer_of(gradient, gradient.numel());
  rows.result = buffer_of(result, gradient.numel());
  rows.columns = size.columns;
  rows.random = random_of(state, p);
  const bool summed = bias.has_value();
  ColumnSums sums(size, 1);
  sums.run([&](int64_t begin, int64_t end, double* part) {
    kernels().bias_dropout_backward(rows, begin, end, summed ? part : nullptr);
  });
  return {result, sums.result(0, bias, gradient)};
}

}  // namespace zs
