"""What `p.grad` of a bucket's parameters shows, and what the user has done to it since.

It is the gradient itself where that is whole on this rank, else a `GradientHandle`, which stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import version_of
from zero_strategy.sharding.dtensors import held_by, like, local_values
from zero_strategy.sharding.gradient_reading import ReadableGradients, reader_of
from zero_strategy.sharding.handles import GradientHandle, unwritable
from zero_strategy.sharding.parameters import ParameterBucket


class ShownGradients:
    """Handles of one bucket's parameters, by index.

    Args:
        gradients: Where a handle reads the gradient; held weakly.
        bucket: The parameters.
    """

    def __init__(self, gradients: ReadableGradients, bucket: ParameterBucket) -> None:
        self._bucket, self._gradients = bucket, ref(gradients)
        self._handles: dict[int, Tensor] = {}
        self._stand_ins: dict[int, GradientHandle] = {}
        self._poisons: dict[int, Tensor] = {}  # the memory of those handles that are no gradients
        self._versions: dict[int, int] = {}

    def itself(self, index: int, whole: Tensor) -> Tensor:
        """A view of the bucket's whole gradients as what `p.grad` is."""
        self._versions.pop(index, None)
        segment = self._bucket.layout.segments[index]
        handle = self._handles.get(index)
        place = whole.data_ptr() + segment.offset * whole.element_size()
        if handle is None or isinstance(handle, GradientHandle) or held_by(handle).data_ptr() != place:
            view = whole[segment.offset : segment.stop].view(segment.shape)
            self._handles[index] = like(self._bucket.parameters[index], view)
        return self._handles[index]

    def stand_in(self, index: int) -> Tensor:
        """A handle that stands for the gradient."""
        if index not in self._handles or index not in self._versions:
            known = self._stand_ins.get(index)
            if known is not None:
                self._handles[index] = known
                self._versions[index] = version_of(self._poisons[index])
                return known
            shape = self._bucket.parts[index].shape
            # A tensor of its own per parameter, so that its version counter tells who was written to.
            poison = torch.full((1,), float("nan"), dtype=self._bucket.dtype, device=self._bucket.device)
            plain = poison[0].expand(shape) if math.prod(shape) else poison[:0].view(shape)
            self._poisons[index] = plain
            name, stage, gradients = self._bucket.names[index], self._bucket.placement.stage, self._gradients()
            assert gradients is not None  # it asks for this
            self._handles[index] = self._stand_ins[index] = GradientHandle.of(
                plain, name, stage, reader_of(gradients, index)
            )
            self._versions[index] = version_of(plain)
        return self._handles[index]

    def is_known(self, index: int, shown: Tensor) -> bool:
        """Whether `p.grad` is what it was set to."""
        return shown is self._handles.get(index)

    def written(self, index: int) -> bool:
        """Whether what stands for the gradient was written to."""
        return index in self._versions and version_of(self._poisons[index]) != self._versions[index]

    def zeroed(self, index: int) -> bool:
        """Whether that has left zeros, the one change that a handle stands for."""
        poison = self._poisons[index]
        return not poison.numel() or not bool(poison.as_strided((1,), (1,)) != 0)

    def forget(self, index: int) -> None:
        """Make a new handle when it is shown again."""
        del self._handles[index]
        self._stand_ins.pop(index, None)
        self._versions.pop(index, None)

    def changes(self) -> list[bool | Tensor | None]:
        """What the user did to each `p.grad`: nothing (True), zeroed (False), removed (None), or assigned (the tensor).

        For `follow` on a rank where nobody does it.
        """
        return [self._change(index) for index in range(len(self._bucket.parameters))]

    def _change(self, index: int) -> bool | Tensor | None:
        gradient = self._bucket.parameters[index].grad
        if gradient is None:
            return None
        if not self.is_known(index, gradient):
            if isinstance(gradient, GradientHandle):
                return True
            return local_values(self._bucket.parts[index], self._bucket.parameters[index], gradient.detach()).cpu()
        if index in self._versions:
            return not self.written(index)
        return bool(held_by(gradient).any())  # the gradient itself: zeros are zeros, whoever wrote them

    @torch.no_grad()
    def follow(self, changes: Sequence[bool | Tensor | None]) -> None:
        """Do to each `p.grad` what another rank's `changes()` says."""
        for parameter, how in zip(self._bucket.parameters, changes, strict=True):
            if isinstance(how, Tensor):
                parameter.grad = like(parameter, how.to(device=parameter.device, dtype=parameter.dtype))
            elif how is None:
                parameter.grad = None
            elif not how and parameter.grad is not None:
                parameter.grad.zero_()

    def refuse(self, index: int) -> None:
        """Raise for a write that would be lost.

        Raises:
            RuntimeError: Naming the parameter and the way out.
        """
        raise RuntimeError(unwritable(self._bucket.names[index], self._bucket.placement.stage, "fill_"))

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let gradients that are shown themselves lie where `move` puts them; `p.grad` stays the same object."""
        for handle in self._handles.values():
            if not isinstance(handle, GradientHandle):
                values = held_by(handle)
                values.data = move(values)

    def held(self) -> Iterator[Tensor]:
        """The memory of what stands for gradients."""
        for index, poison in self._poisons.items():
            if index in self._versions:  # else the handle is the gradient itself
                yield poison
