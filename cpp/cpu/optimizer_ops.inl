// The optimizer ops: hyper-parameters become the kernels' factors, segments are spread over threads.
#include "optimizer_ops.h"

#include <cmath>

#include "../dynamic_map.h"
#include "../hyper.h"
#include "parallel.h"
#include "tensors.h"

namespace zs {
namespace {

// A call on more elements than this leaves nothing of its copies in the caches anyway.
constexpr int64_t kStreamed = int64_t(1) << 22;

std::vector<Segment> segments_of(const Tensors& params, const Tensors& grads, const Tensors& first,
                                 const Tensors& second, const Tensors& copies) {
  std::vector<Segment> segments(params.size());
  int64_t total = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Segment& segment = segments[i];
    segment.numel = params[i].numel();
    segment.parameter = floats_of(params[i]);
    segment.gradient = entry_of(grads, i, params.size(), segment.numel);
    segment.first = entry_of(first, i, params.size(), segment.numel);
    segment.second = entry_of(second, i, params.size(), segment.numel);
    segment.copy = entry_of(copies, i, params.size(), segment.numel);
    total += segment.numel;
  }
  for (Segment& segment : segments) segment.streamed = segment.copy.data && total > kStreamed;
  return segments;
}

Codes codes_of(const Tensors& codes, const Tensors& scales, size_t index, size_t items, int64_t numel) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(codes.size() == items && scales.size() == items, "expected ", items, " lists of codes and scales");
  const Tensor &code = codes[index], &scale = scales[index];
  STD_TORCH_CHECK(code.is_cpu() && code.is_contiguous() && code.scalar_type() == ScalarType::Byte &&
                      code.numel() == numel && scale.numel() == (numel + kCodeBlock - 1) / kCodeBlock,
                  "expected contiguous uint8 codes for ", numel, " elements on the CPU, and a scale for each block");
  return {static_cast<uint8_t*>(const_cast<void*>(code.const_data_ptr())), floats_of(scale)};
}

// `second` may be empty.
std::vector<Segment> coded_segments_of(const Tensors& params, const Tensors& grads, const Tensors& first_codes,
                                       const Tensors& first_scales, const Tensors& second_codes,
                                       const Tensors& second_scales, const Tensors& copies) {
  std::vector<Segment> segments = segments_of(params, grads, {}, {}, copies);
  for (size_t i = 0; i < segments.size(); ++i) {
    const int64_t numel = segments[i].numel;
    segments[i].first_codes = codes_of(first_codes, first_scales, i, segments.size(), numel);
    if (!second_codes.empty()) {
      segments[i].second_codes = codes_of(second_codes, second_scales, i, segments.size(), numel);
    }
  }
  return segments;
}

// `sums`, if given, takes two numbers per segment, added up in the order of its chunks.
void run(SegmentKernel kernel, const std::vector<Segment>& segments, double* sums = nullptr) {
  std::vector<int64_t> sizes;
  for (const Segment& segment : segments) sizes.push_back(segment.numel);
  std::vector<double> partial(sums ? 2 * chunk_count(sizes) : 0, 0.0);
  for_each_chunk(sizes, [&](size_t item, int64_t begin, int64_t end, int64_t chunk) {
    kernel(segments[item], begin, end, sums ? &partial[2 * chunk] : nullptr);
  });
  if (!sums) return;
  const double* part = partial.data();
  for (size_t item = 0; item < sizes.size(); ++item) {
    for (int64_t begin = 0; begin < sizes[item]; begin += kChunk, part += 2) {
      sums[2 * item] += part[0];
      sums[2 * item + 1] += part[1];
    }
  }
}

template <class Fill>
void fill(std::vector<Segment>& segments, const Tensor& hyper, int64_t columns, const Fill& from_row) {
  const double* row = rows_of(hyper, segments.size(), columns);
  for (Segment& segment : segments) {
    from_row(row, segment.factor);
    row += columns;
  }
}

