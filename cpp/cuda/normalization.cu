// Layer norm and RMS norm over rows. Statistics are float64 sums kept as float32; everything else is float32, one
// rounding per operation, as in zero_strategy/ops/normalization.py.
#include "columns.cuh"
#include "layers.h"
#include "reduce.cuh"
#include "rows.cuh"

namespace zs {
namespace {

// Numbers per column, of one thread's eight.
struct Parameters {
  float weight[kWidth], bias[kWidth];

  __device__ Parameters(const NormRows& s, const Span& columns) {
    load_or(1, s.weight, columns, weight);
    load_or(0, s.bias, columns, bias);
  }
};

// x becomes (x - mean) * rstd, or what that was before weight and bias made it the output x.
__device__ inline void normalised(const NormRows& s, const Parameters& p, float mean, float rstd, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (!s.inverted) {
      x[i] = (x[i] - mean) * rstd;
    } else {
      if (s.bias.data != nullptr) x[i] = x[i] - p.bias[i];
      if (s.weight.data != nullptr) x[i] = x[i] / p.weight[i];
    }
  }
}

// Adds up term(i) of those of eight elements that are there.
template <class Term>
__device__ inline void add_terms(double& sum, const Span& span, const Term& term) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (span.has(i)) sum += term(i);
  }
}

__global__ void __launch_bounds__(kMostLanes) forward(const RowGrid grid, const NormRows s) {
  const Group g(grid);
  const double columns = double(grid.columns);
  Kept<1> kept;
  const auto make = [&](int64_t at, float(&x)[1][kWidth]) { load(s.saved, g.in_tensor(at), x[0]); };
  double sum = 0, squares = 0;
  for_each_eight<Pass::first>(g, kept, make, [&](int64_t at, float(&x)[1][kWidth]) {
    if (s.mean != nullptr) add_terms(sum, g.in_row(at), [&](int i) { return double(x[0][i]); });
  });
  const double center = s.mean != nullptr ? over_group<Add>(g, sum) / columns : 0.0;
  const float mean = float(center);
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t at, float(&x)[1][kWidth]) {
    add_terms(squares, g.in_row(at), [&](int i) {
      const double difference = double(x[0][i]) - center;
      return difference * difference;
    });
  });
  const float rstd = float(1 / sqrt(over_group<Add>(g, squares) / columns + s.eps));
  if (g.leads()) {
    s.rstd[g.row] = rstd;
    if (s.mean != nullptr) s.mean[g.row] = mean;
  }
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t at, float(&x)[1][kWidth]) {
    const Parameters p(s, g.in_row(at));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float y = (x[0][i] - mean) * rstd;
      if (s.weight.data != nullptr) y = y * p.weight[i];
      if (s.bias.data != nullptr) y = y + p.bias[i];
      x[0][i] = y;
    }
    store(x[0], s.result, g.in_tensor(at));
  });
}

// With g = gradient * weight: result = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd, the first mean only where the
// forward took one off.
__global__ void __launch_bounds__(kMostLanes) backward(const RowGrid grid, const NormRows s) {
  const Group g(grid);
  const double columns = double(grid.columns);
  const bool centered = s.mean != nullptr;
  const float rstd = g.columns ? s.rstd[g.row] : 0, mean = g.columns && centered ? s.mean[g.row] : 0;
  Kept<2> kept;
  const auto make = [&](int64_t at, float(&x)[2][kWidth]) {  // g and x_hat
    const Raw raw = fetch(s.gradient, g.in_tensor(at)), raw_saved = fetch(s.saved, g.in_tensor(at));
    widen(raw, s.gradient.type, x[0]);
    widen(raw_saved, s.saved.type, x[1]);
    const Parameters p(s, g.in_row(at));
    normalised(s, p, mean, rstd, x[1]);
    if (s.weight.data == nullptr) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[0][i] = x[0][i] * p.weight[i];
  };
  double plain = 0, mixed = 0;
  for_each_eight<Pass::first>(g, kept, make, [&](int64_t at, float(&x)[2][kWidth]) {
    if (centered) add_terms(plain, g.in_row(at), [&](int i) { return double(x[0][i]); });
    add_terms(mixed, g.in_row(at), [&](int i) { return double(x[0][i] * x[1][i]); });
  });
  const float shift = centered ? float(over_group<Add>(g, plain) / columns) : 0.0f;
  const float slope = float(over_group<Add>(g, mixed) / columns);
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t at, float(&x)[2][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[0][i] = ((x[0][i] - shift) - x[1][i] * slope) * rstd;
    store(x[0], s.result, g.in_tensor(at));
  });
}

// A pass of its own: sums over rows want other threads than sums over columns.
__global__ void __launch_bounds__(kColumnThreads) sums(const ColumnGrid grid, const NormRows s, double* partial) {
  const Place place(grid);
  const Parameters p(s, place.columns());
  sum_rows<2>(grid, place, partial, [&](int64_t row, float(&terms)[2][kWidth]) {
    const Span span = place.elements(grid, row);
    load(s.saved, span, terms[0]);
    load(s.gradient, span, terms[1]);
    normalised(s, p, s.mean != nullptr ? s.mean[row] : 0.0f, s.rstd[row], terms[0]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) terms[0][i] = terms[1][i] * terms[0][i];
  });
}

}  // namespace

cudaError_t normalize(const NormRows& rows, cudaStream_t stream) {
  const RowGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(forward, grid.blocks(), grid.threads(), stream, grid, rows);
}

cudaError_t normalize_backward(const NormRows& rows, cudaStream_t stream) {
  const RowGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(backward, grid.blocks(), grid.threads(), stream, grid, rows);
}

cudaError_t normalize_sums(const NormRows& rows, double* partial, cudaStream_t stream) {
  const ColumnGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(sums, dim3(grid.tiles, grid.chunks), kColumnThreads, stream, grid, rows, partial);
}

}  // namespace zs
