// The optimizer ops; schemas and formulas are in zero_strategy/ops.
#pragma once

#include "tensors.h"

namespace zs {

void adam(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper,
          bool decoupled);
void lion(Tensors params, Tensors grads, Tensors exp_avgs, Tensors copies, Tensor hyper);
void adagrad(Tensors params, Tensors grads, Tensors sums, Tensors copies, Tensor hyper);
void sgd(Tensors params, Tensors grads, Tensors buffers, Tensors copies, Tensor hyper, bool nesterov);
Tensor lamb_direction(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensor hyper);
void lamb_apply(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors copies, Tensor hyper, Tensor rates);

}  // namespace zs
