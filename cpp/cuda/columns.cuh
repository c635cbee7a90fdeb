// Elementwise work on rows with parameters per column, and float64 sums over the rows: a block takes a tile of columns
// and a chunk of rows, a thread the same eight columns of every so many rows, so that it loads their parameters once.
// Chunks depend on the shape alone, and so does the order of a sum.
#pragma once

#include <algorithm>

#include "elements.cuh"
#include "launch.cuh"

namespace zs {

constexpr int kColumnThreads = 256;

struct ColumnGrid {
  int64_t rows, columns;
  int64_t step = 1;  // rows of a chunk
  unsigned tiles = 0, chunks = 0;
  int shift = 0;  // 2^shift threads side by side

  ColumnGrid(int64_t rows, int64_t columns) : rows(rows), columns(columns) {
    constexpr int64_t kBlocks = 1024, kMostChunks = 512;  // enough blocks for a large device
    while ((1 << shift) < 32 && (int64_t(kWidth) << shift) < columns) ++shift;
    const int64_t wide = int64_t(kWidth) << shift, wanted = (columns + wide - 1) / wide;
    tiles = unsigned(wanted);
    if (!rows) return;
    const int64_t useful = std::min({kMostChunks, kBlocks / wanted, (rows + lines() - 1) / lines()});
    const int64_t most = std::max<int64_t>(1, useful);
    step = (rows + most - 1) / most;
    chunks = unsigned((rows + step - 1) / step);
  }

  __host__ __device__ int lines() const { return kColumnThreads >> shift; }  // rows side by side
  int64_t sums(int kinds) const { return int64_t(chunks) * kinds * columns; }
};

// This thread's columns, and the rows it begins and ends with.
struct Place {
  int64_t at, row, end;
  int line, count;  // count: how many of the eight columns there are

  __device__ explicit Place(const ColumnGrid& grid) : line(int(threadIdx.x >> grid.shift)) {
    at = (int64_t(blockIdx.x) << grid.shift | (threadIdx.x & ((1u << grid.shift) - 1))) * kWidth;
    row = int64_t(blockIdx.y) * grid.step + line;
    end = int64_t(blockIdx.y + 1) * grid.step;
    if (end > grid.rows) end = grid.rows;
    count = piece(at, grid.columns).last;
    if (count == 0) end = row;
  }

  __device__ Span columns() const { return {at, 0, count}; }
  __device__ Span elements(const ColumnGrid& grid, int64_t of) const { return {of * grid.columns + at, 0, count}; }
};

// partial[chunk][kind][column] = a chunk's sums, from those of its threads; all threads of a block must come here.
template <int kKinds>
__device__ inline void sum_lines(const ColumnGrid& grid, const Place& place, const double (&sums)[kKinds][kWidth],
                                 double* partial) {
  __shared__ double scratch[kWidth][kColumnThreads];
  const int thread = int(threadIdx.x);
#pragma unroll
  for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) scratch[i][thread] = sums[kind][i];
    __syncthreads();
    for (int half = grid.lines() / 2; half > 0; half /= 2) {
      if (place.line < half) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) scratch[i][thread] += scratch[i][thread + (half << grid.shift)];
      }
      __syncthreads();
    }
    double* const target = partial + (int64_t(blockIdx.y) * kKinds + kind) * grid.columns + place.at;
    if (place.line == 0) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i < place.count) target[i] = scratch[i][thread];
      }
    }
    __syncthreads();  // before the next kind writes to `scratch`
  }
}

// Runs work(row, terms) for this thread's rows and adds up the terms it sets, over the rows; `partial` may be null.
template <int kKinds, class Work>
__device__ inline void sum_rows(const ColumnGrid& grid, const Place& place, double* partial, const Work& work) {
  double sums[kKinds][kWidth] = {};
  for (int64_t row = place.row; row < place.end; row += grid.lines()) {
    float terms[kKinds][kWidth];
    work(row, terms);
    if (partial == nullptr) continue;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[kind][i] += double(terms[kind][i]);
    }
  }
  if (partial != nullptr) sum_lines(grid, place, sums, partial);
}

}  // namespace zs
