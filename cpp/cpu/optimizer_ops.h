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


// On states of 8 bits: codes and scales, one of these for each block of 256.
void adam8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors exp_avg_sq_codes,
           Tensors exp_avg_sq_scales, Tensors copies, Tensor hyper, bool decoupled);
void lion8(Tensors params, Tensors grads, Tensors exp_avg_codes, Tensors exp_avg_scales, Tensors copies, Tensor hyper);
void sgd8(Tensors params, Tensors grads, Tensors buffer_codes, Tensors buffer_scales, Tensors copies, Tensor hyper,
          bool nesterov);

}  // namespace zs
