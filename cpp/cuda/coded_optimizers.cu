// Optimizer steps on states of 8 bits (zero_strategy/ops/coded_optimizers.py): the threads of a block of threads take the
// elements of a block of codes, one each, decode, update and code them again; the largest magnitude is their one
// meeting.
#include "../dynamic_map.h"
#include "formulas.cuh"
#include "kernels.h"
#include "reduce.cuh"
#include "table.cuh"

namespace zs {
namespace {

static_assert(kThreads == kCodeBlock && kChunk % kCodeBlock == 0);
using CodedTable = Table<CodedSegment>;

__device__ const DynamicMap kSignedMap = dynamic_map(true), kUnsignedMap = dynamic_map(false);

struct LargerBits {
  __device__ static uint32_t combine(uint32_t a, uint32_t b) { return a > b ? a : b; }
};

__device__ inline float number_at(const Buffer& from, int64_t index) {
  if (from.type == Type::f32) return static_cast<const float*>(from.data)[index];
  return from_half(static_cast<const uint16_t*>(from.data)[index], from.type);
}

__device__ inline void store_number(const Buffer& to, int64_t index, float value) {
  if (to.type == Type::f32) {
    static_cast<float*>(to.data)[index] = value;
  } else {
    static_cast<uint16_t*>(to.data)[index] = static_cast<uint16_t>(to_half(value, to.type));
  }
}

__device__ inline float decoded(const Codes& state, int64_t at, const DynamicMap& map) {
  return map.value[state.codes[at]] * state.scales[at / kCodeBlock];
}

// The code of a number of a block whose scale is usual.
template <bool kSigned>
__device__ inline uint8_t code_of(float value, float inverse, const DynamicMap& map) {
  const float part = float_of(bits_of(value) & 0x7fffffffu) * inverse;
  int decade = 0;
#pragma unroll
  for (int bound = 0; bound < kDecades - 1; ++bound) decade += part > map.bound[bound];
  const float width = map.width[decade], last = width + width - 1.0f;
  const float place = part * map.factor[decade] + width * kShift;
  const float from = place < width ? width : place, inside = from > last ? last : from;
  const int number = int(inside);
  if (!kSigned) return uint8_t((bits_of(value) & 0x7fffffffu) != 0 ? number - 1 : 0);
  if (bits_of(value) < 0x80000000u) return uint8_t(-number);
  return uint8_t(number > 127 ? 127 : number);  // -1 has no code
}

// Every thread of the block comes here; those without an element have `there` false.
template <bool kSigned>
__device__ inline void coded(const Codes& state, int64_t at, bool there, float value, const DynamicMap& map) {
  const uint32_t largest = over_block<kThreads, LargerBits>(there ? bits_of(value) & 0x7fffffffu : 0u);
  const bool usual = largest >= 0x00800000u && largest < 0x7f800000u;
  if (threadIdx.x == 0 && there) {
    state.scales[at / kCodeBlock] = usual ? float_of(largest) : largest >= 0x7f800000u ? float_of(0x7fc00000u) : 0.0f;
  }
  if (there) state.codes[at] = usual ? code_of<kSigned>(value, quotient(1.0f, float_of(largest)), map) : uint8_t(0);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads) update_coded(const __grid_constant__ CodedTable table) {
  const int item = item_of(table, blockIdx.x);
  const CodedSegment s = table.item[item];
  const int64_t begin = int64_t(blockIdx.x - table.first_chunk[item]) * kChunk;
  const int64_t end = begin + kChunk < s.numel ? begin + kChunk : s.numel;
  const Buffer gradient{s.gradient, s.gradient_type}, copy{s.copy, s.copy_type};
  for (int64_t block = begin; block < end; block += kCodeBlock) {
    const int64_t at = block + int(threadIdx.x);
    const bool there = at < end;
    Element e{0, 0, 0, 0};
    if (there) {
      e.parameter = s.parameter[at];
      e.gradient = number_at(gradient, at);
      e.first = decoded(s.first, at, kSignedMap);
      if (s.second.codes) e.second = decoded(s.second, at, kUnsignedMap);
      Rule::update(s.factor, s.option[0], s.option[1], true, e);
      s.parameter[at] = e.parameter;
      if (copy.data) store_number(copy, at, e.parameter);
    }
    // Its barriers also let nobody write a scale that others have not read.
    coded<true>(s.first, at, there, e.first, kSignedMap);
    if (s.second.codes) coded<false>(s.second, at, there, e.second, kUnsignedMap);
  }
}

using Update = void(CodedTable);

Update* kernel_of(Optimizer kind) {
  switch (kind) {
    case Optimizer::adam:
      return update_coded<Adam>;
    case Optimizer::lion:
      return update_coded<Lion>;
    default:
      return update_coded<Sgd>;
  }
}

}  // namespace

cudaError_t optimize_coded(Optimizer kind, const std::vector<CodedSegment>& segments, cudaStream_t stream) {
  Update* const kernel = kernel_of(kind);
  return for_each_table(segments, [&](const CodedTable& table, unsigned blocks, int64_t) {
    return launch(kernel, blocks, kThreads, stream, table);
  });
}

}  // namespace zs
