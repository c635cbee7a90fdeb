// 8-bit optimizer states: blocks of numbers from and to codes with one scale each (zero_strategy/ops/dynamic_codes.py).
// An update decodes a block into tiles, changes them in float32, and codes them again while they are in the caches.

template <bool kSigned>
struct Map {
  static constexpr DynamicMap map = dynamic_map(kSigned);
};

#if ZS_TARGET_LEVEL == 512
// Constants by the last bits of an exponent, or by decade, as permutations of registers look them up.
template <bool kSigned>
struct Lookup {
  alignas(64) float slope[16] = {}, start[16] = {};
  alignas(64) float factor[16] = {}, shift[16] = {};  // by decade; number = part x factor + shift
  alignas(64) float bound[32] = {};  // in [2^(i - 31), 2^(i - 30)): there is one at most
  alignas(64) int32_t decade[32] = {};  // below it

  constexpr Lookup() {
    constexpr DynamicMap map = dynamic_map(kSigned);
    for (int at = 0; at < kDecades; ++at) {
      factor[at] = map.factor[at];
      shift[at] = at == kDecades - 1 ? map.width[at] : map.width[at] * kShift;
      if (at == 0) continue;
      const int place = (at + (kSigned ? 126 : 127)) & 15;  // a number's own exponent says its decade
      slope[place] = kSigned ? -map.slope[at] : map.slope[at];  // a positive code is a negative value
      start[place] = map.start[at];
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

// A constant that the compiler takes for a value: from a register or from memory. It would make it anew in every turn
// otherwise, on the one port that permutations need.
inline __attribute__((always_inline)) __m512i kept(int32_t value) {
  __m512i all = _mm512_set1_epi32(value);
  asm("" : "+v"(all));
  return all;
}

inline __attribute__((always_inline)) __m512 kept(float value) { return _mm512_castsi512_ps(kept(int32_t(bits_of(value)))); }

// Sixteen elements at once, by the arithmetic of decode_block and encode_block.
template <bool kSigned>
struct Wide {
  static constexpr Lookup<kSigned> known{};
  const __m512i magnitude_bits = kept(0x7fffffff), sign_bit = kept(int32_t(0x80000000u)), one = kept(1), low = kept(96);
  const __m512 two = kept(2.0f), twice = kept(2.25f), below = kept(-0.75f);
  __m512 slope, start, factor, shift, low_bound, high_bound;
  __m512i low_decade, high_decade;

  inline __attribute__((always_inline)) Wide() {
    slope = _mm512_load_ps(known.slope), start = _mm512_load_ps(known.start);
    factor = _mm512_load_ps(known.factor), shift = _mm512_load_ps(known.shift);
    low_bound = _mm512_load_ps(known.bound), high_bound = _mm512_load_ps(known.bound + 16);
    low_decade = _mm512_load_si512(known.decade), high_decade = _mm512_load_si512(known.decade + 16);
  }

  inline __attribute__((always_inline)) __m512 decode(__m128i codes, __m512 scale) const {
    const __m512i wide = kSigned ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
    const __m512 number = _mm512_cvtepi32_ps(kSigned ? wide : _mm512_add_epi32(wide, one));
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(number), 23);
    if (!kSigned) {  // the constants of 1, which stands for zero, are zero
      const __m512 value = _mm512_fmadd_ps(number, _mm512_permutexvar_ps(exponent, slope),
                                           _mm512_permutexvar_ps(exponent, start));
      return _mm512_mul_ps(value, scale);
    }
    const __mmask16 present = _mm512_test_epi32_mask(wide, wide);
    const __m512i from = _mm512_castps_si512(_mm512_maskz_permutexvar_ps(present, exponent, start));
    const __m512 turned = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(from, wide, sign_bit, 0xd2));
    const __m512 value = _mm512_fmadd_ps(number, _mm512_maskz_permutexvar_ps(present, exponent, slope), turned);
    return _mm512_mul_ps(value, scale);
  }

  // Only the lowest decade of the unsigned map has numbers before its first, and only the end of a decade has numbers
  // after its last: up to one before twice the width, which is 2.25 shifts.
  inline __attribute__((always_inline)) __m128i encode(__m512 values, __m512 inverse) const {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i magnitude = kSigned ? _mm512_and_si512(bits, magnitude_bits) : bits;  // second moments have no sign
    const __m512 part = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), inverse);
    const __m512i exponent = _mm512_max_epi32(_mm512_srli_epi32(_mm512_castps_si512(part), 23), low);
    const __m512 bound = _mm512_permutex2var_ps(low_bound, exponent, high_bound);
    __m512i decade = _mm512_permutex2var_epi32(low_decade, exponent, high_decade);
    const __mmask16 above = _mm512_cmp_ps_mask(part, bound, _CMP_GT_OQ);
    decade = _mm512_mask_add_epi32(decade, above, decade, one);
    const __m512 shifts = _mm512_permutexvar_ps(decade, shift);
    const __m512 place = _mm512_add_ps(_mm512_mul_ps(part, _mm512_permutexvar_ps(decade, factor)), shifts);
    const __m512 last = _mm512_fmadd_ps(shifts, twice, below);
    if (kSigned) {
      const __m512 inside = _mm512_min_ps(place, last);
      // inside, negative where the value is not: -(+128) is a byte, and what would be +128 for -1 becomes 127.
      const __m512i turned = _mm512_ternarylogic_epi32(_mm512_castps_si512(inside), bits, sign_bit, 0xd2);
      return _mm512_cvtsepi32_epi8(_mm512_cvttps_epi32(_mm512_castsi512_ps(turned)));
    }
    const __m512 inside = _mm512_min_ps(_mm512_max_ps(place, two), last);
    const __mmask16 present = _mm512_test_epi32_mask(magnitude, magnitude);
    const __m512i number = _mm512_cvttps_epi32(inside);
    return _mm512_cvtepi32_epi8(_mm512_maskz_sub_epi32(present, number, one));
  }
};
#elif ZS_TARGET_LEVEL == 2
// A decade is a tenth of the next, so an exponent says it by a straight line, or the one below: (exponent x kPer + kFrom)
// / 256. The bound after that one decides.
constexpr int32_t kLeastExponent = 104, kMostExponent = 126, kPer = 77, kFrom = 150 - kLeastExponent * kPer;

