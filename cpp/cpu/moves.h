// Copies between tensors of any type, with a factor, and sums of two tensors. Arithmetic is in float32.

// Infinite or NaN. Counted in 32 bits so that the loop is as wide as the others; a tile has fewer elements than that.
inline int64_t count_nonfinite(const float* __restrict values, int64_t n) {
  uint32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += (bits_of(values[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  return count;
}

// target = source x scale, or target += source x scale.
int64_t convert(const Move& move, int64_t begin, int64_t end) {
  alignas(64) float scratch[kTile], result[kTile], old[kTile];
  int64_t nonfinite = 0;
  const float scale = move.scale;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = smaller(kTile, end - at);
    const float* __restrict source = open_tile(move.source, at, n, scratch);
    const bool direct = move.target.type == Type::f32;
    float* __restrict target = direct ? static_cast<float*>(move.target.data) + at : result;
    if (move.accumulate) {
      const float* before = direct ? target : open_tile(move.target, at, n, old);
      for (int64_t i = 0; i < n; ++i) target[i] = before[i] + source[i] * scale;
    } else {
      for (int64_t i = 0; i < n; ++i) target[i] = source[i] * scale;
    }
    nonfinite += count_nonfinite(target, n);
    if (!direct) narrow(target, move.target, at, n);
  }
  return nonfinite;
}

// target = source x scale + other x other_scale
int64_t axpby(const Move& move, int64_t begin, int64_t end) {
  alignas(64) float scratch[kTile], second[kTile], result[kTile];
  int64_t nonfinite = 0;
  const float a = move.scale, b = move.other_scale;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = smaller(kTile, end - at);
    const float* x = open_tile(move.source, at, n, scratch);
    const float* y = open_tile(move.other, at, n, second);
    float* target = move.target.type == Type::f32 ? static_cast<float*>(move.target.data) + at : result;
#pragma GCC ivdep  // target may be x or y, never part of one
    for (int64_t i = 0; i < n; ++i) target[i] = x[i] * a + y[i] * b;
    nonfinite += count_nonfinite(target, n);
    close_tile(target, move.target, at, n);
  }
  return nonfinite;
}
