// Norms and non-finite counts in one pass.

Statistics statistics(Buffer values, int64_t begin, int64_t end, Norm norm, double power) {
  alignas(64) float scratch[kTile];
  Statistics found;
  LaneSum sum;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = smaller(kTile, end - at);
    const float* const tile = open_tile(values, at, n, scratch);
    found.nonfinite += count_nonfinite(tile, n);
    if (norm == Norm::two) {
      sum.add(tile, n, Square());
    } else if (norm == Norm::one) {
      sum.add(tile, n, Magnitude());
    } else if (norm == Norm::infinity) {
      for (int64_t i = 0; i < n; ++i) {
        const double magnitude = double(float_of(bits_of(tile[i]) & 0x7fffffffu));
        found.sum = magnitude > found.sum || magnitude != magnitude ? magnitude : found.sum;  // NaN stays
      }
    } else {
      for (int64_t i = 0; i < n; ++i) found.sum += __builtin_pow(double(float_of(bits_of(tile[i]) & 0x7fffffffu)), power);
    }
  }
  if (norm == Norm::two || norm == Norm::one) found.sum = sum.total();
  return found;
}
