// residual + dropout(x + bias), and the gradient of x.
#include "columns.cuh"
#include "layers.h"
#include "random.cuh"

namespace zs {
namespace {

__global__ void __launch_bounds__(kColumnThreads) forward(const ColumnGrid grid, const BiasRows s) {
  const Place place(grid);
  float bias[kWidth];
  load_or(0, s.bias, place.columns(), bias);
  for (int64_t row = place.row; row < place.end; row += grid.lines()) {
    const Span span = place.elements(grid, row);
    const Raw raw = fetch(s.input, span), raw_residual = fetch(s.other, span);
    float x[kWidth], residual[kWidth];
    widen(raw, s.input.type, x);
    widen(raw_residual, s.other.type, residual);
    if (s.bias.data != nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = x[i] + bias[i];
    }
    drop(s.random, span.at, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = residual[i] + x[i];
    store(x, s.result, span);
  }
}

__global__ void __launch_bounds__(kColumnThreads) backward(const ColumnGrid grid, const BiasRows s, double* partial) {
  const Place place(grid);
  sum_rows<1>(grid, place, partial, [&](int64_t row, float(&result)[1][kWidth]) {
    const Span span = place.elements(grid, row);
    load(s.input, span, result[0]);
    drop(s.random, span.at, result[0]);
    store(result[0], s.result, span);
  });
}

}  // namespace

cudaError_t bias_dropout(const BiasRows& rows, cudaStream_t stream) {
  const ColumnGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(forward, dim3(grid.tiles, grid.chunks), kColumnThreads, stream, grid, rows);
}

cudaError_t bias_dropout_backward(const BiasRows& rows, double* partial, cudaStream_t stream) {
  const ColumnGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(backward, dim3(grid.tiles, grid.chunks), kColumnThreads, stream, grid, rows, partial);
}

}  // namespace zs
