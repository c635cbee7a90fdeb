"""Buffers of a module, equal on all ranks as under `DistributedDataParallel`: rank 0's are sent to all.

Forwards change buffers from a rank's own data (running statistics, ranges of activations, codebooks), so that ranks
would evaluate, and resume, with different ones. DDP sends all buffers before each forward. Here the message that ends a
reduction of gradients has a byte for each buffer, which says whether a rank has changed it since the last time, and
those that any rank has changed are sent at once, in one message per dtype: what the next forward sees is the same, and
nothing is sent where nothing changes. Changes are found by torch's version counters and by the identity of the tensors.
Some writes are in neither: torch's kernels write running statistics without counting, and so do user modules through
`buffer.data`, numpy or kernels of their own (codebooks of VQ-VAEs). So running statistics, and the persistent buffers
of classes that are not torch's own, count as changed in every step in which their module trains. Buffers that are not
persistent are constants (masks, frequencies) and go by their counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.dtensor import held_by
from zero_strategy.runtime.torch_private import buffers_of, non_persistent_buffers, version_of

_CHANGED, _RESIZED = 1, 2
_STATISTICS = frozenset({"running_mean", "running_var"})
"""Keys of buffers that torch's kernels of batch and instance normalization write in training, and do not count."""


@dataclass
class _Slot:
    """A place of a buffer in the module.

    Attributes:
        owner: The module that registers it.
        key: Its name there.
        name: Its name in the whole module.
        seen: The tensor when ranks were last equal; it is held, so that no other takes its identity meanwhile.
        version: Its version then.
        layout: Its shape, dtype and device then.
        values: Of one that may be written to without a count, where writes are errors.
    """

    owner: nn.Module
    key: str
    name: str
    seen: Tensor | None = None
    version: int = 0
    layout: tuple[torch.Size, torch.dtype, torch.device] | None = None
    values: Tensor | None = None

    def tensor(self) -> Tensor | None:
        """The present buffer."""
        found = buffers_of(self.owner).get(self.key)
        return None if found is None else held_by(found)

    @property
    def unseen(self) -> bool:
        """True if the buffer may be written to without a count while its module trains."""
        if self.key in _STATISTICS:
            return True
        own = type(self.owner).__module__.partition(".")[0] == "torch"
        return not own and self.key not in non_persistent_buffers(self.owner)

    def note(self) -> None:
        """Ranks are equal now."""
        self.seen = self.tensor()
        self.version = 0 if self.seen is None else version_of(self.seen)
        self.layout = _layout_of(self.seen)

    def counted(self, present: Tensor) -> bool:
        """True if the present buffer is another tensor, or was written to, as far as torch counts writes."""
        return present is not self.seen or version_of(present) != self.version

    def change(self) -> int:
        """`_CHANGED` or `_RESIZED` if it is no longer what was noted, else 0."""
        present = self.tensor()
        # First: values of another layout have no place in the other ranks' tensors.
        if _layout_of(present) != self.layout:
            return _RESIZED
        if present is None:
            return 0
        return _CHANGED if self.counted(present) or (self.owner.training and self.unseen) else 0

    def keep(self) -> None:
        """Note the values where no count tells of writes."""
        present = self.tensor()
        self.values = present.detach().clone() if present is not None and self.unseen else None

    def differs(self) -> bool:
        """True if the buffer is no longer what was noted, as to values where no count tells."""
        present = self.tensor()
        if _layout_of(present) != self.layout or (present is not None and self.counted(present)):
            return True
        return self.values is not None and present is not None and not torch.equal(present, self.values)


def _layout_of(tensor: Tensor | None) -> tuple[torch.Size, torch.dtype, torch.device] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def slots_of(module: nn.Module) -> list[_Slot]:
    """The buffers of a module and its children, one that is there under two names once."""
    slots, seen = list[_Slot](), set[int]()
    for prefix, owner in module.named_modules():
        for key, buffer in buffers_of(owner).items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                slots.append(_Slot(owner, key, f"{prefix}.{key}" if prefix else key))
    return slots


