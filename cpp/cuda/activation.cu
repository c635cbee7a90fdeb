// gelu(x + bias) and its derivative.
#include "columns.cuh"
#include "layers.h"

namespace zs {
namespace {

#include "../functions.h"

// x + bias, with the bias of this thread's columns; without one x stays as it is, a negative zero too.
__device__ inline void add_bias(const BiasRows& s, const float (&bias)[kWidth], float (&x)[kWidth]) {
  if (s.bias.data == nullptr) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = x[i] + bias[i];
}

template <bool kTanh>
__device__ inline Gelu gelu_of(float x) {
  return kTanh ? gelu_tanh(x) : gelu_exact(x);
}

template <bool kTanh>
__global__ void __launch_bounds__(kColumnThreads) forward(const ColumnGrid grid, const BiasRows s) {
  const Place place(grid);
  float bias[kWidth];
  load_or(0, s.bias, place.columns(), bias);
  for (int64_t row = place.row; row < place.end; row += grid.lines()) {
    float x[kWidth];
    load(s.input, place.elements(grid, row), x);
    add_bias(s, bias, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = x[i] * gelu_of<kTanh>(x[i]).gate;
    store(x, s.result, place.elements(grid, row));
  }
}

template <bool kTanh>
__global__ void __launch_bounds__(kColumnThreads) backward(const ColumnGrid grid, const BiasRows s, double* partial) {
  const Place place(grid);
  float bias[kWidth];
  load_or(0, s.bias, place.columns(), bias);
  sum_rows<1>(grid, place, partial, [&](int64_t row, float(&result)[1][kWidth]) {
    const Span span = place.elements(grid, row);
    const Raw raw = fetch(s.input, span), raw_gradient = fetch(s.other, span);
    float x[kWidth], gradient[kWidth];
    widen(raw, s.input.type, x);
    widen(raw_gradient, s.other.type, gradient);
    add_bias(s, bias, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Gelu made = gelu_of<kTanh>(x[i]);
      result[0][i] = gradient[i] * (made.gate + made.slope);
    }
    store(result[0], s.result, span);
  });
}

}  // namespace

cudaError_t bias_gelu(const BiasRows& rows, cudaStream_t stream) {
  const ColumnGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  auto* const kernel = rows.tanh ? forward<true> : forward<false>;
  return launch(kernel, dim3(grid.tiles, grid.chunks), kColumnThreads, stream, grid, rows);
}

cudaError_t bias_gelu_backward(const BiasRows& rows, double* partial, cudaStream_t stream) {
  const ColumnGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  auto* const kernel = rows.tanh ? backward<true> : backward<false>;
  return launch(kernel, dim3(grid.tiles, grid.chunks), kColumnThreads, stream, grid, rows, partial);
}

}  // namespace zs
