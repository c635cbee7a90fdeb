// The second pass of sums over rows: the chunks of a column, in an order that depends on their number alone.
#include "columns.cuh"
#include "layers.h"

namespace zs {
namespace {

constexpr int kSide = 32, kLines = kColumnThreads / kSide;  // columns side by side, and threads of a column

struct Targets {
  Buffer kind[kMostKinds];
};

__global__ void __launch_bounds__(kColumnThreads)
    finish_all(int64_t columns, int64_t chunks, const double* partial, const __grid_constant__ Targets targets) {
  __shared__ double scratch[kColumnThreads];
  const int thread = int(threadIdx.x), line = thread / kSide, kind = int(blockIdx.y), kinds = int(gridDim.y);
  const int64_t column = int64_t(blockIdx.x) * kSide + thread % kSide;
  const Buffer target = targets.kind[kind];
  if (target.data == nullptr) return;
  double sum = 0;
  for (int64_t chunk = line; chunk < chunks && column < columns; chunk += kLines) {
    sum += partial[(chunk * kinds + kind) * columns + column];
  }
  scratch[thread] = sum;
  __syncthreads();
  if (line > 0 || column >= columns) return;
  for (int other = 1; other < kLines; ++other) sum += scratch[thread + other * kSide];
  const float value[kWidth] = {float(sum)};
  store(value, target, Span{column, 0, 1});
}

}  // namespace

int64_t partial_sums(int64_t rows, int64_t columns, int kinds) { return ColumnGrid(rows, columns).sums(kinds); }

cudaError_t finish_columns(int64_t rows, int64_t columns, int kinds, const double* partial, const Buffer* targets,
                           cudaStream_t stream) {
  Targets all;
  std::copy(targets, targets + kinds, all.kind);
  const dim3 blocks(unsigned((columns + kSide - 1) / kSide), unsigned(kinds));
  const int64_t chunks = ColumnGrid(rows, columns).chunks;
  return launch(finish_all, blocks, kColumnThreads, stream, columns, chunks, partial, all);
}

}  // namespace zs
