// What the CUDA kernels of the layer ops offer, free of torch: a call enqueues all its work on the stream and waits for
// nothing. Formulas and their order are those of zero_strategy/ops and of the kernels in cpp/cpu.
#pragma once

#include "elements.cuh"

namespace zs {

constexpr int kMostKinds = 2;  // of sums over rows

// How many numbers `partial` has room for, below; `kinds` sums per column.
int64_t partial_sums(int64_t rows, int64_t columns, int kinds);

// targets[kind][column] = sum of partial[chunk][kind][column] over the chunks; a target may be nothing.
cudaError_t finish_columns(int64_t rows, int64_t columns, int kinds, const double* partial, const Buffer* targets,
                           cudaStream_t stream);

struct NormRows {
  int64_t rows = 0, columns = 0;
  Buffer saved;         // the input; backward of the invertible form: the output
  Buffer gradient;      // backward only
  Buffer result;        // the output; backward: the input's gradient
  Buffer weight, bias;  // one per column, or nothing
  float* mean = nullptr;  // one per row; null: RMS norm
  float* rstd = nullptr;  // one per row
  double eps = 0;
  bool inverted = false;
};

cudaError_t normalize(const NormRows& rows, cudaStream_t stream);
cudaError_t normalize_backward(const NormRows& rows, cudaStream_t stream);

// Of gradient * x_hat and of the gradient, over the rows.
cudaError_t normalize_sums(const NormRows& rows, double* partial, cudaStream_t stream);

// Which elements are dropped, and what the others are multiplied by (see ../philox.h).
struct Random {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold = 0;
  float scale = 1;
};

// Rows to which a bias is added (or nothing) before something is done with them.
struct BiasRows {
  int64_t rows = 0, columns = 0;
  Buffer input;
  Buffer other;  // gelu: the gradient, in the backward; dropout: the residual, in the forward
  Buffer result;
  Buffer bias;
  bool tanh = false;
  Random random;
};

// The backward ones add their result up over the rows before it is rounded, if `partial` is not null.
cudaError_t bias_gelu(const BiasRows& rows, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasRows& rows, double* partial, cudaStream_t stream);
cudaError_t bias_dropout(const BiasRows& rows, cudaStream_t stream);
cudaError_t bias_dropout_backward(const BiasRows& rows, double* partial, cudaStream_t stream);

// Where a row's elements begin in a mask: sum over the dimensions of (row / repeated) % length * stride.
struct MaskDimension {
  int64_t repeated, length, stride;
};

constexpr int kMaskDimensions = 32;  // torch's 64, of which neighbours are taken together

struct SoftmaxRows {
  int64_t rows = 0, columns = 0;
  Buffer input;          // backward: the probabilities
  Buffer mask;           // or nothing
  Buffer gradient;       // backward only
  Buffer result;         // forward: probabilities after dropout
  Buffer probabilities;  // forward: before dropout, or nothing
  int64_t queries = 0;   // row r sees the columns up to r % queries; 0: all
  Random random;
  bool one_for_all = false;  // the mask has one number per row
  int32_t dimensions = 0;
  MaskDimension dimension[kMaskDimensions] = {};
};

cudaError_t softmax(const SoftmaxRows& rows, cudaStream_t stream);
cudaError_t softmax_backward(const SoftmaxRows& rows, cudaStream_t stream);

// Numbers in blocks of `block` with one scale each, as int8 or as two int4 in a byte.
struct Quantized {
  void* codes;
  Buffer scales;
};

struct Blocks {
  Buffer values;
  int64_t numel = 0, block = 0;
  bool packed = false;  // int4
};

cudaError_t quantize(const Blocks& blocks, const Quantized& target, cudaStream_t stream);

// values = sum over the sources, in their order; more than one if the values are float32.
cudaError_t dequantize(const Blocks& blocks, const Quantized* sources, int64_t count, cudaStream_t stream);

}  // namespace zs
