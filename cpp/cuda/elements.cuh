// Number formats: eight neighbouring elements of a tensor of any type, as float32. Plain enough for a host compiler.
//
// Eight, because eight 16-bit numbers are one 16-byte access and eight float32 are two. Where a tensor does not begin
// on a 16-byte boundary, or the eight reach over an end of the work, elements are accessed one by one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace zs {

enum class Type : uint8_t { f32, bf16, f16 };

// Elements of one tensor, or nothing.
struct Buffer {
  void* data = nullptr;
  Type type = Type::f32;
};

constexpr int kWidth = 8;
constexpr uintptr_t kVectorBytes = 16;

__host__ __device__ inline int bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Which of the eight elements from `at` on are there: [first, last). The eight of a tensor's begin may start before it.
struct Span {
  int64_t at;
  int first, last;

  __host__ __device__ bool whole() const { return first == 0 && last == kWidth; }
  __host__ __device__ bool has(int i) const { return i >= first && i < last; }
};

// Eight elements as they lie in memory; 16-bit ones fill the first four words. Loads and conversions are apart, so that
// the loads of all tensors are under way before the first one is waited for.
struct Raw {
  uint32_t word[kWidth];
};

__host__ __device__ inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

__host__ __device__ inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Infinite or NaN.
__host__ __device__ inline bool is_nonfinite(float value) { return (bits_of(value) & 0x7f800000u) == 0x7f800000u; }

__host__ __device__ inline float from_half(uint32_t bits, Type type) {
  if (type == Type::bf16) return float_of(bits << 16);
  __half_raw raw;
  raw.x = static_cast<unsigned short>(bits);
  return __half2float(__half(raw));
}

// Round to nearest, ties to even; a NaN stays one.
__host__ __device__ inline uint32_t to_half(float value, Type type) {
  if (type == Type::bf16) return static_cast<__nv_bfloat16_raw>(__float2bfloat16_rn(value)).x;
  return static_cast<__half_raw>(__float2half_rn(value)).x;
}

__host__ __device__ inline bool can_be_vector(const void* address, const Span& span) {
  return span.whole() && reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

__host__ __device__ inline Raw fetch(const Buffer& from, const Span& span) {
  Raw raw = {};
  if (from.type == Type::f32) {
    const uint32_t* const source = static_cast<const uint32_t*>(from.data) + span.at;
    if (can_be_vector(source, span)) {
      const uint4 low = reinterpret_cast<const uint4*>(source)[0], high = reinterpret_cast<const uint4*>(source)[1];
      raw = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (span.has(i)) raw.word[i] = source[i];
      }
    }
  } else {
    const uint16_t* const source = static_cast<const uint16_t*>(from.data) + span.at;
    if (can_be_vector(source, span)) {
      const uint4 all = *reinterpret_cast<const uint4*>(source);
      raw = {{all.x, all.y, all.z, all.w, 0, 0, 0, 0}};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (span.has(i)) raw.word[i / 2] |= static_cast<uint32_t>(source[i]) << (16 * (i % 2));
      }
    }
  }
  return raw;
}

__host__ __device__ inline void widen(const Raw& raw, Type type, float (&to)[kWidth]) {
  if (type == Type::f32) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = float_of(raw.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = from_half((raw.word[i / 2] >> (16 * (i % 2))) & 0xffffu, type);
  }
}

__host__ __device__ inline void store(const float (&from)[kWidth], const Buffer& to, const Span& span) {
  if (to.type == Type::f32) {
    float* const target = static_cast<float*>(to.data) + span.at;
    if (can_be_vector(target, span)) {
      reinterpret_cast<float4*>(target)[0] = {from[0], from[1], from[2], from[3]};
      reinterpret_cast<float4*>(target)[1] = {from[4], from[5], from[6], from[7]};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (span.has(i)) target[i] = from[i];
      }
    }
  } else {
    uint16_t* const target = static_cast<uint16_t*>(to.data) + span.at;
    uint32_t half[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) half[i] = to_half(from[i], to.type);
    if (can_be_vector(target, span)) {
      *reinterpret_cast<uint4*>(target) = {half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                                           half[6] | half[7] << 16};
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (span.has(i)) target[i] = static_cast<uint16_t>(half[i]);
      }
    }
  }
}

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
