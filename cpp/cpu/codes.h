// 8-bit optimizer states: blocks of numbers from and to codes with one scale each (zero_strategy/ops/dynamic_codes.py).
// An update decodes a block into tiles, changes them in float32, and codes them again while they are in the caches.

template <bool kSigned>
struct Map {
  static constexpr DynamicMap map = dynamic_map(kSigned);
};

#if ZS_TARGET_LEVEL == 512
// Constants by the last bits of an exponent, as permutations of registers look them up.
template <bool kSigned>
struct ByExponent {
  alignas(64) float slope[16] = {}, start[16] = {}, factor[16] = {};  // the latter by decade
  alignas(64) float bound[32] = {};  // in [2^(i - 31), 2^(i - 30)): there is one at most
  alignas(64) int32_t decade[32] = {};  // below it

  constexpr ByExponent() {
    constexpr DynamicMap map = dynamic_map(kSigned);
    for (int at = 1; at < kDecades; ++at) {
      const int place = (at + (kSigned ? 126 : 127)) & 15;  // a number's own exponent says its decade
      slope[place] = map.slope[at];
      start[place] = map.start[at];
      factor[at] = map.factor[at];
    }
    double from = 1.0 / (1u << 31);
    for (int exponent = 0; exponent < 32; ++exponent, from *= 2) {
      bound[exponent] = 2;  // above all parts
      for (int next = 0; next < kDecades - 1; ++next) {
        if (map.bound[next] < from) ++decade[exponent];
        if (map.bound[next] >= from && map.bound[next] < 2 * from) bound[exponent] = map.bound[next];
      }
    }
  }
};

// Sixteen elements at once.
template <bool kSigned>
struct Wide {
  static constexpr ByExponent<kSigned> known{};
  __m512 slope, start, factor, low_bound, high_bound;
  __m512i low_decade, high_decade;

  inline __attribute__((always_inline)) Wide() {
    slope = _mm512_load_ps(known.slope), start = _mm512_load_ps(known.start), factor = _mm512_load_ps(known.factor);
    low_bound = _mm512_load_ps(known.bound), high_bound = _mm512_load_ps(known.bound + 16);
    low_decade = _mm512_load_si512(known.decade), high_decade = _mm512_load_si512(known.decade + 16);
  }

  inline __attribute__((always_inline)) __m512 decode(__m128i codes, __m512 scale) const {
    const __m512i wide = kSigned ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
    const __m512i number = kSigned ? _mm512_abs_epi32(wide) : _mm512_add_epi32(wide, _mm512_set1_epi32(1));
    const __mmask16 present = _mm512_test_epi32_mask(wide, wide);
    const __m512 real = _mm512_cvtepi32_ps(number);
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(real), 23);
    const __m512 scaled = _mm512_mul_ps(real, _mm512_maskz_permutexvar_ps(present, exponent, slope));
    __m512 value = _mm512_add_ps(scaled, _mm512_maskz_permutexvar_ps(present, exponent, start));
    if (kSigned) {
      const __mmask16 negative = _mm512_cmpgt_epi32_mask(wide, _mm512_setzero_si512());
      value = _mm512_mask_xor_ps(value, negative, value, _mm512_set1_ps(-0.0f));
    }
    return _mm512_mul_ps(value, scale);
  }

  // Two operations of one rounding are as exact as each by itself: twice a width, and a width (a power of 2) x kShift.
  inline __attribute__((always_inline)) __m128i encode(__m512 values, __m512 inverse) const {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512 part = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), inverse);
    const __m512i found = _mm512_srli_epi32(_mm512_castps_si512(part), 23);
    const __m512i exponent = _mm512_max_epi32(found, _mm512_set1_epi32(96));
    const __m512 bound = _mm512_permutex2var_ps(low_bound, exponent, high_bound);
    __m512i decade = _mm512_permutex2var_epi32(low_decade, exponent, high_decade);
    const __mmask16 above = _mm512_cmp_ps_mask(part, bound, _CMP_GT_OQ);
    decade = _mm512_mask_add_epi32(decade, above, decade, _mm512_set1_epi32(1));
    const __m512i first = _mm512_set1_epi32(kSigned ? 0x3f000000 : 0x3f800000);
    const __m512 width = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(decade, 23), first));
    const __m512 scaled = _mm512_mul_ps(part, _mm512_permutexvar_ps(decade, factor));
    const __m512 place = _mm512_fmadd_ps(width, _mm512_set1_ps(kShift), scaled);
    const __m512 last = _mm512_fmsub_ps(width, _mm512_set1_ps(2.0f), _mm512_set1_ps(1.0f));
    const __m512 inside = _mm512_min_ps(_mm512_max_ps(place, width), last);
    if (kSigned) {
      // inside, negative where the value is not: -(+128) is a byte, and what would be +128 for -1 becomes 127.
      const __m512i turned = _mm512_ternarylogic_epi32(_mm512_castps_si512(inside), bits,
                                                       _mm512_set1_epi32(int32_t(0x80000000u)), 0xd2);
      return _mm512_cvtsepi32_epi8(_mm512_cvttps_epi32(_mm512_castsi512_ps(turned)));
    }
    const __mmask16 present = _mm512_test_epi32_mask(magnitude, magnitude);
    const __m512i number = _mm512_cvttps_epi32(inside);
    return _mm512_cvtepi32_epi8(_mm512_maskz_sub_epi32(present, number, _mm512_set1_epi32(1)));
  }
};
#endif

