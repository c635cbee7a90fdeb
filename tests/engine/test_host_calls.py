"""Costs of a unit on the host, in calls of functions: they do not depend on the number of units, and stay few.

Calls are counted, not timed. A loop that calls nothing goes unseen.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.device import fake_ranks
from tests.device.fake_ranks import silent_world
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

FEW, MORE, MANY = 6, 12, 24
MOST = {1: 660, 2: 660, 3: 1000}
"""Calls per unit of four parameters in a step of eight ranks, torch's among them, by stage."""


class Block(nn.Sequential):
    """A unit."""


@pytest.mark.parametrize("part", ["forward", "backward", "clipping", "step"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_calls_per_unit_do_not_grow_with_their_number(stage: int, part: str) -> None:
    few, more, many = (_calls_alone(stage, units)[part] for units in (FEW, MORE, MANY))
    assert few > 0
    assert (more - few) / (MORE - FEW) == (many - more) / (MANY - MORE)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_calls_per_unit_of_one_rank_among_others(stage: int) -> None:
    with silent_world(1, 8):
        few, many = _calls(stage, FEW), _calls(stage, MANY)
        count = sum(many.values()) - sum(few.values())
    assert count / (MANY - FEW) <= MOST[stage]


def test_no_step_looks_through_a_protocol() -> None:
    with silent_world(1, 8):
        called = _called(3, FEW)
    # `isinstance` of a runtime-checkable protocol looks at all of its attributes: 70 microseconds each time.
    assert called and ("typing.py", "__instancecheck__") not in called


def _calls(stage: int, units: int) -> dict[str, int]:
    """Calls of functions in each part of one step, after some others."""
    return {part: _count(stats) for part, stats in _profiles(stage, units).items()}


def _count(stats: Any) -> int:
    """All calls but those with which a test plays the other ranks."""
    played = (Path(fake_ranks.__file__).name, "arrive")
    count = int(stats.total_calls)
    for (file, _, name), (_, calls, _, _, callers) in stats.stats.items():
        count -= calls if (Path(file).name, name) == played else 0
        count -= sum(of[1] for (file, _, name), of in callers.items() if (Path(file).name, name) == played)
    return count


@functools.cache
def _calls_alone(stage: int, units: int) -> dict[str, int]:
    """Of one rank alone: one training tells of all parts."""
    return _calls(stage, units)


def _called(stage: int, units: int) -> set[tuple[str, str]]:
    """Functions that a step calls, by file and name."""
    profiles: list[Any] = list(_profiles(stage, units).values())
    return {(Path(file).name, name) for each in profiles for file, _, name in each.stats}


def _profiles(stage: int, units: int) -> dict[str, pstats.Stats]:
    torch.manual_seed(0)
    module = nn.Sequential(*(Block(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(units)))
    engine = ZeroEngine(module, load_config(stage=stage, units={"classes": ["Block"]}))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine.attach(optimizer)
    found: dict[str, pstats.Stats] = {}
    for _ in range(4):
        losses: list[torch.Tensor] = []
        parts: dict[str, Callable[[], object]] = {
            "forward": lambda losses=losses: losses.append(module(torch.ones(2, 4)).sum()),
            "backward": lambda losses=losses: losses[0].backward(),
            "clipping": lambda: engine.clip_grad_norm_(1e-3),
            "step": optimizer.step,
        }
        found = {name: _profile(part) for name, part in parts.items()}
        optimizer.zero_grad()
    engine.close()
    return found


def _profile(action: Callable[[], object]) -> pstats.Stats:
    profile = cProfile.Profile()
    profile.enable()
    action()
    profile.disable()
    return pstats.Stats(profile)
