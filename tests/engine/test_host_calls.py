"""Costs of a unit on the host do not depend on the number of units: calls of functions are counted, not timed.

A loop that calls nothing goes unseen.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

FEW, MORE, MANY = 6, 12, 24


class Block(nn.Sequential):
    """A unit."""


@pytest.mark.parametrize("part", ["forward", "backward", "clipping", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_per_unit_do_not_grow_with_their_number(stage: int, part: str) -> None:
    few, more, many = (_calls(stage, units)[part] for units in (FEW, MORE, MANY))
    assert few > 0
    assert (more - few) / (MORE - FEW) == (many - more) / (MANY - MORE)


def _calls(stage: int, units: int) -> dict[str, int]:
    """Calls of functions in each part of one step, after some others."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(units)))
    engine = ZeroEngine(module, load_config(stage=stage, units={"classes": ["Block"]}))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine.attach(optimizer)
    found: dict[str, int] = {}
    for _ in range(4):
        losses: list[torch.Tensor] = []
        parts: dict[str, Callable[[], object]] = {
            "forward": lambda losses=losses: losses.append(module(torch.ones(2, 4)).sum()),
            "backward": lambda losses=losses: losses[0].backward(),
            "clipping": lambda: engine.clip_grad_norm_(1e-3),
            "step": optimizer.step,
        }
        found = {name: _count(part) for name, part in parts.items()}
        optimizer.zero_grad()
    engine.close()
    return found


def _count(action: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.enable()
    action()
    profile.disable()
    return int(pstats.Stats(profile).total_calls)
