// Work over lists of tensors, spread over torch's threads in chunks that do not depend on their number.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zs {

constexpr int64_t kChunk = 32768;  // elements; a multiple of the kernels' tile

// Calls work(item, begin, end, chunk) for every chunk [begin, end) of every item; `sizes` has the items' elements and
// `chunk` numbers the chunks from 0 through all items.
template <class Work>
void for_each_chunk(const std::vector<int64_t>& sizes, const Work& work) {
  std::vector<int64_t> first(sizes.size() + 1, 0);  // number of each item's first chunk
  for (size_t item = 0; item < sizes.size(); ++item) first[item + 1] = first[item] + (sizes[item] + kChunk - 1) / kChunk;
  torch::stable::parallel_for(0, first.back(), 1, [&](int64_t from, int64_t to) {
    size_t item = std::upper_bound(first.begin(), first.end(), from) - first.begin() - 1;
    for (int64_t chunk = from; chunk < to; ++chunk) {
      while (chunk >= first[item + 1]) ++item;
      const int64_t begin = (chunk - first[item]) * kChunk;
      work(item, begin, std::min(begin + kChunk, sizes[item]), chunk);
    }
  });
}

// How many chunks `for_each_chunk` makes.
inline int64_t chunk_count(const std::vector<int64_t>& sizes) {
  int64_t count = 0;
  for (int64_t size : sizes) count += (size + kChunk - 1) / kChunk;
  return count;
}

}  // namespace zs
