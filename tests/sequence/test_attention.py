"""Attention over divided sequences, against one process: values, gradients, what is sent."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.launcher import Launcher
from zero_strategy.sequence import SequenceGroup, Visible, attention
from zero_strategy.sequence.attention import Shape, pieces

WIDTH, TOKENS = 8, 32


def inputs(heads: int, key_heads: int, dtype: torch.dtype, width: int = WIDTH, device: str = "cpu") -> list[Tensor]:
    chance = torch.Generator().manual_seed(0)
    shapes = [(2, count, TOKENS, width) for count in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=chance, dtype=torch.float64).to(device, dtype) for shape in shapes]


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


def test_divided_attention_what_cannot_be_divided_is_named(ranks: Launcher) -> None:
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


# ---- who sees whom ----

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 18, [0] * 20 + [1] * 12])
PADDING = torch.tensor([[1] * 27 + [0] * 5, [0] * 3 + [1] * 29])
KINDS: dict[str, tuple[Tensor | None, int | None]] = {
    "causal": (None, None),
    "packed": (DOCUMENTS, None),
    "padded": (PADDING, None),
    "window": (None, 7),
    "packed window": (DOCUMENTS, 4),
}


def seen(kind: str) -> tuple[Tensor, Visible | None, int | None]:
    """The mask, (batch, tokens, tokens), and the arguments that say the same."""
    numbers, window = KINDS[kind]
    mask = torch.ones(2, TOKENS, TOKENS, dtype=torch.bool).tril()
    visible = None
    if window is not None:
        mask = mask.triu(1 - window)
    if numbers is DOCUMENTS:
        mask, visible = mask & (numbers[:, :, None] == numbers[:, None]), Visible.documents(numbers)
    elif numbers is not None:
        mask, visible = mask & (numbers[:, None] != 0), Visible.padding(numbers)
    return mask, visible, window


def masked(kind: str, ulysses: int, dtype: torch.dtype, width: int = WIDTH, device: str = "cpu") -> list[float]:
    """Largest differences from float64 in one process, over the largest value: output, gradients of q, k and v."""
    group = SequenceGroup(dist.group.WORLD if dist.is_initialized() else None, ulysses)
    mask, visible, window = seen(kind)
    mask = mask.to(device)
    q, k, v, weight = (each.double() for each in inputs(8, 2, dtype, width, device))
    weight = weight * mask.any(-1)[:, None, :, None]  # a token that sees none counts for nothing
    for each in (q, k, v):
        each.requires_grad_()
    scores = q @ k.repeat_interleave(4, 1).mT * width**-0.5
    out = scores.masked_fill(~mask[:, None], -1e30).softmax(-1) @ v.repeat_interleave(4, 1)
    (out * weight).sum().backward()
    wanted = [out.detach() * mask.any(-1)[:, None, :, None], q.grad, k.grad, v.grad]

    q, k, v, weight = (group.split(each.detach().to(dtype), dim=2) for each in (q, k, v, weight))
    for each in (q, k, v):
        each.requires_grad_()
    out = attention(q, k, v, group, causal=True, visible=visible, window=window)
    (out * weight).sum().backward()
    found = [group.gather(each, dim=2) for each in (out, q.grad, k.grad, v.grad) if each is not None]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True) if b is not None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, ulysses", [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_padding_packed_samples_and_windows(ranks: Launcher, world: int, ulysses: int, kind: str) -> None:
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        for found in ranks(world)(masked, kind, ulysses, dtype):
            assert len(found) == 4 and max(found) <= bound


def test_pieces_cover_what_a_mask_has_once() -> None:
    chance = random.Random(0)
    for _ in range(400):
        tokens, causal = chance.choice([8, 16, 24]), chance.random() < 0.7
        window = chance.choice([None, 1, 2, 3, 5, 30]) if causal else None
        numbers = torch.tensor([[chance.random() < 0.3 for _ in range(tokens)] for _ in range(2)]).long()
        kind, chunks = chance.choice(["none", "documents", "padding"]), chance.choice([1, 2, 4])
        mask, visible = torch.ones(2, tokens, tokens, dtype=torch.bool), None
        if kind == "documents":
            ids = numbers.cumsum(1)
            mask, visible = ids[:, :, None] == ids[:, None], Visible.documents(ids)
        elif kind == "padding":
            mask, visible = (numbers[:, None] != 0).expand_as(mask), Visible.padding(numbers)
        mask = mask.tril() if causal else mask
        mask = mask if window is None else mask.triu(1 - window)
        cuts = [(at * tokens // chunks, (at + 1) * tokens // chunks) for at in range(chunks)]
        rows, columns = (sorted(chance.sample(cuts, chance.randint(1, chunks))) for _ in range(2))
        here, there = (torch.cat([torch.arange(*span) for span in spans]) for spans in (rows, columns))
        found = torch.zeros(2, len(here), len(there), dtype=torch.int)
        for piece in pieces(rows, columns, visible, causal, window):
            part = torch.ones_like(found[piece.batch, piece.rows, piece.columns])
            assert piece.shape is Shape.FULL or part.shape[1] == part.shape[2]
            part = part if piece.shape is Shape.FULL else part.tril() if piece.shape is Shape.CAUSAL else part.triu()
            found[piece.batch, piece.rows, piece.columns] += part
        assert torch.equal(found, mask[:, here][:, :, there].int())
