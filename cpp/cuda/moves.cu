// Copies between tensors of any type, with a factor, and sums of two tensors. Arithmetic is in float32.
#include "kernels.h"
#include "reduce.cuh"
#include "table.cuh"

namespace zs {
namespace {

using MoveTable = Table<Move>;

template <Arithmetic kKind>
__global__ void __launch_bounds__(kThreads) move_all(const __grid_constant__ MoveTable table, float factor,
                                                     float other_factor, unsigned long long* nonfinite) {
  const int item = item_of(table, blockIdx.x);
  const Move m = table.item[item];
  const Buffer source{m.source, m.source_type}, target{m.target, m.target_type};
  const Buffer second = kKind == Arithmetic::axpby ? Buffer{m.other, m.other_type} : target;
  uint32_t count = 0;
  for_each_span(m.numel, m.lead, blockIdx.x - table.first_chunk[item], [&](const Span& span) {
    constexpr bool kBoth = kKind != Arithmetic::scale;
    float x[kWidth], y[kWidth];
    const Raw raw = fetch(source, span);
    const Raw raw_second = kBoth ? fetch(second, span) : Raw{};
    widen(raw, source.type, x);
    if (kBoth) widen(raw_second, second.type, y);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      x[i] = x[i] * factor;
      if (kKind == Arithmetic::axpby) x[i] = x[i] + y[i] * other_factor;
      if (kKind == Arithmetic::accumulate) x[i] = y[i] + x[i];
      count += span.has(i) && is_nonfinite(x[i]);
    }
    store(x, target, span);
  });
  if (nonfinite != nullptr) add_count<kThreads>(count, nonfinite);
}

}  // namespace

cudaError_t move(Arithmetic kind, std::vector<Move>& moves, float factor, float other_factor,
                 unsigned long long* nonfinite, cudaStream_t stream) {
  for (Move& m : moves) {
    m.lead = best_lead({{m.target, m.target_type}, {m.source, m.source_type}, {m.other, m.other_type}});
  }
  auto* const kernel = kind == Arithmetic::scale        ? move_all<Arithmetic::scale>
                       : kind == Arithmetic::accumulate ? move_all<Arithmetic::accumulate>
                                                        : move_all<Arithmetic::axpby>;
  return for_each_table(moves, [&](const MoveTable& table, unsigned blocks, int64_t) {
    return launch(kernel, blocks, kThreads, stream, table, factor, other_factor, nonfinite);
  });
}

}  // namespace zs
