"""Evaluation: without gradients, on uneven data, without an optimizer; and memory that does not grow."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.live import live_bytes, only_new
from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher

STAGE_3 = Setting(3, "per_micro_batch")


def evaluation_between_steps(training: PlainTraining) -> None:
    """Forwards without gradients do not disturb the training that follows."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(4):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model.eval()
                training.note(model(training.data(20 + step, 3, 6)).clone())
                model.train()
        loss = loss_of(model(training.data(step, 2, 6)))
        with torch.inference_mode():  # between forward and backward
            training.note(model(training.data(30 + step, 3, 6)).clone())
        training.backward(loss)
        training.step()
        training.zero_grad()


def test_training_after_no_grad_and_inference_mode(ranks: Launcher) -> None:
    settings = [*DEFAULTS, Setting(3, "per_micro_batch", {"prefetch": 2}), KEPT]
    for wrong in ranks(2)(play, evaluation_between_steps, settings):
        assert not wrong


def test_inference_mode_before_anything_else(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, inference_first):
        assert not wrong


def inference_first(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    with torch.inference_mode():
        training.note(model(training.data(0, 2, 6)).clone())
    training.attach(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False))
    for step in range(2):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        with torch.inference_mode():
            training.note(model(training.data(step, 2, 6)).clone())
        training.step()
        training.zero_grad()


# -------------------------------------------------------------------------------------- only evaluated, uneven


class Several(Net):
    """Evaluation steps of several kinds."""

    order = 0

    def kind(self, number: int, x: Tensor) -> Tensor:
        if number == 0:
            return self(x)
        if number == 1:  # two forwards per step
            return self(x) + self(2 * x)
        if number == 2:  # the root's forward is not called
            for block in self.blocks:
                x = block(x)
            return self.head(x)
        # Another order in every step, which nobody can know from the last one.
        for place in range(3):
            x = self.blocks[(place * int(x.shape[0]) + self.order) % 3](x)
        self.order += 1
        return self.head(x)


def uneven_evaluation(kind: int, batches: list[int], modes: bool) -> list[tuple[int, bool]]:
    """Rank r evaluates `batches[r]` batches, twice over; returns which outputs were right."""
    training = ShardedTraining(STAGE_3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, plain = Several(), Several()
    plain.load_state_dict(model.state_dict())
    training.shard(model)
    engine, found = training.own, []
    for epoch in range(2):
        mode: AbstractContextManager[Any] = torch.inference_mode() if modes and epoch else torch.no_grad()
        with mode:
            for number in range(batches[training.rank]):
                model.order = plain.order = number
                x = training.data(10 * epoch + number, 2, 6)
                with engine.shared_step():
                    output = model.kind(kind, x)
                found.append((number, torch.equal(output, plain.kind(kind, x))))
            engine.drain()
    # Everybody is in step again.
    found.append((-1, torch.equal(model(training.data(0, 2, 6)), plain(training.data(0, 2, 6)))))
    return found


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_uneven_evaluation_of_a_model_without_an_optimizer(ranks: Launcher, kind: int) -> None:
    for batches in ([1, 3], [4, 2]):
        for found in ranks(2)(uneven_evaluation, kind, batches, True):
            assert all(right for _, right in found), found


def test_uneven_evaluation_on_three_ranks(ranks: Launcher) -> None:
    for found in ranks(3)(uneven_evaluation, 0, [3, 1, 2], False):
        assert all(right for _, right in found), found


def messages_of_evaluation(kind: int, batches: list[int]) -> tuple[int, int]:
    """Messages of the host in an evaluation, and how many units the model has."""
    training = ShardedTraining(STAGE_3)
    model = Several()
    training.shard(model)
    engine = training.own
    before = engine.counters.calls["control"]
    with torch.no_grad():
        for number in range(batches[training.rank]):
            model.order = number
            with engine.shared_step():
                model.kind(kind, training.data(number, 2, 6))
        engine.drain()
    return engine.counters.calls["control"] - before, len(engine.model.units)


@pytest.mark.parametrize(("kind", "first"), [(0, 1), (2, 1), (0, 0)])
def test_a_batch_is_announced_and_not_each_unit(ranks: Launcher, kind: int, first: int) -> None:
    """One message before it, and one after it where some ranks have none.

    Units are told in the first step alone: all of them where no rank has seen a step, else those that were there then.
    """
    batches = [first, 6]
    for messages, units in ranks(2)(messages_of_evaluation, kind, batches):
        told = messages - first - 2 * (6 - first) - 1
        assert units > 3 and told == (units if first == 0 else kind == 2)


@pytest.mark.parametrize("batches", [[0, 2], [2, 0], [0, 0]])
def test_a_rank_without_any_batch(ranks: Launcher, batches: list[int]) -> None:
    for kind in (0, 3):
        for found in ranks(2)(uneven_evaluation, kind, batches, False):
            assert all(right for _, right in found), found


# ------------------------------------------------------------------------------------------------ live bytes


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def bytes_over_time(stage: int) -> dict[str, Any]:
    """Live bytes after every step, while evaluating, and gathered elements at rest."""
    with only_new():
        return new_bytes_over_time(stage)


def new_bytes_over_time(stage: int) -> dict[str, Any]:
    training = ShardedTraining(Setting(stage, "per_step" if stage < 2 else "per_micro_batch"))
    model = Wide()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False))
    steps, evaluations, gathered = [], [], []
    for step in range(5):
        for micro in range(2):
            training.backward(model(training.data(step, 2, 32)).square().mean(), sync=micro == 1)
        training.clip(1.0)
        training.step()
        training.zero_grad()
        steps.append(live_bytes())
        with torch.no_grad():
            model(training.data(step, 2, 32))
        evaluations.append(live_bytes())
        whole = [
            unit for unit in training.own.model.units if any(b.flat.untyped_storage().nbytes() for b in unit.buckets)
        ]
        gathered.append([unit.name for unit in whole])
    trace = 0 if training.own.model.unsharder is None else len(training.own.model.unsharder.trace)
    return {"steps": steps, "evaluations": evaluations, "gathered": gathered, "trace": trace}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_bytes_are_flat(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(bytes_over_time, stage):
        assert len(set(found["steps"][2:])) == 1, found["steps"]
        assert len(set(found["evaluations"][2:])) == 1, found["evaluations"]
        if stage == 3:
            assert found["gathered"] == [[]] * 5
            assert found["trace"] <= 8


def traces_of_direct_calls() -> tuple[int, int]:
    """Lengths of what is remembered about the order of units, when nobody calls the root."""
    training = ShardedTraining(STAGE_3)
    model = net()
    training.shard(model)
    unsharder = training.own.model.unsharder
    assert unsharder is not None
    lengths = []
    for _ in range(2):
        for _ in range(20):
            loss_of(model.blocks[0](training.data(0, 2, 6))).backward()
            model.zero_grad()
        lengths.append(len(unsharder.trace))
    return lengths[0], lengths[1]


def test_nothing_piles_up_when_parts_are_called_directly(ranks: Launcher) -> None:
    for first, second in ranks(2)(traces_of_direct_calls):
        assert max(first, second) <= 16 * 4
