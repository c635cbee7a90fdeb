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

// A state in 8 bits: a code per element and a scale per block (see ../dynamic_map.h), or nothing.
struct Codes {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
};

// One piece of a parameter with its gradient, optimizer state and low-precision copy; the same number of elements each.
// `factor` has what the optimizer's formula needs of its hyper-parameters (see optimizers.h).
struct Segment {
  float* parameter = nullptr;
  Buffer gradient;
  Buffer first;   // exp_avg, momentum_buffer or sum
  Buffer second;  // exp_avg_sq
  Codes first_codes, second_codes;  // in their place
  Buffer copy;
  bool streamed = false;  // the copy is written past the caches
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

// A sum of float64 numbers without rounding (see exact_sums.h): digits of 32 bits, the first of weight 2^-1075, then how
// many of the numbers were infinite and how many not a number.
constexpr int kSumDigits = 67, kSumWords = kSumDigits + 2;
constexpr int64_t kSumBlock = 16;  // elements whose powers are added up with rounding, in a fixed order

struct Power {
  double order = 2;
  int32_t halves = 4;  // 2 x order where products and a root do, else 0
  double factor = 1;   // of the elements
  double weight = 1;   // of the blocks' sums
};

// Adds what elements [begin, end) sum up to; digits are below 2^32. Returns how many elements are not finite.
using ExactKernel = int64_t (*)(Buffer, int64_t begin, int64_t end, const Power&, uint64_t sum[kSumWords]);

// Rows of `columns` elements, normalised (see normalization.h). Weight and bias: one per column, or null.
struct NormRows {
  Buffer saved;     // the input; backward of the invertible form: the output
  Buffer gradient;  // backward only
  Buffer result;    // the output; backward: the input's gradient
  const float* weight = nullptr;
  const float* bias = nullptr;
  float* mean = nullptr;  // one per row; null: RMS norm
  float* rstd = nullptr;  // one per row
  int64_t rows = 0, columns = 0;
  double eps = 0;
  bool inverted = false;
};

// Rows [begin, end). `sums`: null, or what the kernel adds up over rows, some numbers per column.
using NormKernel = void (*)(const NormRows&, int64_t begin, int64_t end, double* sums);

// Which elements are dropped, and what the others are multiplied by (see ../philox.h).
struct Random {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold = 0;
  float scale = 1;
};

// Rows of `columns` elements to which a bias is added (null: none) before something is done with them.
struct BiasRows {
  Buffer input;
  Buffer other;  // gelu: the gradient, in the backward; dropout: the residual, or nothing
  Buffer result;
  const float* bias = nullptr;
  int64_t columns = 0;
  bool tanh = false;
  Random random;
};

using BiasKernel = void (*)(const BiasRows&, int64_t begin, int64_t end, double* sums);

// Rows of a softmax. The mask's elements for row r begin at mask_offset[r], one per column or (mask_step 0) one for all.
struct SoftmaxRows {
  Buffer input;          // backward: the probabilities
  Buffer mask;           // or nothing
  Buffer gradient;       // backward only
  Buffer result;         // forward: probabilities after dropout
  Buffer probabilities;  // forward: before dropout, or nothing
  const int64_t* mask_offset = nullptr;
  int64_t mask_step = 0;
  int64_t rows = 0, columns = 0;
  int64_t queries = 0;  // row r sees the columns up to r % queries; 0: all
  Random random;
};

// Rows [begin, end); `scratch` has room for one row.
using SoftmaxKernel = void (*)(const SoftmaxRows&, int64_t begin, int64_t end, float* scratch);

// Numbers in blocks of `block` with one scale each, as int8 or as two int4 in a byte.
struct Blocks {
  Buffer values;
  void* const* codes = nullptr;    // per source; there is one but for the sum of several
  const Buffer* scales = nullptr;  // likewise
  int64_t sources = 1;
  int64_t numel = 0, block = 0;
  bool packed = false;  // int4
};

// Blocks [begin, end).
using BlockKernel = void (*)(const Blocks&, int64_t begin, int64_t end);

struct Kernels {
  const char* target;
  SegmentKernel adam, lion, adagrad, sgd, lamb_direction, lamb_apply;
  MoveKernel convert, axpby;
  StatisticsKernel statistics;
  ExactKernel exact_sum;
  NormKernel normalize, normalize_backward;
  BiasKernel bias_gelu, bias_gelu_backward, bias_dropout, bias_dropout_backward;
  SoftmaxKernel softmax, softmax_backward;
  BlockKernel quantize, dequantize;
};

extern const Kernels kernels_avx512, kernels_avx2, kernels_portable;

// The best that this processor runs; ZERO_STRATEGY_CPU=avx2|portable chooses a lower one.
const Kernels& kernels();

}  // namespace zs
