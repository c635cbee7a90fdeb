"""The model that the step benchmark trains: a plain GPT with tied embedding and head, in several sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTSize:
    width: int
    depth: int
    heads: int
    vocabulary: int


SIZES = {
    "transformer-tiny": GPTSize(width=64, depth=2, heads=2, vocabulary=256),
    "transformer-small": GPTSize(width=384, depth=8, heads=6, vocabulary=4096),
    "transformer-medium": GPTSize(width=512, depth=8, heads=8, vocabulary=8192),
    "transformer-34m": GPTSize(width=512, depth=8, heads=8, vocabulary=16384),
    "transformer-46m": GPTSize(width=512, depth=12, heads=8, vocabulary=16384),
    "transformer-large": GPTSize(width=512, depth=16, heads=8, vocabulary=32768),
    "transformer-98m": GPTSize(width=768, depth=12, heads=12, vocabulary=16384),
    "transformer-1b": GPTSize(width=2048, depth=20, heads=16, vocabulary=32768),
}
"""0.1, 16, 30, 34, 46, 67, 98 and 1080 million parameters."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    def __init__(self, size: GPTSize, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(name: str, length: int, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(SIZES[name], length)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
