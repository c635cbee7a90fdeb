"""Copies of parameters that autocast makes in a unit's forward are made again in backward, not kept until then.

Autocast casts a matrix before it multiplies by it, and autograd keeps the cast, which is no view of the gathered
parameters: on every rank a 16-bit copy of the whole model from forward to backward, which sharding does not divide.
Here autograd keeps the parameter's name instead. In backward the unit is gathered again before its gradients are
computed, and the same cast of the same values gives the same bits. A cast of a view of a parameter (its
transpose, a row) is kept as in plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_strategy.fsdp.ownership import place_of
from zero_strategy.runtime.torch_private import base_of, has_saved_tensors_hooks, version_of

_CAST = "ToCopyBackward0"
"""Autograd's node of a cast."""


class CastAgain(NamedTuple):
    """A view of a parameter's cast: what makes it again.

    Attributes:
        bucket: The parameter's; weakly, as the garbage collector does not see what a graph holds.
        place: Its index there.
        state: Of the bucket, when it was cast.
        dtype: Of the cast.
        size, stride, offset: The view, in elements of the contiguous cast.
    """

    bucket: ReferenceType[Any]
    place: int
    state: tuple[int, int]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Any other tensor that autograd keeps, and its version, which torch does not look at where hooks are set."""

    tensor: Tensor
    version: int


def pack_cast(tensor: Tensor) -> CastAgain | None:
    """Recipe of a tensor that is a cast of a sharded parameter, or a view of such a cast; None: it is neither."""
    cast = base_of(tensor)
    cast = tensor if cast is None else cast
    node = cast.grad_fn
    if node is None or type(node).__name__ != _CAST:
        return None
    parameter: Any = getattr(node.next_functions[0][0], "variable", None)
    # Not of a `DTensor`, whose values are in a tensor that it holds.
    if type(parameter).__name__ != "TrackedParameter" or not cast.is_contiguous() or cast.storage_offset():
        return None
    if (place := place_of(parameter)) is None:
        return None
    bucket: Any = place[0]
    # What stays whole until backward is over, the root's, is made again as well; what does not, has no reason to be.
    if not bucket.placement.shard_parameters or cast.numel() != parameter.numel():
        return None
    geometry = tensor.size(), tensor.stride(), int(tensor.storage_offset())
    return CastAgain(ref(bucket), place[1], bucket.state, tensor.dtype, *geometry)


def unpack_cast(kept: CastAgain) -> Tensor:
    """The cast, made again.

    Raises:
        RuntimeError: If the parameter has changed since the forward, which is named, or is gone with its module.
    """
    bucket = kept.bucket()
    if bucket is None:
        raise RuntimeError(
            "backward through a module that is gone, whose parameters autocast has cast: keep it until backward is over"
        )
    if bucket.state != kept.state:
        raise RuntimeError(
            f"parameter {bucket.names[kept.place]!r} has changed since the forward whose graph this backward goes "
            "through, and autocast's copy of it is made again here, from what it was then: run backward before the "
            "step or the write, or compute this unit again (activation_checkpointing.mode: full)"
        )
    # Where the unit is not whole, this read gathers it, as any read in a backward does.
    values = bucket.views[kept.place] if bucket.gathered else bucket.parameters[kept.place].detach()
    made: Tensor = values.to(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)
    return made


class AutocastCopies:
    """Hooks on what autograd keeps of units whose forwards run under autocast.

    Args:
        device: Kind of the device that computes.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._open: list[saved_tensors_hooks | None] = []

    def enter(self) -> None:
        """A unit's forward begins."""
        hooks = None
        # A user's own hooks stay: torch asks the innermost ones alone. So do those of a unit around this one.
        if torch.is_grad_enabled() and torch.is_autocast_enabled(self._device) and not has_saved_tensors_hooks():
            hooks = saved_tensors_hooks(_pack, _unpack)
            hooks.__enter__()
        self._open.append(hooks)

    def leave(self) -> None:
        """The forward that began last ends, also with an exception."""
        if self._open and (hooks := self._open.pop()) is not None:
            hooks.__exit__()

    def reset(self) -> None:
        """No forward is under way: end those that an interrupt has torn apart, after which torch calls no hooks."""
        while self._open:
            self.leave()


def _pack(tensor: Tensor) -> CastAgain | _Kept:
    if (cast := pack_cast(tensor)) is not None:
        return cast
    # A result that is kept as itself would hold its graph, and that the result.
    return _Kept(tensor if tensor.is_leaf else tensor.detach(), version_of(tensor))


def _unpack(kept: CastAgain | _Kept) -> Tensor:
    if isinstance(kept, CastAgain):
        return unpack_cast(kept)
    tensor, version = kept
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(tensor.shape)} {tensor.dtype} is at version {version_of(tensor)}; expected version {version}"
        )
    return tensor
