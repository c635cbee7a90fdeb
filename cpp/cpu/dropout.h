// residual + dropout(x + bias). The mask is made anew wherever it is needed, from an element's index alone.

// Random words of elements [first, first + n). `scratch` has room for a tile and two blocks.
constexpr int64_t kWords = kTile + 8;

inline const uint32_t* random_words(const Random& random, int64_t first, int64_t n, uint32_t* __restrict scratch) {
  const uint64_t block = uint64_t(first) / 4;
  const int64_t skipped = first % 4, blocks = (skipped + n + 3) / 4;
  const uint32_t low = uint32_t(block), high = uint32_t(block >> 32);
  const uint32_t offset_low = uint32_t(random.offset), offset_high = uint32_t(random.offset >> 32);
  const uint64_t seed = random.seed;
  for (int64_t j = 0; j < blocks; ++j) {
    uint32_t a = low + uint32_t(j), b = high + (a < low ? 1u : 0u), c = offset_low, d = offset_high;
    philox(a, b, c, d, seed);
    scratch[4 * j] = a;
    scratch[4 * j + 1] = b;
    scratch[4 * j + 2] = c;
    scratch[4 * j + 3] = d;
  }
  return scratch + skipped;
}

// Elements [first, first + n) in place: 0 where dropped, whatever it was, else times the scale.
ZS_OUTLINE void drop_tile(const Random& random, int64_t first, int64_t n, float* __restrict values,
                      uint32_t* __restrict scratch) {
  if (random.threshold == 0 && random.scale == 1) return;
  const uint32_t* __restrict words = random_words(random, first, n, scratch);
  const uint32_t threshold = random.threshold;
  const float scale = random.scale;
  for (int64_t i = 0; i < n; ++i) values[i] = words[i] >= threshold ? values[i] * scale : 0.0f;
}

void bias_dropout(const BiasRows& s, int64_t begin, int64_t end, double*) {
  alignas(64) float scratch[kTile], other[kTile], result[kTile];
  alignas(64) uint32_t words[kWords];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = row * s.columns + at;
      const float* __restrict values = open_tile(s.input, place, n, scratch);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + place : result;
      if (s.bias) {
        const float* __restrict bias = s.bias + at;
        for (int64_t i = 0; i < n; ++i) target[i] = values[i] + bias[i];
      } else {
        for (int64_t i = 0; i < n; ++i) target[i] = values[i];
      }
      drop_tile(s.random, place, n, target, words);
      const float* __restrict residual = open_tile(s.other, place, n, other);
      for (int64_t i = 0; i < n; ++i) target[i] = residual[i] + target[i];
      close_tile(target, s.result, place, n);
    }
  }
}

// The gradient of x; `sums` takes it, before it is rounded, added up over the rows.
void bias_dropout_backward(const BiasRows& s, int64_t begin, int64_t end, double* sums) {
  alignas(64) float scratch[kTile], result[kTile];
  alignas(64) uint32_t words[kWords];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = row * s.columns + at;
      const float* __restrict gradient = open_tile(s.input, place, n, scratch);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + place : result;
      for (int64_t i = 0; i < n; ++i) target[i] = gradient[i];
      drop_tile(s.random, place, n, target, words);
      if (sums) {
        double* __restrict biases = sums + at;
        for (int64_t i = 0; i < n; ++i) biases[i] += double(target[i]);
      }
      close_tile(target, s.result, place, n);
    }
  }
}
