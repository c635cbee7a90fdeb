"""Training on different numbers of batches: what one process does with the batches that there are.

The cases of a test run one after the other in one call of the ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import Launcher
from tests.models import Batch, build, loss_fn, make_batch, param_groups
from tests.reference import (
    MODEL_SEED,
    ORDERS,
    Order,
    Trained,
    _reduce,
    adamw,
    clip,
    flat_state,
    optimizer_state_of,
    unequal,
    weights_of,
)
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.train_state import ModelPart

EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int
    order: Order
    policy: str
    accumulation: int = 1
    clip_norm: float | None = None
    sized: bool = True
    release: bool = True
    """Whether stage 3 releases units after backward."""


class Batches:
    """A rank's batches of an epoch, other ones on every rank and in every epoch."""

    def __init__(self, rank: int, epoch: int, count: int) -> None:
        self.rank, self.epoch, self.count = rank, epoch, count

    def __iter__(self) -> Iterator[Batch]:
        for index in range(self.count):
            yield make_batch("convnet", 100 * self.epoch + 10 * self.rank + index, 2)


class Sized(Batches):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.count


def train(case: Case, counts: list[int]) -> tuple[Trained, list[list[float]], int]:
    """On every rank: what is left, the weights of each epoch, and the length where there is one."""
    rank, seen, length = dist.get_rank(), [], -1
    model = build("convnet", MODEL_SEED)
    more = {"units": {"min_numel": 0}, "gradient_reduction": case.order, "reshard_after_backward": case.release}
    engine = ZeroEngine(model, load_config(stage=case.stage, uneven_batches=case.policy, **more))
    optimizer = adamw(param_groups(model))
    engine.attach(optimizer)
    norms = []
    for epoch in range(EPOCHS):
        weights = []
        batches = engine.join_batches((Sized if case.sized else Batches)(rank, epoch, counts[rank]))
        for index, (batch, weight) in enumerate(batches):
            last = (index + 1) % case.accumulation == 0
            with contextlib.nullcontext() if last else engine.no_sync():
                (loss_fn(model, batch) * weight / case.accumulation).backward()
            if last:
                if case.clip_norm is not None:
                    norms.append(float(engine.clip_grad_norm_(case.clip_norm)))
                optimizer.step()
                optimizer.zero_grad()
            weights.append(weight)
        seen.append(weights)
        length = len(batches) if case.sized else -1
    names = [name for name, _ in model.named_parameters()]
    full = engine.full_state_dict()
    state = {name: dict(entry) for name, entry in engine.full_optimizer_state(optimizer).items() if entry}
    return Trained([], {name: full[name] for name in names}, state, norms), seen, length


def train_all(cases: list[Case], counts: list[int]) -> list[tuple[Trained, list[list[float]], int]]:
    return [train(case, counts) for case in cases]


def weights_by_hand(policy: str, counts: list[int]) -> list[list[float]]:
    """By batch and rank."""
    world, found = len(counts), []
    for index in range(max(counts)):
        active = sum(index < count for count in counts)
        factor = 1.0 if policy == "join" else world / active
        found.append([factor if index < count else 0.0 for count in counts])
    return found


def oracle(case: Case, counts: list[int]) -> Trained:
    """The same for all that differ in where parameters and state are."""
    return _oracle(replace(case, stage=0, sized=True, release=True), tuple(counts))


@functools.cache
def _oracle(case: Case, counts: tuple[int, ...]) -> Trained:
    """One process; a rank that has no batch contributes nothing to a sum that is divided by all ranks."""
    model = build("convnet", MODEL_SEED)
    optimizer = adamw(param_groups(model))
    parameters, norms = list(model.parameters()), []

    def gradients(batch: Batch, factor: float) -> list[Any]:
        model.zero_grad(set_to_none=True)
        (loss_fn(model, batch) * factor / case.accumulation).backward()
        return [None if p.grad is None else p.grad.clone() for p in parameters]

    factors = weights_by_hand(case.policy, list(counts))
    for epoch in range(EPOCHS):
        epochs = [list(Batches(rank, epoch, count)) for rank, count in enumerate(counts)]
        for first in range(0, max(counts), case.accumulation):
            per_rank = [
                [
                    gradients(own[index], factors[index][rank]) if index < len(own) else [None] * len(parameters)
                    for index in range(first, first + case.accumulation)
                ]
                for rank, own in enumerate(epochs)
            ]
            for parameter, gradient in zip(parameters, _reduce(per_rank, case.order), strict=True):
                parameter.grad = gradient
            if case.clip_norm is not None:
                norms.append(clip([p.grad for p in parameters if p.grad is not None], case.clip_norm))
            optimizer.step()
    return Trained([], weights_of(model), optimizer_state_of(model, optimizer), norms)


def check(ranks: Launcher, counts: list[int], cases: list[Case]) -> None:
    by_rank = ranks(len(counts), timeout=120)(train_all, cases, counts)
    for index, case in enumerate(cases):
        expected, factors = oracle(case, counts), weights_by_hand(case.policy, counts)
        for rank, results in enumerate(by_rank):
            found, seen, length = results[index]
            assert seen == [[step[rank] for step in factors]] * EPOCHS, (case, rank)
            assert length == (max(counts) if case.sized else -1)
            assert not unequal(found.weights, expected.weights), (case, rank)
            assert not unequal(flat_state(found.optimizer), flat_state(expected.optimizer)), (case, rank)
            assert found.norms == pytest.approx(expected.norms, rel=1e-6)


