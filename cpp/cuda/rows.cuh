// Rows shared out to threads: a group of 2^n neighbouring threads takes a row, each thread eight neighbouring elements
// at a time. The size of a group depends on the length of a row alone, and so does the order of a sum.
#pragma once

#include "elements.cuh"
#include "launch.cuh"

namespace zs {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kMostLanes = 512;        // threads of a group
constexpr unsigned kRowThreads = 128;  // of a block of several groups, each within a warp
constexpr int kKept = 2;               // how many eights a thread keeps in registers

struct RowGrid {
  int64_t rows, columns;
  int shift = 0;  // a group has 2^shift threads

  RowGrid(int64_t rows, int64_t columns) : rows(rows), columns(columns) {
    while ((1 << shift) < kMostLanes && (int64_t(kKept * kWidth) << shift) < columns) ++shift;
  }

  __host__ __device__ int lanes() const { return 1 << shift; }
  // How many a block has.
  __host__ __device__ int64_t groups() const { return lanes() > kWarp ? 1 : int64_t(kRowThreads) >> shift; }
  unsigned threads() const { return lanes() > kWarp ? unsigned(lanes()) : kRowThreads; }
  unsigned blocks() const { return unsigned((rows + groups() - 1) / groups()); }
};

// This thread's part of a row. A group beyond the last row has no columns; it still takes part in reductions.
struct Group {
  int64_t row, begin, columns;  // begin: of the row, in the tensor
  int lane, lanes;

  __device__ explicit Group(const RowGrid& grid) : lanes(grid.lanes()) {
    lane = int(threadIdx.x) & (lanes - 1);
    row = int64_t(blockIdx.x) * grid.groups() + (threadIdx.x >> grid.shift);
    begin = row * grid.columns;
    columns = row < grid.rows ? grid.columns : 0;
  }

  __device__ bool leads() const { return lane == 0 && columns > 0; }
  __device__ Span in_row(int64_t at) const { return piece(at, columns); }
  __device__ Span in_tensor(int64_t at) const { return {begin + at, 0, in_row(at).last}; }
};

// All threads of a block must come here; each gets its group's result. `Rule` combines two values, in either order.
template <class Rule, class T>
__device__ inline T over_group(const Group& g, T value) {
  for (int apart = (g.lanes < kWarp ? g.lanes : kWarp) / 2; apart > 0; apart /= 2) {
    value = Rule::combine(value, __shfl_xor_sync(kWholeWarp, value, apart));
  }
  if (g.lanes <= kWarp) return value;
  __shared__ T part[kMostLanes / kWarp];
  if (threadIdx.x % kWarp == 0) part[threadIdx.x / kWarp] = value;
  __syncthreads();
  T result = part[0];
  for (int warp = 1; warp < g.lanes / kWarp; ++warp) result = Rule::combine(result, part[warp]);
  __syncthreads();  // before the next call writes to `part`
  return result;
}

// Some numbers for every element of a thread's first eights.
template <int kNumbers>
struct Kept {
  float value[kKept][kNumbers][kWidth];
};

enum class Pass { first, later };

// Calls use(at, x) for the eights of this thread, `at` being the first one's column. In the first pass x comes from
// make(at, x); later, what has been kept is as `use` left it, and the rest of a long row is made anew.
template <Pass kPass, int kNumbers, class Make, class Use>
__device__ inline void for_each_eight(const Group& g, Kept<kNumbers>& kept, const Make& make, const Use& use) {
  const int64_t first = int64_t(g.lane) * kWidth, stride = int64_t(g.lanes) * kWidth;
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const int64_t at = first + k * stride;
    if (at < g.columns) {
      if (kPass == Pass::first) make(at, kept.value[k]);
      use(at, kept.value[k]);
    }
  }
  for (int64_t at = first + kKept * stride; at < g.columns; at += stride) {
    float x[kNumbers][kWidth];
    make(at, x);
    use(at, x);
  }
}

}  // namespace zs
