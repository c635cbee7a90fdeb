// Ops on rows and blocks, in one translation unit (see list_ops.cpp).
#include "bias_ops.inl"
#include "normalization_ops.inl"
#include "quantization_ops.inl"
#include "softmax_ops.inl"
