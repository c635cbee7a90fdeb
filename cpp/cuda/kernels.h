// What the CUDA kernels offer, free of torch: a call enqueues all its work on the stream and waits for nothing.
#pragma once

#include <vector>

#include "elements.cuh"

namespace zs {

// One piece of a parameter with its gradient, optimizer state and low-precision copy; the same number of elements each.
// Packed by hand: a kernel's arguments hold as many of these as fit into 4 KiB.
struct Segment {
  float* parameter;
  void *gradient, *first, *second, *copy;  // first: exp_avg, momentum_buffer or sum; second: exp_avg_sq; or null
  int64_t numel;
  float factor[8];  // see cpp/hyper.h
  Type gradient_type, first_type, second_type, copy_type;
  uint8_t lead;
  bool option[2];
};

// Not LAMB's first pass: that returns sums.
enum class Optimizer { adam, lion, adagrad, sgd, lamb_apply };

cudaError_t optimize(Optimizer kind, std::vector<Segment>& segments, cudaStream_t stream);

// A state in 8 bits (see ../dynamic_map.h), or nothing.
struct Codes {
  uint8_t* codes;
  float* scales;
};

// As `Segment`, with states in 8 bits.
struct CodedSegment {
  float* parameter;
  void *gradient, *copy;
  Codes first, second;
  int64_t numel;
  float factor[8];
  Type gradient_type, copy_type;
  uint8_t lead;  // 0: chunks begin where blocks of codes do
  bool option[2];
};

// Adam, Lion and SGD with momentum.
cudaError_t optimize_coded(Optimizer kind, const std::vector<CodedSegment>& segments, cudaStream_t stream);

// One number for each chunk of each item; 0 for an item without elements.
int64_t chunk_count(const std::vector<int64_t>& numels);

// LAMB's first pass. `partial` has room for 2 x chunk_count numbers; `sums` takes (segments, 2).
cudaError_t lamb_direction(const std::vector<Segment>& segments, double* partial, double* sums, cudaStream_t stream);

// One or two tensors read, one written.
struct Move {
  void *source, *other, *target;  // other: second operand of axpby
  int64_t numel;
  Type source_type, other_type, target_type;
  uint8_t lead;
};

// scale: target = source x factor; accumulate: target += source x factor; axpby: target = source x factor + other x
// other_factor.
enum class Arithmetic { scale, accumulate, axpby };

// `nonfinite` takes how many results are infinite or NaN, added to what is there; or is null.
cudaError_t move(Arithmetic kind, std::vector<Move>& moves, float factor, float other_factor,
                 unsigned long long* nonfinite, cudaStream_t stream);

enum class Norm { one, two, infinity, power };

// `partial` has room for chunk_count numbers; `sums` takes one number per tensor, and to `counts` is added how many of
// its elements are not finite.
cudaError_t statistics(const std::vector<Buffer>& buffers, const std::vector<int64_t>& numels, Norm norm, double power,
                       double* partial, double* sums, unsigned long long* counts, cudaStream_t stream);

// results[item][column] = sum (or, for `infinity`, largest) of partial[column][chunks of item], in a fixed order.
cudaError_t finish(const std::vector<int64_t>& numels, int columns, bool largest, const double* partial,
                   double* results, cudaStream_t stream);

}  // namespace zs