constexpr int32_t decade_or_below(int32_t exponent) { return (exponent * kPer + kFrom) >> 8; }

// True if it is so for all parts of an exponent; those of lower ones count with the least, and 1 with the most.
constexpr bool line_holds(bool is_signed) {
  const DynamicMap map = dynamic_map(is_signed);
  double from = 1.0 / (1 << 23);
  for (int32_t exponent = kLeastExponent; exponent <= kMostExponent; ++exponent, from *= 2) {
    const int32_t guess = decade_or_below(exponent);
    int32_t least = is_signed ? 0 : 1, most = 0;
    for (int next = 0; next < kDecades - 1; ++next) {
      const double bound = map.bound[next];
      if (bound > 0 && bound < from && exponent > kLeastExponent) ++least;
      if (bound < 2 * from) ++most;
    }
    if (exponent == kMostExponent) most = kDecades - 1;
    if (guess < 0 || guess > kDecades - 2 || guess > least || guess + 1 < most) return false;
  }
  return true;
}
static_assert(line_holds(true) && line_holds(false));

// Constants by the last three bits of an exponent or of a decade: the first and the last decade have one place.
template <bool kSigned>
struct Lookup {
  alignas(32) float slope[8] = {}, start[8] = {}, factor[8] = {}, bound[8] = {};

  constexpr Lookup() {
    constexpr DynamicMap map = dynamic_map(kSigned);
    for (int at = 1; at < kDecades; ++at) {
      const int place = (at + (kSigned ? 126 : 127)) & 7;  // a number's own exponent says its decade
      slope[place] = kSigned ? -map.slope[at] : map.slope[at];  // a positive code is a negative value
      start[place] = map.start[at];
      factor[at & 7] = map.factor[at];
      bound[at - 1] = map.bound[at - 1];
    }
  }
};

