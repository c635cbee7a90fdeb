// Eights of a row: what the row kernels and the column kernels share.
#pragma once

#include "elements.cuh"

namespace zs {

// Elements [at, at + 8) of a row, as many as there are.
__host__ __device__ inline Span piece(int64_t at, int64_t columns) {
  const int64_t left = columns - at;
  return {at, 0, left < 0 ? 0 : left < kWidth ? int(left) : kWidth};
}

// Eight elements as float32; those that are not there are 0.
__host__ __device__ inline void load(const Buffer& from, const Span& span, float (&to)[kWidth]) {
  widen(fetch(from, span), from.type, to);
}

// As `load`, of a tensor that may be missing: then all are `otherwise`.
__host__ __device__ inline void load_or(float otherwise, const Buffer& from, const Span& span, float (&to)[kWidth]) {
  if (from.data != nullptr) {
    load(from, span, to);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = otherwise;
  }
}

}  // namespace zs
