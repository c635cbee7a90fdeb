// Work over many tensors in one launch: the table of tensors travels as the kernel's argument, in the memory for
// constants, so that nothing is copied, allocated or kept alive for it. More tensors than fit take several launches.
//
// A block takes one chunk of one tensor; its threads take eight elements at a time.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "elements.cuh"
#include "launch.cuh"

namespace zs {

constexpr int kThreads = 256;
constexpr int64_t kChunk = 8192;             // elements; a multiple of kThreads x kWidth
constexpr size_t kArgumentBytes = 4096 - 64;  // 4 KiB is what every driver takes; the rest is for further arguments

inline int64_t chunks_of(int64_t numel, int lead) { return numel ? (numel + lead + kChunk - 1) / kChunk : 0; }

// `Item` has `numel` and `lead`: its chunks begin `lead` (0 to 7) elements before its first one.
template <class Item>
struct Table {
  static constexpr int kItems = int((kArgumentBytes - 8) / (sizeof(Item) + sizeof(uint32_t)));
  Item item[kItems];
  uint32_t first_chunk[kItems];  // of each item, in this launch
  int32_t items = 0;
};

// The lead with which the most tensors are accessed 16 bytes at a time; 0 if it does not matter. Elementwise work only:
// a sum must not depend on where a tensor lies.
inline uint8_t best_lead(std::initializer_list<Buffer> buffers) {
  int best = 0, most = -1;
  for (int lead = 0; lead < kWidth; ++lead) {
    int aligned = 0, all = 0;
    for (const Buffer& buffer : buffers) {
      if (buffer.data == nullptr) continue;
      ++all;
      const uintptr_t start = reinterpret_cast<uintptr_t>(buffer.data) - uintptr_t(lead * bytes_of(buffer.type));
      aligned += start % kVectorBytes == 0;
    }
    if (aligned > most) best = lead, most = aligned;
    if (most == all) break;
  }
  return uint8_t(best);
}

// Calls launch(table, blocks, chunks before) until all items are done. Items without elements are left out.
template <class Item, class Launch>
cudaError_t for_each_table(const std::vector<Item>& items, const Launch& launch) {
  static_assert(sizeof(Table<Item>) <= kArgumentBytes);
  Table<Item> table;
  int64_t before = 0, chunks = 0;
  for (size_t index = 0; index <= items.size(); ++index) {
    const bool end = index == items.size();
    const int64_t more = end ? 0 : chunks_of(items[index].numel, items[index].lead);
    if (table.items == Table<Item>::kItems || (end && table.items) || chunks + more > INT32_MAX) {
      const cudaError_t error = launch(table, unsigned(chunks), before);
      if (error != cudaSuccess) return error;
      before += chunks;
      chunks = 0;
      table.items = 0;
    }
    if (more == 0) continue;
    table.item[table.items] = items[index];
    table.first_chunk[table.items++] = uint32_t(chunks);
    chunks += more;
  }
  return cudaSuccess;
}

// Which item of the table a block works on: the last one whose chunks begin at or before it.
template <class Item>
__device__ inline int item_of(const Table<Item>& table, uint32_t block) {
  int low = 0, high = table.items - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_chunk[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Calls work(span) for all eights of this thread in chunk `chunk` of an item.
template <class Work>
__device__ inline void for_each_span(int64_t numel, int lead, uint32_t chunk, const Work& work) {
  const int64_t start = int64_t(chunk) * kChunk - lead;
  for (int64_t at = start + int(threadIdx.x) * kWidth; at < start + kChunk && at < numel; at += kThreads * kWidth) {
    const int64_t left = numel - at;
    work(Span{at, at < 0 ? int(-at) : 0, left < kWidth ? int(left) : kWidth});
  }
}

}  // namespace zs
