// The optimizers' formulas for one element; the same operations in the same order as cpp/cpu/optimizers.h and the
// Python references, one rounding each (--fmad=false). Factors are those of cpp/hyper.h. Plain enough for a host
// compiler.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace zs {

// What an element's update reads and writes. `gradient` comes in as it is stored, before its factor `scale`.
struct Element {
  float parameter, gradient, first, second;
};

// Correctly rounded whatever nvcc is told about precision.
__host__ __device__ inline float root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

__host__ __device__ inline float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// Adam's moments and the step of unit length; factor[2..7] of adam_factors and lamb_factors.
__host__ __device__ inline void moments(const float* factor, float gradient, Element& e) {
  const float first = e.first + (gradient - e.first) * factor[2];
  const float second = e.second * factor[3] + (gradient * gradient) * factor[4];
  e.first = first;
  e.second = second;
}

__host__ __device__ inline float adaptive(const float* factor, const Element& e) {
  return quotient(e.first * factor[7], root(e.second) * factor[5] + factor[6]);
}

// What a rule reads and writes beside the parameter, for the kernel that runs it.
struct AllTensors {
  static constexpr bool kReadsGradient = true, kWritesStates = true, kWritesParameter = true;
};

// option 0 true: decoupled (AdamW)
struct Adam : AllTensors {
  __host__ __device__ static void update(const float* factor, bool decoupled, bool, bool, Element& e) {
    const float decay = factor[1];
    float gradient = e.gradient * factor[0];
    if (!decoupled && decay != 0) gradient = gradient + e.parameter * decay;
    moments(factor, gradient, e);
    const float shrunk = decoupled ? e.parameter * decay : e.parameter;
    e.parameter = shrunk - adaptive(factor, e);
  }
};

struct Lion : AllTensors {
  __host__ __device__ static void update(const float* factor, bool, bool, bool, Element& e) {
    const float gradient = e.gradient * factor[0], lr = factor[6];
    const float mixed = e.first * factor[2] + gradient * factor[3];
    const float step = mixed > 0 ? lr : mixed < 0 ? -lr : mixed == 0 ? 0.0f : mixed;  // NaN stays NaN
    e.first = e.first * factor[4] + gradient * factor[5];
    e.parameter = e.parameter * factor[1] - step;
  }
};

struct Adagrad : AllTensors {
  __host__ __device__ static void update(const float* factor, bool, bool, bool, Element& e) {
    float gradient = e.gradient * factor[0];
    if (factor[1] != 0) gradient = gradient + e.parameter * factor[1];
    e.first = e.first + gradient * gradient;
    e.parameter = e.parameter - quotient(gradient * factor[2], root(e.first) + factor[3]);
  }
};

// Options: nesterov, fresh. Without a buffer there is no momentum.
struct Sgd : AllTensors {
  __host__ __device__ static void update(const float* factor, bool nesterov, bool fresh, bool buffer, Element& e) {
    float gradient = e.gradient * factor[0];
    if (factor[1] != 0) gradient = gradient + e.parameter * factor[1];
    if (buffer) {
      const float moving = fresh ? gradient : e.first * factor[3] + gradient * factor[4];
      e.first = moving;
      gradient = nesterov ? gradient + moving * factor[3] : moving;
    }
    e.parameter = e.parameter - gradient * factor[2];
  }
};

__host__ __device__ inline float lamb_step(const float* factor, const Element& e) {
  return adaptive(factor, e) + e.parameter * factor[1];
}

// First pass: moments, and the direction instead of the gradient, for its norm.
struct LambDirection : AllTensors {
  static constexpr bool kWritesParameter = false;

  __host__ __device__ static void update(const float* factor, bool, bool, bool, Element& e) {
    moments(factor, e.gradient * factor[0], e);
    e.gradient = lamb_step(factor, e);
  }
};

// Second pass, from the moments as they are stored; factor[0] is lr x trust.
struct LambApply : AllTensors {
  static constexpr bool kReadsGradient = false, kWritesStates = false;

  __host__ __device__ static void update(const float* factor, bool, bool, bool, Element& e) {
    e.parameter = e.parameter - lamb_step(factor, e) * factor[0];
  }
};

}  // namespace zs
