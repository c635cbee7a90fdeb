"""No test of this directory leaves options or random states in the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zero_strategy.activation.functional import PROCESS


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    state = torch.get_rng_state()
    PROCESS.clear()
    yield
    PROCESS.clear()
    torch.set_rng_state(state)