// Eight elements at once, by the arithmetic of decode_block and encode_block.
template <bool kSigned>
struct Wide {
  static constexpr Lookup<kSigned> known{};
  const __m256 slope = _mm256_load_ps(known.slope), start = _mm256_load_ps(known.start);
  const __m256 factor = _mm256_load_ps(known.factor), bound = _mm256_load_ps(known.bound);
  const __m256 sign_bit = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f), shift = _mm256_set1_ps(kShift);
  const __m256i least = _mm256_set1_epi32(kLeastExponent), most = _mm256_set1_epi32(kMostExponent);
  const __m256i per = _mm256_set1_epi32(kPer), from = _mm256_set1_epi32(kFrom), zero = _mm256_setzero_si256();
  const __m256i first_width = _mm256_set1_epi32(int32_t(bits_of(kSigned ? 0.5f : 1.0f)));

  inline __attribute__((always_inline)) Wide() {}  // one that the compiler makes is for no processor of the pragma

  inline __attribute__((always_inline)) __m256 decode(__m128i codes, __m256 scale) const {
    const __m256i wide = kSigned ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes);
    const __m256i count = kSigned ? wide : _mm256_add_epi32(wide, _mm256_set1_epi32(1));
    const __m256 number = _mm256_cvtepi32_ps(count);
    const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(number), 23);  // the sign is no part of three bits
    const __m256 absent = _mm256_castsi256_ps(_mm256_cmpeq_epi32(wide, zero));
    __m256 begin = _mm256_permutevar8x32_ps(start, exponent);
    if (kSigned) begin = _mm256_xor_ps(begin, _mm256_andnot_ps(number, sign_bit));
    const __m256 value = _mm256_fmadd_ps(number, _mm256_permutevar8x32_ps(slope, exponent), begin);
    return _mm256_mul_ps(_mm256_andnot_ps(absent, value), scale);
  }

  // Numbers, which `bytes` packs.
  inline __attribute__((always_inline)) __m256i encode(__m256 value, __m256 inverse) const {
    const __m256 magnitude = _mm256_andnot_ps(sign_bit, value), part = _mm256_mul_ps(magnitude, inverse);
    __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(part), 23);
    exponent = _mm256_min_epi32(_mm256_max_epi32(exponent, least), most);
    // Products of 16 bits: below 2^14, and the upper halves are zero.
    const __m256i guess = _mm256_srli_epi32(_mm256_add_epi32(_mm256_mullo_epi16(exponent, per), from), 8);
    const __m256 above = _mm256_cmp_ps(part, _mm256_permutevar8x32_ps(bound, guess), _CMP_GT_OQ);
    const __m256i decade = _mm256_sub_epi32(guess, _mm256_castps_si256(above));
    const __m256 width = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(decade, 23), first_width));
    const __m256 last = _mm256_sub_ps(_mm256_add_ps(width, width), one);
    const __m256 scaled = _mm256_mul_ps(part, _mm256_permutevar8x32_ps(factor, decade));
    const __m256 place = _mm256_add_ps(scaled, _mm256_mul_ps(width, shift));
    const __m256 inside = _mm256_min_ps(_mm256_max_ps(place, width), last);
    // The number, negative where the value is not: -(+128) is a byte, and what would be +128 for -1 becomes 127.
    if (kSigned) return _mm256_cvttps_epi32(_mm256_xor_ps(inside, _mm256_andnot_ps(value, sign_bit)));
    const __m256i absent = _mm256_cmpeq_epi32(_mm256_castps_si256(magnitude), zero);
    const __m256i number = _mm256_add_epi32(_mm256_cvttps_epi32(inside), _mm256_set1_epi32(-1));
    return _mm256_andnot_si256(absent, number);
  }

  inline __attribute__((always_inline)) __m256i bytes(__m256i a, __m256i b, __m256i c, __m256i d) const {
    const __m256i low = _mm256_packs_epi32(a, b), high = _mm256_packs_epi32(c, d);
    const __m256i all = kSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
    // Each pack works by halves of a register.
    return _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
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
#elif ZS_TARGET_LEVEL == 2
  const Wide<kSigned> wide;
  const __m256 scales = _mm256_set1_ps(scale);
  for (; i + 8 <= n; i += 8) {
    const __m128i some = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    _mm256_storeu_ps(values + i, wide.decode(some, scales));
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

// Largest magnitudes that have an inverse.
inline bool is_usual(int32_t largest) { return largest >= 0x00800000 && largest < 0x7f800000; }

// The other blocks: of zeros, or of something infinite or NaN. Returns the scale.
inline float without_scale(int32_t largest, int64_t n, uint8_t* codes) {
  std::memset(codes, 0, size_t(n));
  return largest >= 0x7f800000 ? float_of(0x7fc00000u) : 0.0f;
}

// Returns the scale.
template <bool kSigned>
ZS_OUTLINE float encode_block(const float* __restrict values, int32_t largest, int64_t n, uint8_t* __restrict codes) {
  constexpr DynamicMap map = dynamic_map(kSigned);
  if (!is_usual(largest)) return without_scale(largest, n, codes);
  const float scale = float_of(uint32_t(largest)), inverse = 1.0f / scale;
  int64_t i = 0;
#if ZS_TARGET_LEVEL == 512
  const Wide<kSigned> wide;
  const __m512 inverses = _mm512_set1_ps(inverse);
  for (; i + 16 <= n; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), wide.encode(_mm512_loadu_ps(values + i), inverses));
  }
#elif ZS_TARGET_LEVEL == 2
  const Wide<kSigned> wide;
  const __m256 inverses = _mm256_set1_ps(inverse);
  for (; i + 32 <= n; i += 32) {
    __m256i numbers[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) numbers[k] = wide.encode(_mm256_loadu_ps(values + i + 8 * k), inverses);
    const __m256i some = wide.bytes(numbers[0], numbers[1], numbers[2], numbers[3]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), some);
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

// What follows the update of elements [at, at + n) of a segment: their low-precision copy.
inline void copy_block(const Segment& s, int64_t at, int64_t n) {
  if (!s.streamed) {
    copy_out(s.parameter + at, s.copy, at, n);
    return;
  }
  for (int64_t done = 0; done < n; done += kUpdateTile) {
    stream_out(s.parameter + at + done, s.copy, at + done, smaller(kUpdateTile, n - done));
  }
}

#if ZS_TARGET_LEVEL == 512
constexpr int64_t kBlocksAhead = 2, kAheadOfUpdate = kBlocksAhead * kCodeBlock;

// A block whose scale is known and whose codes are not written yet.
struct Uncoded {
  const float* values = nullptr;
  uint8_t* codes = nullptr;
  __m512 inverse;

  // Returns the scale. Codes of a block without a usual one are written here, and nothing is left to do.
  inline __attribute__((always_inline)) float set(const float* block, __m512i magnitudes, uint8_t* target) {
    const int32_t largest = _mm512_reduce_max_epi32(magnitudes);
    if (!is_usual(largest)) {
      codes = nullptr;
      return without_scale(largest, kCodeBlock, target);
    }
    values = block, codes = target;
    inverse = _mm512_set1_ps(1.0f / float_of(uint32_t(largest)));
    return float_of(uint32_t(largest));
  }

  template <bool kSigned>
  inline __attribute__((always_inline)) void code(const Wide<kSigned>& wide, int64_t i) const {
    if (codes == nullptr) return;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), wide.encode(_mm512_load_ps(values + i), inverse));
  }
};

