// gelu(x + bias) and its derivative.

// Tile of input + bias.
inline const float* biased_tile(const BiasRows& s, int64_t row, int64_t at, int64_t n, float* scratch,
                                float* __restrict result) {
  const float* __restrict values = open_tile(s.input, row * s.columns + at, n, scratch);
  if (s.bias == nullptr) return values;
  const float* __restrict bias = s.bias + at;
  for (int64_t i = 0; i < n; ++i) result[i] = values[i] + bias[i];
  return result;
}

void bias_gelu(const BiasRows& s, int64_t begin, int64_t end, double*) {
  alignas(64) float scratch[kTile], biased[kTile], result[kTile];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = row * s.columns + at;
      const float* __restrict x = biased_tile(s, row, at, n, scratch, biased);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + place : result;
      if (s.tanh) {
        for (int64_t i = 0; i < n; ++i) target[i] = x[i] * gelu_tanh(x[i]).gate;
      } else {
        for (int64_t i = 0; i < n; ++i) target[i] = x[i] * gelu_exact(x[i]).gate;
      }
      close_tile(target, s.result, place, n);
    }
  }
}

// `sums` takes the result, before it is rounded, added up over the rows.
void bias_gelu_backward(const BiasRows& s, int64_t begin, int64_t end, double* sums) {
  alignas(64) float scratch[kTile], other[kTile], biased[kTile], result[kTile];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = row * s.columns + at;
      const float* __restrict x = biased_tile(s, row, at, n, scratch, biased);
      const float* __restrict gradient = open_tile(s.other, place, n, other);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + place : result;
      if (s.tanh) {
        for (int64_t i = 0; i < n; ++i) {
          const Gelu made = gelu_tanh(x[i]);
          target[i] = gradient[i] * (made.gate + made.slope);
        }
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const Gelu made = gelu_exact(x[i]);
          target[i] = gradient[i] * (made.gate + made.slope);
        }
      }
      if (s.bias) {
        double* __restrict biases = sums + at;
        for (int64_t i = 0; i < n; ++i) biases[i] += double(target[i]);
      }
      close_tile(target, s.result, place, n);
    }
  }
}
