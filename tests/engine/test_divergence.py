"""Ranks that do not do the same: served below stage 3, an error on all of them where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import Block, loss_of, net, seeded
from tests.engine.trainings import SETTINGS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.checkpoint import CheckpointReader


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Branches(nn.Module):
    """Units of equal size, used in the order that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.own = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = self.stem(x)
        for number in order:
            x = self.experts[number](x)
        if len(order) % 2:
            x = x * self.own
        out: Tensor = self.head(x)
        return out


# --------------------------------------------------------------------------------------------- below stage 3


def branches_by_rank(training: PlainTraining) -> None:
    model = seeded(Branches)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    orders = [[0, 1], [2], [], [3, 2, 1, 0], [1, 1], [0, 2, 3], [3]]
    for step in range(3):
        for micro in range(2):
            order = orders[(3 * step + micro + 2 * training.rank) % len(orders)]
            loss = loss_of(model(training.data(2 * step + micro, 2, 6), order))
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        training.note(*training.gradients(), training.clip(2.0))
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("world, replicate", [(2, 1), (4, 2)])
def test_branches_that_depend_on_the_rank_train_right(ranks: Launcher, world: int, replicate: int) -> None:
    settings = [Setting(s.stage, s.order, {"mesh": {"replicate": replicate}}) for s in SETTINGS if s.stage < 3]
    for wrong in ranks(world)(play, branches_by_rank, settings, tolerance=1e-5):
        assert not wrong


# ------------------------------------------------------------------------------------------------ at stage 3


def different_orders(by_rank: list[list[int]], steps_before: int, config: dict[str, Any]) -> str:
    """Result of a step in which ranks run other units, after some in which they did not: the error, or "right"
    or "wrong" of the gradients."""
    training = ShardedTraining(Setting(3, "per_micro_batch", config))
    model, plain = seeded(Branches), seeded(Branches)
    training.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training.attach(optimizer)
    for _ in range(steps_before):
        loss_of(model(training.data(0, 2, 6), [0, 1, 2, 3])).backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        loss_of(model(training.data(0, 2, 6), by_rank[training.rank])).backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    by_hand = PlainTraining(training.setting)
    by_hand.shard(plain)
    by_hand.backward(loss_of(plain(training.data(0, 2, 6), by_rank[training.rank])))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        actual, expected = training.gradient(p), by_hand.gradient(q)
        if actual is None or expected is None:
            if actual is not expected:
                return "wrong"
        elif not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6):
            return "wrong"
    return "right"


REASON = "ranks ran different modules in this step, or in a different order"


@pytest.mark.parametrize("release", ["reshard_after_forward", "reshard_after_backward", None])
@pytest.mark.parametrize("steps_before, prefetch", [(0, 1), (2, 0)])
def test_other_units_of_equal_size_are_an_error_on_all_ranks(
    ranks: Launcher, steps_before: int, prefetch: int, release: str | None
) -> None:
    """As many gathers and reductions of the same sizes on all ranks: nothing but the order gives them away."""
    config = {"prefetch": prefetch, **({release: False} if release else {})}
    for by_rank in ([[0, 1, 2, 3], [1, 0, 2, 3]], [[0, 1], [1, 0]], [[0], [1]], [[0, 1, 2], [0, 3, 2]]):
        for message in ranks(2)(different_orders, by_rank, steps_before, config):
            assert REASON in message and "stage 2" in message, by_rank


@pytest.mark.parametrize("prefetch", [1, 2])
def test_an_order_of_one_rank_alone_is_never_silently_wrong(ranks: Launcher, prefetch: int) -> None:
    """Units that were fetched ahead arrive in the usual order on all ranks; their gradients are ready in another."""
    for by_rank in ([[0, 1, 2, 3], [1, 0, 2, 3]], [[0, 1, 3, 2], [0, 1, 2, 3]]):
        for outcome in ranks(2)(different_orders, by_rank, 2, {"prefetch": prefetch}):
            assert outcome == "right" or REASON in outcome, by_rank


# ------------------------------------------------------------------------------------------------ checkpoints


def failing_reads(folder: str, stage: int) -> dict[str, Any]:
    """Rank 1 alone cannot read: a weight, then a moment. The second attempt finds everything."""
    training = ShardedTraining(Setting(stage, "per_micro_batch"))
    model = net()
    training.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    training.attach(optimizer)

    def train_one(step: int) -> None:
        loss_of(model(training.data(step, 2, 6))).backward()
        optimizer.step()
        optimizer.zero_grad()

    train_one(0)
    training.own.save(folder)
    saved = training.outcome()
    train_one(1)
    read, found = CheckpointReader._read_checked, {}
    for kind in ("model", "exp_avg"):

        def broken(
            self: CheckpointReader, fd: int, transfer: Any, layout: Any, name: str, *args: Any, kind_: str = kind
        ) -> None:
            if training.rank == 1 and kind_ in layout.path:
                raise OSError(f"the disk is gone at {name}")
            read(self, fd, transfer, layout, name, *args)

        CheckpointReader._read_checked = broken  # type: ignore[method-assign]
        try:
            found[kind] = message_of(lambda: training.own.load(folder))
        finally:
            CheckpointReader._read_checked = read  # type: ignore[method-assign]
        dist.barrier()  # nobody is left in a collective
    training.own.load(folder)
    loaded = training.outcome()
    found["not loaded"] = str([name for name, value in saved.items() if not torch.equal(value, loaded[name])])
    train_one(2)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_read_error_of_one_rank_is_raised_on_all(ranks: Launcher, stage: int, tmp_path: Path) -> None:
    first, second = ranks(2)(failing_reads, str(tmp_path / "saved"), stage)
    for kind in ("model", "exp_avg"):
        assert second[kind].startswith("OSError: the disk is gone at "), kind
        assert first[kind].startswith("RuntimeError: failed on other rank(s): {1: ")
        assert "the disk is gone" in first[kind]
    assert first["not loaded"] == second["not loaded"] == "[]"
