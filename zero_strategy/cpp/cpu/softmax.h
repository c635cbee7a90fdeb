// Softmax over rows with an additive mask, a causal limit and dropout.

typedef float WideLanes __attribute__((vector_size(64)));

constexpr float kInfinity = __builtin_inff();

// The largest element that is a number; -infinity if there is none.
inline float largest(const float* values, int64_t n) {
  float result = -kInfinity;
  int64_t i = 0;
  if (n >= 16) {
    WideLanes most = {};
    most = most - kInfinity;
    for (; i + 16 <= n; i += 16) {
      WideLanes next;
      std::memcpy(&next, values + i, sizeof next);
      most = next > most ? next : most;
    }
    for (int lane = 0; lane < 16; ++lane) result = most[lane] > result ? most[lane] : result;
  }
  for (; i < n; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

// Scores of a row into `row`: input + mask.
inline void score_row(const SoftmaxRows& s, int64_t number, int64_t seen, float* __restrict row) {
  alignas(64) float scratch[kTile], other[kTile];
  for (int64_t at = 0; at < seen; at += kTile) {
    const int64_t n = smaller(kTile, seen - at);
    const float* __restrict values = open_tile(s.input, number * s.columns + at, n, scratch);
    float* __restrict target = row + at;
    if (s.mask.data == nullptr) {
      for (int64_t i = 0; i < n; ++i) target[i] = values[i];
    } else if (s.mask_step) {
      const float* __restrict mask = open_tile(s.mask, s.mask_offset[number] + at, n, other);
      for (int64_t i = 0; i < n; ++i) target[i] = values[i] + mask[i];
    } else {
      const float mask = *open_tile(s.mask, s.mask_offset[number], 1, other);
      for (int64_t i = 0; i < n; ++i) target[i] = values[i] + mask;
    }
  }
}

// The first `n` elements of a row of scores become their softmax; all zeros if every one is -infinity.
inline void softmax_row(float* __restrict row, int64_t n) {
  const float most = largest(row, n);
  if (most == -kInfinity) {
    float rest = 0;  // or NaN, if there is one
    for (int64_t i = 0; i < n; ++i) rest = row[i] == -kInfinity ? rest : row[i];
    for (int64_t i = 0; i < n; ++i) row[i] = rest;
    return;
  }
  for (int64_t i = 0; i < n; ++i) row[i] = exp_negative(row[i] - most, 0.0f);
  LaneSum sum;
  sum.add(row, n, Itself());
  const float share = float(1 / sum.total());
  for (int64_t i = 0; i < n; ++i) row[i] = row[i] * share;
}

void softmax(const SoftmaxRows& s, int64_t begin, int64_t end, float* row) {
  alignas(64) uint32_t words[kWords];
  for (int64_t number = begin; number < end; ++number) {
    const int64_t seen = s.queries ? smaller(s.columns, number % s.queries + 1) : s.columns;
    score_row(s, number, seen, row);
    softmax_row(row, seen);
    for (int64_t i = seen; i < s.columns; ++i) row[i] = 0;
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = number * s.columns + at;
      copy_out(row + at, s.probabilities, place, n);
      drop_tile(s.random, place, n, row + at, words);
      copy_out(row + at, s.result, place, n);
    }
  }
}

// With g = the gradient through the dropout: result = p * (g - sum(g * p)).
void softmax_backward(const SoftmaxRows& s, int64_t begin, int64_t end, float* row) {
  alignas(64) float scratch[kTile], product[kTile];
  alignas(64) uint32_t words[kWords];
  for (int64_t number = begin; number < end; ++number) {
    LaneSum sum;
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = number * s.columns + at;
      const float* __restrict gradient = open_tile(s.gradient, place, n, scratch);
      float* __restrict target = row + at;
      for (int64_t i = 0; i < n; ++i) target[i] = gradient[i];
      drop_tile(s.random, place, n, target, words);
      const float* __restrict probability = open_tile(s.input, place, n, scratch);
      for (int64_t i = 0; i < n; ++i) product[i] = target[i] * probability[i];
      sum.add(product, n, Itself());
    }
    const float shift = float(sum.total());
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at), place = number * s.columns + at;
      const float* __restrict probability = open_tile(s.input, place, n, scratch);
      float* __restrict target = row + at;
      for (int64_t i = 0; i < n; ++i) target[i] = probability[i] * (target[i] - shift);
      copy_out(target, s.result, place, n);
    }
  }
}
