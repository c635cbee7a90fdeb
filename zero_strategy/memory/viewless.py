"""Tensors that are no views, so that the memory of what they were taken from can go.

A view keeps a reference to its base (`_base`), also after its `.data` was replaced. A pipeline that wants to free an
output's memory and keep its place in the graph (`tensor.data = empty`) needs one without a base.

    hidden = make_viewless_tensor(layer_output.transpose(0, 1), requires_grad=True, keep_graph=True)
    send(hidden)
    safely_set_viewless_tensor_data(hidden, torch.empty(1))     # the memory is free, hidden.grad_fn is not
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import base_of

T = TypeVar("T")


def _kernel_make_viewless_tensor(inp: Tensor, requires_grad: bool) -> Tensor:
    """A leaf of the same memory, shape and strides as `inp`, which is no view of it.

    Args:
        inp: Any tensor.
        requires_grad: Of the result.
    """
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


class MakeViewlessTensor(torch.autograd.Function):
    """The same, with the graph of its input: gradients pass through as they are."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        """See `_kernel_make_viewless_tensor`."""
        return _kernel_make_viewless_tensor(inp, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """The gradient itself; the flag has none."""
        return grad_output, None


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """`inp` if it is no view, else a tensor of the same memory that is none.

    Args:
        inp: Any tensor.
        requires_grad: Of the result, where it is a new leaf.
        keep_graph: Gradients of the result reach `inp`; otherwise it is a leaf.
    """
    if base_of(inp) is None:
        return inp
    if keep_graph:
        out: Tensor = MakeViewlessTensor.apply(inp, requires_grad)
        return out
    return _kernel_make_viewless_tensor(inp, requires_grad)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """`tensor` itself, if it is no view; each element of a list likewise, and anything else unchecked.

    Args:
        tensor: A tensor, a list, or another object.
        extra_msg: Ends the message.

    Raises:
        AssertionError: If it is a view.
    """
    if isinstance(tensor, list):
        for element in tensor:
            assert_viewless_tensor(element, extra_msg)
    elif isinstance(tensor, Tensor) and (base := base_of(tensor)) is not None:
        raise AssertionError(
            f"this tensor of shape {list(tensor.shape)} is a view of one of shape {list(base.shape)}, whose "
            "memory it would keep; make_viewless_tensor() makes it one that is none"
            + (f". {extra_msg}" if extra_msg else "")
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """`tensor.data = new_data_tensor`, which frees memory only where `tensor` is no view.

    Args:
        tensor: Keeps its place in the graph.
        new_data_tensor: What it shows from now on.

    Raises:
        AssertionError: If `tensor` is a view; nothing has changed then.
    """
    assert_viewless_tensor(
        tensor, f"Its data cannot be replaced by a tensor of shape {list(new_data_tensor.shape)} to free memory"
    )
    tensor.data = new_data_tensor
