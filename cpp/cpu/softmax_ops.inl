#include "softmax_ops.h"

#include "random.h"

namespace zs {
namespace {

// Where in a mask, whose dimensions are aligned with the input's last ones, each row's elements begin.
std::vector<int64_t> mask_offsets(const Tensor& input, const Tensor& mask, int64_t rows) {
  const int64_t missing = input.dim() - mask.dim();
  STD_TORCH_CHECK(missing >= 0, "expected a mask of no more dimensions than the input");
  std::vector<int64_t> offsets(rows, 0);
  int64_t stride = mask.dim() ? mask.size(mask.dim() - 1) : 1, repeated = 1;
  for (int64_t dim = input.dim() - 2; dim >= 0; --dim) {
    const int64_t length = input.size(dim), own = dim >= missing ? mask.size(dim - missing) : 1;
    STD_TORCH_CHECK(own == 1 || own == length, "expected a mask that broadcasts to the input");
    if (own != 1) {
      for (int64_t row = 0; row < rows; ++row) offsets[row] += (row / repeated) % length * stride;
    }
    stride *= own;
    repeated *= length;
  }
  return offsets;
}

template <class Kernel>
void run(const Rows& size, const SoftmaxRows& rows, const Kernel& kernel) {
  for_each_rows(size, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size.columns);
    kernel(rows, begin, end, scratch.data());
  });
}

}  // namespace

std::tuple<Tensor, Tensor> masked_softmax_dropout(Tensor input, MaybeTensor mask, Tensor state, bool causal,
                                                  double p) {
  const Rows size = last_rows(input);
  Tensor result = torch::stable::empty_like(input);
  Tensor probabilities = p > 0 ? torch::stable::empty_like(input) : torch::stable::new_empty(input, {0});
  SoftmaxRows rows;
  std::vector<int64_t> offsets;
  rows.input = buffer_of(input, input.numel());
  rows.result = buffer_of(result, input.numel());
  if (p > 0) rows.probabilities = buffer_of(probabilities, input.numel());
  rows.rows = size.rows;
  rows.columns = size.columns;
  rows.queries = causal ? input.size(input.dim() - 2) : 0;
  rows.random = random_of(state, p);
  if (mask && size.rows) {
    const int64_t step = mask->dim() ? mask->size(mask->dim() - 1) : 1;
    STD_TORCH_CHECK(step == 1 || step == size.columns, "expected a mask that broadcasts to the input");
    rows.mask = buffer_of(*mask, mask->numel());
    offsets = mask_offsets(input, *mask, size.rows);
    rows.mask_offset = offsets.data();
    rows.mask_step = step == 1 ? 0 : 1;
  }
  run(size, rows, kernels().softmax);
  return {result, probabilities};
}

Tensor masked_softmax_dropout_backward(Tensor gradient, Tensor probabilities, Tensor state, double p) {
  const Rows size = last_rows(gradient);
  Tensor result = torch::stable::empty_like(gradient);
  SoftmaxRows rows;
  rows.input = buffer_of(probabilities, gradient.numel());
  rows.gradient = buffer_of(gradient, gradient.numel());
  rows.result = buffer_of(result, gradient.numel());
  rows.rows = size.rows;
  rows.columns = size.columns;
  rows.random = random_of(state, p);
  run(size, rows, kernels().softmax_backward);
  return result;
}

}  // namespace zs