class SharedBuffers:
    """Keeps the buffers of a module equal to those of the mesh's first rank.

    Args:
        module: The module; buffers that it registers later are left alone, as by DDP.
        mesh: The data-parallel ranks. Tensor-parallel ranks of one place share among their own kind.
        fixed: None may change in training (`reproducible.slots`): what a rank's own forwards make of it, or their
            number, would differ with the number of ranks.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, *, fixed: bool = False) -> None:
        self._mesh, self._slots, self._fixed = mesh, slots_of(module), fixed
        self.note()

    def note(self) -> None:
        """Note that the buffers are equal on all ranks now."""
        for slot in self._slots:
            slot.note()
            if self._fixed:
                slot.keep()

    def changes(self, *, shares: bool) -> Tensor:
        """This rank's part of a message: what it has changed since ranks were equal.

        Args:
            shares: Ranks are to become equal now; else nothing is told before the next time.

        Returns:
            uint8, one element for each buffer, 0 where it has not changed.
        """
        found = bytearray(len(self._slots))
        for number, slot in enumerate(self._slots) if shares else ():
            found[number] = slot.differs() if self._fixed else slot.change()
        # `frombuffer` refuses a buffer without bytes.
        return torch.frombuffer(found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)

    def share(self, changes: Tensor) -> None:
        """Send rank 0's values of the buffers that any rank has changed. A collective if there are any.

        Args:
            changes: `changes()` of every rank, in rows.

        Raises:
            RuntimeError: If none may change; on all ranks.
        """
        if not self._slots:
            return
        # The maximum: a new layout on one rank counts for more than new values on another.
        found = changes.amax(dim=0).tolist()
        slots = [slot for slot, change in zip(self._slots, found, strict=True) if change]
        if not slots:
            return
        if self._fixed:
            raise RuntimeError(
                f"a forward has changed the buffer(s) {', '.join(slot.name for slot in slots)}: with "
                "reproducible.slots what a rank's own slots make of a buffer would depend on the ranks. Keep such "
                "statistics outside of the module, or out of training"
            )
        # A layout that is new on some rank is known to that rank alone: such a buffer goes as an object.
        resized = [slot for slot, change in zip(self._slots, found, strict=True) if change == _RESIZED]
        self._replace(resized)
        groups: dict[tuple[torch.dtype, torch.device], list[_Slot]] = {}
        for slot in slots:
            tensor = slot.tensor()
            if slot not in resized and tensor is not None:
                groups.setdefault((tensor.dtype, tensor.device), []).append(slot)
        for together in groups.values():
            self._broadcast(together)
        for slot in slots:
            slot.note()

    @torch.no_grad()
    def _broadcast(self, slots: Sequence[_Slot]) -> None:
        tensors = [tensor for slot in slots if (tensor := slot.tensor()) is not None]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        sent = flat.view(torch.uint8) if flat.dtype == torch.bool else flat
        names = [slot.name for slot in slots]
        # Along the row and along the column: together they reach every rank from the mesh's first.
        self._mesh.gather.broadcast(sent, 0, names)
        self._mesh.replicate.broadcast(sent, 0, names)
        if self._mesh.rank == 0:
            return
        parts = flat.split([tensor.numel() for tensor in tensors])
        for slot, tensor, part in zip(slots, tensors, parts, strict=True):
            # Not counted where no count has changed: a graph that has saved the buffer may be gone through once more.
            counted = slot.key not in _STATISTICS and slot.counted(tensor)
            target = tensor.data if slot.unseen and not counted else tensor
            target.copy_(part.view(tensor.shape))

    def _replace(self, slots: Sequence[_Slot]) -> None:
        """Give all ranks the first rank's tensors, of whatever layout."""
        if not slots:
            return
        first = self._mesh.rank == 0
        mine = [None if (t := slot.tensor()) is None else t.detach().cpu() for slot in slots] if first else None
        values = self._mesh.control.all_gather_objects(mine, [slot.name for slot in slots])[0]
        for slot, value in zip(slots, values, strict=True) if not first else ():
            present = slot.tensor()
            if value is not None and present is not None:
                value = value.to(present.device)
            buffers_of(slot.owner)[slot.key] = value
