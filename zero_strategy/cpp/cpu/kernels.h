// What the CPU kernels offer, in plain C++: no torch, no allocation, no threads. Each is compiled for AVX-512, for AVX2
// and for any processor, and the three give the same bits: only IEEE-754 addition, subtraction, multiplication, division
// and square root in a fixed order, nothing contracted (-ffp-contract=off), so that neither the width of a vector nor an
// element's place in it matters.
#pragma once

#include <cstdint>

namespace zs {

enum class Type : int32_t { f32, bf16, f16 };

// Elements of one tensor, or nothing.
struct Buffer {
  void* data = nullptr;
  Type type = Type::f32;
};

// One piece of a parameter with its gradient, optimizer state and low-precision copy; the same number of elements each.
// `factor` has what the optimizer's formula needs of its hyper-parameters (see optimizers.h).
struct Segment {
  float* parameter = nullptr;
  Buffer gradient;
  Buffer first;   // exp_avg, momentum_buffer or sum
  Buffer second;  // exp_avg_sq
  Buffer copy;
  int64_t numel = 0;
  float factor[8] = {};
  bool option[2] = {};
};

// Elements [begin, end) of a segment. `sums` is null, or takes what the kernel adds up (LAMB).
using SegmentKernel = void (*)(const Segment&, int64_t begin, int64_t end, double* sums);

// One tensor read, one written.
struct Move {
  Buffer source;
  Buffer other;   // second operand of axpby
  Buffer target;
  int64_t numel = 0;
  float scale = 1, other_scale = 1;
  bool accumulate = false;
};

// Elements [begin, end) of a move; returns how many results are not finite.
using MoveKernel = int64_t (*)(const Move&, int64_t begin, int64_t end);

enum class Norm : int32_t { one, two, infinity, power };

struct Statistics {
  double sum = 0;         // of |x|^p, or the largest |x|
  int64_t nonfinite = 0;  // how many elements are infinite or not a number
};

// Of elements [begin, end), in float64.
using StatisticsKernel = Statistics (*)(Buffer, int64_t begin, int64_t end, Norm, double power);

struct Kernels {
  const char* target;
  SegmentKernel adam, lion, adagrad, sgd, lamb_direction, lamb_apply;
  MoveKernel convert, axpby;
  StatisticsKernel statistics;
};

extern const Kernels kernels_avx512, kernels_avx2, kernels_portable;

// The best that this processor runs; ZERO_STRATEGY_CPU=avx2|portable chooses a lower one.
const Kernels& kernels();

}  // namespace zs