def test_two_ranks_equal_the_oracle(ranks: Launcher) -> None:
    """At every stage and order of summation, bit for bit."""
    cases = [Case(stage, order, "join") for stage in range(4) for order in ORDERS]
    cases += [Case(stage, ORDERS[stage % 2], "join_active", 2, 0.6, sized=stage < 2) for stage in range(4)]
    kept = [Case(3, order, "join_active", number, release=False) for number in (2, 4) for order in ORDERS]
    check(ranks, [4, 2], cases + kept)


def test_three_ranks_equal_the_oracle(ranks: Launcher) -> None:
    check(
        ranks,
        [3, 1, 4],
        [Case(1, "per_step", "join_active", 2), Case(3, "per_micro_batch", "join_active"), Case(2, "per_step", "join")],
    )


def test_weights_make_means() -> None:
    for step in weights_by_hand("join_active", [3, 1, 4]):
        assert sum(step) == pytest.approx(3)


# ------------------------------------------------------------------------------------------------------ mistakes


def fails(loader: Any, **options: Any) -> str:
    """Error from going through a loader, and whether the ranks can go on afterwards."""
    config = {"stage": 2, "barrier_seconds": 5.0, **options.pop("config", {})}
    engine = ZeroEngine(nn.Linear(2, 2), config, **options)
    with pytest.raises((ValueError, RuntimeError, KeyError, OSError)) as caught:
        for _ in engine.join_batches(loader):
            pass
    engine.mesh.barrier.wait_for_all("afterwards")
    engine.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def breaks(count: int) -> Iterator[int]:
    yield from range(count)
    raise KeyError("row 7")


class BreaksAtOnce:
    def __iter__(self) -> Iterator[int]:
        raise OSError("no such file")


def mistakes() -> dict[str, str]:
    rank = dist.get_rank()
    join = {"config": {"uneven_batches": "join"}}
    cases: dict[str, Callable[[], str]] = {
        "error": partial(fails, range(3 - rank)),
        "nothing, error": partial(fails, range(2 * rank)),
        "nothing": partial(fails, range(2 * rank), **join),
        "raises": partial(fails, breaks(2) if rank else range(9), **join),
        "raises at once": partial(fails, BreaksAtOnce() if rank else range(9), **join),
        "raises alone in error mode": partial(fails, breaks(2) if rank else range(9)),
        "raises when out": partial(fails, breaks(4) if rank else range(2), **join),
        "copies of one": partial(fails, range(3 - rank), part=ModelPart(dp_groups=[[0], [1]]), **join),
    }
    return {name: case() for name, case in cases.items()}


def test_mistakes_are_the_same_error_on_all_ranks(ranks: Launcher) -> None:
    first, second = ranks(2)(mistakes)
    for name in ("error", "nothing, error", "nothing", "copies of one"):
        assert first[name] == second[name]
        assert first[name].startswith("ValueError: ")
    assert "rank 1 after 2; give all ranks" in first["error"] and "uneven_batches: join" in first["error"]
    assert "rank 0 after 0" in first["nothing, error"]
    assert "rank(s) [0] give no batch at all" in first["nothing"]
    assert "divide the same layers" in first["copies of one"] and "rank 1 after 2" in first["copies of one"]
    for name, text, given in (
        ("raises", "KeyError: 'row 7'", 3),
        ("raises at once", "OSError: no such file", 1),
        ("raises alone in error mode", "KeyError: 'row 7'", 3),
        ("raises when out", "KeyError: 'row 7'", 2),
    ):
        assert second[name] == text
        assert first[name].startswith("RuntimeError: ")
        assert f"rank 1: {text}" in first[name] and f"after {given} batches" in first[name], first[name]


class Dicts(Batches):
    def __iter__(self) -> Iterator[Any]:
        for index in range(self.count):
            yield {"x": [torch.tensor(index)], "y": index}

    def __len__(self) -> int:
        return self.count


def once_again() -> None:
    """Repeated batches are as they were; going through again; leaving early; lengths that only some have."""
    rank = dist.get_rank()
    engine = ZeroEngine(nn.Linear(2, 2), {"stage": 1, "uneven_batches": "join_active"})
    joined = engine.join_batches(Dicts(rank, 0, 2 + 2 * rank))
    assert len(joined) == 4
    for _ in range(2):
        taken = [(batch.pop("x")[0].item(), batch.pop("y"), weight) for batch, weight in joined]
        rest = [(2, 2, 2.0), (3, 3, 2.0)] if rank else [(1, 1, 0.0)] * 2
        assert taken == [(0, 0, 1.0), (1, 1, 1.0), *rest]
    for number, _ in enumerate(joined):
        if number == 2:
            break
    with pytest.raises(TypeError, match=r"rank\(s\) \[1\] have no length"):
        len(engine.join_batches(iter(range(2)) if rank else [1, 2]))
    assert list(engine.join_batches([])) == []
    engine.close()


def test_batches_that_are_changed_and_loops_that_end_early(ranks: Launcher) -> None:
    ranks(2)(once_again)


def test_uneven_batches_one_rank() -> None:
    engine = ZeroEngine(nn.Linear(2, 2), {"stage": 3})
    assert list(engine.join_batches("ab")) == [("a", 1.0), ("b", 1.0)]
    with pytest.raises(KeyError, match="row 7"):
        list(engine.join_batches(breaks(1)))
