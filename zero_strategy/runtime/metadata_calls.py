"""Functions of torch that ask a tensor for something else than its values, as `__torch_function__` sees them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import (
    METADATA_GETTERS,
    METADATA_SETTERS,
    has_compatible_shallow_copy_type,
)

METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in (
            "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "grad",
            "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_mps",
            "is_xpu", "is_xla", "is_nested", "names", "retains_grad", "output_nr", "itemsize", "nbytes",
        ) if hasattr(Tensor, name)),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
        *METADATA_GETTERS, *METADATA_SETTERS,
        cast(Any, Tensor.grad).__delete__,
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference, Tensor.get_device,
        Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.__len__,
        torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference, torch.get_device,
        torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
        Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
        torch.is_same_size, torch.result_type, has_compatible_shallow_copy_type,
        Tensor.is_pinned, Tensor.is_shared, Tensor.is_conj, Tensor.is_neg, Tensor.dim_order,
    }
)  # fmt: skip
"""Functions whose answer does not depend on a tensor's values, nor on where they are."""

STRIDES = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset})
