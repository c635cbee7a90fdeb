#include "normalization_ops.h"

#include <cmath>

namespace zs {
namespace {

// Below this a weight cannot be divided by: what the output lost in rounding would be 1024 times as large in x_hat.
constexpr float kSmallestWeight = 1.0f / 1024;

void check_invertible(const float* weight, int64_t columns) {
  for (int64_t i = 0; weight && i < columns; ++i) {
    STD_TORCH_CHECK(!(std::fabs(weight[i]) < kSmallestWeight), "weight[", i, "] is ", weight[i],
                    ", too near to zero for invertible=True, which divides by it: 1/1024 is the least");
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> norm_forward(Tensor input, MaybeTensor weight, MaybeTensor bias, int64_t columns,
                                                double eps, bool centered, bool invertible) {
  const Rows size = rows_of_length(input, columns);
  const ColumnValues weights(weight, size), biases(bias, size);
  if (invertible) check_invertible(weights.data(), columns);
  using torch::headeronly::ScalarType;
  Tensor output = torch::stable::empty_like(input);
  Tensor mean = torch::stable::new_empty(input, {centered ? size.rows : 0}, ScalarType::Float);
  Tensor rstd = torch::stable::new_empty(input, {size.rows}, ScalarType::Float);
  NormRows rows;
  rows.saved = buffer_of(input, input.numel());
  rows.result = buffer_of(output, input.numel());
  rows.weight = weights.data();
  rows.bias = biases.data();
  rows.mean = centered ? floats_of(mean) : nullptr;
  rows.rstd = floats_of(rstd);
  rows.rows = size.rows;
  rows.columns = columns;
  rows.eps = eps;
  for_each_rows(size, [&](int64_t begin, int64_t end) { kernels().normalize(rows, begin, end, nullptr); });
  return {output, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(Tensor gradient, Tensor saved, Tensor mean, Tensor rstd,
                                                 MaybeTensor weight, MaybeTensor bias, int64_t columns,
                                                 bool centered, bool invertible) {
  const Rows size = rows_of_length(saved, columns);
  const ColumnValues weights(weight, size), biases(bias, size);
  STD_TORCH_CHECK(rstd.numel() == size.rows && mean.numel() == (centered ? size.rows : 0), "expected one per row");
  Tensor result = torch::stable::empty_like(saved);
  NormRows rows;
  rows.saved = buffer_of(saved, saved.numel());
  rows.gradient = buffer_of(gradient, saved.numel());
  rows.result = buffer_of(result, saved.numel());
  rows.weight = weights.data();
  rows.bias = biases.data();
  rows.mean = centered ? floats_of(mean) : nullptr;
  rows.rstd = floats_of(rstd);
  rows.rows = size.rows;
  rows.columns = columns;
  rows.inverted = invertible;
  ColumnSums sums(size, 2);
  sums.run([&](int64_t begin, int64_t end, double* part) { kernels().normalize_backward(rows, begin, end, part); });
  return {result, sums.result(0, weight, saved), sums.result(1, bias, saved)};
}

}  // namespace zs
