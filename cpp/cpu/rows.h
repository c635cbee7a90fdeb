// Work over rows of equal length, spread over torch's threads in chunks that do not depend on their number, and sums over
// the rows, column by column.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "parallel.h"
#include "tensors.h"

namespace zs {

using MaybeTensor = std::optional<Tensor>;

struct Rows {
  int64_t rows = 0, columns = 0;
};

inline Rows rows_of_length(const Tensor& tensor, int64_t columns) {
  STD_TORCH_CHECK(columns > 0 && tensor.numel() % columns == 0, "expected rows of ", columns, " elements");
  return {tensor.numel() / columns, columns};
}

// Rows of the last dimension.
inline Rows last_rows(const Tensor& tensor) {
  return rows_of_length(tensor, tensor.dim() ? std::max<int64_t>(1, tensor.size(tensor.dim() - 1)) : 1);
}

// Calls work(begin, end) for chunks of rows.
template <class Work>
void for_each_rows(const Rows& size, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, kChunk / size.columns);
  torch::stable::parallel_for(0, size.rows, grain, work);
}

// One value per column as float32; data() is null if there is no tensor.
class ColumnValues {
 public:
  ColumnValues(const MaybeTensor& tensor, const Rows& size) {
    if (!tensor || !size.rows) return;
    const int64_t columns = size.columns;
    values_.resize(columns);
    kernels().convert(move_of(buffer_of(*tensor, columns), {values_.data(), Type::f32}, columns), 0, columns);
  }

  const float* data() const { return values_.empty() ? nullptr : values_.data(); }

  static Move move_of(const Buffer& source, const Buffer& target, int64_t numel) {
    Move move;
    move.source = source;
    move.target = target;
    move.numel = numel;
    return move;
  }

 private:
  std::vector<float> values_;
};

// Sums over rows in float64: one partial sum per chunk of rows, the chunks' sums added in their order.
class ColumnSums {
 public:
  // `kinds`: how many sums there are per column.
  ColumnSums(const Rows& size, int64_t kinds) : size_(size), kinds_(kinds) {
    const int64_t fitting = std::max<int64_t>(1, kMostSums / size.columns);
    const int64_t chunks = std::max<int64_t>(1, std::min({size.rows, kMostChunks, fitting}));
    step_ = std::max<int64_t>(1, (size.rows + chunks - 1) / chunks);
    chunks_ = (size.rows + step_ - 1) / step_;
    partial_.assign(chunks_ * kinds_ * size.columns, 0.0);
  }

  // Calls work(begin, end, sums): `sums` has `kinds` x columns numbers to add to.
  template <class Work>
  void run(const Work& work) {
    torch::stable::parallel_for(0, chunks_, 1, [&](int64_t from, int64_t to) {
      for (int64_t chunk = from; chunk < to; ++chunk) {
        work(chunk * step_, std::min(size_.rows, (chunk + 1) * step_), &partial_[chunk * kinds_ * size_.columns]);
      }
    });
  }

  // The sums as a tensor of the shape and dtype of `like`; an empty one without it.
  Tensor result(int64_t kind, const MaybeTensor& like, const Tensor& device) const {
    if (!like) return torch::stable::new_empty(device, {0});
    Tensor tensor = torch::stable::empty_like(*like);
    const int64_t columns = tensor.numel();
    STD_TORCH_CHECK(columns == size_.columns || !chunks_, "expected one parameter per column");
    std::vector<float> sums(columns);
    torch::stable::parallel_for(0, columns, kChunk / kMostChunks, [&](int64_t from, int64_t to) {
      for (int64_t column = from; column < to; ++column) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) sum += partial_[(chunk * kinds_ + kind) * columns + column];
        sums[column] = float(sum);
      }
    });
    kernels().convert(ColumnValues::move_of({sums.data(), Type::f32}, buffer_of(tensor, columns), columns), 0, columns);
    return tensor;
  }

 private:
  static constexpr int64_t kMostChunks = 32, kMostSums = int64_t(1) << 21;
  Rows size_;
  int64_t kinds_, step_, chunks_;
  std::vector<double> partial_;
};

}  // namespace zs
