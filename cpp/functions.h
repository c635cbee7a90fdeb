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

// exp(high + low) for -87 <= high <= 0 and |low| < 0.1, within 1 ulp. The polynomial is summed in pairs: a chain of
// multiplications and additions half as long lets a processor work on more elements at once.
ZS_EVERYWHERE inline float exp_bounded(float high, float low) {
  const float rounder = 12582912.0f;  // 1.5 x 2^23: adding it rounds to an integer, which then lies in the low bits
  const float shifted = high * 1.44269504088896341f + rounder;
  const float whole = shifted - rounder;
  // ln 2 in two parts, the first of so few bits that its product with `whole` is exact.
  const float rest = ((high - whole * 0.693359375f) - whole * -2.12194440e-4f) + low;
  const float square = rest * rest;
  // minimax coefficients of Cephes' expf
  const float third = 1.9875691500e-4f * rest + 1.3981999507e-3f;
  const float second = 8.3334519073e-3f * rest + 4.1665795894e-2f;
  const float first = 1.6666665459e-1f * rest + 5.0000001201e-1f;
  const float p = (third * square + second) * square + first;
  const float mantissa = (rest + square * p) + 1.0f;
  return mantissa * float_from_bits((bits_from_float(shifted) + 127u) << 23);
}

// The same for any high <= 0: below exp(-87) it is 0, and a NaN stays one.
ZS_EVERYWHERE inline float exp_negative(float high, float low) {
  return high < -87.0f ? 0.0f : exp_bounded(high, low);
}

// A normal variable's probability to lie below x, and its density at x.
struct Normal {
  float below, density;
};

// `below` within 4 ulp for x >= -1, and within 6 ulp of itself in the tail below that; from x = -13.1875 on both are 0.
// `density` within 3 ulp.
ZS_EVERYWHERE inline Normal normal_distribution(float x) {
  const float z = float_from_bits(bits_from_float(x) & 0x7fffffffu);
  // exp(-z^2 / 2) with z^2 in two parts, since a rounding error of the argument is a relative one of the result.
  const float coarse = float_from_bits(bits_from_float(z) & 0xfffff000u);
  const float low = (z - coarse) * (z + coarse) * -0.5f;
  const float decay = z > 13.1875f ? 0.0f : exp_bounded(coarse * coarse * -0.5f, low);
  // From 1 on the tail is exp(-z^2 / 2) x q x p(q - 1/4) with q = 1 / (1 + z / 1.25), in which p is nearly even. Below 1:
  // 0.5 + x r(x^2). Both polynomials are fits of least squares with weights moved towards the largest errors, which are
  // 6e-8 and 7e-10.
  const float q = 1.0f / (z * 0.8f + 1.0f);
  const float s = q - 0.25f, s2 = s * s;
  const float p3 = 0.996302724f * s + -1.142678499f;
  const float p2 = 0.215014011f * s + 0.447349578f;
  const float p1 = -0.308698714f * s + -0.180798352f;
  const float p0 = 0.302991569f * s + 0.400156826f;
  const float tail = decay * (q * (((p3 * s2 + p2) * s2 + p1) * s2 + p0));
  const float square = z * z, fourth = square * square;
  const float r2 = -7.65419827e-06f * square + 1.13486349e-04f;
  const float r1 = -1.18632987e-03f * square + 9.97332297e-03f;
  const float r0 = -6.64903596e-02f * square + 3.98942292e-01f;
  const float center = x * ((r2 * fourth + r1) * fourth + r0) + 0.5f;
  const float outer = x > 0 ? 1.0f - tail : tail;
  return {z < 1.0f ? center : outer, decay * 0.39894228040143268f};
}

// What gelu and its derivative are made of: y = x * gate, dy/dx = gate + slope.
struct Gelu {
  float gate, slope;
};

// x Phi(x)
ZS_EVERYWHERE inline Gelu gelu_exact(float x) {
  const Normal normal = normal_distribution(x);
  return {normal.below, normal.density == 0 ? 0.0f : x * normal.density};  // infinity x 0 is no slope
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