template <bool kSigned>
inline __attribute__((always_inline)) void decode_some(const Wide<kSigned>& map, const uint8_t* codes, __m512 scale,
                                                       float* values) {
  _mm512_store_ps(values, map.decode(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), scale));
}

inline __attribute__((always_inline)) __m512i larger(__m512i magnitudes, const float* values, __m512i magnitude_bits) {
  return _mm512_max_epi32(magnitudes, _mm512_and_si512(_mm512_load_si512(values), magnitude_bits));
}

// Whole blocks, in steps of sixteen elements. While some are updated, which waits for divisions and roots, those of the
// block after are decoded and those of the block before are coded: none of the three waits for another. Returns where it
// ended.
template <bool kTwo, class Update>
__attribute__((noinline, flatten)) int64_t by_whole_blocks(const Segment& s, int64_t begin, int64_t end,
                                                           const Update& given) {
  if (begin + kCodeBlock > end) return begin;
  const Update update = given;  // its numbers are known not to change where a state is written
  // Rows not half a page apart, or the processor would take a load from one for that of a store into another.
  alignas(64) float gradients[kCodeBlock], firsts[3][kCodeBlock + 32], seconds[3][kCodeBlock + 32];
  const Wide<true> signed_map;
  const Wide<false> unsigned_map;
  const int64_t gradient_size = s.gradient.type == Type::f32 ? 4 : 2;
  float *const first_scales = s.first_codes.scales, *const second_scales = s.second_codes.scales;
  Uncoded before, before_second;
  int64_t at = begin;
  for (int64_t i = 0; i < kCodeBlock; i += 16) {
    const int64_t block = at / kCodeBlock;
    decode_some(signed_map, s.first_codes.codes + at + i, _mm512_set1_ps(first_scales[block]), firsts[0] + i);
    if (kTwo) {
      decode_some(unsigned_map, s.second_codes.codes + at + i, _mm512_set1_ps(second_scales[block]), seconds[0] + i);
    }
  }
  for (int turn = 0; at + kCodeBlock <= end; at += kCodeBlock) {
    const int64_t block = at / kCodeBlock;
    const int after = turn == 2 ? 0 : turn + 1;
    const bool fetched = at + (kBlocksAhead + 1) * kCodeBlock <= s.numel;
    // After the last one it is decoded again, for nothing: that is simpler for the processor than not to.
    const int64_t next = at + 2 * kCodeBlock <= end ? at + kCodeBlock : at;
    float* const parameter = s.parameter + at;
    const float* const gradient = open_tile(s.gradient, at, kCodeBlock, gradients);
    const char* const gradient_ahead = static_cast<const char*>(s.gradient.data) + (at + kAheadOfUpdate) * gradient_size;
    uint8_t *const first_codes = s.first_codes.codes + at, *const second_codes = s.second_codes.codes + (kTwo ? at : 0);
    const uint8_t *const next_first = s.first_codes.codes + next, *const next_second = s.second_codes.codes + next;
    const __m512 scale = _mm512_set1_ps(first_scales[next / kCodeBlock]);
    const __m512 second_scale = _mm512_set1_ps(kTwo ? second_scales[next / kCodeBlock] : 0.0f);
    float *const first = firsts[turn], *const second = seconds[turn];
    float *const first_after = firsts[after], *const second_after = seconds[after];
    __m512i largest = _mm512_setzero_si512(), largest_second = largest;
    for (int64_t i = 0; i < kCodeBlock; i += 16) {
      if (fetched) {  // one line of each at a time: there are few places for lines under way
        __builtin_prefetch(parameter + kAheadOfUpdate + i);
        __builtin_prefetch(gradient_ahead + i * gradient_size);
        if (i % 64 == 0) {
          __builtin_prefetch(first_codes + kAheadOfUpdate + i);
          if (kTwo) __builtin_prefetch(second_codes + kAheadOfUpdate + i);
        }
      }
      decode_some(signed_map, next_first + i, scale, first_after + i);
      if (kTwo) decode_some(unsigned_map, next_second + i, second_scale, second_after + i);
      update(parameter + i, gradient + i, first + i, kTwo ? second + i : nullptr, 16);
      largest = larger(largest, first + i, signed_map.magnitude_bits);
      if (kTwo) largest_second = larger(largest_second, second + i, signed_map.magnitude_bits);
      before.code(signed_map, i);
      if (kTwo) before_second.code(unsigned_map, i);
    }
    first_scales[block] = before.set(first, largest, first_codes);
    if (kTwo) second_scales[block] = before_second.set(second, largest_second, second_codes);
    copy_block(s, at, kCodeBlock);
    turn = after;
  }
  for (int64_t i = 0; i < kCodeBlock; i += 16) {
    before.code(signed_map, i);
    if (kTwo) before_second.code(unsigned_map, i);
  }
  return at;
}
#endif

