"""What mode `selective` keeps: matrix products, convolutions, what attention gives. The rest is cheap to compute again.

An op that draws random numbers is computed again even if it is a product (attention with dropout inside): a kept
result would leave the generator behind, and what follows would draw other numbers than in forward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from zero_strategy.runtime.torch_private import schema_of

KEPT_OPS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_addmm_activation",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::convolution",
        "aten::mkldnn_convolution",
        "mkldnn::_linear_pointwise",
        "mkldnn::_convolution_pointwise",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "flex_attention",
    }
)
"""Names of ops, in all their overloads."""
KEPT_NAMESPACES = ("_c10d_functional", "c10d_functional")
"""A collective is not sent twice."""


def keep_products(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy, as torch's selective checkpointing asks for it."""
    kept = _name(op) in KEPT_OPS or getattr(op, "namespace", "") in KEPT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if kept and not _draws(op, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a selective checkpoint's forward and its recomputation run in."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(keep_products)
    return contexts


def _name(op: Any) -> str:
    """Of an op without its overload; of a higher-order op its only one."""
    schema = schema_of(op)
    return schema.name if schema is not None else str(op)


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call takes numbers from a random generator."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    for place, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True
