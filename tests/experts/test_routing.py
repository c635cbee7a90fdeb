"""Tokens on their way to experts of other ranks, and back, against one process: values, gradients, what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.experts import ExpertGroup

WIDTH, EXPERTS = 6, 8


def inputs(rank: int, tokens: int, choices: int, only: range | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, chosen experts and weights of a rank; all of its choices are among `only`."""
    chance = torch.Generator().manual_seed(rank)
    values = torch.randn(tokens, WIDTH, generator=chance, dtype=torch.float64)
    scores = torch.rand(tokens, EXPERTS, generator=chance)
    among = torch.tensor(list(range(EXPERTS) if only is None else only))
    chosen = among[scores[:, : len(among)].argsort(dim=1)[:, :choices]]
    return values, chosen, torch.rand(tokens, choices, generator=chance, dtype=torch.float64)


def weights_of_experts() -> Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def expected(values: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """The sum over a token's choices of what the expert makes of it; a choice that is none adds nothing."""
    out = torch.zeros_like(values)
    for token, (numbers, factors) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for number, factor in zip(numbers, factors, strict=True):
            if number < EXPERTS:
                out[token] = out[token] + factor * (values[token] @ experts[number]).tanh()
    return out


def routed(counts: list[int], choices: int, only: range | None, dropped: bool) -> dict[str, Any]:
    """Largest differences from one process, elements sent and those of the formula."""
    group = ExpertGroup(dist.group.WORLD)
    values, chosen, weights = inputs(group.rank, counts[group.rank], choices, only)
    if dropped:
        chosen[::2, -1] = EXPERTS
    everyone = weights_of_experts()
    held = group.held(EXPERTS)
    leaves = [values.clone().requires_grad_(), weights.clone().requires_grad_()]
    mine = everyone[held.start : held.stop].clone().requires_grad_()
    arrived, route = group.dispatch(leaves[0], chosen, EXPERTS)
    results = torch.zeros_like(arrived)
    for number in range(len(held)):
        rows = (route.experts == number).nonzero().flatten()
        results = results.index_copy(0, rows, (arrived[rows] @ mine[number]).tanh())
    out = group.combine(results, arrived, leaves[1], route)
    (out**2).sum().backward()
    sent = group.counters.elements
    # One process, with the tokens of all ranks.
    wanted = [each.clone().requires_grad_() for each in (values, weights, everyone)]
    alone = expected(wanted[0], chosen, wanted[1], wanted[2])
    ((alone**2).sum() + 0 * sum(each.sum() for each in wanted)).backward()
    total = wanted[2].grad if wanted[2].grad is not None else torch.zeros_like(everyone)
    dist.all_reduce(total)
    found = [(out, alone), (mine.grad, total[held.start : held.stop])]
    found += [(leaf.grad, want.grad) for leaf, want in zip(leaves, wanted[:2], strict=True)]
    nothing = torch.zeros(1, dtype=torch.float64)
    differences = [
        float(((nothing if a is None else a) - (nothing if b is None else b)).abs().max())
        if a is None or a.numel()
        else 0.0
        for a, b in found
    ]
    there = (chosen < EXPERTS) & ((chosen < held.start) | (chosen >= held.stop))
    rows = (route.experts.numel() - route.received[group.rank], int(there.sum()))
    return {
        "differences": differences,
        "all_to_all": sent.get("all_to_all", 0),
        "control": sent.get("control", 0),
        "rows": rows,
        "counts": route.counts.tolist(),
    }


CASES = [
    ([5, 5], 1, None, False), ([7, 3], 2, None, False), ([0, 6], 4, None, False), ([6, 6], 8, None, False),
    ([4, 4], 2, range(4), False), ([0, 0], 2, None, False), ([6, 5], 3, None, True),
    ([5, 0, 9, 2], 2, None, False), ([4, 4, 4, 4], 2, range(6, 8), True),
]  # fmt: skip


@pytest.mark.parametrize("counts, choices, only, dropped", CASES)
def test_routed_tokens_are_those_of_one_process(
    ranks: Launcher, counts: list[int], choices: int, only: range | None, dropped: bool
) -> None:
    """Ragged numbers of tokens, ranks without tokens, experts that nobody chooses, choices that are dropped."""
    for found in ranks(len(counts))(routed, counts, choices, only, dropped):
        assert max(found["differences"]) < 1e-12


@pytest.mark.parametrize("world", [2, 4])
def test_messages_to_experts_have_the_elements_of_the_formula(ranks: Launcher, world: int) -> None:
    """Rows for elsewhere go out, results of rows from elsewhere go back; the same again backward; counts once."""
    results = ranks(world)(routed, [12] * world, 2, None, False)
    for found in results:
        arrived, left = found["rows"]
        assert found["all_to_all"] == 2 * (arrived + left) * WIDTH
        assert found["control"] == (world - 1) * (EXPERTS + 4)
    assert sum(found["all_to_all"] for found in results) == 4 * sum(found["rows"][1] for found in results) * WIDTH
    assert all(sum(found["counts"]) == world * 12 * 2 for found in results)


def balanced() -> int:
    """Elements that a rank sends where each expert is chosen equally often."""
    group = ExpertGroup(dist.group.WORLD)
    tokens, choices = 2 * EXPERTS, 2
    chosen = torch.arange(tokens * choices).view(tokens, choices) % EXPERTS
    arrived, route = group.dispatch(torch.ones(tokens, WIDTH, requires_grad=True), chosen, EXPERTS)
    group.combine(arrived * 2, arrived, torch.ones(tokens, choices), route).sum().backward()
    return group.counters.elements["all_to_all"]


def test_balanced_experts_cost_two_passes_of_all_rows(ranks: Launcher) -> None:
    for world in (2, 4):
        rows = 2 * EXPERTS * 2
        assert ranks(world)(balanced) == [2 * (2 * rows * WIDTH * (world - 1) // world)] * world


def wrong(rank: int) -> str:
    group = ExpertGroup(dist.group.WORLD)
    chosen = torch.zeros(3, 1, dtype=torch.int64)
    if group.rank == rank:
        chosen[1] = -1 if rank else EXPERTS + 1
    try:
        group.dispatch(torch.zeros(3, WIDTH), chosen, EXPERTS)
    except ValueError as error:
        return str(error)
    return ""


def test_a_choice_out_of_range_is_an_error_of_all_ranks(ranks: Launcher) -> None:
    for rank in (0, 1):
        for text in ranks(2)(wrong, rank):
            assert f"ranks [{rank}]" in text and "0 to 7" in text


def test_ranks_have_equal_numbers_of_experts() -> None:
    group = ExpertGroup(None)
    group.size = 3
    with pytest.raises(ValueError, match="8 experts cannot be divided among 3 ranks"):
        group.held(8)
