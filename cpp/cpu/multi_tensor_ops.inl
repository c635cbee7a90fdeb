#include "multi_tensor_ops.h"

#include <atomic>
#include <cmath>

#include "parallel.h"

namespace zs {
namespace {

int64_t run(MoveKernel kernel, const std::vector<Move>& moves) {
  std::vector<int64_t> sizes;
  for (const Move& move : moves) sizes.push_back(move.numel);
  std::atomic<int64_t> nonfinite{0};
  for_each_chunk(sizes, [&](size_t item, int64_t begin, int64_t end, int64_t) {
    nonfinite += kernel(moves[item], begin, end);
  });
  return nonfinite;
}

Tensor count_tensor(const Tensor& like, std::vector<int64_t> shape) {
  return torch::stable::new_zeros(like, shape, torch::headeronly::ScalarType::Long);
}

// Elements [offset, offset + numel) of a contiguous tensor.
Buffer part_of(const Tensor& flat, int64_t offset, int64_t numel) {
  Buffer buffer = buffer_of(flat, flat.numel());
  STD_TORCH_CHECK(offset >= 0 && offset + numel <= flat.numel(), "a tensor lies outside of the flat buffer");
  buffer.data = static_cast<char*>(buffer.data) + offset * (buffer.type == Type::f32 ? 4 : 2);
  return buffer;
}

}  // namespace

std::tuple<Tensor, Tensor> grad_stats(Tensors tensors, double order) {
  STD_TORCH_CHECK(!tensors.empty(), "expected at least one tensor");
  const Norm norm = order == 2            ? Norm::two
                    : order == 1          ? Norm::one
                    : std::isinf(order)   ? Norm::infinity
                                          : Norm::power;
  std::vector<int64_t> sizes;
  std::vector<Buffer> buffers;
  for (const Tensor& tensor : tensors) {
    sizes.push_back(tensor.numel());
    buffers.push_back(buffer_of(tensor, tensor.numel()));
  }
  std::vector<Statistics> partial(chunk_count(sizes));
  for_each_chunk(sizes, [&](size_t item, int64_t begin, int64_t end, int64_t chunk) {
    partial[chunk] = kernels().statistics(buffers[item], begin, end, norm, order);
  });
  const std::vector<int64_t> shape{int64_t(tensors.size())};
  Tensor sums = torch::stable::new_zeros(tensors[0], shape, torch::headeronly::ScalarType::Double);
  Tensor counts = count_tensor(tensors[0], shape);
  double* sum = static_cast<double*>(sums.mutable_data_ptr());
  int64_t* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  const Statistics* part = partial.data();
  for (size_t item = 0; item < sizes.size(); ++item) {
    for (int64_t begin = 0; begin < sizes[item]; begin += kChunk, ++part) {
      const bool larger = !(part->sum <= sum[item]);  // NaN counts as larger, and stays
      sum[item] = norm != Norm::infinity ? sum[item] + part->sum : larger && sum[item] == sum[item] ? part->sum : sum[item];
      count[item] += part->nonfinite;
    }
  }
  return {sums, counts};
}

std::tuple<Tensor, Tensor> exact_sums(Tensors tensors, double order, Tensor factors) {
  STD_TORCH_CHECK(!tensors.empty(), "expected at least one tensor");
  static_assert(kChunk % kSumBlock == 0 && kChunk / kSumBlock < 4096, "a kernel carries once for a chunk");
  const double* const factor = rows_of(factors, tensors.size(), 1);
  const bool of_sums = order == 1 || order == 2;  // neither can overflow
  const bool by_products = order <= 32 && 2 * order == std::floor(2 * order);
  std::vector<int64_t> sizes;
  std::vector<Buffer> buffers;
  std::vector<Power> powers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sizes.push_back(tensors[i].numel());
    buffers.push_back(buffer_of(tensors[i], sizes[i]));
    const double size = std::fabs(factor[i]);
    powers.push_back({order, by_products ? int32_t(2 * order) : 0, of_sums ? 1 : size,
                      !of_sums ? 1 : order == 2 ? size * size : size});
  }
  const int64_t items = int64_t(tensors.size());
  Tensor sums = count_tensor(tensors[0], {items, kSumWords}), counts = count_tensor(tensors[0], {items});
  int64_t* const sum = static_cast<int64_t*>(sums.mutable_data_ptr());
  int64_t* const count = static_cast<int64_t*>(counts.mutable_data_ptr());
  for_each_chunk(sizes, [&](size_t item, int64_t begin, int64_t end, int64_t) {
    uint64_t part[kSumWords] = {};
    const int64_t nonfinite = kernels().exact_sum(buffers[item], begin, end, powers[item], part);
    // Integers, so the threads' order does not matter. Most digits are 0.
    for (int i = 0; i < kSumWords; ++i) {
      if (part[i] != 0) __atomic_fetch_add(sum + int64_t(item) * kSumWords + i, int64_t(part[i]), __ATOMIC_RELAXED);
    }
    if (nonfinite != 0) __atomic_fetch_add(count + item, nonfinite, __ATOMIC_RELAXED);
  });
  for (int64_t item = 0; item < items; ++item) {
    int64_t carry = 0;
    for (int i = 0; i < kSumDigits; ++i) {
      int64_t& digit = sum[item * kSumWords + i];
      digit += carry;
      if (i + 1 == kSumDigits) break;
      carry = digit >> 32;
      digit &= 0xffffffff;
    }
  }
  return {sums, counts};
}

