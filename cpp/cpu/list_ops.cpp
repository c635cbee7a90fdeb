// Ops on lists of tensors, and the registration of all: in one translation unit, since most of the time of a build is
// reading torch's headers.
#include "optimizer_ops.inl"
#include "multi_tensor_ops.inl"

#include "binding.inl"
