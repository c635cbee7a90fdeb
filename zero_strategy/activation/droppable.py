"""Activations that are kept as long as there is room: those of checkpointed units can be dropped at any moment.

    forward     what autograd saves goes to torch's checkpoint, which can compute it again, and is kept beside it
    drop        nothing is kept any more
    backward    what is kept is used, and a unit of which something is gone is computed again

No bit depends on when, or whether, something is dropped.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_strategy.activation.offload import Storages, add_storage
from zero_strategy.runtime.torch_private import hooks_on_saved_tensors


class _Kept:
    """A saved tensor, and its place in the checkpoint."""

    __slots__ = ("__weakref__", "place", "tensor")

    def __init__(self, place: Any, tensor: Tensor) -> None:
        self.place = place
        self.tensor: Tensor | None = tensor


class Droppable:
    """Tensors that autograd saves inside of checkpoints.

    Args:
        parameters: Memory that does not count.

    Attributes:
        dropped: Bytes that were dropped; None: nothing was, and all is kept.
    """

    def __init__(self, parameters: frozenset[int]) -> None:
        self._parameters = parameters
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.dropped: int | None = None

    def context(self) -> AbstractContextManager[Any]:
        """The context of a forward, which is entered inside of the checkpoint."""
        return nullcontext() if self.dropped is not None else _Keeping(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        found: Storages = {}
        for kept in list(self._kept):
            if kept.tensor is not None:
                add_storage(found, kept.tensor, self._parameters)
        return sum(found.values())

    def drop(self) -> None:
        """Let go of all of it, and keep nothing from now on."""
        self.dropped = self.nbytes
        for kept in list(self._kept):
            kept.tensor = None
        self._kept.clear()


class _Keeping:
    """Inside, saved tensors are kept beside their places in the checkpoint around it."""

    def __init__(self, into: weakref.WeakSet[_Kept]) -> None:
        self._into = into
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> None:
        to_place, from_place = hooks_on_saved_tensors()

        def pack(tensor: Tensor) -> _Kept:
            # A result that its own node saves would keep that node alive.
            kept = _Kept(to_place(tensor), tensor if tensor.is_leaf else tensor.detach())
            self._into.add(kept)
            return kept

        def unpack(kept: _Kept) -> Tensor:
            found: Tensor = from_place(kept.place) if kept.tensor is None else kept.tensor
            return found

        self._hooks = saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)
