// Layer norm and RMS norm over rows. Statistics are float64 sums kept as float32; everything else is float32.

struct Itself {
  void operator()(Lanes&) const {}
};

inline const float* columns_from(const float* values, int64_t at) { return values ? values + at : nullptr; }

// Tile of the normalised input (x - mean) / deviation: from the input, or from the output y = x_hat * weight + bias.
ZS_OUTLINE void normalised_tile(const NormRows& s, int64_t row, int64_t at, int64_t n, float* scratch,
                            float* __restrict result) {
  const float* __restrict values = open_tile(s.saved, row * s.columns + at, n, scratch);
  if (!s.inverted) {
    const float mean = s.mean ? s.mean[row] : 0.0f, rstd = s.rstd[row];
    for (int64_t i = 0; i < n; ++i) result[i] = (values[i] - mean) * rstd;
    return;
  }
  const float* __restrict weight = columns_from(s.weight, at);
  const float* __restrict bias = columns_from(s.bias, at);
  if (s.weight && s.bias) {
    for (int64_t i = 0; i < n; ++i) result[i] = (values[i] - bias[i]) / weight[i];
  } else if (s.weight) {
    for (int64_t i = 0; i < n; ++i) result[i] = values[i] / weight[i];
  } else if (s.bias) {
    for (int64_t i = 0; i < n; ++i) result[i] = values[i] - bias[i];
  } else {
    for (int64_t i = 0; i < n; ++i) result[i] = values[i];
  }
}

// output = (saved - mean) * rstd * weight + bias; mean and rstd are written.
void normalize(const NormRows& s, int64_t begin, int64_t end, double*) {
  alignas(64) float scratch[kTile], result[kTile];
  const int64_t columns = s.columns;
  for (int64_t row = begin; row < end; ++row) {
    float mean = 0;
    if (s.mean) {
      LaneSum sum;
      for (int64_t at = 0; at < columns; at += kTile) {
        const int64_t n = smaller(kTile, columns - at);
        sum.add(open_tile(s.saved, row * columns + at, n, scratch), n, Itself());
      }
      mean = float(sum.total() / double(columns));
      s.mean[row] = mean;
    }
    LaneSum squares;
    for (int64_t at = 0; at < columns; at += kTile) {
      const int64_t n = smaller(kTile, columns - at);
      const float* __restrict values = open_tile(s.saved, row * columns + at, n, scratch);
      for (int64_t i = 0; i < n; ++i) result[i] = values[i] - mean;
      squares.add(result, n, Square());
    }
    s.rstd[row] = float(1 / __builtin_sqrt(squares.total() / double(columns) + s.eps));
    for (int64_t at = 0; at < columns; at += kTile) {
      const int64_t n = smaller(kTile, columns - at);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + row * columns + at : result;
      const float* __restrict values = open_tile(s.saved, row * columns + at, n, scratch);
      const float* __restrict weight = columns_from(s.weight, at);
      const float* __restrict bias = columns_from(s.bias, at);
      const float rstd = s.rstd[row];
      if (s.weight && s.bias) {
        for (int64_t i = 0; i < n; ++i) target[i] = ((values[i] - mean) * rstd) * weight[i] + bias[i];
      } else if (s.weight) {
        for (int64_t i = 0; i < n; ++i) target[i] = ((values[i] - mean) * rstd) * weight[i];
      } else if (s.bias) {
        for (int64_t i = 0; i < n; ++i) target[i] = (values[i] - mean) * rstd + bias[i];
      } else {
        for (int64_t i = 0; i < n; ++i) target[i] = (values[i] - mean) * rstd;
      }
      close_tile(target, s.result, row * columns + at, n);
    }
  }
}

// With g = gradient * weight: result = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd, the first mean only where the
// forward took one off. `sums` takes gradient * x_hat and then gradient, added up over the rows.
void normalize_backward(const NormRows& s, int64_t begin, int64_t end, double* sums) {
  alignas(64) float scratch[kTile], other[kTile], normalised[kTile], product[kTile];
  const int64_t columns = s.columns;
  for (int64_t row = begin; row < end; ++row) {
    LaneSum plain, mixed;
    for (int64_t at = 0; at < columns; at += kTile) {
      const int64_t n = smaller(kTile, columns - at);
      const float* __restrict gradient = open_tile(s.gradient, row * columns + at, n, other);
      normalised_tile(s, row, at, n, scratch, normalised);
      if (s.weight) {
        double* __restrict weights = sums + at;
        for (int64_t i = 0; i < n; ++i) weights[i] += double(gradient[i] * normalised[i]);
      }
      if (s.bias) {
        double* __restrict biases = sums + columns + at;
        for (int64_t i = 0; i < n; ++i) biases[i] += double(gradient[i]);
      }
      const float* __restrict weight = columns_from(s.weight, at);
      if (s.weight) {
        for (int64_t i = 0; i < n; ++i) product[i] = gradient[i] * weight[i];
      } else {
        for (int64_t i = 0; i < n; ++i) product[i] = gradient[i];
      }
      if (s.mean) plain.add(product, n, Itself());
      for (int64_t i = 0; i < n; ++i) product[i] = product[i] * normalised[i];
      mixed.add(product, n, Itself());
    }
    const float shift = s.mean ? float(plain.total() / double(columns)) : 0.0f;
    const float slope = float(mixed.total() / double(columns)), rstd = s.rstd[row];
    for (int64_t at = 0; at < columns; at += kTile) {
      const int64_t n = smaller(kTile, columns - at);
      const float* __restrict gradient = open_tile(s.gradient, row * columns + at, n, other);
      normalised_tile(s, row, at, n, scratch, normalised);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + row * columns + at : product;
      const float* __restrict weight = columns_from(s.weight, at);
      if (s.weight) {
        for (int64_t i = 0; i < n; ++i) target[i] = ((gradient[i] * weight[i] - shift) - normalised[i] * slope) * rstd;
      } else {
        for (int64_t i = 0; i < n; ++i) target[i] = ((gradient[i] - shift) - normalised[i] * slope) * rstd;
      }
      close_tile(target, s.result, row * columns + at, n);
    }
  }
}
