// Optimizer updates of one segment, in one pass over memory. Every line of a formula is one rounding.
//
// The factors are float32, computed from the hyper-parameters in float64 by the binding. The gradient is first multiplied
// by `scale` (1 / loss scale x clipping coefficient / world size, negative to maximize).

struct Tiles {
  float gradient[kUpdateTile], first[kUpdateTile], second[kUpdateTile];
};

// What an update reads of elements [at, at + n), if there are so many.
inline void fetch_segment(const Segment& s, int64_t at, int64_t n) {
  if (at + n > s.numel) return;
  fetch({s.parameter, Type::f32}, at, n);
  if (s.gradient.data) fetch(s.gradient, at, n);
  if (s.first.data) fetch(s.first, at, n);
  if (s.second.data) fetch(s.second, at, n);
}

// Runs `update(parameter, gradient, first, second, n)` tile by tile, in float32.
template <class Update>
inline void by_tiles(const Segment& s, int64_t begin, int64_t end, const Update& update) {
  if (s.first_codes.codes) {
    by_blocks(s, begin, end, update);
    return;
  }
  alignas(64) Tiles scratch;
  for (int64_t at = begin; at < end; at += kUpdateTile) {
    const int64_t n = smaller(kUpdateTile, end - at);
    fetch_segment(s, at + kAhead, kUpdateTile);
    float* const parameter = s.parameter + at;
    const float* const gradient = s.gradient.data ? open_tile(s.gradient, at, n, scratch.gradient) : nullptr;
    float* const first = s.first.data ? open_tile(s.first, at, n, scratch.first) : nullptr;
    float* const second = s.second.data ? open_tile(s.second, at, n, scratch.second) : nullptr;
    update(parameter, gradient, first, second, n);
    if (first) close_tile(first, s.first, at, n);
    if (second) close_tile(second, s.second, at, n);
    if (s.streamed) {
      stream_out(parameter, s.copy, at, n);
    } else {
      copy_out(parameter, s.copy, at, n);
    }
  }
  if (s.streamed) end_of_stream();
}

// Adam (option 0 false: decay is added to the gradient) and AdamW (true: decay shrinks the parameter).
// factor: scale, decay (weight_decay, or 1 - lr x weight_decay), 1 - beta1, beta2, 1 - beta2,
//         1 / sqrt(1 - beta2^t), eps, lr / (1 - beta1^t)
void adam(const Segment& s, int64_t begin, int64_t end, double*) {
  const float scale = s.factor[0], decay = s.factor[1], rest1 = s.factor[2], beta2 = s.factor[3], rest2 = s.factor[4];
  const float correction = s.factor[5], eps = s.factor[6], size = s.factor[7];
  const bool decoupled = s.option[0];
  by_tiles(s, begin, end,
           [=](float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int64_t n) {
             if (decoupled || decay == 0) {
               const float shrink = decoupled ? decay : 1.0f;
               for (int64_t i = 0; i < n; ++i) {
                 const float gradient = g[i] * scale;
                 const float first = m[i] + (gradient - m[i]) * rest1;
                 const float second = v[i] * beta2 + (gradient * gradient) * rest2;
                 m[i] = first;
                 v[i] = second;
                 p[i] = p[i] * shrink - (first * size) / (__builtin_sqrtf(second) * correction + eps);
               }
             } else {
               for (int64_t i = 0; i < n; ++i) {
                 const float gradient = g[i] * scale + p[i] * decay;
                 const float first = m[i] + (gradient - m[i]) * rest1;
                 const float second = v[i] * beta2 + (gradient * gradient) * rest2;
                 m[i] = first;
                 v[i] = second;
                 p[i] = p[i] - (first * size) / (__builtin_sqrtf(second) * correction + eps);
               }
             }
           });
}

// Lion (Chen et al. 2023). factor: scale, 1 - lr x weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr
void lion(const Segment& s, int64_t begin, int64_t end, double*) {
  const float scale = s.factor[0], shrink = s.factor[1], beta1 = s.factor[2], rest1 = s.factor[3];
  const float beta2 = s.factor[4], rest2 = s.factor[5];
  const int32_t whole = int32_t(bits_of(s.factor[6]));
  by_tiles(s, begin, end, [=](float* __restrict p, const float* __restrict g, float* __restrict m, float*, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float gradient = g[i] * scale, before = m[i];
      const float mixed = before * beta1 + gradient * rest1;
      // +-lr or 0, and NaN stays NaN: in bits, without branches on the sign, which is not to be foreseen
      const int32_t bits = int32_t(bits_of(mixed)), magnitude = bits & 0x7fffffff;
      const int32_t nan = magnitude > 0x7f800000 ? 0x7fc00000 : 0, sign = bits & int32_t(0x80000000u);
      const int32_t step = magnitude > 0 ? (nan | whole) ^ sign : 0;
      m[i] = before * beta2 + gradient * rest2;
      p[i] = p[i] * shrink - float_of(uint32_t(step));
    }
  });
}

