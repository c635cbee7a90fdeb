// Functions of float32 from IEEE addition, multiplication and division only, without branches and without fma: the same
// bits in every vector width and on every device. Errors were measured against float64 (tests/ops). For the CPU and for
// CUDA; includes nothing, so that a kernel file can include it inside of its own namespace.

#if defined(__CUDACC__)
#define ZS_EVERYWHERE __host__ __device__
#else
#define ZS_EVERYWHERE
#endif

ZS_EVERYWHERE inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

ZS_EVERYWHERE inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// exp(high + low) for high <= 0 and |low| < 0.1, within 1 ulp; below exp(-87) it is 0.
ZS_EVERYWHERE inline float exp_negative(float high, float low) {
  const float rounder = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, which then lies in the low bits
  const float bounded = high < -87.0f ? -87.0f : high;
  const float shifted = bounded * 1.44269504088896341f + rounder;
  const float whole = shifted - rounder;
  // ln 2 in two parts, the first of so few bits that its product with `whole` is exact.
  const float rest = ((bounded - whole * 0.693359375f) - whole * -2.12194440e-4f) + low;
  float p = 1.9875691500e-4f;  // minimax coefficients of Cephes' expf
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  const float mantissa = (rest + (rest * rest) * p) + 1.0f;
  const float power = float_from_bits((bits_from_float(shifted) + 127u) << 23);
  const float result = mantissa * power;
  return high < -87.0f ? 0.0f : high != high ? high : result;
}

// A normal variable's probability to lie below x, and its density at x.
struct Normal {
  float below, density;
};

// `below` within 4 ulp for x >= -1, and within 6.5 ulp of itself in the tail below that; from x = -13.2 on it is 0.
// `density` within 3 ulp.
ZS_EVERYWHERE inline Normal normal_distribution(float x) {
  const float z = float_from_bits(bits_from_float(x) & 0x7fffffffu);
  // exp(-z^2 / 2) with z^2 in two parts, since a rounding error of the argument is a relative one of the result.
  const float bounded = z > 16.0f ? 16.0f : z;
  const float coarse = float_from_bits(bits_from_float(bounded) & 0xfffff000u);
  const float decay = exp_negative(coarse * coarse * -0.5f, (bounded - coarse) * (bounded + coarse) * -0.5f);
  // From 1 on the tail is exp(-z^2 / 2) x q x p(s) with q = 1 / (1 + z / 4), s = 2 q - 1. What rounding took from the
  // denominator is put back into q, since the polynomial is steep. Below 1: 0.5 + x r(x^2). Both polynomials are fits of
  // least squares with weights moved towards the largest errors, which are TAILERR and 7e-10.
  const float quarter = bounded * 0.25f;
  const float denominator = quarter + 1.0f;
  const float rounded = 1.0f / denominator;
  const float q = rounded - (rounded * rounded) * (quarter - (denominator - 1.0f));
  const float s = (q + q) - 1.0f;
  float p = 3.59874794e-05f;
  p = p * s + -0.000367774483f;
  p = p * s + -0.000870991033f;
  p = p * s + 0.00187538366f;
  p = p * s + 0.0150992041f;
  p = p * s + 0.0466313399f;
  p = p * s + 0.0967843533f;
  p = p * s + 0.151974142f;
  p = p * s + 0.188821286f;
  const float tail = decay * (q * p);
  const float square = bounded * bounded;
  float r = -7.65419827e-06f;
  r = r * square + 1.13486349e-04f;
  r = r * square + -1.18632987e-03f;
  r = r * square + 9.97332297e-03f;
  r = r * square + -6.64903596e-02f;
  r = r * square + 3.98942292e-01f;
  const float outer = x > 0 ? 1.0f - tail : tail;
  return {z < 1.0f ? x * r + 0.5f : outer, decay * 0.39894228040143268f};
}

// What gelu and its derivative are made of: y = x * gate, dy/dx = gate + slope.
struct Gelu {
  float gate, slope;
};

// x Phi(x)
ZS_EVERYWHERE inline Gelu gelu_exact(float x) {
  const Normal normal = normal_distribution(x);
  const float bounded = x > 16.0f ? 16.0f : x < -16.0f ? -16.0f : x;  // infinity x 0 is no slope
  return {normal.below, bounded * normal.density};
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). The gate is within 4 ulp for
// x >= -1; below that rounding errors of u show, relative to the gate up to 2e-7 x |2u|.
ZS_EVERYWHERE inline Gelu gelu_tanh(float x) {
  const float magnitude = float_from_bits(bits_from_float(x) & 0x7fffffffu);
  const float z = magnitude > 16.0f ? 16.0f : magnitude;
  const float square = z * z;
  const float argument = z * (square * 7.1354816272600254e-2f + 1.5957691216057308f);
  const float decay = exp_negative(-argument, 0.0f);
  const float upper = 1.0f / (decay + 1.0f);
  const float lower = decay * upper;
  const float slope = z * (square * 2.1406444881780075e-1f + 1.5957691216057308f) * (lower * upper);
  return {x > 0 ? upper : lower, x > 0 ? slope : -slope};
}
