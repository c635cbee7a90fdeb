"""The random state in which a layer is built, so that its weights depend on the layer alone.

Layer i is built with the generators seeded with s + i, and they are put back afterwards. So a layer has the same
initial weights whichever layers are built beside it, and what the script draws later does not depend on the stages
either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

_SEEDS = 2**31
"""Below it are seeds that every generator takes, and room for layers above."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the generators of Python, NumPy and torch (CPU and current CUDA device) back at the end."""
    if torch.cuda.is_available() and torch.get_default_device().type == "cuda":
        torch.cuda.init()  # what is built will draw there
    python, numpy, host = random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if device is not None:
            torch.cuda.set_rng_state(device)


def seed_generators(seed: int) -> None:
    """Seed what `random_state_kept` puts back. Unlike `torch.manual_seed`, leaves no seed for a CUDA start later on."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def draw_seed() -> int:
    """A number from torch's CPU generator, which moves on by one draw."""
    return int(torch.randint(_SEEDS, (), device="cpu").item())


class LayerSeeds:
    """Seeds of all layers of a model.

    Args:
        first: Seed of layer 0.
        seed_fn: Seeds the generators with a number; None: `seed_generators`.
    """

    def __init__(self, first: int, seed_fn: Callable[[int], object] | None = None) -> None:
        self.first, self._seed = first, seed_fn or seed_generators

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """The random state of a layer while it is built."""
        with random_state_kept():
            self._seed(self.first + index)
            yield

    @contextmanager
    def forward(self, index: int, base_seed: int, micro_offset: int) -> Iterator[None]:
        """That of a layer's forward: seed base_seed x micro_offset + index, as DeepSpeed's `seed_layers` has it."""
        with random_state_kept():
            self._seed(base_seed * micro_offset + index)
            yield
