"""`load_checkpoint` of scripts: in the middle of an accumulation, weights alone, and by a function of the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from zero_strategy import initialize

MICRO = 2


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, 8, generator=generator)


def config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.0}},
        "gradient_clipping": 0.5, "zero_optimization": {"stage": stage, **zero},
    }  # fmt: skip


def started(stage: int, **zero: Any) -> Any:
    return initialize(model=net(), config=config(stage, **zero))[0]


def micro_step(engine: Any, number: int, *, bad: bool = False) -> None:
    loss = engine(batch(number, engine.global_rank)).square().mean()
    engine.backward(loss * float("nan") if bad else loss)
    engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    state: dict[str, Tensor] = engine.zero.full_state_dict()
    return state


DISTURBANCES = ["half", "nan", "step of nan", "backward alone"]


def rolled_back(stage: int, folder: str, zero: dict[str, Any]) -> dict[str, tuple[bool, int]]:
    """By disturbance: weights equal those of an engine that was not disturbed before it loaded; steps."""
    expected: dict[str, Tensor] = {}
    found = {}
    for how in ("", *DISTURBANCES):
        engine = started(stage, **zero)
        if not how:
            for number in range(2):
                micro_step(engine, number)
            engine.save_checkpoint(folder, "t")
        elif how == "half":
            micro_step(engine, 50)
        elif how == "nan":
            micro_step(engine, 50, bad=True)
        elif how == "step of nan":
            for number in (50, 51):
                micro_step(engine, number, bad=True)
        else:
            engine.backward(engine(batch(50, engine.global_rank)).square().mean())
        engine.load_checkpoint(folder, "t")
        for number in range(2, 6):
            micro_step(engine, number)
        here = weights(engine)
        expected = expected or here
        same = all(torch.equal(expected[name], here[name]) for name in expected)  # no NaN equals another
        found[how] = (same, engine.global_steps)
    return found


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
PLACES = [(0, {}), (1, {}), (2, {}), (3, {}), (1, OFFLOADED), (2, OFFLOADED), (3, OFFLOADED)]


@pytest.mark.parametrize(
    ("stage", "zero"), PLACES, ids=[f"{stage}-{'offloaded' if zero else 'memory'}" for stage, zero in PLACES]
)
def test_a_load_drops_gradients_of_before(ranks: Launcher, stage: int, zero: dict[str, Any], tmp_path: Path) -> None:
    for found in ranks(2)(rolled_back, stage, str(tmp_path), zero):
        assert found == dict.fromkeys(("", *DISTURBANCES), (True, 3))


def loaded_alone(stage: int, folder: str) -> dict[str, Any]:
    first = started(stage)
    for number in range(4):
        micro_step(first, number)
    first.save_checkpoint(folder, "t", client_state={"mine": 1})
    second, calls = started(stage), list[tuple[set[str], bool]]()
    micro_step(second, 9)
    _, state = second.load_checkpoint(folder, "t", load_module_only=True)
    third = started(stage)

    def doubled(src: dict[str, Tensor], dst: nn.Module) -> None:
        calls.append((set(src), all(bool(p.isfinite().all()) for p in dst.parameters())))
        dst.load_state_dict({name: 2 * value for name, value in src.items()})

    third.load_checkpoint(folder, "t", custom_load_fn=doubled)
    expected, twice = weights(first), weights(third)
    return {
        "weights": all(torch.equal(value, weights(second)[name]) for name, value in expected.items()),
        "steps": (second.global_steps, second.micro_steps % MICRO, third.global_steps),
        "state": state,
        "twice": all(torch.equal(2 * value, twice[name]) for name, value in expected.items()),
        "called": calls == [(set(net().state_dict()), True)],
    }


def names_of_scripts(stage: int) -> dict[str, Any]:
    asked = {**config(stage), "steps_per_print": 7, "wall_clock_breakdown": True}
    engine: Any = initialize(model=net(), config=asked)[0]
    state = engine._consolidated_16bit_state_dict()
    return {
        "printed": (engine.steps_per_print(), engine.wall_clock_breakdown()),
        "state": None if state is None else all(torch.equal(v, net().state_dict()[k]) for k, v in state.items()),
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_names_that_scripts_use(ranks: Launcher, stage: int) -> None:
    first, last = ranks(2)(names_of_scripts, stage)
    assert first == {"printed": (7, True), "state": True} and last == {"printed": (7, True), "state": None}


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_alone_and_by_a_function(ranks: Launcher, stage: int, tmp_path: Path) -> None:
    for found in ranks(2)(loaded_alone, stage, str(tmp_path)):
        assert found["weights"] and found["twice"] and found["called"], found
        assert found["steps"] == (0, 0, 2) and found["state"] == {"mine": 1}
