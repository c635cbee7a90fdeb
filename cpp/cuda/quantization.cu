// Symmetric quantisation in blocks: code = round(x / scale), scale = largest |x| / 127 (int4: 7), rounded up to how it
// is kept. A block with an element that is not finite, or too large for its scale, has a scale that is not finite and
// comes back as NaN.
#include <algorithm>

#include "layers.h"
#include "rows.cuh"

namespace zs {
namespace {

struct LargerBits {
  __device__ static uint32_t combine(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

__device__ inline float number_at(const Buffer& from, int64_t index) {
  if (from.type == Type::f32) return static_cast<const float*>(from.data)[index];
  return from_half(static_cast<const uint16_t*>(from.data)[index], from.type);
}

// The least number of the scales' format that is not below `value`; stored by one thread.
__device__ inline float kept_scale(const Buffer& scales, int64_t index, float value, bool stores) {
  if (scales.type == Type::f32) {
    if (stores) static_cast<float*>(scales.data)[index] = value;
    return value;
  }
  uint32_t half = to_half(value, scales.type);
  if (from_half(half, scales.type) < value) ++half;  // the next number up, since it is positive
  if (stores) static_cast<uint16_t*>(scales.data)[index] = static_cast<uint16_t>(half);
  return from_half(half, scales.type);
}

// round(x / scale) within [-most, most], as the low byte.
__device__ inline uint32_t code_of(float x, float scale, float most) {
  const float rounder = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, ties to even
  const float ratio = x / scale;
  const float above = ratio < -most ? -most : ratio;
  const float inside = above > most ? most : above;
  return uint32_t(int32_t((inside + rounder) - rounder)) & 0xffu;
}

// Words of eight codes: two of int8, one of int4.
struct Codes {
  uint32_t word[2];
};

// Memory of `bytes` (8, or 4 if packed) from `address` on; fewer at an end.
__device__ inline void store_codes(const Codes& codes, uint8_t* target, int bytes, int whole) {
  if (bytes == whole && reinterpret_cast<uintptr_t>(target) % unsigned(whole) == 0) {
    if (whole == 8) {
      *reinterpret_cast<uint2*>(target) = {codes.word[0], codes.word[1]};
    } else {
      *reinterpret_cast<uint32_t*>(target) = codes.word[0];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < bytes) target[i] = static_cast<uint8_t>(codes.word[i / 4] >> (8 * (i % 4)));
  }
}

__device__ inline Codes load_codes(const uint8_t* source, int bytes, int whole) {
  Codes codes = {};
  if (bytes == whole && reinterpret_cast<uintptr_t>(source) % unsigned(whole) == 0) {
    if (whole == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(source);
      codes = {{both.x, both.y}};
    } else {
      codes.word[0] = *reinterpret_cast<const uint32_t*>(source);
    }
    return codes;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < bytes) codes.word[i / 4] |= static_cast<uint32_t>(source[i]) << (8 * (i % 4));
  }
  return codes;
}

__device__ inline float number_of(const Codes& codes, int i, bool packed) {
  if (packed) return float((int32_t(codes.word[0] >> (4 * i) & 15u) ^ 8) - 8);
  return float((int32_t(codes.word[i / 4] >> (8 * (i % 4)) & 255u) ^ 128) - 128);
}

__global__ void __launch_bounds__(kMostLanes) quantize_all(const RowGrid grid, const Blocks s, const Quantized target) {
  Group g(grid);
  if (g.columns && g.begin + g.columns > s.numel) g.columns = s.numel - g.begin;
  const float most = s.packed ? 7.0f : 127.0f;
  Kept<1> kept;
  uint32_t largest = 0;  // magnitudes compare as integers, and a NaN is the largest
  const auto make = [&](int64_t at, float(&x)[1][kWidth]) { load(s.values, g.in_tensor(at), x[0]); };
  for_each_eight<Pass::first>(g, kept, make, [&](int64_t, float(&x)[1][kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = LargerBits::combine(largest, bits_of(x[0][i]) & 0x7fffffffu);
  });
  largest = over_group<LargerBits>(g, largest);
  const float scale = kept_scale(target.scales, g.row, float_of(largest) / most, g.leads());
  const bool codable = scale > 0 && !is_nonfinite(scale);
  for_each_eight<Pass::later>(g, kept, make, [&](int64_t at, float(&x)[1][kWidth]) {
    const int count = g.in_row(at).last;
    Codes codes = {};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {  // elements that are not there are 0, and so are their codes
      const uint32_t code = codable ? code_of(x[0][i], scale, most) : 0;
      codes.word[s.packed ? 0 : i / 4] |= s.packed ? (code & 15u) << (4 * i) : code << (8 * (i % 4));
    }
    uint8_t* const bytes = static_cast<uint8_t*>(target.codes);
    const int64_t place = g.begin + at;
    store_codes(codes, bytes + (s.packed ? place / 2 : place), s.packed ? (count + 1) / 2 : count, s.packed ? 4 : 8);
  });
}

constexpr unsigned kFlatThreads = 256;
constexpr int kSources = 128;  // of a launch, in the memory for arguments

struct Sources {
  Quantized item[kSources];
  int count;
  bool first;  // of the launches: the sum begins with 0
};

// Adds a source to the sum of eight elements from `at` on.
__device__ inline void add_source(const Blocks& s, const Quantized& source, int64_t at, int count, int64_t block,
                                  int64_t left, float (&sum)[kWidth]) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(source.codes) + (s.packed ? at / 2 : at);
  const Codes codes = load_codes(bytes, s.packed ? (count + 1) / 2 : count, s.packed ? 4 : 8);
  float scale = number_at(source.scales, block);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (i < count) {
      if (left == 0) {  // the eight reach into the next block
        scale = number_at(source.scales, ++block);
        left = s.block;
      }
      --left;
      sum[i] += number_of(codes, i, s.packed) * scale;
    }
  }
}

__global__ void __launch_bounds__(kFlatThreads)
    dequantize_all(const Blocks s, const __grid_constant__ Sources sources) {
  const int64_t at = (int64_t(blockIdx.x) * kFlatThreads + threadIdx.x) * kWidth;
  if (at >= s.numel) return;
  const Span span = piece(at, s.numel);
  const int64_t block = at / s.block, left = s.block - at % s.block;
  float sum[kWidth] = {};
  if (!sources.first) load(s.values, span, sum);
  for (int i = 0; i < sources.count; ++i) add_source(s, sources.item[i], at, span.last, block, left, sum);
  store(sum, s.values, span);
}

}  // namespace

cudaError_t quantize(const Blocks& blocks, const Quantized& target, cudaStream_t stream) {
  if (!blocks.numel) return cudaSuccess;
  const int64_t size = std::min(blocks.block, blocks.numel);
  const RowGrid grid((blocks.numel + size - 1) / size, size);
  return launch(quantize_all, grid.blocks(), grid.threads(), stream, grid, blocks, target);
}

cudaError_t dequantize(const Blocks& blocks, const Quantized* sources, int64_t count, cudaStream_t stream) {
  constexpr int64_t kElements = int64_t(kFlatThreads) * kWidth;
  const unsigned grid = unsigned((blocks.numel + kElements - 1) / kElements);
  for (int64_t done = 0; done < count && blocks.numel; done += kSources) {
    Sources some;
    some.count = int(std::min<int64_t>(kSources, count - done));
    some.first = done == 0;
    std::copy(sources + done, sources + done + some.count, some.item);
    const cudaError_t error = launch(dequantize_all, grid, kFlatThreads, stream, blocks, some);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace zs
