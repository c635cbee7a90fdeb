// Layer norm and RMS norm over rows. Statistics are float64 sums kept as float32; everything else is float32, but for the
// sums over rows (add_rows).

constexpr int64_t kFetched = 256;  // elements worked on between fetching as many of the next row

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

// Mean and rstd of a row, from one pass over it; meanwhile the next row is fetched.
inline void measure(const NormRows& s, int64_t row) {
  alignas(64) float scratch[kFetched];
  const int64_t first = row * s.columns;
  Moments moments;
  moments.pivot = s.mean ? double(*open_tile(s.saved, first, 1, scratch)) : 0.0;
  LaneSum squares;
  for (int64_t at = 0; at < s.columns; at += kFetched) {
    const int64_t n = smaller(kFetched, s.columns - at);
    if (row + 1 < s.rows) fetch(s.saved, first + s.columns + at, n);
    const float* const values = open_tile(s.saved, first + at, n, scratch);
    if (s.mean) {
      moments.add(values, n);
    } else {
      squares.add(values, n, Square());
    }
  }
  if (s.mean) s.mean[row] = float(moments.mean(s.columns));
  const double variance = s.mean ? moments.variance(s.columns) : squares.total() / double(s.columns);
  s.rstd[row] = float(1 / __builtin_sqrt(variance + s.eps));
}

// output = (saved - mean) * rstd * weight + bias; mean and rstd are written.
void normalize(const NormRows& s, int64_t begin, int64_t end, double*) {
  alignas(64) float scratch[kTile], result[kTile];
  const int64_t columns = s.columns;
  for (int64_t row = begin; row < end; ++row) {
    measure(s, row);
    const float mean = s.mean ? s.mean[row] : 0.0f, rstd = s.rstd[row];
    for (int64_t at = 0; at < columns; at += kTile) {
      const int64_t n = smaller(kTile, columns - at);
      const bool direct = s.result.type == Type::f32;
      float* __restrict target = direct ? static_cast<float*>(s.result.data) + row * columns + at : result;
      const float* __restrict values = open_tile(s.saved, row * columns + at, n, scratch);
      const float* __restrict weight = columns_from(s.weight, at);
      const float* __restrict bias = columns_from(s.bias, at);
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

// Sums of g = gradient * weight and of g * x_hat.
struct GradientSums {
  LaneSum plain, mixed;
  float mean, rstd;

  ZS_OUTLINE void add(const float* values, const float* gradient, const float* weight, int64_t n) {
    int64_t i = 0;
    LaneSum sum = plain, product = mixed;
    for (; i + 16 <= n; i += 16) {
      add_eight(values + i, gradient + i, weight + i, sum.low, product.low);
      add_eight(values + i + 8, gradient + i + 8, weight + i + 8, sum.high, product.high);
    }
    plain = sum;
    mixed = product;
    if (i < n) {
      float rest[3][16] = {};
      for (float& value : rest[0]) value = mean;
      std::memcpy(rest[0], values + i, size_t(n - i) * 4);
      std::memcpy(rest[1], gradient + i, size_t(n - i) * 4);
      std::memcpy(rest[2], weight + i, size_t(n - i) * 4);
      add(rest[0], rest[1], rest[2], 16);
    }
  }

  void add_eight(const float* values, const float* gradient, const float* weight, Lanes& sum, Lanes& product) const {
    NarrowLanes x, g, w;
    std::memcpy(&x, values, sizeof x);
    std::memcpy(&g, gradient, sizeof g);
    std::memcpy(&w, weight, sizeof w);
    const NarrowLanes scaled = g * w, both = scaled * ((x - mean) * rstd);
    sum += wide_lanes(scaled);
    product += wide_lanes(both);
  }
};

// Means of g (0 in RMS norm) and of g * x_hat.
struct GradientMeans {
  float shift, slope;
};

// Of one row; meanwhile the next one is fetched.
inline GradientMeans gradient_means(const NormRows& s, int64_t row) {
  alignas(64) float scratch[kFetched], other[kFetched], normalised[kFetched], ones[kFetched];
  for (float& one : ones) one = 1;
  const int64_t first = row * s.columns;
  GradientSums sums;
  sums.mean = s.mean && !s.inverted ? s.mean[row] : 0.0f;
  sums.rstd = s.inverted ? 1.0f : s.rstd[row];
  for (int64_t at = 0; at < s.columns; at += kFetched) {
    const int64_t n = smaller(kFetched, s.columns - at);
    if (row + 1 < s.rows) {
      fetch(s.gradient, first + s.columns + at, n);
      fetch(s.saved, first + s.columns + at, n);
    }
    const float* values = normalised;
    if (s.inverted) {
      normalised_tile(s, row, at, n, scratch, normalised);
    } else {
      values = open_tile(s.saved, first + at, n, scratch);
    }
    sums.add(values, open_tile(s.gradient, first + at, n, other), s.weight ? s.weight + at : ones, n);
  }
  const double columns = double(s.columns);
  return {s.mean ? float(sums.plain.total() / columns) : 0.0f, float(sums.mixed.total() / columns)};
}

// With g = gradient * weight: result = (g - mean(g) - x_hat * mean(g * x_hat)) * rstd, the first mean only where the
// forward took one off. `sums` takes gradient * x_hat and then gradient, added up over the rows.
void normalize_backward(const NormRows& s, int64_t begin, int64_t end, double* sums) {
  alignas(64) float scratch[kGroupTile], result[kGroupTile], normalised[kGroupTile];
  alignas(64) float opened[kRowGroup][kGroupTile], product[kRowGroup][kGroupTile];
  const int64_t columns = s.columns;
  for (int64_t group = begin; group < end; group += kRowGroup) {
    const int64_t count = smaller(kRowGroup, end - group);
    GradientMeans means[kRowGroup];
    const float *gradients[kRowGroup] = {}, *products[kRowGroup] = {};
    for (int64_t k = 0; k < count; ++k) means[k] = gradient_means(s, group + k);
    for (int64_t at = 0; at < columns; at += kGroupTile) {
      const int64_t n = smaller(kGroupTile, columns - at);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t place = (group + k) * columns + at;
        const float shift = means[k].shift, slope = means[k].slope, rstd = s.rstd[group + k];
        const float* __restrict gradient = open_tile(s.gradient, place, n, opened[k]);
        normalised_tile(s, group + k, at, n, scratch, normalised);
        const bool direct = s.result.type == Type::f32;
        float* __restrict target = direct ? static_cast<float*>(s.result.data) + place : result;
        if (s.weight) {
          const float* __restrict weight = s.weight + at;
          float* __restrict mixed = product[k];
          for (int64_t i = 0; i < n; ++i) {
            mixed[i] = gradient[i] * normalised[i];
            target[i] = ((gradient[i] * weight[i] - shift) - normalised[i] * slope) * rstd;
          }
        } else {
          for (int64_t i = 0; i < n; ++i) target[i] = ((gradient[i] - shift) - normalised[i] * slope) * rstd;
        }
        close_tile(target, s.result, place, n);
        gradients[k] = gradient;
        products[k] = product[k];
      }
      if (s.weight) add_rows(products, count, n, sums + at);
      if (s.bias) add_rows(gradients, count, n, sums + columns + at);
    }
  }
}