// Runs `update(parameter, gradient, first, second, n)` block by block, in float32.
template <class Update>
inline void by_blocks(const Segment& s, int64_t begin, int64_t end, const Update& update) {
  alignas(64) float gradients[kCodeBlock], firsts[kCodeBlock], seconds[kCodeBlock];
  int64_t at = begin;
#if ZS_TARGET_LEVEL == 512
  at = s.second_codes.codes ? by_whole_blocks<true>(s, at, end, update) : by_whole_blocks<false>(s, at, end, update);
#endif
  for (; at < end; at += kCodeBlock) {
    const int64_t n = smaller(kCodeBlock, end - at), block = at / kCodeBlock;
    if (at + 2 * kCodeBlock <= s.numel) {
      fetch({s.parameter, Type::f32}, at + kCodeBlock, kCodeBlock);
      fetch(s.gradient, at + kCodeBlock, kCodeBlock);
    }
    const float* const gradient = open_tile(s.gradient, at, n, gradients);
    float* const second = s.second_codes.codes ? seconds : nullptr;
    decode_block<true>(s.first_codes.codes + at, s.first_codes.scales[block], n, firsts);
    if (second) decode_block<false>(s.second_codes.codes + at, s.second_codes.scales[block], n, second);
    update(s.parameter + at, gradient, firsts, second, n);
    // Both before the first is coded, which does not wait for the second then.
    const int32_t largest = largest_of(firsts, n), largest_second = second ? largest_of(second, n) : 0;
    s.first_codes.scales[block] = encode_block<true>(firsts, largest, n, s.first_codes.codes + at);
    if (second) s.second_codes.scales[block] = encode_block<false>(second, largest_second, n, s.second_codes.codes + at);
    copy_block(s, at, n);
  }
  if (s.streamed) end_of_stream();
}
