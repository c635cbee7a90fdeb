// The CUDA kernels of the ops that zero_strategy/ops defines: tensors and hyper-parameters become tables of buffers and
// factors on the host. Only torch's stable ABI is used, so that one library serves every Python and every torch from
// TORCH_TARGET_VERSION on.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <tuple>

#include "../hyper.h"
#include "kernels.h"
#include "tensors.cuh"

#define ZS_TEXT_OF(value) #value
#define ZS_TEXT(value) ZS_TEXT_OF(value)

namespace zs {

// For zero_strategy/ops/fatbin.py, which asks of a file whether it can run here before it is loaded.
extern const char kRuntime[];  // of external linkage, or the compiler would leave out what nobody reads
const char kRuntime[] = "zero_strategy: CUDA runtime " ZS_TEXT(CUDART_VERSION);

namespace {

unsigned long long* counter_of(const Tensor& counts) {
  return static_cast<unsigned long long*>(counts.mutable_data_ptr());
}

double* doubles_of(const Tensor& tensor) { return static_cast<double*>(tensor.mutable_data_ptr()); }

std::vector<Segment> segments_of(const OnDevice& device, const Tensors& params, const Tensors& grads,
                                 const Tensors& first, const Tensors& second, const Tensors& copies) {
  const size_t items = params.size();
  std::vector<Segment> segments(items);
  for (size_t i = 0; i < items; ++i) {
    Segment& s = segments[i];
    s.numel = params[i].numel();
    s.parameter = device.floats_of(params[i]);
    const Buffer gradient = device.entry_of(grads, i, items, s.numel);
    const Buffer one = device.entry_of(first, i, items, s.numel), two = device.entry_of(second, i, items, s.numel);
    const Buffer copy = device.entry_of(copies, i, items, s.numel);
    s.gradient = gradient.data, s.gradient_type = gradient.type;
    s.first = one.data, s.first_type = one.type;
    s.second = two.data, s.second_type = two.type;
    s.copy = copy.data, s.copy_type = copy.type;
  }
  return segments;
}

template <class Fill>
void fill(std::vector<Segment>& segments, const Tensor& hyper, int64_t columns, const Fill& from_row) {
  const double* row = rows_of(hyper, segments.size(), columns);
  for (Segment& segment : segments) {
    from_row(row, segment);
    row += columns;
  }
}

void adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper,
          bool decoupled) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, grads, exp_avgs, exp_avg_sqs, copies);
  fill(segments, hyper, kAdamColumns, [=](const double* row, Segment& s) {
    adam_factors(row, decoupled, s.factor);
    s.option[0] = decoupled;
  });
  STD_CUDA_CHECK(optimize(Optimizer::adam, segments, device.stream));
}

void lion(Tensors params, Tensors grads, Tensors exp_avgs, Tensors copies, Tensor hyper) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, grads, exp_avgs, {}, copies);
  fill(segments, hyper, kLionColumns, [](const double* row, Segment& s) { lion_factors(row, s.factor); });
  STD_CUDA_CHECK(optimize(Optimizer::lion, segments, device.stream));
}

void adagrad(Tensors params, Tensors grads, Tensors sums, Tensors copies, Tensor hyper) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, grads, sums, {}, copies);
  fill(segments, hyper, kAdagradColumns, [](const double* row, Segment& s) { adagrad_factors(row, s.factor); });
  STD_CUDA_CHECK(optimize(Optimizer::adagrad, segments, device.stream));
}

void sgd(Tensors params, Tensors grads, Tensors buffers, Tensors copies, Tensor hyper, bool nesterov) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, grads, buffers, {}, copies);
  fill(segments, hyper, kSgdColumns, [=](const double* row, Segment& s) {
    sgd_factors(row, s.factor);
    s.option[0] = nesterov;
    s.option[1] = row[kSgdFresh] != 0;
  });
  STD_CUDA_CHECK(optimize(Optimizer::sgd, segments, device.stream));
}

void fill_lamb(std::vector<Segment>& segments, const Tensor& hyper) {
  fill(segments, hyper, kLambColumns, [](const double* row, Segment& s) { lamb_factors(row, s.factor); });
}

