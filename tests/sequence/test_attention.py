"""Attention over divided sequences, against one process: values, gradients, what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.sequence import SequenceGroup, attention

WIDTH, TOKENS = 8, 32


def inputs(heads: int, key_heads: int, dtype: torch.dtype) -> list[Tensor]:
    chance = torch.Generator().manual_seed(0)
    shapes = [(2, count, TOKENS, WIDTH) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype) for shape in shapes]


def expected(heads: int, key_heads: int, causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients in one process, in float64."""
    q, k, v, weight = (each.double() for each in inputs(heads, key_heads, dtype))
    for each in (q, k, v):
        each.requires_grad_()
    repeat = heads // key_heads
    scores = q @ k.repeat_interleave(repeat, 1).mT * WIDTH**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(repeat, 1)
    (out * weight).sum().backward()
    return [out.detach(), *(each.grad for each in (q, k, v) if each.grad is not None)]


def divided(
    heads: int, key_heads: int, causal: bool, dtype: torch.dtype, ulysses: int
) -> tuple[list[float], dict[str, int]]:
    """Largest differences, over the largest value; elements sent."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    group = SequenceGroup(dist.group.WORLD if world > 1 else None, ulysses)
    q, k, v, weight = (group.split(each, dim=2) for each in inputs(heads, key_heads, dtype))
    for each in (q, k, v):
        each.requires_grad_()
    out = attention(q, k, v, group, causal=causal)
    (out * weight).sum().backward()
    sent = dict(group.counters.elements)
    found = [group.gather(each, dim=2) for each in (out, q.grad, k.grad, v.grad) if each is not None]
    wanted = expected(heads, key_heads, causal, dtype)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)], sent


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("heads, key_heads", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("world, ulysses", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_attention_is_that_of_one_process(
    ranks: Launcher, world: int, ulysses: int, heads: int, key_heads: int, causal: bool
) -> None:
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for found, _ in ranks(world)(divided, heads, key_heads, causal, dtype, ulysses):
            assert max(found) <= bound


def test_messages_have_the_elements_of_the_formulas(ranks: Launcher) -> None:
    activation = 2 * 4 * TOKENS * WIDTH  # of one of q, k, v and the output, of all ranks
    for world in (2, 4):
        for _, sent in ranks(world)(divided, 4, 4, True, torch.float32, world):
            assert sent["all_to_all"] == 2 * 4 * activation * (world - 1) // world // world  # forward and backward
        for _, sent in ranks(world)(divided, 4, 4, True, torch.float32, 1):
            keys_and_values = 2 * activation
            forward, again = (keys_and_values * (world - 1) // world,) * 2
            assert sent["all_to_all"] == forward + again + keys_and_values  # and their gradients come home


def refused() -> list[str]:
    group, found = SequenceGroup(dist.group.WORLD), []
    calls: list[Any] = [
        lambda: SequenceGroup(dist.group.WORLD, 3),
        lambda: group.positions(30 + 1),
        lambda: attention(*(torch.ones(1, count, 4, 8) for count in (3, 3, 3)), group),  # type: ignore[call-arg]
        lambda: attention(*(torch.ones(1, count, 4, 8) for count in (4, 3, 3)), group),  # type: ignore[call-arg]
    ]
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        found.append(str(raised.value))
    return found


def test_what_cannot_be_divided_is_named(ranks: Launcher) -> None:
    for texts in ranks(2)(refused):
        parts = ("ulysses=3", "31 tokens", "ulysses 2 does not divide 3 heads", "4 heads of queries")
        assert all(part in text for part, text in zip(parts, texts, strict=True)), texts


def cut(ulysses: int) -> bool:
    group = SequenceGroup(dist.group.WORLD, ulysses)
    whole = torch.arange(3 * 16 * 2.0).view(3, 16, 2)
    assert torch.equal(group.split(whole)[0, :, 0], 2.0 * group.positions(16))
    return torch.equal(group.gather(group.split(whole)), whole)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_tokens_are_divided_and_come_back(ranks: Launcher, ulysses: int) -> None:
    assert all(ranks(4)(cut, ulysses))
