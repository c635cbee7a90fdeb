"""Local gradients of one bucket before they are reduced: sums, reused buffers, deferred factors.

On the CPU new memory is paid for page by page when it is first written to: a tenth of a step of a small model. Nothing
is kept between backwards, and never more than what the last bucket gave back.

As long as each parameter has had one gradient and the transport takes parts from where they lie, they stay what
autograd made (`handed`): nothing is copied. A second one, or another dtype, calls for the whole buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zero_strategy.comm.shared_memory import Scattered
from zero_strategy.fsdp.dtensor import local_gradient
from zero_strategy.fsdp.param_bucket import ParameterBucket


class BufferReuse:
    """Buffers that buckets gave back; they are of use only while a backward runs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._open = False

    def open(self) -> None:
        """A backward begins."""
        self._open = True

    def close(self) -> None:
        """A backward has ended: memory goes."""
        self._open = False
        self._free.clear()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A buffer with whatever is in it; None if there is none of this kind."""
        if self._free and (self._free[-1].numel(), self._free[-1].dtype, self._free[-1].device) == (
            numel, dtype, device
        ):  # fmt: skip
            return self._free.pop()
        self._free.clear()
        return None

    def give(self, buffer: Tensor) -> None:
        """Nobody uses a buffer any more."""
        if self._open:
            self._free.append(buffer)


class DeferredScale:
    """One factor per parameter; two are joined only where their product rounds as one after the other does.

    Args:
        multiply: Carries a factor out on a parameter's values.
    """

    def __init__(self, multiply: Callable[[int, float], object]) -> None:
        self._multiply = multiply
        self._factors: dict[int, float] = {}

    def of(self, index: int) -> float:
        """That of a parameter; 1 if none waits."""
        return self._factors.get(index, 1.0)

    def add(self, index: int, factor: float) -> None:
        """One more."""
        waiting = self.of(index)
        if not (_is_power_of_two(waiting) or _is_power_of_two(factor)):
            self.carry_out()
            waiting = 1.0
        self._factors[index] = waiting * factor

    def drop(self, index: int) -> None:
        """The values are of no use any more: nan times zero is no zero."""
        self._factors.pop(index, None)

    def clear(self) -> None:
        """The same of all."""
        self._factors.clear()

    def carry_out(self) -> None:
        """Multiply now."""
        factors, self._factors = self._factors, {}
        for index, factor in factors.items():
            if factor != 1.0:
                self._multiply(index, factor)

    def carry_out_those_that_round(self) -> None:
        """The same, if some factor rounds, as before a look at the result."""
        if not all(map(_is_power_of_two, self._factors.values())):
            self.carry_out()


def _is_power_of_two(factor: float) -> bool:
    return abs(math.frexp(factor)[0]) == 0.5


class LocalSums:
    """Sums over backwards on this rank.

    Args:
        bucket: The parameters.
        dtype: In which they are summed.

    Attributes:
        live: Indices of parameters with a gradient.
        whole: The buffer of all of them.
        handed: Gradients that are autograd's own tensors, by index; only without a buffer.
        hands_over: Whether there may be such: what the caller sends may be in parts, and the result needs no memory.
        reuse: Where memory comes from and goes to that lives in a backward only.
    """

    def __init__(self, bucket: ParameterBucket, dtype: torch.dtype) -> None:
        self.bucket, self.dtype = bucket, dtype
        self.live: set[int] = set()
        self.whole: Tensor | None = None
        self.handed: dict[int, Tensor] = {}
        self.hands_over = False
        self.reuse: BufferReuse | None = None

    def plain(self, index: int, gradient: Tensor) -> Tensor:
        """This rank's own, dense values of a gradient of parameter `index`."""
        gradient = local_gradient(self.bucket.parameters[index], gradient)
        return gradient.to_dense() if gradient.is_sparse else gradient

    def add(self, index: int, gradient: Tensor) -> None:
        """Add a gradient (see `plain`), of which the caller lets go."""
        if self._is_handed_over(index, gradient):
            self.handed[index] = gradient.detach().reshape(-1)
            self.live.add(index)
            return
        view = self.view(index)
        if index in self.live:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.live.add(index)

    def _is_handed_over(self, index: int, gradient: Tensor) -> bool:
        if not self.hands_over or self.whole is not None or index in self.live:
            return False
        alone = gradient.untyped_storage().nbytes() == gradient.nbytes  # else it would keep more than itself
        alike = gradient.dtype == self.dtype and gradient.is_contiguous() and alone
        return alike and self.bucket.mesh.reduce.takes_scattered(self.bucket.layout.numel, self.dtype)

    def view(self, index: int) -> Tensor:
        """Its place in the buffer of all, which is made, in its shape."""
        segment = self.bucket.layout.segments[index]
        whole = self.whole if self.whole is not None and not self.handed else self._collected()
        return whole[segment.offset : segment.stop].view(segment.shape)

    def sum_of(self, index: int) -> Tensor | None:
        """The sum of a parameter's gradients, in its shape; None: it has none."""
        if index not in self.live:
            return None
        if index in self.handed:
            return self.handed[index].view(self.bucket.layout.segments[index].shape)
        return self.view(index)

    def zero(self, index: int) -> None:
        """A gradient becomes zero, if there is one."""
        if index in self.live:
            self.view(index).zero_()

    def forget(self, index: int) -> None:
        """There is none of this parameter any more."""
        self.live.discard(index)
        self.handed.pop(index, None)

    def clear(self) -> None:
        """There is none of any; the buffer stays."""
        self.live.clear()
        self.handed.clear()

    def zeros(self) -> Tensor:
        """The buffer, of zeros if it is new."""
        if self.whole is None:
            self.whole = torch.zeros(self.bucket.layout.numel, dtype=self.dtype, device=self.bucket.device)
        return self.whole

    def scattered(self) -> Scattered | None:
        """All of them as they lie, where none had to be copied; what has none is zero."""
        if not self.handed:
            return None
        segments = self.bucket.layout.segments
        parts = [(segments[index].offset, self.handed[index]) for index in sorted(self.handed)]
        return Scattered(self.bucket.layout.numel, parts, parts[0][1])

    def complete(self) -> Tensor:
        """All of them in the buffer; what has none is zero. They are the caller's from now on."""
        if self.whole is None and not self.handed:
            self.zeros()
        else:
            whole = self._collected()
            if len(self.live) < len(self.bucket.parameters):
                for index, segment in enumerate(self.bucket.layout.segments):
                    if index not in self.live:
                        whole[segment.offset : segment.stop].zero_()
        self.live.clear()
        assert self.whole is not None
        return self.whole

    def give_back(self) -> None:
        """The buffer's values are of no use any more, nor are those of the tensors."""
        if self.whole is not None and self.reuse is not None:
            self.reuse.give(self.whole)
        self.whole = None
        self.handed.clear()

    def _collected(self) -> Tensor:
        """The buffer, with all that was handed over."""
        if self.whole is None:
            self.whole = self._buffer()
        handed, self.handed = self.handed, {}
        for index, values in handed.items():
            segment = self.bucket.layout.segments[index]
            self.whole[segment.offset : segment.stop].copy_(values)
        return self.whole

    def _buffer(self) -> Tensor:
        """A buffer for whole gradients, of which all is written before it is sent."""
        numel, device = self.bucket.layout.numel, self.bucket.device
        if self.reuse is None:
            return torch.zeros(numel, dtype=self.dtype, device=device)
        buffer = self.reuse.take(numel, self.dtype, device)
        if buffer is None:
            buffer = torch.empty(numel, dtype=self.dtype, device=device)
        end = 0
        for segment in self.bucket.layout.segments:  # what lies between parameters
            buffer[end : segment.offset].zero_()
            end = segment.stop
        buffer[end:].zero_()
        return buffer

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let them lie where `move` puts them."""
        self.whole = None if self.whole is None else move(self.whole)
        self.handed = {index: move(values) for index, values in self.handed.items()}

    def held(self) -> Iterator[Tensor]:
        """Every tensor with memory of its own."""
        if self.whole is not None:
            yield self.whole
        yield from self.handed.values()
