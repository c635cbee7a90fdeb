// Symmetric quantisation in blocks: code = round(x / scale), scale = largest |x| / 127 (int4: 7), rounded up to how it is
// kept. A block with an element that is not finite, or too large for its scale, has a scale that is not finite and comes
// back as NaN.

inline float scale_at(const Buffer& scales, int64_t index) {
  float value;
  return *open_tile(scales, index, 1, &value);
}

// Stores the least number that is not below `value`, and returns it.
inline float store_scale(const Buffer& scales, int64_t index, float value) {
  if (scales.type == Type::f32) {
    static_cast<float*>(scales.data)[index] = value;
    return value;
  }
  uint16_t* const kept = static_cast<uint16_t*>(scales.data) + index;
  narrow(&value, scales, index, 1);
  if (scale_at(scales, index) < value) ++*kept;  // the next number up, since it is positive
  return scale_at(scales, index);
}

// Codes of a tile as integers.
inline void code_tile(const float* __restrict values, int64_t n, float scale, float most, int8_t* __restrict codes) {
  const float rounder = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, ties to even
  for (int64_t i = 0; i < n; ++i) {
    const float ratio = values[i] / scale;
    const float above = ratio < -most ? -most : ratio;
    const float inside = above > most ? most : above;
    codes[i] = int8_t(int32_t((inside + rounder) - rounder));
  }
}

void quantize(const Blocks& s, int64_t begin, int64_t end) {
  alignas(64) float scratch[kTile];
  alignas(64) int8_t single[kTile];
  const float most = s.packed ? 7.0f : 127.0f;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * s.block, last = smaller(first + s.block, s.numel);
    int32_t largest_bits = 0;  // magnitudes compare as integers, and a NaN is the largest
    for (int64_t at = first; at < last; at += kTile) {
      const int64_t n = smaller(kTile, last - at);
      const float* __restrict values = open_tile(s.values, at, n, scratch);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t magnitude = int32_t(bits_of(values[i]) & 0x7fffffffu);
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
      }
    }
    const float scale = store_scale(s.scales[0], block, float_of(uint32_t(largest_bits)) / most);
    const bool codable = scale > 0 && (bits_of(scale) & 0x7f800000u) != 0x7f800000u;
    for (int64_t at = first; at < last; at += kTile) {
      const int64_t n = smaller(kTile, last - at);
      int8_t* const codes = s.packed ? single : static_cast<int8_t*>(s.codes[0]) + at;
      if (codable) {
        code_tile(open_tile(s.values, at, n, scratch), n, scale, most, codes);
      } else {
        for (int64_t i = 0; i < n; ++i) codes[i] = 0;
      }
      if (s.packed) {
        if (n % 2) single[n] = 0;
        uint8_t* __restrict bytes = static_cast<uint8_t*>(s.codes[0]) + at / 2;
        for (int64_t i = 0; i < (n + 1) / 2; ++i) {
          bytes[i] = uint8_t((uint8_t(single[2 * i]) & 15u) | (uint8_t(single[2 * i + 1]) << 4));
        }
      }
    }
  }
}

// values = sum over the sources of code * scale, in their order.
void dequantize(const Blocks& s, int64_t begin, int64_t end) {
  alignas(64) float sum[kTile + 1];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * s.block, last = smaller(first + s.block, s.numel);
    for (int64_t at = first; at < last; at += kTile) {
      const int64_t n = smaller(kTile, last - at);
      for (int64_t i = 0; i <= n; ++i) sum[i] = 0;  // one more: int4 come in pairs
      for (int64_t source = 0; source < s.sources; ++source) {
        const float scale = scale_at(s.scales[source], block);
        if (s.packed) {
          const uint8_t* __restrict bytes = static_cast<const uint8_t*>(s.codes[source]) + at / 2;
          for (int64_t i = 0; i < (n + 1) / 2; ++i) {
            sum[2 * i] += float((int32_t(bytes[i] & 15u) ^ 8) - 8) * scale;
            sum[2 * i + 1] += float((int32_t(bytes[i] >> 4) ^ 8) - 8) * scale;
          }
        } else {
          const int8_t* __restrict codes = static_cast<const int8_t*>(s.codes[source]) + at;
          for (int64_t i = 0; i < n; ++i) sum[i] += float(codes[i]) * scale;
        }
      }
      copy_out(sum, s.values, at, n);
    }
  }
}
