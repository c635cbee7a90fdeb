"""Models for the command line."""

from __future__ import annotations

import torch
from torch import nn


class Stack(nn.Module):
    """Equal layers."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))


class LooksAtValues(nn.Module):
    """Reads a number out of a tensor while it is built, which the meta device has not."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.layers = nn.ModuleList(nn.Linear(100 + int(rate), 100) for rate in rates)


ready = Stack()
number = 3


def returns_nothing() -> None:
    """A factory that forgot its return."""


def gpt(hidden: int, layers: int, vocabulary: int) -> nn.Module:
    """The module that the shapes of plain numbers stand for."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(hidden)
            self.attention = nn.ModuleDict({"qkv": nn.Linear(hidden, 3 * hidden), "out": nn.Linear(hidden, hidden)})
            self.norm2 = nn.LayerNorm(hidden)
            self.mlp = nn.ModuleDict({"up": nn.Linear(hidden, 4 * hidden), "down": nn.Linear(4 * hidden, hidden)})

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, hidden)
            self.norm = nn.LayerNorm(hidden)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(hidden, vocabulary, bias=False)
            self.head.weight = self.embedding.weight

    return GPT()
