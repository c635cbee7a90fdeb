// Dropout of eight neighbouring elements. The mask is made anew wherever it is needed, from an element's index alone.
#pragma once

#include "layers.h"

namespace zs {

#include "../philox.h"

// Random words of elements first to first + 7: those of two blocks of four, or of three.
__device__ inline void random_words(const Random& random, int64_t first, uint32_t (&words)[kWidth]) {
  const int skipped = int(first & 3);
  uint32_t all[kWidth + 4] = {};
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j == 2 && skipped == 0) break;
    const uint64_t block = uint64_t(first) / 4 + uint64_t(j);
    uint32_t a = uint32_t(block), b = uint32_t(block >> 32);
    uint32_t c = uint32_t(random.offset), d = uint32_t(random.offset >> 32);
    philox(a, b, c, d, random.seed);
    all[4 * j] = a, all[4 * j + 1] = b, all[4 * j + 2] = c, all[4 * j + 3] = d;
  }
  // selected and not indexed, so that the words stay in registers
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    words[i] = skipped == 0 ? all[i] : skipped == 1 ? all[i + 1] : skipped == 2 ? all[i + 2] : all[i + 3];
  }
}

// In place: 0 where dropped, whatever it was, else times the scale. `first` is the first element's index.
__device__ inline void drop(const Random& random, int64_t first, float (&x)[kWidth]) {
  if (random.threshold == 0 && random.scale == 1) return;
  uint32_t words[kWidth];
  random_words(random, first, words);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = words[i] >= random.threshold ? x[i] * random.scale : 0.0f;
}

}  // namespace zs
