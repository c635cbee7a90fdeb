"""Random numbers of a slot: they belong to it and its step, whichever rank computes it.

When a micro-batch begins, torch's generators, Python's and NumPy's legacy one are seeded from SHA-256 of the run's
seed, the step and the slot. What is drawn until its backward is over (dropout, noise, a loss's samples) is then the
slot's.

A module that numbers its layers (`NumberedLayers`), of which ranks of a pipeline have some each, begins a stream for
every layer of the slot, and one for what comes after the last: they do not depend on which layers a rank runs before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from zero_strategy.reproducible.slots import SlotCount


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits from numbers and names: the first eight bytes of SHA-256 of them, in one line."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed torch's generators on all devices in use, Python's `random`, and NumPy's legacy generator."""
    # `torch.manual_seed` notes a stack of calls for devices that are not in use yet, which takes as long as a layer.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    # NumPy takes 32 bits.
    np.random.seed(seed & 0xFFFFFFFF)


class SlotStreams:
    """Random streams of the slots of one training.

    Args:
        seed: Of the run, the same on all ranks.
        count: The slot at hand.
        step: Number of the step at hand.

    Attributes:
        seed: As above; a checkpoint's may take its place.
    """

    def __init__(self, seed: int, count: SlotCount, step: Callable[[], int]) -> None:
        self.seed, self._count, self._step = seed, count, step
        self._begun = False
        self._generators: dict[str, torch.Generator] = {}

    def begin(self) -> None:
        """A micro-batch begins, if it has not begun yet: whatever was drawn before, its numbers are its own."""
        if self._begun:
            return
        self._begun = True
        self._seed(self._step(), self._count.slot)

    def of_layers(self) -> Callable[[int], None]:
        """A function that begins the stream of a layer of the micro-batch at hand, also where it is computed again."""
        step, slot = self._step(), self._count.slot
        return lambda layer: self._seed(step, slot, "layer", layer)

    def _seed(self, *parts: int | str) -> None:
        seed_generators(seed_of(self.seed, *parts))
        for name, generator in self._generators.items():
            generator.manual_seed(seed_of(self.seed, *parts, name))

    def end(self) -> None:
        """A micro-batch is over, or a step, or another training has been loaded."""
        self._begun = False

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator of one's own that is seeded with each micro-batch; the same object for the same name."""
        if name not in self._generators:
            self._generators[name] = torch.Generator(device)
            self._generators[name].manual_seed(seed_of(self.seed, self._step(), self._count.slot, name))
        return self._generators[name]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of a module that follows the streams is not trained."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


@runtime_checkable
class NumberedLayers(Protocol):
    """A module that runs layers with numbers, which its forwards in training draw by."""

    def follow_streams(self, streams: SlotStreams | None) -> None:
        """Begin a stream of these for each layer from now on; None: draw from the generators as they are."""
