"""`nonfinite_gradients`: skipped on all ranks and counted, or an error on all, or taken, as plain torch does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

OFFLOADED = {"offload": {"optimizer": "cpu"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, offloaded": {"stage": 2, **OFFLOADED},
    "3, offloaded": {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "3, optimizer offloaded": {"stage": 3, "offload": {"optimizer": "cpu"}},
    "3, kept": {"stage": 3, "reshard_after_backward": False},
}


class Lines(logging.Handler):
    """Lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def played(config: dict[str, Any], choice: str, dtype: torch.dtype, clip: bool, bad: float) -> list[Any]:
    """Three steps, of which the second has a bad gradient on the last rank; the same without it."""
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    found: list[Any] = []
    for steps in ([0, 1, 2], [0, 2]):
        model: Any = net()
        settings = load_config(units={"min_numel": 0}, nonfinite_gradients=choice, **config)
        engine = ZeroEngine(model, settings, compute_dtype=None if dtype == torch.float32 else dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        engine.attach(optimizer)
        taken = []
        for step in steps:
            x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)
            loss = loss_of(model(x))
            if step == 1:
                loss = loss + (model.head(torch.ones(1, 6, dtype=dtype)) * (bad if last else 1.0)).sum() * 0.1
            loss.backward()
            if clip:
                engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(not engine.sharded(optimizer).skipped)
        found.append((taken, engine.steps.taken, engine.steps.skipped, engine.full_state_dict()))
    return found


CLIPPED_LOW = {"0", "1", "3", "3, offloaded"}
"""Whose step is clipped in bfloat16, and not in float32; that of the others the other way round."""
SKIPS = [
    pytest.param(config, dtype, clip, id=f"{name}-dtype{number}-{'clipped' if clip else ''}")
    for name, config in CONFIGS.items()
    for number, dtype in enumerate((torch.float32, torch.bfloat16))
    for clip in [(name in CLIPPED_LOW) == (dtype == torch.bfloat16)]
]


@pytest.mark.parametrize("config, dtype, clip", SKIPS)
def test_a_step_with_gradients_that_are_not_finite_is_skipped_on_all_ranks(
    ranks: Launcher, config: dict[str, Any], dtype: torch.dtype, clip: bool
) -> None:
    for bad, plain in ranks(2)(played, config, "skip", dtype, clip, float("inf")):
        assert bad[0] == [True, False, True] and bad[1:3] == (2, 1)
        assert plain[0] == [True, True] and plain[1:3] == (2, 0)
        assert all(torch.equal(bad[3][name], value) for name, value in plain[3].items())
        assert all(value.isfinite().all() for value in plain[3].values())


def test_by_default_the_step_is_taken_as_in_plain_torch(ranks: Launcher) -> None:
    for bad, _ in ranks(2)(played, {"stage": 3}, "ignore", torch.float32, False, float("nan")):
        assert bad[0] == [True, True, True] and bad[1:3] == (3, 0)
        assert any(value.isnan().any() for value in bad[3].values())


def raised(clip: bool) -> list[Any]:
    model: Any = net()
    engine = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}, nonfinite_gradients="raise"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    before, found = engine.full_state_dict(), list[Any]()
    for bad in (float("nan"), 1.0):
        (model(torch.ones(2, 6)).sum() * (bad if dist.get_rank() == 0 else 1.0)).backward()
        if clip:
            engine.clip_grad_norm_(1.0)
        try:
            optimizer.step()
            found.append("")
        except FloatingPointError as error:
            found.append(str(error))
            after = engine.full_state_dict()
            found.append(all(torch.equal(before[name], after[name]) for name in before))
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
def test_it_is_an_error_on_all_ranks_that_names_parameters_and_the_next_step_goes_on(
    ranks: Launcher, clip: bool
) -> None:
    first, last = ranks(2)(raised, clip)
    for message, unchanged, following in (first, last):
        assert "step 0: gradients are not finite (" in message and "more, in the parts of ranks 0, 1" in message
        assert ".weight'" in message and "nonfinite_gradients: skip" in message
        assert unchanged and following == ""


def two_optimizers() -> list[Any]:
    model: Any = net()
    engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}, nonfinite_gradients="skip"))
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    rest = torch.optim.SGD([p for name, p in model.named_parameters() if not name.startswith("head")], lr=0.1)
    engine.attach(head, rest)
    lines = Lines()
    logging.getLogger("zero_strategy").addHandler(lines)
    try:
        found: list[Any] = []
        for _ in range(2):
            model.head(torch.ones(2, 6)).sum().mul(float("inf") if dist.get_rank() == 1 else 1.0).backward()
            model.stem(torch.ones(2, 6)).sum().backward()
            engine.clip_grad_norm_(1.0, optimizer=head)
            head.step()
            rest.step()
            head.zero_grad()
            rest.zero_grad()
            found.append([engine.sharded(head).skipped, engine.sharded(rest).skipped])
    finally:
        logging.getLogger("zero_strategy").removeHandler(lines)
    return [found, lines.lines, engine.steps.skipped]


def test_each_optimizer_is_judged_by_its_own_gradients_and_rank_0_logs(ranks: Launcher) -> None:
    first, last = ranks(2)(two_optimizers)
    for found, _, skipped in (first, last):
        assert found == [[True, False], [True, False]] and skipped == 2
    assert len(first[1]) == 2 and not last[1]
    assert "'head.weight'" in first[1][0] and "skipped on all ranks (" in first[1][0]
    assert "2 in a row (" in first[1][1]


def accumulated() -> int:
    """A norm that was taken between two backwards says nothing of the second."""
    model: Any = net()
    engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}, nonfinite_gradients="skip"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach(optimizer)
    model(torch.ones(2, 6)).sum().backward()
    engine.grad_norm()
    model(torch.ones(2, 6)).sum().mul(float("inf") if dist.get_rank() == 1 else 1.0).backward()
    optimizer.step()
    return engine.steps.skipped


def test_a_norm_before_another_backward_says_nothing(ranks: Launcher) -> None:
    assert ranks(2)(accumulated) == [1, 1]
