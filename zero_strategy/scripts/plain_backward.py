"""Backwards that a script starts itself, `loss.backward()`: gradients are what `engine.backward(loss)` gives.

That divides the loss by the number of micro-batches per step; here every gradient is divided when it reaches its
parameter. Scripts have it so under DeepSpeed since 0.18.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Running:
    """Counts the calls of `engine.backward` that go on in this process: of any engine, as a loss may use several."""

    def __init__(self) -> None:
        self.count = 0


_running = _Running()


class PlainBackward:
    """Tells by what the gradients of a backward are divided.

    Args:
        micro_batches: Of a step.
        scaled: Losses need a loss scale (fp16).

    Attributes:
        micro_batches: See the argument.
    """

    def __init__(self, micro_batches: int, *, scaled: bool) -> None:
        self.micro_batches, self._needs_scale = micro_batches, scaled
        self._has_scale = False

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Inside runs `engine.backward`, which has divided and scaled the loss."""
        _running.count += 1
        try:
            yield
        finally:
            _running.count -= 1

    def was_scaled(self) -> None:
        """The script has asked for a scaled loss."""
        self._has_scale = True

    def step_over(self) -> None:
        """A micro-batch has ended."""
        self._has_scale = False

    def divisor(self) -> int:
        """By what the gradients of the backward that begins now are to be divided.

        Raises:
            RuntimeError: If the loss lacks its scale.
        """
        if _running.count:
            return 1
        if self._needs_scale and not self._has_scale:
            raise RuntimeError(
                "loss.backward() in fp16 without a loss scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        return self.micro_batches
