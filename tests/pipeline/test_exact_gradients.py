"""Gradients of pipelines under ZeRO have the bits of one process that adds micro-batches up in the schedule's order.

On two stages and two copies, in the two documented orders over copies:

    per_step          (sum over copies of (sum over micro-batches, in the stage's order of backwards)) / copies
    per_micro_batch   sum over micro-batches, in that order, of ((sum over copies) / copies)

What a tied weight gets from other ranks comes last, as one more micro-batch.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.launcher import Launcher
from tests.pipeline.test_engine import Case, batches, config_of, head, layers, loss_of, module_of
from zero_strategy.optim.full_state import safe_get_full_grad
from zero_strategy.pipeline import build_table
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.schedules import Kind

COPIES, COUNT = 2, 4
ADDING = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Gradients = dict[str, Tensor]
OWNED, BORROWED = "tied_modules.embed.weight", "the head's use of it"


class Setting(NamedTuple):
    case: Case
    order: str
    replicate: int = 1


def _train(settings: list[Setting]) -> list[tuple[float, Gradients]]:
    found = []
    for case, order, replicate in settings:
        module = module_of(case)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        more = {"gradient_reduction": order, "mesh": {"replicate": replicate}}
        engine = PipelineEngine(module, {**config_of(case), **more})
        engine.attach(optimizer)
        for _ in range(2):  # the second time buckets leave before the end of backward
            optimizer.zero_grad()
            loss = engine.forward_backward(batches(0, COUNT, module.mpu().data_parallel_id))
        gradients = {name: safe_get_full_grad(parameter) for name, parameter in module.named_parameters()}
        assert all(gradient is not None for gradient in gradients.values())
        found.append((float(loss), {name: g.clone() for name, g in gradients.items() if g is not None}))
    return found


@functools.cache
def _alone(tied: bool) -> tuple[float, dict[str, int], list[list[Gradients]]]:
    """The mean loss, the layer of each parameter, and gradients by copy and micro-batch, with each use by itself."""
    torch.manual_seed(0)
    module = module_of(Case(1, 1, 0, tied=tied), rank=0)
    count, last = len(layers(tied)), nn.Embedding.from_pretrained(torch.zeros(1, 1), freeze=False)
    if tied:
        last.weight = nn.Parameter(module.tied_modules["embed"].weight.detach().clone())
    named = [*module.named_parameters(), *([(BORROWED, last.weight)] if tied else [])]
    calls = [*module.forward_funcs[:-1], functools.partial(head, last) if tied else module.forward_funcs[-1]]
    places = {name: count - 1 if name == BORROWED else module.layer_of(name) for name, _ in named}
    losses, found = [], []
    for copy in range(COPIES):
        of_copy = []
        for value, labels in batches(0, COUNT, copy):
            for call in calls:
                value = call(value)
            loss = loss_of(value, labels)
            losses.append(float(loss.detach()))
            of_copy.append(dict(zip((name for name, _ in named), _gradients(loss / COUNT, named), strict=True)))
        found.append(of_copy)
    return sum(losses) / len(losses), places, found


def _gradients(loss: Tensor, named: list[tuple[str, nn.Parameter]]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [parameter for _, parameter in named])


def _expected(case: Case, order: str, parts: list[int]) -> tuple[float, Gradients]:
    """By the formulas; `parts` are the bounds of the stages in the layers."""
    loss, places, by_copy = _alone(case.tied)
    table = build_table(case.schedule, case.stages, COUNT, case.chunks)
    stages = {
        name: next(stage for stage, stop in enumerate(parts[1:]) if layer < stop) for name, layer in places.items()
    }
    ranks = {name: table.placement.rank_of(stage) for name, stage in stages.items()}
    totals = {}
    for name, rank in ranks.items():
        if name == BORROWED and rank == ranks[OWNED]:
            continue  # one parameter there: its uses' gradients come as their backwards do
        uses = {stages[name]: name}
        if name == OWNED and ranks[BORROWED] == rank:
            uses[stages[BORROWED]] = BORROWED
        terms = [
            (action.micro_batch, uses[stage])
            for action in table.rows[rank]
            if (stage := table.placement.stage_of(rank, action.chunk)) in uses and action.kind in ADDING
        ]
        if order == "per_step" or name == BORROWED:  # replicas send what they have added up
            totals[name] = _mean([_sum([copy[number][use] for number, use in terms]) for copy in by_copy])
        else:
            totals[name] = _sum([_mean([copy[number][use] for copy in by_copy]) for number, use in terms])
    if BORROWED in totals:
        totals[OWNED] = totals[OWNED] + totals.pop(BORROWED)
    return loss, totals


def _sum(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, tensors)


def _mean(tensors: list[Tensor]) -> Tensor:
    return _sum(tensors) * (1 / len(tensors))


CHUNKS = {"1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zbv": 2}
PER_STEP, PER_MICRO_BATCH = "per_step", "per_micro_batch"
ROWS = {
    True: [
        (0, "1f1b", PER_STEP), (1, "zbv", PER_STEP), (1, "zb_h1", PER_STEP), (2, "1f1b", PER_MICRO_BATCH),
        (2, "interleaved_1f1b", PER_MICRO_BATCH), (2, "zbv", PER_MICRO_BATCH), (3, "1f1b", PER_MICRO_BATCH),
        (3, "zb_h1", PER_MICRO_BATCH), (3, "zbv", PER_MICRO_BATCH), (3, "1f1b", PER_STEP),
    ],
    False: [
        (0, "zb_h1", PER_STEP), (1, "1f1b", PER_STEP), (2, "zb_h1", PER_MICRO_BATCH), (3, "1f1b", PER_MICRO_BATCH),
    ],
}  # fmt: skip
"""By ties: ZeRO stage, schedule and order."""


@pytest.mark.parametrize("tied", [True, False])
def test_two_stages_of_two_copies(ranks: Launcher, tied: bool) -> None:
    settings = [
        Setting(Case(2, COPIES, zero, schedule, CHUNKS[schedule], COUNT, tied), order)
        for zero, schedule, order in ROWS[tied]
    ]
    settings += [
        Setting(Case(2, COPIES, 3, "1f1b", 1, COUNT, tied, "per_step"), PER_MICRO_BATCH),
        Setting(Case(2, COPIES, 2, "zb_h1", 1, COUNT, tied), PER_MICRO_BATCH, COPIES),
    ]
    by_rank = ranks(2 * COPIES, timeout=180)(_train, settings)
    for number, (case, order, _) in enumerate(settings):
        parts = module_of(case, rank=0).parts
        loss, gradients = _expected(case, order, parts)
        seen = set()
        for rank, results in enumerate(by_rank):
            told, found = results[number]
            assert told == pytest.approx(loss, abs=1e-6), case
            for name, gradient in found.items():
                assert torch.equal(gradient, gradients[name]), (rank, case, order, name)
            seen |= found.keys()
        assert seen == gradients.keys(), case
