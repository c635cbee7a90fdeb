// Softmax over rows with an additive mask, a causal limit and dropout.
#include "layers.h"
#include "random.cuh"
#include "reduce.cuh"
#include "rows.cuh"

namespace zs {
namespace {

#include "../functions.h"

constexpr float kLowest = -HUGE_VALF;

// Of numbers that are none of them NaN.
struct LargerNumber {
  __device__ static float combine(float a, float b) { return a > b ? a : b; }
};

// Where the elements of a row begin in the mask.
__device__ inline int64_t mask_offset(const SoftmaxRows& s, int64_t row) {
  int64_t offset = 0;
  for (int i = 0; i < s.dimensions; ++i) {
    offset += (row / s.dimension[i].repeated) % s.dimension[i].length * s.dimension[i].stride;
  }
  return offset;
}

// Input + mask of the elements from `at` on that a row sees; the others are -infinity, and not read.
__device__ inline void scores(const SoftmaxRows& s, const Group& g, int64_t seen, int64_t offset, int64_t at,
                              float (&x)[kWidth]) {
  const int count = piece(at, seen).last;
  load(s.input, Span{g.begin + at, 0, count}, x);
  if (s.mask.data != nullptr) {
    float mask[kWidth];
    load(s.mask, s.one_for_all ? Span{offset, 0, 1} : Span{offset + at, 0, count}, mask);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = x[i] + (s.one_for_all ? mask[0] : mask[i]);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = i < count ? x[i] : kLowest;
}

// exp(x - most). Where nothing is visible, what shows that instead: 0, and NaN for a NaN.
__device__ inline void shares(float most, float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float empty = x[i] == kLowest ? 0.0f : x[i];
    x[i] = most == kLowest ? empty : exp_negative(x[i] - most, 0.0f);
  }
}

__global__ void __launch_bounds__(kMostLanes) forward(const RowGrid grid, const __grid_constant__ SoftmaxRows s) {
  const Group g(grid);
  const int64_t limit = s.queries ? g.row % s.queries + 1 : g.columns;
  const int64_t seen = limit < g.columns ? limit : g.columns, offset = mask_offset(s, g.row);
  Kept<1> kept;
  float most = kLowest;
  const auto make = [&](int64_t at, float(&x)[1][kWidth]) { scores(s, g, seen, offset, at, x[0]); };
  for_each_eight<Pass::first>(g, kept, make, [&](int64_t, float(&x)[1][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) most = x[0][i] > most ? x[0][i] : most;  // a NaN is passed over
  });
  most = over_group<LargerNumber>(g, most);
  double sum = 0;
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t, float(&x)[1][kWidth]) {
    shares(most, x[0]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += double(x[0][i]);
  });
  sum = over_group<Add>(g, sum);
  const bool empty = most == kLowest;
  const float factor = empty ? float(sum) : float(1 / sum);
  const auto remake = [&](int64_t at, float(&x)[1][kWidth]) {
    make(at, x);
    shares(most, x[0]);
  };
  for_each_eight<Pass::later>(g, kept, remake, [&](int64_t at, float(&x)[1][kWidth]) {
    const Span span = g.in_tensor(at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[0][i] = at + i >= seen ? 0.0f : empty ? factor : x[0][i] * factor;
    if (s.probabilities.data != nullptr) store(x[0], s.probabilities, span);
    drop(s.random, span.at, x[0]);
    store(x[0], s.result, span);
  });
}

// With g = the gradient through the dropout: result = p * (g - sum(g * p)).
__global__ void __launch_bounds__(kMostLanes) backward(const RowGrid grid, const __grid_constant__ SoftmaxRows s) {
  const Group g(grid);
  Kept<2> kept;
  const auto make = [&](int64_t at, float(&x)[2][kWidth]) {  // p and g
    const Span span = g.in_tensor(at);
    const Raw raw = fetch(s.input, span), raw_gradient = fetch(s.gradient, span);
    widen(raw, s.input.type, x[0]);
    widen(raw_gradient, s.gradient.type, x[1]);
    drop(s.random, span.at, x[1]);
  };
  double sum = 0;
  for_each_eight<Pass::first>(g, kept, make, [&](int64_t, float(&x)[2][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += double(x[1][i] * x[0][i]);  // 0 where nothing is
  });
  const float shift = float(over_group<Add>(g, sum));
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t at, float(&x)[2][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[0][i] = x[0][i] * (x[1][i] - shift);
    store(x[0], s.result, g.in_tensor(at));
  });
}

}  // namespace

cudaError_t softmax(const SoftmaxRows& rows, cudaStream_t stream) {
  const RowGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(forward, grid.blocks(), grid.threads(), stream, grid, rows);
}

cudaError_t softmax_backward(const SoftmaxRows& rows, cudaStream_t stream) {
  const RowGrid grid(rows.rows, rows.columns);
  if (!rows.rows) return cudaSuccess;
  return launch(backward, grid.blocks(), grid.threads(), stream, grid, rows);
}

}  // namespace zs
