"""Ranks with divided experts of which one does something else: the others are told within seconds, or train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.experts.model import Model, batch, make
from tests.faulty import die
from tests.launcher import Launcher, RankError
from tests.watchdog.faults import PATIENCE, Told, play
from zero_strategy.engine import ZeroEngine


class Training:
    """A loop of a model with divided experts."""

    def __init__(self, stage: int, watchdog: dict[str, Any]) -> None:
        self.model: Model = make()
        config = {"stage": stage, "mesh": {"expert": 2}, "watchdog": watchdog}
        self.engine, self.rank = ZeroEngine(self.model, config), dist.get_rank()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.engine.attach(self.optimizer)

    def step(self) -> None:
        self.model(batch(self.rank, 0)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def raise_in_an_expert(training: Training) -> None:
    def refuse(module: Any, args: Any) -> None:
        raise FloatingPointError("no number in this expert")

    # After the hook that sends tokens, which was there first.
    training.model.blocks[1].experts.register_forward_pre_hook(refuse)
    training.step()


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArithmeticError("no gradient in this expert")


def raise_in_the_backward_of_an_expert(training: Training) -> None:
    training.model.blocks[1].experts.register_forward_hook(lambda module, args, out: _Refuse.apply(out))
    training.step()


def skip_a_layer(training: Training) -> None:
    training.model.blocks = torch.nn.ModuleList(list(training.model.blocks)[:1])
    training.step()


def play_experts(fault: Callable[[Any], None], stage: int) -> Told:
    return play(fault, stage, make=Training)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("fault", [raise_in_an_expert, raise_in_the_backward_of_an_expert])
def test_a_rank_that_raises_in_an_expert_is_named(ranks: Launcher, fault: Any, stage: int) -> None:
    healthy, faulty = ranks(2)(play_experts, fault, stage)
    assert healthy.kind == "DesyncError" and healthy.seconds < PATIENCE, healthy
    assert "rank 1" in healthy.text, healthy
    assert faulty.kind in ("FloatingPointError", "ArithmeticError")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_skips_a_layer_of_experts_is_named(ranks: Launcher, stage: int) -> None:
    healthy, _ = ranks(2)(play_experts, skip_a_layer, stage)
    assert healthy.kind == "DesyncError" and healthy.seconds < PATIENCE, healthy
    assert "rank 1" in healthy.text, healthy


def play_to_the_end(stage: int) -> None:
    told = play_experts(die, stage)
    raise RuntimeError(f"{told.kind} after {told.seconds:.1f} s: {told.text}")


def test_a_rank_with_experts_that_is_killed_is_named(ranks: Launcher) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, timeout=60, grace=PATIENCE)(play_to_the_end, 1)
    assert caught.value.failures[1].kind == "died"
    assert "DesyncError" in caught.value.failures[0].text, caught.value.failures[0].text
