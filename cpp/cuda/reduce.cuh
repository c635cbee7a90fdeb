// Reductions in an order that is always the same: over a block by a tree in shared memory, over the chunks of a tensor
// in a second launch (statistics.cu).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace zs {

struct Add {
  template <class T>
  __device__ static T combine(T a, T b) {
    return a + b;
  }
};

// The larger number; NaN counts as larger, and stays.
struct Larger {
  __device__ static double combine(double a, double b) { return a != a ? a : !(b <= a) ? b : a; }
};

// Every thread of a block of `kSize` (a power of 2) must come here; thread 0 gets the result.
template <int kSize, class Rule, class T>
__device__ inline T over_block(T value) {
  __shared__ T scratch[kSize];
  const int thread = int(threadIdx.x);
  scratch[thread] = value;
  __syncthreads();
  for (int half = kSize / 2; half > 0; half /= 2) {
    if (thread < half) scratch[thread] = Rule::combine(scratch[thread], scratch[thread + half]);
    __syncthreads();
  }
  const T result = scratch[0];
  __syncthreads();  // before the next call writes to `scratch`
  return result;
}

// Adds a block's counts to `total`; integers, whose order does not matter. Nearly always there is nothing to add.
template <int kSize>
__device__ inline void add_count(uint32_t count, unsigned long long* total) {
  if (!__syncthreads_or(count != 0)) return;
  const uint32_t sum = over_block<kSize, Add>(count);
  if (threadIdx.x == 0) atomicAdd(total, static_cast<unsigned long long>(sum));
}

}  // namespace zs
