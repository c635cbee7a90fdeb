// The CPU kernels of the ops that zero_strategy/ops defines. Only torch's stable ABI is used, so that one library serves
// every Python and every torch from TORCH_TARGET_VERSION on.
#include <torch/csrc/stable/library.h>

#include "bias_ops.h"
#include "multi_tensor_ops.h"
#include "normalization_ops.h"
#include "optimizer_ops.h"
#include "quantization_ops.h"
#include "softmax_ops.h"

STABLE_TORCH_LIBRARY_IMPL(zero_strategy, CPU, library) {
  library.impl("adam_", TORCH_BOX(&zs::adam));
  library.impl("lion_", TORCH_BOX(&zs::lion));
  library.impl("adagrad_", TORCH_BOX(&zs::adagrad));
  library.impl("sgd_", TORCH_BOX(&zs::sgd));
  library.impl("lamb_direction_", TORCH_BOX(&zs::lamb_direction));
  library.impl("lamb_apply_", TORCH_BOX(&zs::lamb_apply));
  library.impl("adam8_", TORCH_BOX(&zs::adam8));
  library.impl("lion8_", TORCH_BOX(&zs::lion8));
  library.impl("sgd8_", TORCH_BOX(&zs::sgd8));
  library.impl("grad_stats", TORCH_BOX(&zs::grad_stats));
  library.impl("exact_sums", TORCH_BOX(&zs::exact_sums));
  library.impl("scale_", TORCH_BOX(&zs::scale));
  library.impl("axpby_", TORCH_BOX(&zs::axpby));
  library.impl("accumulate_", TORCH_BOX(&zs::accumulate));
  library.impl("flatten_", TORCH_BOX(&zs::flatten));
  library.impl("unflatten_", TORCH_BOX(&zs::unflatten));
  library.impl("norm_forward", TORCH_BOX(&zs::norm_forward));
  library.impl("norm_backward", TORCH_BOX(&zs::norm_backward));
  library.impl("bias_gelu", TORCH_BOX(&zs::bias_gelu));
  library.impl("bias_gelu_backward", TORCH_BOX(&zs::bias_gelu_backward));
  library.impl("bias_dropout_residual", TORCH_BOX(&zs::bias_dropout_residual));
  library.impl("bias_dropout_residual_backward", TORCH_BOX(&zs::bias_dropout_residual_backward));
  library.impl("masked_softmax_dropout", TORCH_BOX(&zs::masked_softmax_dropout));
  library.impl("masked_softmax_dropout_backward", TORCH_BOX(&zs::masked_softmax_dropout_backward));
  library.impl("quantize_blocks", TORCH_BOX(&zs::quantize_blocks));
  library.impl("dequantize_blocks", TORCH_BOX(&zs::dequantize_blocks));
  library.impl("dequantize_reduce", TORCH_BOX(&zs::dequantize_reduce));
}
