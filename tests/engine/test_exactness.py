"""The engine trains what one process trains: bit for bit in its documented order, closely on the whole batch.

The cases of a test run one after the other in one call of the ranks, and the oracles are computed once.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.engine.training import Case, train_cases
from tests.launcher import Launcher
from tests.models import KINDS, Kind
from tests.reference import (
    ORDERS,
    OptimizerFactory,
    Order,
    Trained,
    adamw_foreach,
    errors,
    flat_state,
    merge_ranks,
    sgd_momentum,
    train_plain,
    train_rank_separated,
    unequal,
)

STEPS = 6
"""Two of them without a marked row (`make_batch`)."""
STAGES = (0, 1, 2, 3)
CLIP_NORMS: dict[Kind, dict[int, float]] = {"transformer": {1: 1.45, 2: 1.0, 3: 1.0}, "convnet": {1: 1.5, 3: 0.6}}
"""By kind and accumulation: on two ranks, the gradient norms lie on both sides of it within STEPS."""


def grid(kind: Kind) -> list[tuple[int, float | None]]:
    return [(accumulation, norm) for accumulation in (1, 3) for norm in (None, CLIP_NORMS[kind][accumulation])]


@functools.cache
def oracle(case: Case, world: int) -> Trained:
    assert case.stage is None and case.reduction is not None
    return train_rank_separated(
        case.kind, world, case.accumulation, STEPS, case.clip_norm, case.reduction, case.optimizer
    )


def differences(results: list[Trained], expected: Trained) -> dict[str, object]:
    """Differences from the oracle, on any rank; empty if there are none."""
    found: dict[str, object] = {}
    losses = merge_ranks(results).losses
    if losses != expected.losses:
        step = next(i for i, (a, e) in enumerate(zip(losses, expected.losses, strict=True)) if a != e)
        found["losses"] = f"from step {step} on: {losses[step]}, expected {expected.losses[step]}"
    for rank, result in enumerate(results):
        parts = {
            "weights": unequal(result.weights, expected.weights),
            "optimizer": unequal(flat_state(result.optimizer), flat_state(expected.optimizer)),
        }
        found |= {f"{part} of rank {rank}": value for part, value in parts.items() if value}
        if result.norms != pytest.approx(expected.norms, rel=1e-6):
            found[f"norms of rank {rank}"] = f"{result.norms}, expected {expected.norms}"
    return found


def check_exact(ranks: Launcher, world: int, cases: list[Case]) -> None:
    by_rank = ranks(world, timeout=180)(train_cases, cases, STEPS)
    wrong = {}
    for index, case in enumerate(cases):
        expected = oracle(replace(case, stage=None, reduction=case.order), world)
        found = differences([results[index] for results in by_rank], expected)
        if found:
            key = f"{case.kind}, stage {case.stage}, accumulation {case.accumulation}, clip {case.clip_norm}"
            wrong[key] = found
    assert not wrong


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_and_order_equals_the_oracle(ranks: Launcher, kind: Kind, stage: int, order: Order) -> None:
    """So all stages equal each other, for either setting of ``gradient_reduction``.

    Each is with both accumulations, and clips with one of them. By turns: any three of kind, stage, order, accumulation
    and clipping meet in all their values.
    """
    turn = (KINDS.index(kind) + stage + ORDERS.index(order)) % 2
    cases = [(1, None), (3, CLIP_NORMS[kind][3])] if turn else [(1, CLIP_NORMS[kind][1]), (3, None)]
    check_exact(ranks, 2, [Case(kind, accumulation, clip, stage, order) for accumulation, clip in cases])


@pytest.mark.parametrize("stage", STAGES)
def test_the_default_order_of_a_stage(ranks: Launcher, stage: int) -> None:
    check_exact(ranks, 2, [Case("transformer", 3, CLIP_NORMS["transformer"][3], stage)])


@pytest.mark.parametrize("optimizer", [adamw_foreach, sgd_momentum])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_optimizers_equal_the_oracle(ranks: Launcher, stage: int, optimizer: OptimizerFactory) -> None:
    check_exact(ranks, 2, [Case(kind, 3, CLIP_NORMS[kind][3], stage, optimizer=optimizer) for kind in KINDS])


@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_world_sizes_equal_the_oracle(ranks: Launcher, world: int) -> None:
    """Three ranks divide unevenly; on four, a stage that gathers parameters and one that does not."""
    stages = STAGES if world < 4 else (1, 3)
    check_exact(ranks, world, [Case("transformer", 2, CLIP_NORMS["transformer"][2], stage) for stage in stages])


@pytest.mark.parametrize(("kind", "world"), [("transformer", 2), ("convnet", 2), ("transformer", 4)])
def test_no_further_from_the_whole_batch_than_ddp(ranks: Launcher, kind: Kind, world: int) -> None:
    """A whole batch and its parts differ by rounding, so DDP's own error is the measure.

    The oracles stand for the engine, whose bits they have at every stage and in either order, as tested above. A tensor
    whose elements nearly all round alike under DDP has an error of almost zero there; below one float32 epsilon the
    comparison says nothing.
    """
    epsilon = torch.finfo(torch.float32).eps
    cases = [Case(kind, accumulation, clip) for accumulation, clip in grid(kind)]
    by_rank = ranks(world, timeout=180)(train_cases, cases, STEPS)
    for index, case in enumerate(cases):
        plain = train_plain(kind, world, case.accumulation, STEPS, case.clip_norm)
        ddp = merge_ranks([results[index] for results in by_rank])
        ddp_errors = errors(ddp.weights, plain.weights)
        for trained in (ddp, *(oracle(replace(case, reduction=order), world) for order in ORDERS)):
            for actual, expected in zip(trained.mean_losses(), plain.mean_losses(), strict=True):
                assert abs(actual - expected) <= 1e-6, case
            our_errors = errors(trained.weights, plain.weights)
            worse = {n: e for n, e in our_errors.items() if e > max(2 * ddp_errors[n], epsilon)}
            assert not worse, case


@pytest.mark.parametrize("kind", KINDS)
def test_the_clipping_cases_clip_some_steps_and_not_others(kind: Kind) -> None:
    for accumulation, clip_norm in CLIP_NORMS[kind].items():
        norms = train_rank_separated(kind, 2, accumulation, STEPS, clip_norm, "per_step").norms
        assert min(norms) < clip_norm < max(norms), norms
