"""Model states moved to the host for a while: `engine.offload_states()` and `reload_states()`.

`engine.offload_states()` until `engine.reload_states()`.

Between training and generation a device has better uses for memory than what only the next step needs. Whole storages
are copied, padding included, and everything that was a view of one becomes the same view of its copy: parameters,
gradients and the optimizer's state stay the same objects and can be read where they are. What computes with them on the
device is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from zero_strategy.offload.tier import HostMemory

OPTIMIZER, MASTERS, PARAMETERS = "optim_states", "hp_params", "lp_params"
GRADIENTS = ("lp_grads", "contiguous_grad_buffer")
KINDS = (OPTIMIZER, MASTERS, PARAMETERS, *GRADIENTS)
"""What can be moved, under DeepSpeed's names: optimizer state, fp32 master weights, parameters, reduced gradients, and
buffers of those that are not reduced. Masters are the parameters themselves where these are fp32."""
IN_BACKWARD = (PARAMETERS, *GRADIENTS)
"""What a backward needs on the device."""

_ALIGNMENT = 64
Move = Callable[[Tensor], Tensor]
"""Gives a tensor as it lies elsewhere, or itself if it stays."""


class Movable(Protocol):
    """Object that holds states; see `ShardedModel`."""

    device: torch.device

    def come_to_rest(self, *, parameters: bool) -> None: ...

    def relocate(self, kinds: Collection[str], move: Move) -> None: ...

    def in_tiers(self) -> dict[str, str]: ...


class MovedStates:
    """States of a model that are on the host, and the way there and back.

    Args:
        model: Whose states.

    Attributes:
        kinds: What is on the host.
    """

    def __init__(self, model: Movable) -> None:
        self._model = model
        self.kinds: frozenset[str] = frozenset()
        self._memory: list[HostMemory] = []
        self._copies: dict[int, Tensor] = {}  # bytes on the host, by their address

    def check(self, call: str, kinds: Iterable[str] = KINDS) -> None:
        """Raise if one of these kinds is on the host.

        Args:
            call: What needs them, for the message.
            kinds: Those that it needs.

        Raises:
            RuntimeError: Then; names them and the way back.
        """
        if self.kinds and (away := [kind for kind in KINDS if kind in self.kinds and kind in kinds]):
            raise RuntimeError(
                f"{call} needs states that are on the host since offload_states(): {', '.join(away)}. Call "
                "reload_states() first"
            )

    def holds(self, tensor: Tensor) -> bool:
        """True if a tensor is on the host because it was moved there."""
        return bool(self._copies) and tensor.untyped_storage().data_ptr() in self._copies

    def offload(self, include: Iterable[str] | None = None, *, pin_memory: bool = True) -> None:
        """Move states to the host; those that are there stay. On this rank alone: nothing is sent.

        Args:
            include: Of `KINDS`; None: all.
            pin_memory: Page-lock the memory there, which makes both ways faster; of use with a GPU only.

        Raises:
            MemoryError, OSError: If the host has no memory for them; nothing has changed.
            RuntimeError: In a forward, a backward or a step, or if one of these was left with an exception.
            TypeError, ValueError: If `include` is no list of such names, or the config has put a kind into a tier.
        """
        kinds = self._chosen(include)
        self._model.come_to_rest(parameters=PARAMETERS in kinds)
        with torch.inference_mode(False), torch.no_grad():
            found = self._storages(kinds, lambda tensor: tensor.device == self._model.device)
            starts, end = [], 0
            for storage in found.values():
                starts.append(end)
                end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
            if found:
                memory = HostMemory(end, pinned=pin_memory and self._model.device.type == "cuda")
                whole = memory.bytes.numpy()
                copies = {
                    place: torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=storage.nbytes())
                    for start, (place, storage) in zip(starts, found.items(), strict=True)
                }
                self._put(kinds, found, copies)
                self._memory.append(memory)
                self._copies.update({copy.data_ptr(): copy for copy in copies.values()})
        self.kinds |= kinds
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()  # others on this device shall have it

    def reload(self) -> None:
        """Move all states back that `offload` has moved. On this rank alone.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for them; nothing has changed.
        """
        with torch.inference_mode(False), torch.no_grad():
            found = self._storages(self.kinds, self.holds)
            device = self._model.device
            self._put(
                self.kinds,
                found,
                {
                    place: torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
                    for place, storage in found.items()
                },
            )
        self.kinds = frozenset()
        self._copies.clear()
        self._memory.clear()

    def _chosen(self, include: Iterable[str] | None) -> frozenset[str]:
        if isinstance(include, str):
            raise TypeError(f"include takes a list of kinds of state, such as [{str(include)!r}], or None for all")
        asked = KINDS if include is None else [getattr(kind, "value", kind) for kind in include]
        for kind in asked:
            if kind not in KINDS:
                raise ValueError(f"offload_states() knows no state {kind!r}; accepted: {', '.join(KINDS)}")
        in_tiers = {kind: setting for kind, setting in self._model.in_tiers().items() if kind in asked}
        if in_tiers:
            raise ValueError(
                f"offload_states() cannot move {', '.join(in_tiers)}: by {', '.join(dict.fromkeys(in_tiers.values()))} "
                "they are off the device for the whole run. Leave them out of include, or the setting out of the config"
            )
        return frozenset(asked) - self.kinds

    def _storages(self, kinds: frozenset[str], wanted: Callable[[Tensor], bool]) -> dict[int, torch.UntypedStorage]:
        """The memory of these kinds, by its address; empty tensors have none."""
        found: dict[int, torch.UntypedStorage] = {}

        def look(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() and wanted(tensor):
                found.setdefault(storage.data_ptr(), storage)
            return tensor

        self._model.relocate(kinds, look)
        return found

    def _put(
        self, kinds: frozenset[str], found: Mapping[int, torch.UntypedStorage], copies: Mapping[int, Tensor]
    ) -> None:
        """Copy the bytes, then let all views be views of the copies."""
        for place, storage in found.items():
            copies[place].copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))

        def move(tensor: Tensor) -> Tensor:
            copy = copies.get(tensor.untyped_storage().data_ptr())
            if copy is None:
                return tensor
            moved = torch.empty(0, dtype=tensor.dtype, device=copy.device)
            place = copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
            return moved.set_(*place)

        self._model.relocate(kinds, move)
