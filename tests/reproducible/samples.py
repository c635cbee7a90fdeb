"""Samples of `training` as data sets: in the order of their slots, and changed at random when they are read."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.reproducible.training import LENGTH, VOCABULARY, tokens_of


class Samples(Dataset[Tensor]):
    """Of some steps, so that a loader in their order gives slot s of step t `tokens_of(t, s)`.

    Args:
        slots: Of a step.
        steps: Number of steps.
    """

    def __init__(self, slots: int, steps: int) -> None:
        found = torch.stack([torch.stack([tokens_of(step, slot) for slot in range(slots)]) for step in range(steps)])
        self.tokens = found.transpose(1, 2).flatten(0, 2)  # place (step, row, slot)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Masked(Dataset[Tensor]):
    """Samples of which some tokens are drawn when they are read."""

    def __init__(self, dataset: Dataset[Tensor]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Tensor:
        tokens = self.dataset[index].clone()
        tokens[random.randrange(LENGTH)] = np.random.randint(VOCABULARY)
        return tokens


def collate(rows: list[Tensor]) -> Tensor:
    """A batch of which tokens are drawn, as by the collation of a masked language model."""
    batch = torch.stack(rows)
    return torch.where(torch.rand(batch.shape) < 0.1, torch.randint(0, VOCABULARY, batch.shape), batch)
