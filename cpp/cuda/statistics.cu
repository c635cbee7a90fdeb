// Norms and counts of non-finite elements in one pass, in float64 and in an order that depends on sizes only: a thread
// adds its elements up, a block its threads, a second launch the chunks.
#include "kernels.h"
#include "reduce.cuh"
#include "table.cuh"

namespace zs {
namespace {

struct Reading {
  void* data;
  int64_t numel;
  int32_t index;  // of the tensor in the call
  Type type;
  uint8_t lead;
};

using ReadingTable = Table<Reading>;

template <Norm kNorm>
__device__ inline double term(float value, double power) {
  const double x = double(value);
  if (kNorm == Norm::two) return x * x;
  return kNorm == Norm::power ? pow(fabs(x), power) : fabs(x);
}

template <Norm kNorm>
__global__ void __launch_bounds__(kThreads) read_all(const __grid_constant__ ReadingTable table, double power,
                                                     double* partial, unsigned long long* counts) {
  const int item = item_of(table, blockIdx.x);
  const Reading r = table.item[item];
  const Buffer values{r.data, r.type};
  double sum = 0;
  uint32_t count = 0;
  for_each_span(r.numel, r.lead, blockIdx.x - table.first_chunk[item], [&](const Span& span) {
    float x[kWidth];
    widen(fetch(values, span), values.type, x);  // elements that are not there are 0 and change nothing
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double more = term<kNorm>(x[i], power);
      sum = kNorm == Norm::infinity ? Larger::combine(sum, more) : sum + more;
      count += is_nonfinite(x[i]);
    }
  });
  sum = kNorm == Norm::infinity ? over_block<kThreads, Larger>(sum) : over_block<kThreads, Add>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
  add_count<kThreads>(count, counts + r.index);
}

constexpr int kFinishThreads = 1024;  // a tensor of 10^9 elements has 10^5 chunks, and one block adds them up

// Where the chunks of some items begin among all of the call, and where those of the last one end.
struct Ranges {
  static constexpr int kItems = int(kArgumentBytes / sizeof(uint32_t)) - 1;
  uint32_t begin[kItems + 1];
};

template <class Rule>
__global__ void __launch_bounds__(kFinishThreads)
    finish_items(const __grid_constant__ Ranges ranges, int64_t stride, const double* partial, double* results) {
  const double* const column = partial + int64_t(blockIdx.y) * stride;
  double value = 0;
  for (int64_t chunk = int64_t(ranges.begin[blockIdx.x]) + threadIdx.x; chunk < ranges.begin[blockIdx.x + 1];
       chunk += kFinishThreads) {
    value = Rule::combine(value, column[chunk]);
  }
  value = over_block<kFinishThreads, Rule>(value);
  if (threadIdx.x == 0) results[int64_t(blockIdx.x) * gridDim.y + blockIdx.y] = value;
}

}  // namespace

int64_t chunk_count(const std::vector<int64_t>& numels) {
  int64_t count = 0;
  for (int64_t numel : numels) count += chunks_of(numel, 0);
  return count;
}

cudaError_t finish(const std::vector<int64_t>& numels, int columns, bool largest, const double* partial,
                   double* results, cudaStream_t stream) {
  const int64_t stride = chunk_count(numels);
  auto* const kernel = largest ? finish_items<Larger> : finish_items<Add>;
  Ranges ranges;
  int64_t chunk = 0;
  for (size_t index = 0; index < numels.size();) {
    int items = 0;
    ranges.begin[0] = uint32_t(chunk);
    while (items < Ranges::kItems && index < numels.size()) {
      chunk += chunks_of(numels[index++], 0);
      ranges.begin[++items] = uint32_t(chunk);
    }
    const cudaError_t error = launch(kernel, dim3(unsigned(items), unsigned(columns)), kFinishThreads, stream, ranges,
                                     stride, partial, results);
    if (error != cudaSuccess) return error;
    results += int64_t(items) * columns;
  }
  return cudaSuccess;
}

cudaError_t statistics(const std::vector<Buffer>& buffers, const std::vector<int64_t>& numels, Norm norm, double power,
                       double* partial, double* sums, unsigned long long* counts, cudaStream_t stream) {
  std::vector<Reading> readings;
  for (size_t i = 0; i < buffers.size(); ++i) {
    readings.push_back({buffers[i].data, numels[i], int32_t(i), buffers[i].type, 0});
  }
  auto* const kernel = norm == Norm::one        ? read_all<Norm::one>
                       : norm == Norm::two      ? read_all<Norm::two>
                       : norm == Norm::infinity ? read_all<Norm::infinity>
                                                : read_all<Norm::power>;
  const cudaError_t error = for_each_table(readings, [&](const ReadingTable& table, unsigned blocks, int64_t before) {
    return launch(kernel, blocks, kThreads, stream, table, power, partial + before, counts);
  });
  return error != cudaSuccess ? error : finish(numels, 1, norm == Norm::infinity, partial, sums, stream);
}

}  // namespace zs
