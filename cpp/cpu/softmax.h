// Softmax over rows with an additive mask, a causal limit and dropout.

typedef float WideLanes __attribute__((vector_size(64)));

constexpr float kInfinity = __builtin_inff();

inline void take_largest(WideLanes& most, const float* values) {
  WideLanes next;
  std::memcpy(&next, values, sizeof next);
  most = next > most ? next : most;
}

// The largest element that is a number; -infinity if there is none. Four chains, because a comparison takes its time.
ZS_OUTLINE float largest(const float* values, int64_t n) {
  WideLanes a = {};
  a = a - kInfinity;
  WideLanes b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    take_largest(a, values + i);
    take_largest(b, values + i + 16);
    take_largest(c, values + i + 32);
    take_largest(d, values + i + 48);
  }
  for (; i + 16 <= n; i += 16) take_largest(a, values + i);
  a = b > a ? b : a;
  c = d > c ? d : c;
  a = c > a ? c : a;
  float result = -kInfinity;
  for (int lane = 0; lane < 16; ++lane) result = a[lane] > result ? a[lane] : result;
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

// A row's scores become their softmax, `row` may be `scores`; all zeros if every one is -infinity. `next` is the place
// of the row that comes after, which is fetched meanwhile; negative: none.
inline void softmax_row(const SoftmaxRows& s, const float* scores, float* row, int64_t n, int64_t next) {
  const float most = largest(scores, n);
  if (most == -kInfinity) {
    float rest = 0;  // or NaN, if there is one
    for (int64_t i = 0; i < n; ++i) rest = scores[i] == -kInfinity ? rest : scores[i];
    for (int64_t i = 0; i < n; ++i) row[i] = rest;
    return;
  }
  LaneSum sum;
  for (int64_t at = 0; at < n; at += kFetched) {
    const int64_t length = smaller(kFetched, n - at);
    if (next >= 0) fetch(s.input, next + at, length);
    const float* const from = scores + at;
    float* const to = row + at;
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i) to[i] = exp_negative(from[i] - most, 0.0f);
    sum.add(to, length, Itself());
  }
  const float share = float(1 / sum.total());
  for (int64_t i = 0; i < n; ++i) row[i] = row[i] * share;
}

inline bool drops(const Random& random) { return random.threshold != 0 || random.scale != 1; }

void softmax(const SoftmaxRows& s, int64_t begin, int64_t end, float* scratch) {
  alignas(64) uint32_t words[kWords];
  const bool dropping = drops(s.random);
  // Where nothing follows the softmax it is written in place, and read in place if nothing comes before.
  const bool direct = s.result.type == Type::f32 && s.probabilities.data == nullptr && !dropping;
  const bool plain = s.input.type == Type::f32 && s.mask.data == nullptr;
  for (int64_t number = begin; number < end; ++number) {
    const int64_t seen = s.queries ? smaller(s.columns, number % s.queries + 1) : s.columns;
    const int64_t first = number * s.columns;
    float* const row = direct ? static_cast<float*>(s.result.data) + first : scratch;
    if (!plain) score_row(s, number, seen, row);
    const float* const scores = plain ? static_cast<const float*>(s.input.data) + first : row;
    softmax_row(s, scores, row, seen, number + 1 < s.rows ? first + s.columns : -1);
    for (int64_t i = seen; i < s.columns; ++i) row[i] = 0;
    for (int64_t at = 0; at < s.columns && !direct; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at);
      copy_out(row + at, s.probabilities, first + at, n);
      if (dropping) drop_tile(s.random, first + at, n, row + at, words);
      copy_out(row + at, s.result, first + at, n);
    }
  }
}

// The gradient through the dropout: in place, or in `row`.
inline const float* dropped_tile(const SoftmaxRows& s, int64_t place, int64_t n, float* row, uint32_t* words) {
  const float* __restrict gradient = open_tile(s.gradient, place, n, row);
  if (!drops(s.random)) return gradient;
  if (gradient != row) std::memcpy(row, gradient, size_t(n) * 4);
  drop_tile(s.random, place, n, row, words);
  return row;
}

// With g = the gradient through the dropout: result = p * (g - sum(g * p)).
void softmax_backward(const SoftmaxRows& s, int64_t begin, int64_t end, float* row) {
  alignas(64) float scratch[kTile], product[kTile];
  alignas(64) uint32_t words[kWords];
  const bool in_row = s.gradient.type != Type::f32 || drops(s.random);  // where g of the whole row lies
  for (int64_t number = begin; number < end; ++number) {
    const int64_t first = number * s.columns;
    LaneSum sum;
    for (int64_t at = 0; at < s.columns; at += kFetched) {
      const int64_t n = smaller(kFetched, s.columns - at);
      if (number + 1 < s.rows) {
        fetch(s.gradient, first + s.columns + at, n);
        fetch(s.input, first + s.columns + at, n);
      }
      const float* __restrict g = dropped_tile(s, first + at, n, row + at, words);
      const float* __restrict probability = open_tile(s.input, first + at, n, scratch);
      for (int64_t i = 0; i < n; ++i) product[i] = g[i] * probability[i];
      sum.add(product, n, Itself());
    }
    const float shift = float(sum.total());
    for (int64_t at = 0; at < s.columns; at += kTile) {
      const int64_t n = smaller(kTile, s.columns - at);
      const float* __restrict g = in_row ? row + at : static_cast<const float*>(s.gradient.data) + first + at;
      const float* __restrict probability = open_tile(s.input, first + at, n, scratch);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + first + at : product;
      for (int64_t i = 0; i < n; ++i) target[i] = probability[i] * (g[i] - shift);
      close_tile(target, s.result, first + at, n);
    }
  }
}
