// Number formats: tiles of float32 from and to buffers of any type.

constexpr int64_t kTile = 1024;  // elements worked on at once; a float32 tile is 4 KiB, so that several stay in L1

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float from_bf16(uint16_t half) { return float_of(uint32_t(half) << 16); }

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// IEEE binary16 by integer arithmetic without branches: exact for every value, subnormals included.
inline float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t rest = uint32_t(half & 0x7fffu);
  const float normal = float_of((rest << 13) + 0x38000000u);
  const float special = float_of((rest << 13) + 0x70000000u);
  const float subnormal = float_of((rest << 13) + 0x38800000u) - float_of(0x38800000u);
  const float magnitude = rest >= 0x7c00u ? special : rest < 0x0400u ? subnormal : normal;
  return float_of(bits_of(magnitude) | sign);
}

inline uint16_t to_f16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  // Adding 0.5 lets the float32 addition do the rounding to the subnormal's step of 2^-24.
  const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((rest >> 13) & 0x1ffu);
  const uint32_t finite = rest < 0x38800000u ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
  return uint16_t(sign | (rest > 0x7f800000u ? nan : finite));
}

// Loops over whole tiles stay functions of their own: inlined everywhere they would double the time of a build.
#define ZS_OUTLINE __attribute__((noinline))

ZS_OUTLINE void widen(const Buffer& from, int64_t offset, int64_t n, float* __restrict to) {
  if (from.type == Type::bf16) {
    const uint16_t* __restrict source = static_cast<const uint16_t*>(from.data) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = from_bf16(source[i]);
  } else {
    const uint16_t* __restrict source = static_cast<const uint16_t*>(from.data) + offset;
    for (int64_t i = 0; i < n; ++i) to[i] = from_f16(source[i]);
  }
}

ZS_OUTLINE void narrow(const float* __restrict from, const Buffer& to, int64_t offset, int64_t n) {
  uint16_t* __restrict target = static_cast<uint16_t*>(to.data) + offset;
  if (to.type == Type::bf16) {
    for (int64_t i = 0; i < n; ++i) target[i] = to_bf16(from[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) target[i] = to_f16(from[i]);
  }
}

// A tile of a buffer as float32: in place, or in `scratch`.
inline float* open_tile(const Buffer& buffer, int64_t offset, int64_t n, float* scratch) {
  if (buffer.type == Type::f32) return static_cast<float*>(buffer.data) + offset;
  widen(buffer, offset, n, scratch);
  return scratch;
}

// What `open_tile` gave goes back, if it was not in place.
inline void close_tile(const float* tile, const Buffer& buffer, int64_t offset, int64_t n) {
  if (buffer.type != Type::f32) narrow(tile, buffer, offset, n);
}

inline void copy_out(const float* tile, const Buffer& copy, int64_t offset, int64_t n) {
  if (copy.data == nullptr) return;
  if (copy.type == Type::f32) {
    std::memcpy(static_cast<float*>(copy.data) + offset, tile, size_t(n) * 4);
  } else {
    narrow(tile, copy, offset, n);
  }
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Float64 sums in sixteen lanes, then in one fixed tree: the result depends on where a chunk begins, never on the
// processor or on the number of threads.
typedef double Lanes __attribute__((vector_size(64)));
typedef float NarrowLanes __attribute__((vector_size(32)));

// Eight floats as doubles. GCC makes five instructions of the second form with AVX-512, where the first is one.
inline Lanes wide_lanes(NarrowLanes values) {
#if ZS_TARGET_LEVEL == 512
  return (Lanes)_mm512_cvtps_pd((__m256)values);
#else
  return __builtin_convertvector(values, Lanes);
#endif
}

inline Lanes wide_lanes(const float* from) {
  NarrowLanes values;
  std::memcpy(&values, from, sizeof values);
  return wide_lanes(values);
}

struct LaneSum {
  Lanes low = {}, high = {};

  template <class Term>
  ZS_OUTLINE void add(const float* values, int64_t n, const Term& term) {
    int64_t i = 0;
    Lanes a = low, b = high;  // of their own: a member would be stored in every turn
    for (; i + 16 <= n; i += 16) {
      Lanes first = wide_lanes(values + i), second = wide_lanes(values + i + 8);
      term(first);
      term(second);
      a += first;
      b += second;
    }
    low = a;
    high = b;
    if (i < n) {
      float rest[16] = {};
      std::memcpy(rest, values + i, size_t(n - i) * 4);
      add(rest, 16, term);
    }
  }

  double total() const {
    const Lanes sum = low + high;
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
};

// Mean and variance in one pass: float64 sums of (x - pivot) and of its square, in lanes as above, where the pivot is one
// of the elements. Its own square is part of the sum, so that (mean - pivot)^2 is at most n variances and subtracting it
// loses no more than n x 2^-52 of the variance.
struct Moments {
  LaneSum sum, squares;
  double pivot;

  ZS_OUTLINE void add(const float* values, int64_t n) {
    int64_t i = 0;
    LaneSum plain = sum, square = squares;
    for (; i + 16 <= n; i += 16) {
      const Lanes first = wide_lanes(values + i) - pivot, second = wide_lanes(values + i + 8) - pivot;
      plain.low += first;
      plain.high += second;
      square.low += first * first;
      square.high += second * second;
    }
    sum = plain;
    squares = square;
    if (i < n) {
      float rest[16];
      for (float& value : rest) value = float(pivot);
      std::memcpy(rest, values + i, size_t(n - i) * 4);
      add(rest, 16);
    }
  }

  double mean(int64_t n) const { return pivot + sum.total() / double(n); }

  double variance(int64_t n) const {
    const double total = sum.total(), result = (squares.total() - total * total / double(n)) / double(n);
    return result < 0 ? 0 : result;
  }
};

// Sums over rows, column by column, take so many rows at once: these are added up in float32, in pairs, and that in
// float64, which is converting and storing a quarter as often.
constexpr int64_t kRowGroup = 4;
constexpr int64_t kGroupTile = 512;  // so that the tiles of a group stay in L1

ZS_OUTLINE void add_rows(const float* const rows[kRowGroup], int64_t count, int64_t n, double* __restrict sums) {
  const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
  if (count == kRowGroup) {
    for (int64_t i = 0; i < n; ++i) sums[i] += double((a[i] + b[i]) + (c[i] + d[i]));
  } else {
    for (int64_t row = 0; row < count; ++row) {
      const float* values = rows[row];
      for (int64_t i = 0; i < n; ++i) sums[i] += double(values[i]);
    }
  }
}

// Elements needed soon: the processor by itself fetches ahead up to the end of a page only, and a row is often one.
inline void fetch(const Buffer& buffer, int64_t offset, int64_t n) {
  const int64_t size = buffer.type == Type::f32 ? 4 : 2;
  const char* const from = static_cast<const char*>(buffer.data) + offset * size;
  for (int64_t at = 0; at < n * size; at += 64) __builtin_prefetch(from + at);
}

struct Square {
  void operator()(Lanes& x) const { x = x * x; }
};

struct Magnitude {
  void operator()(Lanes& x) const { x = x < 0 ? -x : x; }
};
