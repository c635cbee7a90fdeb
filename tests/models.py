"""Small models that hold every kind of parameter the sharding must get right, with data and loss.

Both models tie a weight, freeze a parameter and leave one unused. The transformer also has a zero-size and a
0-d parameter, buffers, and a parameter that is used only by micro-batches that contain a marked row, so that
in one step some ranks touch it and others do not. Nothing in them depends on the size of the batch: the mean
over equal micro-batches is the mean over the whole batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Kind = Literal["transformer", "convnet"]
KINDS: tuple[Kind, ...] = get_args(Kind)

VOCABULARY = 31
LENGTH = 12
MARK = 0
"""A row whose first token is the mark uses the transformer's ``sometimes``."""
CLASSES = 7
IMAGE = (3, 8, 8)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Transformer(nn.Module):
    """A language model with tied embedding and head, and one parameter of every awkward kind."""

    offset: Tensor
    cache: Tensor

    def __init__(self, width: int = 20, heads: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.sometimes = nn.Parameter(torch.randn(width) * 0.1)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, width))
        self.register_buffer("version", torch.tensor(1))
        self.register_buffer("cache", torch.ones(LENGTH), persistent=False)
        # Frozen in the midst of a block: one unit holds trainable and frozen parameters.
        block = self.blocks[1]
        assert isinstance(block, Block)
        block.norm1.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position + self.offset * self.cache[:, None]
        marked = tokens[:, 0] == MARK
        if marked.any():
            x = x + marked[:, None, None] * self.sometimes
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits * self.scale + self.empty.sum()


class ConvNet(nn.Module):
    """GroupNorm instead of BatchNorm, whose statistics would differ between a batch and its parts."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE[0], width, 3, padding=1)
        self.frozen = nn.Conv2d(width, width, 1)
        self.frozen.requires_grad_(False)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.GroupNorm(3, width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.second.weight = self.first.weight
        self.norm2 = nn.GroupNorm(3, width)
        self.unused = nn.Conv2d(width, width, 1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.gelu(self.frozen(self.stem(images)))
        x = x + F.gelu(self.norm1(self.first(x)))
        x = x + F.gelu(self.norm2(self.second(x)))
        x = F.gelu(self.down(x))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


@dataclass(frozen=True)
class Batch:
    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.inputs[rows], self.targets[rows])


def build(kind: Kind, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the weights of ``seed``; the random state of the caller is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer() if kind == "transformer" else ConvNet()
    return model.to(dtype)


def make_batch(kind: Kind, seed: int, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if kind == "transformer":
        tokens = torch.randint(1, VOCABULARY, (size, LENGTH + 1), generator=generator)
        # Whole batches without a mark must occur too: then no rank touches the parameter.
        marks = torch.rand(size, generator=generator) < 0.3
        if seed % 3 != 0:
            tokens[marks, 0] = MARK
        return Batch(tokens[:, :-1], tokens[:, 1:])
    images = torch.randn(size, *IMAGE, generator=generator).to(dtype)
    return Batch(images, torch.randint(0, CLASSES, (size,), generator=generator))


def loss_fn(forward: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Mean cross entropy over the rows (and tokens) of the batch."""
    logits = forward(batch.inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), batch.targets.flatten())


def param_groups(model: nn.Module, lr: float = 1e-3) -> list[dict[str, Any]]:
    """Matrices with weight decay; the rest without, at twice the learning rate. Frozen ones are included."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": lr},
        {"params": others, "weight_decay": 0.0, "lr": 2 * lr},
    ]
