// The CUDA kernels of steps on states of 8 bits, as binding.cpp for the others.
#include <torch/csrc/stable/library.h>

#include "../dynamic_map.h"
#include "../hyper.h"
#include "kernels.h"
#include "tensors.cuh"

namespace zs {
namespace {

using torch::headeronly::ScalarType;

Codes codes_of(const OnDevice& device, const Tensors& codes, const Tensors& scales, size_t index, size_t items,
               int64_t numel) {
  STD_TORCH_CHECK(codes.size() == items && scales.size() == items, "expected ", items, " lists of codes and scales");
  const Tensor &code = codes[index], &scale = scales[index];
  STD_TORCH_CHECK(device.holds(code) && code.scalar_type() == ScalarType::Byte && code.numel() == numel &&
                      scale.numel() == (numel + kCodeBlock - 1) / kCodeBlock,
                  "expected contiguous uint8 codes for ", numel, " elements on the device, and a scale for each block");
  return {static_cast<uint8_t*>(const_cast<void*>(code.const_data_ptr())), device.floats_of(scale)};
}

// `second` may be empty.
std::vector<CodedSegment> segments_of(const OnDevice& device, const Tensors& params, const Tensors& grads,
                                      const Tensors& first_codes, const Tensors& first_scales,
                                      const Tensors& second_codes, const Tensors& second_scales,
                                      const Tensors& copies) {
  const size_t items = params.size();
  std::vector<CodedSegment> segments(items, CodedSegment{});
  for (size_t i = 0; i < items; ++i) {
    CodedSegment& s = segments[i];
    s.numel = params[i].numel();
    s.parameter = device.floats_of(params[i]);
    STD_TORCH_CHECK(!grads.empty(), "expected one gradient per parameter");
    const Buffer gradient = device.entry_of(grads, i, items, s.numel), copy = device.entry_of(copies, i, items, s.numel);
    s.gradient = gradient.data, s.gradient_type = gradient.type;
    s.copy = copy.data, s.copy_type = copy.type;
    s.first = codes_of(device, first_codes, first_scales, i, items, s.numel);
    if (!second_codes.empty()) s.second = codes_of(device, second_codes, second_scales, i, items, s.numel);
  }
  return segments;
}

template <class Fill>
void fill(std::vector<CodedSegment>& segments, const Tensor& hyper, int64_t columns, const Fill& from_row) {
  const double* row = rows_of(hyper, segments.size(), columns);
  for (CodedSegment& segment : segments) {
    from_row(row, segment);
    row += columns;
  }
}

void adam8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors exp_avg_sq_codes,
           Tensors exp_avg_sq_scales, Tensors copies, Tensor hyper, bool decoupled) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<CodedSegment> segments = segments_of(device, params, grads, exp_avg_codes, exp_avg_scales,
                                                   exp_avg_sq_codes, exp_avg_sq_scales, copies);
  fill(segments, hyper, kAdamColumns, [=](const double* row, CodedSegment& s) {
    adam_factors(row, decoupled, s.factor);
    s.option[0] = decoupled;
  });
  STD_CUDA_CHECK(optimize_coded(Optimizer::adam, segments, device.stream));
}

void lion8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors copies, Tensor hyper) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<CodedSegment> segments = segments_of(device, params, grads, exp_avg_codes, exp_avg_scales, {}, {}, copies);
  fill(segments, hyper, kLionColumns, [](const double* row, CodedSegment& s) { lion_factors(row, s.factor); });
  STD_CUDA_CHECK(optimize_coded(Optimizer::lion, segments, device.stream));
}

void sgd8(Tensors params, Tensors grads, Tensors buffer_codes, Tensors buffer_scales, Tensors copies, Tensor hyper,
          bool nesterov) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<CodedSegment> segments = segments_of(device, params, grads, buffer_codes, buffer_scales, {}, {}, copies);
  fill(segments, hyper, kSgdColumns, [=](const double* row, CodedSegment& s) {
    sgd_factors(row, s.factor);
    s.option[0] = nesterov;
    s.option[1] = row[kSgdFresh] != 0;
  });
  STD_CUDA_CHECK(optimize_coded(Optimizer::sgd, segments, device.stream));
}

}  // namespace
}  // namespace zs

STABLE_TORCH_LIBRARY_IMPL(zero_strategy, CUDA, library) {
  library.impl("adam8_", TORCH_BOX(&zs::adam8));
  library.impl("lion8_", TORCH_BOX(&zs::lion8));
  library.impl("sgd8_", TORCH_BOX(&zs::sgd8));
}
