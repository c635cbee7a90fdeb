"""The namespace `torch.ops.zero_strategy`: every op has a schema and a reference in plain torch.

The reference is what runs on any device without a kernel of its own, the oracle of the kernels' tests, and the
definition of an op's numerics. A shared library that is loaded later registers kernels for the CPU or for CUDA, which
the dispatcher then prefers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from zero_strategy.runtime import torch_private

NAMESPACE = "zero_strategy"
_library = Library(NAMESPACE, "DEF")
_names: list[str] = []


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Add an op.

    Args:
        schema: `name(arguments) -> results` in torch's schema language.
        reference: Its definition in plain torch.
        fake: Makes empty results from fake arguments; not needed by ops that only write to their arguments.

    Returns:
        The op, which checks nothing but what its schema says.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _no_result, lib=_library)
    _names.append(name)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def differentiate(
    op: Callable[..., Any], setup: Callable[..., None], derivative: Callable[..., Any], backward_op: Callable[..., Any]
) -> None:
    """Give a functional op a derivative. A second one is refused by name, instead of being left out of a sum.

    Args:
        op: What `define` returned.
        setup: Called with `ctx`, `inputs` and `output` after the forward, to save what the backward needs.
        derivative: Called with (ctx, *gradients of the results); returns one gradient or None per argument.
        backward_op: The op that `derivative` calls.
    """

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(f"{op} has no second derivative")

    torch.library.register_autograd(_name_of(op), derivative, setup_context=setup, lib=_library)
    torch.library.register_autograd(_name_of(backward_op), refuse, lib=_library)


def _name_of(op: Any) -> str:
    return f"{op.namespace}::{torch_private.op_name(op)}"


def op_names() -> list[str]:
    """Names of all ops."""
    return list(_names)


def has_kernel(name: str, key: str) -> bool:
    """Whether op `name` has a native kernel under dispatch key `key` ("CPU", "CUDA")."""
    return torch_private.has_kernel(f"{NAMESPACE}::{name}", key)


def _no_result(*args: Any, **kwargs: Any) -> None:
    return None
