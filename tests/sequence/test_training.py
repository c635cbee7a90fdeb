"""Trainings whose ranks divide sequences, against one process that has whole ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.launcher import Launcher
from zero_strategy import ZeroEngine
from zero_strategy.config import load_config
from zero_strategy.sequence import SequenceGroup, attention

WORDS, WIDTH, TOKENS, STEPS, IGNORED = 20, 16, 16, 6, -100


class Block(nn.Module):
    """Attention with fewer heads of keys than of queries, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, group: SequenceGroup, causal: bool) -> Tensor:
        here = self.norm(x)
        q = self.q(here).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.kv(here).chunk(2, -1))
        mixed = attention(q, k, v, group, causal=causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.mlp(torch.tanh(x))
        return found


class Model(nn.Module):
    """Of tokens and their places. (Adam would make steps of rounding: gradients of key biases are zero.)"""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, places: Tensor, group: SequenceGroup, causal: bool) -> Tensor:
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, group, causal)
        found: Tensor = self.head(x)
        return found


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def batch(step: int, rows: range) -> tuple[Tensor, Tensor]:
    """Tokens, and labels of which each row ignores others."""
    found = []
    for row in rows:
        chance = torch.Generator().manual_seed(1000 * step + row)
        tokens = torch.randint(WORDS, (TOKENS,), generator=chance)
        labels = torch.cat([tokens[1:], tokens.new_tensor([IGNORED])])
        labels[: int(torch.randint(1, TOKENS - 2, (), generator=chance))] = IGNORED
        found.append((tokens, labels))
    tokens, labels = (torch.stack(each) for each in zip(*found, strict=True))
    return tokens, labels


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@cache
def plain(rows: int, causal: bool, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model, alone = made(dtype), SequenceGroup(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        tokens, labels = batch(step, range(rows))
        loss = summed(model(tokens, torch.arange(TOKENS), alone, causal), labels) / int((labels != IGNORED).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def trained(
    stage: int, sequence: int, ulysses: int, causal: bool, dtype: torch.dtype
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights."""
    model = made(dtype)
    mesh = {"sequence": sequence, "ulysses": ulysses}
    engine = ZeroEngine(model, {"stage": stage, "units": {"min_numel": 1}, "mesh": mesh})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine.attach(optimizer)
    group, sampler = engine.sequence, engine.sampler_arguments
    losses: list[float] = []
    for step in range(STEPS):
        row = sampler["rank"]
        tokens, labels = (group.split(each) for each in batch(step, range(row, row + 1)))
        logits = model(tokens, group.positions(TOKENS), group, causal)
        loss = engine.token_mean(summed(logits, labels), int((labels != IGNORED).sum()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        everyone = engine.mesh.control.all_gather_small(loss.detach().view(1))
        losses.append(float(torch.stack(everyone).mean()))
    return losses, engine.full_state_dict()


def apart(losses: list[float], state: dict[str, Tensor], rows: int, causal: bool, dtype: torch.dtype) -> list[float]:
    """Differences from one process's losses and weights."""
    wanted, weights = plain(rows, causal, dtype)
    of_losses = [abs(a - b) / b for a, b in zip(losses, wanted, strict=True)]
    return of_losses + [float((state[n] - w).abs().max() / w.abs().max()) for n, w in weights.items()]


WAYS = [(2, 2, 2), (2, 2, 1), (4, 2, 1), (4, 4, 2)]
CASES = [
    (*way, stage, "causal" if (stage + number) % 2 == 0 else "whole")
    for number, way in enumerate(WAYS)
    for stage in range(4)
]


@pytest.mark.parametrize("world, sequence, ulysses, stage, kind", CASES)
def test_losses_and_weights_are_those_of_one_process(
    ranks: Launcher, world: int, sequence: int, ulysses: int, stage: int, kind: str
) -> None:
    """Every stage with every division; masks in turn, float32 at stage 3."""
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 2e-5))[: 2 if stage == 3 else 1]:
        causal = kind == "causal"
        for losses, state in ranks(world)(trained, stage, sequence, ulysses, causal, dtype):
            differences = apart(losses, state, world // sequence, causal, dtype)
            assert all(each < bound for each in differences), differences  # a NaN is not below it


def replicas() -> None:
    model = made()
    engine = ZeroEngine(model, {"stage": 3, "mesh": {"sequence": 2, "replicate": 2}})
    assert engine.sequence.size == 2 and engine.sampler_arguments == {"num_replicas": 2, "rank": dist.get_rank() // 2}
    assert engine.sequence.rank == dist.get_rank() % 2
    with pytest.raises(ValueError, match="no token of any rank"):
        engine.token_mean(torch.zeros(()), 0)
    engine.close()


def test_groups_of_neighbours(ranks: Launcher) -> None:
    ranks(4)(replicas)


def kept(sequence: int, ulysses: int) -> int:
    """Bytes that autograd keeps of a forward of one sequence, beside parameters."""
    group = SequenceGroup(dist.group.WORLD if sequence > 1 else None, ulysses)
    model, storages = made(), dict[int, int]()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, labels = (group.split(each) for each in batch(0, range(8)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = summed(model(tokens, group.positions(TOKENS), group, True), labels)
    assert loss.requires_grad  # what is kept is alive, so that no storage was counted twice
    return sum(storages.values())


def test_activations_of_a_rank_are_its_part(ranks: Launcher) -> None:
    whole = ranks(1)(kept, 1, 1)[0]
    for world, ulysses in ((2, 1), (2, 2), (4, 1), (4, 2)):  # more than heads of keys have these several times
        for found in ranks(world)(kept, world, ulysses):
            # Ulysses has outputs twice: by heads for its own backward, by tokens for the layer after it.
            outputs = 2 * 8 * TOKENS * WIDTH * 4 if ulysses > 1 else 0
            assert whole / world <= 1.001 * found and found <= 1.03 * (whole + outputs) / world


def refusals() -> None:
    def message(**mesh: Any) -> str:
        with pytest.raises(ValueError) as raised:
            ZeroEngine(made(), {"stage": 3, "mesh": mesh})
        return str(raised.value)

    assert "mesh.sequence is 3" in message(sequence=3) and "accepted: a divisor" in message(sequence=3)
    assert "mesh.ulysses is 3" in message(sequence=2, ulysses=3)
    from tests.integrations.lightning.trainers import Module, loader, trainer, zero

    with pytest.raises(ValueError, match=r"mesh\.sequence is 2 .*no sequence was divided"):
        trainer(zero(2, mesh={"sequence": 2})).fit(Module(), loader())


def test_what_cannot_be_is_refused(ranks: Launcher) -> None:
    ranks(2)(refusals)
    assert load_config(mesh={"sequence": 2}).mesh.sequence == 2