Tensor scale(Tensors inputs, Tensors outputs, double factor) {
  STD_TORCH_CHECK(!outputs.empty(), "expected at least one tensor");
  std::vector<Move> moves(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    moves[i].numel = outputs[i].numel();
    moves[i].source = entry_of(inputs, i, outputs.size(), moves[i].numel);
    moves[i].target = buffer_of(outputs[i], moves[i].numel);
    moves[i].scale = float(factor);
  }
  Tensor count = count_tensor(outputs[0], {});
  *static_cast<int64_t*>(count.mutable_data_ptr()) = run(kernels().convert, moves);
  return count;
}

Tensor axpby(Tensors x, Tensors y, Tensors outputs, double a, double b) {
  STD_TORCH_CHECK(!outputs.empty(), "expected at least one tensor");
  std::vector<Move> moves(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    moves[i].numel = outputs[i].numel();
    moves[i].source = entry_of(x, i, outputs.size(), moves[i].numel);
    moves[i].other = entry_of(y, i, outputs.size(), moves[i].numel);
    moves[i].target = buffer_of(outputs[i], moves[i].numel);
    moves[i].scale = float(a);
    moves[i].other_scale = float(b);
  }
  Tensor count = count_tensor(outputs[0], {});
  *static_cast<int64_t*>(count.mutable_data_ptr()) = run(kernels().axpby, moves);
  return count;
}

void accumulate(Tensors targets, Tensors sources, double factor) {
  std::vector<Move> moves(targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    moves[i].numel = targets[i].numel();
    moves[i].source = entry_of(sources, i, targets.size(), moves[i].numel);
    moves[i].target = buffer_of(targets[i], moves[i].numel);
    moves[i].scale = float(factor);
    moves[i].accumulate = true;
  }
  run(kernels().convert, moves);
}

void flatten(Tensors tensors, Tensor flat, std::vector<int64_t> offsets, double factor, bool add) {
  STD_TORCH_CHECK(offsets.size() == tensors.size(), "expected one offset per tensor");
  std::vector<Move> moves(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    moves[i].numel = tensors[i].numel();
    moves[i].source = buffer_of(tensors[i], moves[i].numel);
    moves[i].target = part_of(flat, offsets[i], moves[i].numel);
    moves[i].scale = float(factor);
    moves[i].accumulate = add;
  }
  run(kernels().convert, moves);
}

void unflatten(Tensor flat, Tensors tensors, std::vector<int64_t> offsets) {
  STD_TORCH_CHECK(offsets.size() == tensors.size(), "expected one offset per tensor");
  std::vector<Move> moves(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    moves[i].numel = tensors[i].numel();
    moves[i].source = part_of(flat, offsets[i], moves[i].numel);
    moves[i].target = buffer_of(tensors[i], moves[i].numel);
  }
  run(kernels().convert, moves);
}

}  // namespace zs
