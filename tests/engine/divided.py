"""A small GPT whose layers are divided among tensor-parallel ranks, and the same trained by one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.nets import seeded

VOCABULARY, LENGTH, WIDTH, HEADS = 13, 6, 8, 4
"""13 rows do not divide evenly."""
MICRO_BATCHES, STEPS, CLIP = 2, 3, 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Tied embedding, a frozen bias, and a position table that no plan divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def gpt() -> Gpt:
    model = seeded(Gpt)
    assert isinstance(model, Gpt)
    return model


def parallelize(model: Gpt, mesh: Any, *, sequence: bool = False) -> Gpt:
    """Divide the layers, as torch's users do; with `sequence` norms and residuals are divided along the tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "blocks.*.attention.q": ColwiseParallel(),
        "blocks.*.attention.k": ColwiseParallel(),
        "blocks.*.attention.v": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=rows),
        "blocks.*.up": ColwiseParallel(input_layouts=rows),
        "blocks.*.down": RowwiseParallel(output_layouts=rows),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    if sequence:
        into = {"input_layouts": (Replicate(),), "desired_input_layouts": (rows,), "use_local_output": True}
        plan |= {
            "blocks.0": PrepareModuleInput(**into),
            "blocks.*.norm1": SequenceParallel(),
            "blocks.*.norm2": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),)),
            "norm": SequenceParallel(),
        }
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embed.weight  # each of them was replaced
    return model


def tokens(copy_: int, step: int, micro: int) -> Tensor:
    """A micro-batch of one data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * copy_ + 10 * step + micro)
    return torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Next-token loss of a micro-batch, as its share of the step."""
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / MICRO_BATCHES


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Its epsilon is far above the rounding of sums, which it would amplify."""
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4, weight_decay=0.1)


def train_plain(copies: int) -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """One process: by step the losses of each copy, the norms, and the weights in the end."""
    model = gpt()
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        replicas = [copy.deepcopy(model) for _ in range(copies)]
        losses.append([])
        for number, replica in enumerate(replicas):
            total = 0.0
            for micro in range(MICRO_BATCHES):
                loss = loss_of(replica, tokens(number, step, micro))
                loss.backward()
                total += float(loss.detach())
            losses[-1].append(total)
        for parameter, *theirs in zip(model.parameters(), *(each.parameters() for each in replicas)):
            if parameter.requires_grad:
                parameter.grad = sum(each.grad for each in theirs) / copies  # type: ignore[misc,operator]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: tensor.detach() for name, tensor in model.state_dict().items()}
