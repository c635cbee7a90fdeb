// Seed, offset and probability as the kernels' plain numbers.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace zs {
namespace {
#include "../philox.h"
}  // namespace

// `state`: int64 (seed, offset) on the CPU.
inline Random random_of(const Tensor& state, double probability) {
  STD_TORCH_CHECK(state.is_cpu() && state.is_contiguous() && state.numel() == 2 &&
                      state.scalar_type() == torch::headeronly::ScalarType::Long,
                  "expected seed and offset as two int64 on the CPU");
  const int64_t* const numbers = static_cast<const int64_t*>(state.const_data_ptr());
  Random random;
  random.seed = uint64_t(numbers[0]);
  random.offset = uint64_t(numbers[1]);
  random.threshold = drop_threshold(probability);
  random.scale = keep_scale(probability);
  return random;
}

}  // namespace zs