template <bool kSigned>
ZS_OUTLINE void decode_block(const uint8_t* __restrict codes, float scale, int64_t n, float* __restrict values) {
  int64_t i = 0;
#if ZS_TARGET_LEVEL == 512
  const Wide<kSigned> wide;
  const __m512 scales = _mm512_set1_ps(scale);
  for (; i + 16 <= n; i += 16) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
    _mm512_storeu_ps(values + i, wide.decode(some, scales));
  }
#endif
  for (; i < n; ++i) values[i] = Map<kSigned>::map.value[codes[i]] * scale;
}

// The largest magnitude as an integer: so they compare, and a NaN is the largest.
inline int32_t largest_of(const float* __restrict values, int64_t n) {
  int64_t i = 0;
  int32_t largest = 0;
#if ZS_TARGET_LEVEL == 512
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i even = _mm512_setzero_si512(), odd = even;
  for (; i + 32 <= n; i += 32) {
    even = _mm512_max_epi32(even, _mm512_and_si512(_mm512_loadu_si512(values + i), mask));
    odd = _mm512_max_epi32(odd, _mm512_and_si512(_mm512_loadu_si512(values + i + 16), mask));
  }
  largest = _mm512_reduce_max_epi32(_mm512_max_epi32(even, odd));
#endif
  for (; i < n; ++i) {
    const int32_t magnitude = int32_t(bits_of(values[i]) & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Returns the scale.
template <bool kSigned>
ZS_OUTLINE float encode_block(const float* __restrict values, int32_t largest, int64_t n, uint8_t* __restrict codes) {
  constexpr DynamicMap map = dynamic_map(kSigned);
  if (largest >= 0x7f800000 || largest < 0x00800000) {
    std::memset(codes, 0, size_t(n));
    return largest >= 0x7f800000 ? float_of(0x7fc00000u) : 0.0f;
  }
  const float scale = float_of(uint32_t(largest)), inverse = 1.0f / scale;
  int64_t i = 0;
#if ZS_TARGET_LEVEL == 512
  const Wide<kSigned> wide;
  const __m512 inverses = _mm512_set1_ps(inverse);
  for (; i + 16 <= n; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), wide.encode(_mm512_loadu_ps(values + i), inverses));
  }
#endif
  for (; i < n; ++i) {
    const uint32_t bits = bits_of(values[i]);
    const float part = float_of(bits & 0x7fffffffu) * inverse;
    const int32_t order = int32_t(bits_of(part));  // integers: a comparison is a mask, and nothing branches
    int32_t decade = 0, factor = int32_t(bits_of(map.factor[0]));
#pragma GCC unroll 8
    for (int next = 1; next < kDecades; ++next) {
      const int32_t above = -int32_t(order > int32_t(bits_of(map.bound[next - 1])));
      decade -= above;
      factor += above & (int32_t(bits_of(map.factor[next])) - int32_t(bits_of(map.factor[next - 1])));
    }
    const float width = float_of(uint32_t(decade << 23) + bits_of(map.width[0])), last = width + width - 1.0f;
    const float place = part * float_of(uint32_t(factor)) + width * kShift;
    const float from = place < width ? width : place, inside = from > last ? last : from;
    int32_t number = int32_t(inside);
    if (kSigned) {
      const int32_t positive = ~(int32_t(bits) >> 31);   // all ones
      number -= (number >> 7) & ~positive;               // -1 has no code
      number = (number ^ positive) - positive;
    } else {
      number = (number - 1) & -int32_t((bits & 0x7fffffffu) != 0);
    }
    codes[i] = uint8_t(number);
  }
  return scale;
}

// Runs `update(parameter, gradient, first, second, n)` block by block, in float32.
template <class Update>
inline void by_blocks(const Segment& s, int64_t begin, int64_t end, const Update& update) {
  alignas(64) float gradients[kCodeBlock], firsts[kCodeBlock], seconds[kCodeBlock];
  for (int64_t at = begin; at < end; at += kCodeBlock) {
    const int64_t n = smaller(kCodeBlock, end - at), block = at / kCodeBlock;
    if (at + 2 * kCodeBlock <= s.numel) {
      fetch({s.parameter, Type::f32}, at + kCodeBlock, kCodeBlock);
      fetch(s.gradient, at + kCodeBlock, kCodeBlock);
    }
    float* const parameter = s.parameter + at;
    const float* const gradient = open_tile(s.gradient, at, n, gradients);
    float* const first = s.first_codes.codes ? firsts : nullptr;
    float* const second = s.second_codes.codes ? seconds : nullptr;
    if (first) decode_block<true>(s.first_codes.codes + at, s.first_codes.scales[block], n, first);
    if (second) decode_block<false>(s.second_codes.codes + at, s.second_codes.scales[block], n, second);
    update(parameter, gradient, first, second, n);
    // Both before the first is coded, which does not wait for the second then.
    const int32_t largest = first ? largest_of(first, n) : 0, largest_second = second ? largest_of(second, n) : 0;
    if (first) s.first_codes.scales[block] = encode_block<true>(first, largest, n, s.first_codes.codes + at);
    if (second) s.second_codes.scales[block] = encode_block<false>(second, largest_second, n, s.second_codes.codes + at);
    if (s.streamed) {
      for (int64_t done = 0; done < n; done += kUpdateTile) {
        stream_out(parameter + done, s.copy, at + done, smaller(kUpdateTile, n - done));
      }
    } else {
      copy_out(parameter, s.copy, at, n);
    }
  }
  if (s.streamed) end_of_stream();
}
