// Sums of powers whose bits do not depend on how the elements are divided among calls, chunks, threads and ranks.
//
// The powers of sixteen neighbours, counted from the beginning of a tensor, are float64 and added up in halves: the first
// eight and the last eight, of these sums the first four and the last four, and so on. Nothing else is rounded. The sums
// of such blocks go into digits of 32 bits: the two that a block's 53 bits begin in, where the upper one takes the
// rest, up to 52 bits. Integer additions have no order.
//
//   digit i       weighs 2^(32 i - 1075)
//   sum of block  mantissa x 2^(exponent - 1075); digit exponent / 32 takes the low 32 bits of mantissa << exponent % 32
//
// A digit of 64 bits takes 4095 such additions. A call has fewer blocks, and carries once at its end.
// Source: Neal, "Fast Exact Summation Using Small and Large Superaccumulators", 2015 (the small one, without signs).

typedef double Quad __attribute__((vector_size(32)));
typedef float NarrowQuad __attribute__((vector_size(16)));

inline Quad wide_quad(const float* from) {
  NarrowQuad values;
  std::memcpy(&values, from, sizeof values);
  return __builtin_convertvector(values, Quad);
}

struct QuadSquare {
  Quad operator()(Quad x) const { return x * x; }
};

struct QuadMagnitude {
  Quad operator()(Quad x) const { return x < 0 ? -x : x; }
};

inline double sum_of_block(Quad a, Quad b, Quad c, Quad d) {
  const Quad sum = (a + c) + (b + d);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

template <class Term>
ZS_OUTLINE void add_blocks(const float* values, int64_t blocks, const Term& term, double* __restrict sums) {
  for (int64_t block = 0; block < blocks; ++block, values += kSumBlock) {
    sums[block] = sum_of_block(term(wide_quad(values)), term(wide_quad(values + 4)), term(wide_quad(values + 8)),
                               term(wide_quad(values + 12)));
  }
}

// |x| to the power of halves / 2: squares and products from the highest bit on, and a root at the end.
inline double product_power(double x, int32_t halves) {
  double result = 1;
  for (int32_t bit = 1 << 6; bit > 1; bit >>= 1) {
    result *= result;
    if (halves & bit) result *= x;
  }
  return halves & 1 ? result * __builtin_sqrt(x) : result;
}

ZS_OUTLINE void add_power_blocks(const float* values, int64_t blocks, const Power& power, double* __restrict sums) {
  for (int64_t block = 0; block < blocks; ++block, values += kSumBlock) {
    double x[kSumBlock];
    for (int64_t i = 0; i < kSumBlock; ++i) {
      x[i] = double(float_of(bits_of(values[i]) & 0x7fffffffu)) * power.factor;
    }
    if (power.halves != 0) {
      for (double& value : x) value = product_power(value, power.halves);
    } else {
      for (double& value : x) value = __builtin_pow(value, power.order);
    }
    Quad part[4];
    std::memcpy(part, x, sizeof part);
    sums[block] = sum_of_block(part[0], part[1], part[2], part[3]);
  }
}

inline void add_power_sums(const float* values, int64_t blocks, const Power& power, double* sums) {
  if (power.order == 2) {
    add_blocks(values, blocks, QuadSquare(), sums);
  } else if (power.order == 1) {
    add_blocks(values, blocks, QuadMagnitude(), sums);
  } else {
    add_power_blocks(values, blocks, power, sums);
  }
}

int64_t exact_sum(Buffer values, int64_t begin, int64_t end, const Power& power, uint64_t sum[kSumWords]) {
  alignas(64) float scratch[kTile];
  double blocks[kTile / kSumBlock];
  int64_t nonfinite = 0;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = smaller(kTile, end - at), whole = n / kSumBlock;
    const float* const tile = open_tile(values, at, n, scratch);
    add_power_sums(tile, whole, power, blocks);
    int64_t count = whole;
    if (whole * kSumBlock < n) {
      float rest[kSumBlock] = {};  // the powers of zeros change nothing
      std::memcpy(rest, tile + whole * kSumBlock, size_t(n - whole * kSumBlock) * 4);
      add_power_sums(rest, 1, power, blocks + count++);
    }
    for (int64_t block = 0; block < count; ++block) {
      const double value = blocks[block] * power.weight;
      uint64_t bits;
      std::memcpy(&bits, &value, 8);
      const uint64_t exponent = bits >> 52 & 0x7ff, fraction = bits & 0xfffffffffffff;
      if (exponent == 0x7ff) {
        ++sum[kSumDigits + (fraction != 0)];
        const int64_t first = block * kSumBlock;
        nonfinite += count_nonfinite(tile + first, smaller(kSumBlock, n - first));
        continue;
      }
      // A subnormal number has the exponent of the smallest normal one, and no leading bit.
      const uint64_t place = exponent + (exponent == 0), mantissa = fraction | uint64_t(exponent != 0) << 52;
      uint64_t* const digit = sum + (place >> 5);
      digit[0] += uint32_t(mantissa << (place & 31));
      digit[1] += mantissa >> (32 - (place & 31));
    }
  }
  uint64_t carry = 0;
  for (int i = 0; i + 1 < kSumDigits; ++i) {
    sum[i] += carry;
    carry = sum[i] >> 32;
    sum[i] &= 0xffffffff;
  }
  sum[kSumDigits - 1] += carry;
  return nonfinite;
}
