// One pass over memory per optimizer step.
#include "formulas.cuh"
#include "kernels.h"
#include "reduce.cuh"
#include "table.cuh"

namespace zs {
namespace {

using SegmentTable = Table<Segment>;

// Runs `Rule` on eight elements. `sum` sees them afterwards, whether they are there or not.
template <class Rule, class Sum>
__device__ inline void update_span(const Segment& s, const Span& span, const Sum& sum) {
  const Buffer parameter{s.parameter, Type::f32}, gradient{s.gradient, s.gradient_type};
  const Buffer first{s.first, s.first_type}, second{s.second, s.second_type}, copy{s.copy, s.copy_type};
  const Raw nothing = {};
  const Raw raw_parameter = fetch(parameter, span);
  const Raw raw_gradient = Rule::kReadsGradient ? fetch(gradient, span) : nothing;
  const Raw raw_first = first.data ? fetch(first, span) : nothing;
  const Raw raw_second = second.data ? fetch(second, span) : nothing;
  float p[kWidth], g[kWidth], m[kWidth], v[kWidth];
  widen(raw_parameter, Type::f32, p);
  widen(raw_gradient, Rule::kReadsGradient ? gradient.type : Type::f32, g);
  widen(raw_first, first.type, m);
  widen(raw_second, second.type, v);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    Element e{p[i], g[i], m[i], v[i]};
    Rule::update(s.factor, s.option[0], s.option[1], first.data != nullptr, e);
    sum(i, e);
    p[i] = e.parameter;
    m[i] = e.first;
    v[i] = e.second;
  }
  if (Rule::kWritesStates) {
    if (first.data) store(m, first, span);
    if (second.data) store(v, second, span);
  }
  if (Rule::kWritesParameter) {
    store(p, parameter, span);
    if (copy.data) store(p, copy, span);
  }
}

template <class Rule>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ SegmentTable table) {
  const int item = item_of(table, blockIdx.x);
  const Segment s = table.item[item];
  for_each_span(s.numel, s.lead, blockIdx.x - table.first_chunk[item], [&](const Span& span) {
    update_span<Rule>(s, span, [](int, const Element&) {});
  });
}

// Chunk c's sum of p^2 is partial[c], its sum of u^2 is partial[stride + c].
__global__ void __launch_bounds__(kThreads)
    update_and_sum(const __grid_constant__ SegmentTable table, double* partial, int64_t stride) {
  const int item = item_of(table, blockIdx.x);
  const Segment s = table.item[item];
  double weights = 0, directions = 0;
  for_each_span(s.numel, s.lead, blockIdx.x - table.first_chunk[item], [&](const Span& span) {
    update_span<LambDirection>(s, span, [&](int i, const Element& e) {
      if (!span.has(i)) return;
      weights += double(e.parameter) * double(e.parameter);
      directions += double(e.gradient) * double(e.gradient);
    });
  });
  weights = over_block<kThreads, Add>(weights);
  directions = over_block<kThreads, Add>(directions);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = weights;
    partial[stride + blockIdx.x] = directions;
  }
}

using Update = void(SegmentTable);

Update* kernel_of(Optimizer kind) {
  switch (kind) {
    case Optimizer::adam:
      return update<Adam>;
    case Optimizer::lion:
      return update<Lion>;
    case Optimizer::adagrad:
      return update<Adagrad>;
    case Optimizer::sgd:
      return update<Sgd>;
    default:
      return update<LambApply>;
  }
}

}  // namespace

cudaError_t optimize(Optimizer kind, std::vector<Segment>& segments, cudaStream_t stream) {
  for (Segment& s : segments) {
    s.lead = best_lead({{s.parameter, Type::f32},
                        {s.gradient, s.gradient_type},
                        {s.first, s.first_type},
                        {s.second, s.second_type},
                        {s.copy, s.copy_type}});
  }
  Update* const kernel = kernel_of(kind);
  return for_each_table(segments, [&](const SegmentTable& table, unsigned blocks, int64_t) {
    return launch(kernel, blocks, kThreads, stream, table);
  });
}

cudaError_t lamb_direction(const std::vector<Segment>& segments, double* partial, double* sums, cudaStream_t stream) {
  std::vector<int64_t> numels;
  for (const Segment& s : segments) numels.push_back(s.numel);
  const int64_t stride = chunk_count(numels);
  const cudaError_t error = for_each_table(segments, [&](const SegmentTable& table, unsigned blocks, int64_t before) {
    return launch(update_and_sum, blocks, kThreads, stream, table, partial + before, stride);
  });
  return error != cudaSuccess ? error : finish(numels, 2, false, partial, sums, stream);
}

}  // namespace zs