// Adagrad. factor: scale, weight_decay, lr / (1 + (t - 1) x lr_decay), eps
void adagrad(const Segment& s, int64_t begin, int64_t end, double*) {
  const float scale = s.factor[0], decay = s.factor[1], lr = s.factor[2], eps = s.factor[3];
  by_tiles(s, begin, end, [=](float* __restrict p, const float* __restrict g, float* __restrict h, float*, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = g[i] * scale;
      const float gradient = decay == 0 ? scaled : scaled + p[i] * decay;
      const float sum = h[i] + gradient * gradient;
      h[i] = sum;
      p[i] = p[i] - (gradient * lr) / (__builtin_sqrtf(sum) + eps);
    }
  });
}

// SGD. factor: scale, weight_decay, lr, momentum, 1 - dampening (1 in a segment's first step); option: nesterov.
// Without a buffer there is no momentum.
void sgd(const Segment& s, int64_t begin, int64_t end, double*) {
  const float scale = s.factor[0], decay = s.factor[1], lr = s.factor[2], momentum = s.factor[3], rest = s.factor[4];
  const bool nesterov = s.option[0], fresh = s.option[1];
  by_tiles(s, begin, end, [=](float* __restrict p, const float* __restrict g, float* __restrict b, float*, int64_t n) {
    if (b == nullptr) {
      for (int64_t i = 0; i < n; ++i) {
        const float scaled = g[i] * scale;
        p[i] = p[i] - (decay == 0 ? scaled : scaled + p[i] * decay) * lr;
      }
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      const float scaled = g[i] * scale;
      const float gradient = decay == 0 ? scaled : scaled + p[i] * decay;
      const float moving = fresh ? gradient : b[i] * momentum + gradient * rest;
      b[i] = moving;
      p[i] = p[i] - (nesterov ? gradient + moving * momentum : moving) * lr;
    }
  });
}

// LAMB (You et al. 2020), first pass: moments as in Adam, and sums[0] += p^2, sums[1] += u^2 of the direction
// u = m^ / (sqrt(v^) + eps) + weight_decay x p. factor: scale, weight_decay, 1 - beta1, beta2, 1 - beta2,
// 1 / sqrt(1 - beta2^t), eps, 1 / (1 - beta1^t)
void lamb_direction(const Segment& s, int64_t begin, int64_t end, double* sums) {
  const float scale = s.factor[0], decay = s.factor[1], rest1 = s.factor[2], beta2 = s.factor[3], rest2 = s.factor[4];
  const float correction = s.factor[5], eps = s.factor[6], size = s.factor[7];
  LaneSum weights, directions;
  by_tiles(s, begin, end,
           [=, &weights, &directions](float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v,
                         int64_t n) {
             alignas(64) float direction[kUpdateTile];
             for (int64_t i = 0; i < n; ++i) {
               const float gradient = g[i] * scale;
               const float first = m[i] + (gradient - m[i]) * rest1;
               const float second = v[i] * beta2 + (gradient * gradient) * rest2;
               m[i] = first;
               v[i] = second;
               direction[i] = (first * size) / (__builtin_sqrtf(second) * correction + eps) + p[i] * decay;
             }
             weights.add(p, n, Square());
             directions.add(direction, n, Square());
           });
  sums[0] += weights.total();
  sums[1] += directions.total();
}

// LAMB, second pass: p -= lr x trust x u, with u as in the first pass. factor: as there, but [0] is lr x trust.
void lamb_apply(const Segment& s, int64_t begin, int64_t end, double*) {
  const float rate = s.factor[0], decay = s.factor[1];
  const float correction = s.factor[5], eps = s.factor[6], size = s.factor[7];
  by_tiles(s, begin, end,
           [=](float* __restrict p, const float*, float* __restrict m, float* __restrict v, int64_t n) {
             for (int64_t i = 0; i < n; ++i) {
               const float direction = (m[i] * size) / (__builtin_sqrtf(v[i]) * correction + eps) + p[i] * decay;
               p[i] = p[i] - direction * rate;
             }
           });
}