void run_adam(std::vector<Segment>& segments, const Tensor& hyper, bool decoupled) {
  fill(segments, hyper, kAdamColumns,
       [=](const double* row, float* factor) { adam_factors(row, decoupled, factor); });
  for (Segment& segment : segments) segment.option[0] = decoupled;
  run(kernels().adam, segments);
}

void run_lion(std::vector<Segment>& segments, const Tensor& hyper) {
  fill(segments, hyper, kLionColumns, lion_factors);
  run(kernels().lion, segments);
}

void run_sgd(std::vector<Segment>& segments, const Tensor& hyper, bool nesterov) {
  const double* row = rows_of(hyper, segments.size(), kSgdColumns);
  for (Segment& segment : segments) {
    sgd_factors(row, segment.factor);
    segment.option[0] = nesterov;
    segment.option[1] = row[kSgdFresh] != 0;
    row += kSgdColumns;
  }
  run(kernels().sgd, segments);
}

}  // namespace

void adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper,
          bool decoupled) {
  std::vector<Segment> segments = segments_of(params, grads, exp_avgs, exp_avg_sqs, copies);
  run_adam(segments, hyper, decoupled);
}

void lion(Tensors params, Tensors grads, Tensors exp_avgs, Tensors copies, Tensor hyper) {
  std::vector<Segment> segments = segments_of(params, grads, exp_avgs, {}, copies);
  run_lion(segments, hyper);
}

void adagrad(Tensors params, Tensors grads, Tensors sums, Tensors copies, Tensor hyper) {
  std::vector<Segment> segments = segments_of(params, grads, sums, {}, copies);
  fill(segments, hyper, kAdagradColumns, adagrad_factors);
  run(kernels().adagrad, segments);
}

void sgd(Tensors params, Tensors grads, Tensors buffers, Tensors copies, Tensor hyper, bool nesterov) {
  std::vector<Segment> segments = segments_of(params, grads, buffers, {}, copies);
  run_sgd(segments, hyper, nesterov);
}

void adam8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors exp_avg_sq_codes,
           Tensors exp_avg_sq_scales, Tensors copies, Tensor hyper, bool decoupled) {
  std::vector<Segment> segments = coded_segments_of(params, grads, exp_avg_codes, exp_avg_scales, exp_avg_sq_codes,
                                                    exp_avg_sq_scales, copies);
  run_adam(segments, hyper, decoupled);
}

void lion8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors copies, Tensor hyper) {
  std::vector<Segment> segments = coded_segments_of(params, grads, exp_avg_codes, exp_avg_scales, {}, {}, copies);
  run_lion(segments, hyper);
}

void sgd8(Tensors params, Tensors grads, Tensors buffer_codes, Tensors buffer_scales, Tensors copies, Tensor hyper,
          bool nesterov) {
  std::vector<Segment> segments = coded_segments_of(params, grads, buffer_codes, buffer_scales, {}, {}, copies);
  run_sgd(segments, hyper, nesterov);
}

Tensor lamb_direction(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensor hyper) {
  std::vector<Segment> segments = segments_of(params, grads, exp_avgs, exp_avg_sqs, {});
  fill(segments, hyper, kLambColumns, lamb_factors);
  Tensor sums = torch::stable::new_zeros(hyper, {int64_t(segments.size()), 2});
  run(kernels().lamb_direction, segments, static_cast<double*>(sums.mutable_data_ptr()));
  return sums;
}

void lamb_apply(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper, Tensor rates) {
  std::vector<Segment> segments = segments_of(params, {}, exp_avgs, exp_avg_sqs, copies);
  fill(segments, hyper, kLambColumns, lamb_factors);
  const double* rate = rows_of(rates, segments.size(), 1);
  for (Segment& segment : segments) segment.factor[0] = float(*rate++);
  run(kernels().lamb_apply, segments);
}

}  // namespace zs
