// Hyper-parameters, one float64 row per segment, to the float32 factors of the kernels' formulas. The same code for the
// CPU and for CUDA, and the same formulas in the Python references.
#pragma once

#include <cmath>
#include <cstdint>

namespace zs {

// lr, beta1, beta2, eps, weight_decay, step (from 1), scale
constexpr int64_t kAdamColumns = 7;

inline void adam_factors(const double* row, bool decoupled, float* factor) {
  const double lr = row[0], beta1 = row[1], beta2 = row[2], eps = row[3], decay = row[4], step = row[5];
  factor[0] = float(row[6]);
  factor[1] = float(decoupled ? 1 - lr * decay : decay);
  factor[2] = float(1 - beta1);
  factor[3] = float(beta2);
  factor[4] = float(1 - beta2);
  factor[5] = float(1 / std::sqrt(1 - std::pow(beta2, step)));
  factor[6] = float(eps);
  factor[7] = float(lr / (1 - std::pow(beta1, step)));
}

// lr, beta1, beta2, weight_decay, scale
constexpr int64_t kLionColumns = 5;

inline void lion_factors(const double* row, float* factor) {
  const double lr = row[0], beta1 = row[1], beta2 = row[2], decay = row[3];
  factor[0] = float(row[4]);
  factor[1] = float(1 - lr * decay);
  factor[2] = float(beta1);
  factor[3] = float(1 - beta1);
  factor[4] = float(beta2);
  factor[5] = float(1 - beta2);
  factor[6] = float(lr);
}

// lr, lr_decay, eps, weight_decay, step (from 1), scale
constexpr int64_t kAdagradColumns = 6;

inline void adagrad_factors(const double* row, float* factor) {
  factor[0] = float(row[5]);
  factor[1] = float(row[3]);
  factor[2] = float(row[0] / (1 + (row[4] - 1) * row[1]));
  factor[3] = float(row[2]);
}

// lr, momentum, dampening, weight_decay, fresh (1 in the first step: the buffer has no value yet), scale
constexpr int64_t kSgdColumns = 6;
constexpr int64_t kSgdFresh = 4;

inline void sgd_factors(const double* row, float* factor) {
  factor[0] = float(row[5]);
  factor[1] = float(row[3]);
  factor[2] = float(row[0]);
  factor[3] = float(row[1]);
  factor[4] = float(1 - row[2]);
}

// lr, beta1, beta2, eps, weight_decay, step (from 1), scale
constexpr int64_t kLambColumns = 7;

inline void lamb_factors(const double* row, float* factor) {
  const double beta1 = row[1], beta2 = row[2], step = row[5];
  factor[0] = float(row[6]);
  factor[1] = float(row[4]);
  factor[2] = float(1 - beta1);
  factor[3] = float(beta2);
  factor[4] = float(1 - beta2);
  factor[5] = float(1 / std::sqrt(1 - std::pow(beta2, step)));
  factor[6] = float(row[3]);
  factor[7] = float(1 / (1 - std::pow(beta1, step)));
}

}  // namespace zs