// The sums go to the host, as the op promises: the one place where a call waits for the device.
Tensor lamb_direction_sums(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensor hyper) {
  STD_TORCH_CHECK(!params.empty(), "expected at least one tensor");
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, grads, exp_avgs, exp_avg_sqs, {});
  fill_lamb(segments, hyper);
  std::vector<int64_t> numels;
  for (const Segment& segment : segments) numels.push_back(segment.numel);
  const Tensor partial = new_doubles(params[0], {2, chunk_count(numels)});
  const Tensor sums = new_doubles(params[0], {int64_t(segments.size()), 2});
  STD_CUDA_CHECK(lamb_direction(segments, doubles_of(partial), doubles_of(sums), device.stream));
  return torch::stable::to(sums, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

void lamb_step_with(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper, Tensor rates) {
  if (params.empty()) return;
  const OnDevice device(params[0]);
  std::vector<Segment> segments = segments_of(device, params, {}, exp_avgs, exp_avg_sqs, copies);
  fill_lamb(segments, hyper);
  fill(segments, rates, 1, [](const double* rate, Segment& s) { s.factor[0] = float(*rate); });
  STD_CUDA_CHECK(optimize(Optimizer::lamb_apply, segments, device.stream));
}

std::tuple<Tensor, Tensor> grad_stats(Tensors tensors, double order) {
  STD_TORCH_CHECK(!tensors.empty(), "expected at least one tensor");
  const Norm norm = order == 2            ? Norm::two
                    : order == 1          ? Norm::one
                    : std::isinf(order)   ? Norm::infinity
                                          : Norm::power;
  const OnDevice device(tensors[0]);
  std::vector<int64_t> numels;
  std::vector<Buffer> buffers;
  for (const Tensor& tensor : tensors) {
    numels.push_back(tensor.numel());
    buffers.push_back(device.buffer_of(tensor, tensor.numel()));
  }
  const int64_t items = int64_t(tensors.size());
  const Tensor partial = new_doubles(tensors[0], {chunk_count(numels)});
  const Tensor sums = new_doubles(tensors[0], {items}), counts = new_counts(tensors[0], {items});
  STD_CUDA_CHECK(statistics(buffers, numels, norm, order, doubles_of(partial), doubles_of(sums), counter_of(counts),
                            device.stream));
  return {sums, counts};
}

// Moves between two lists, or three; `others` may be empty.
std::vector<Move> moves_of(const OnDevice& device, const Tensors& sources, const Tensors& others,
                           const Tensors& targets) {
  const size_t items = targets.size();
  std::vector<Move> moves(items);
  for (size_t i = 0; i < items; ++i) {
    const int64_t numel = targets[i].numel();
    const Buffer source = device.entry_of(sources, i, items, numel), other = device.entry_of(others, i, items, numel);
    const Buffer target = device.buffer_of(targets[i], numel);
    STD_TORCH_CHECK(source.data != nullptr || numel == 0, "expected one source per target");
    moves[i] = {source.data, other.data, target.data, numel, source.type, other.type, target.type, 0};
  }
  return moves;
}

Tensor scale(Tensors inputs, Tensors outputs, double factor) {
  STD_TORCH_CHECK(!outputs.empty(), "expected at least one tensor");
  const OnDevice device(outputs[0]);
  std::vector<Move> moves = moves_of(device, inputs, {}, outputs);
  const Tensor count = new_counts(outputs[0], {});
  STD_CUDA_CHECK(move(Arithmetic::scale, moves, float(factor), 0, counter_of(count), device.stream));
  return count;
}

Tensor axpby(Tensors x, Tensors y, Tensors outputs, double a, double b) {
  STD_TORCH_CHECK(!outputs.empty() && y.size() == outputs.size(), "expected as many y as outputs, and at least one");
  const OnDevice device(outputs[0]);
  std::vector<Move> moves = moves_of(device, x, y, outputs);
  const Tensor count = new_counts(outputs[0], {});
  STD_CUDA_CHECK(move(Arithmetic::axpby, moves, float(a), float(b), counter_of(count), device.stream));
  return count;
}

void accumulate(Tensors targets, Tensors sources, double factor) {
  if (targets.empty()) return;
  const OnDevice device(targets[0]);
  std::vector<Move> moves = moves_of(device, sources, {}, targets);
  STD_CUDA_CHECK(move(Arithmetic::accumulate, moves, float(factor), 0, nullptr, device.stream));
}

void flatten(Tensors tensors, Tensor flat, std::vector<int64_t> offsets, double factor, bool add) {
  STD_TORCH_CHECK(offsets.size() == tensors.size(), "expected one offset per tensor");
  const OnDevice device(flat);
  std::vector<Move> moves;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    const Buffer source = device.buffer_of(tensors[i], numel), target = device.part_of(flat, offsets[i], numel);
    moves.push_back({source.data, nullptr, target.data, numel, source.type, Type::f32, target.type, 0});
  }
  const Arithmetic kind = add ? Arithmetic::accumulate : Arithmetic::scale;
  STD_CUDA_CHECK(move(kind, moves, float(factor), 0, nullptr, device.stream));
}

void unflatten(Tensor flat, Tensors tensors, std::vector<int64_t> offsets) {
  STD_TORCH_CHECK(offsets.size() == tensors.size(), "expected one offset per tensor");
  const OnDevice device(flat);
  std::vector<Move> moves;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t numel = tensors[i].numel();
    const Buffer source = device.part_of(flat, offsets[i], numel), target = device.buffer_of(tensors[i], numel);
    moves.push_back({source.data, nullptr, target.data, numel, source.type, Type::f32, target.type, 0});
  }
  STD_CUDA_CHECK(move(Arithmetic::scale, moves, 1, 0, nullptr, device.stream));
}

}  // namespace
}  // namespace zs

STABLE_TORCH_LIBRARY_IMPL(zero_strategy, CUDA, library) {
  library.impl("adam_", TORCH_BOX(&zs::adam));
  library.impl("lion_", TORCH_BOX(&zs::lion));
  library.impl("adagrad_", TORCH_BOX(&zs::adagrad));
  library.impl("sgd_", TORCH_BOX(&zs::sgd));
  library.impl("lamb_direction_", TORCH_BOX(&zs::lamb_direction_sums));
  library.impl("lamb_apply_", TORCH_BOX(&zs::lamb_step_with));
  library.impl("grad_stats", TORCH_BOX(&zs::grad_stats));
  library.impl("scale_", TORCH_BOX(&zs::scale));
  library.impl("axpby_", TORCH_BOX(&zs::axpby));
  library.impl("accumulate_", TORCH_BOX(&zs::accumulate));
  library.impl("flatten_", TORCH_BOX(&zs::flatten));
  library.impl("unflatten_", TORCH_BOX(&zs::unflatten));
}
