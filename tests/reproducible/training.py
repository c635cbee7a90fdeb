"""A small training with dropout in slots, by engines of any kind, and by one plain process with the same sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.muon import MuonAdamW, split_matrices
from zero_strategy.reproducible.slot_tree import children
from zero_strategy.reproducible.streams import seed_generators, seed_of

VOCABULARY, LENGTH, WIDTH, ROWS = 40, 8, 48, 2
SEED = 11


class Block(nn.Module):
    """Attention, an MLP and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.mlp(x))


class Language(nn.Module):
    """A language model with tied embedding; `sometimes` is used by the batches that have token 0."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        if bool((tokens == 0).any()):
            x = x + self.sometimes(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, slot: int) -> Tensor:
    """The samples of a slot."""
    generator = torch.Generator().manual_seed(1000 * step + slot)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def build(kind: type[nn.Module] = Language) -> nn.Module:
    torch.manual_seed(5)
    return kind()


@dataclass
class Case:
    """One training.

    Attributes:
        config: Of the engine, beside `reproducible`.
        slots: Of a step.
        steps: Optimizer steps.
        clip: Bound of the norm.
        dtype: Of the computation.
        optimizer: Its name.
    """

    config: dict[str, Any]
    slots: int = 12
    steps: int = 3
    clip: float | None = 0.5
    dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """Results of a training.

    Attributes:
        digest: Of weights and states.
        losses: Of all slots, by step.
        norms: By step.
        gradients: Of the first step, where they were asked for.
    """

    digest: str
    losses: list[dict[int, float]]
    norms: list[float]
    gradients: dict[str, Tensor]


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "MuonAdamW":
        return MuonAdamW(split_matrices(model), muon={"lr": 0.02}, adamw={"lr": 0.01})
    kind = getattr(torch.optim, case.optimizer)
    return kind(model.parameters(), lr=1e-2, **case.settings)


def train(case: Case, *, gradients: bool = False) -> Result:
    """Train with an engine, on the ranks there are."""
    model = build()
    config = {**case.config, "reproducible": {"slots": case.slots, "seed": SEED}}
    with ZeroEngine(model, config, compute_dtype=case.dtype) as engine:
        optimizer = optimizer_of(case, model)
        engine.attach(optimizer)
        losses: list[dict[int, float]] = []
        norms: list[float] = []
        seen: dict[str, Tensor] = {}
        for step in range(case.steps):
            own = {}
            for _ in range(engine.slots.count):
                with engine.micro_batch() as slot:
                    loss = model(tokens_of(step, slot))
                    loss.backward()
                    own[slot] = float(loss.detach())
            everyone = engine.mesh.control.all_gather_objects(own)
            losses.append(dict(sorted((slot, value) for one in everyone for slot, value in one.items())))
            if gradients and step == 0:
                seen = {name: torch.clone(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            if case.clip is not None:
                norms.append(float(engine.clip_grad_norm_(case.clip)))
            optimizer.step()
            optimizer.zero_grad()
        return Result(digest_of(engine), losses, norms, seen)


def digest_of(engine: ZeroEngine) -> str:
    """SHA-256 of the weights and all states, by name."""
    found = hashlib.sha256()
    for name, value in engine.full_state_dict().items():
        found.update(name.encode() + bytes(value.contiguous().view(torch.uint8).numpy()))
    for sharded in engine.optimizers:
        states = engine.full_optimizer_state(sharded.optimizer)
        for name in sorted(states):
            for key in sorted(states[name]):
                value = torch.as_tensor(states[name][key])
                found.update(f"{name} {key}".encode() + bytes(value.reshape(-1).contiguous().view(torch.uint8).numpy()))
    return found.hexdigest()


def plain_gradients(case: Case, step: int = 0) -> tuple[dict[str, Tensor], dict[int, float]]:
    """Mean gradients of a step at the first weights and the losses of its slots, by plain torch in the tree's order."""
    model = build()
    found: list[dict[str, Tensor]] = []
    losses: dict[int, float] = {}
    for slot in range(case.slots):
        seed_generators(seed_of(SEED, step, slot))
        model.zero_grad()
        loss = model(tokens_of(step, slot))
        loss.backward()
        losses[slot] = float(loss.detach())
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return {name: value for name, value in _means(found, case.slots)}, losses


def _means(found: list[dict[str, Tensor]], slots: int) -> Iterator[tuple[str, Tensor]]:
    shapes = {name: value for one in found for name, value in one.items()}
    for name, like in shapes.items():
        leaves = [one.get(name, torch.zeros_like(like)) for one in found]
        yield name, _sum(leaves, (0, slots)) * (1.0 / slots)


def _sum(leaves: list[Tensor], node: tuple[int, int]) -> Tensor:
    if node[1] - node[0] == 1:
        return leaves[node[0]]
    left, right = children(node)
    return _sum(leaves, left) + _sum(leaves, right)
