"""A model of eight layers, its stages, and one process that does the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_strategy.pipeline import PipeSchedule, Placement, TrainSchedule, build_table, inference, lower
from zero_strategy.pipeline.schedules import Kind

WIDTH, LAYERS = 8, 8


class Layer(nn.Module):
    """Passes a dict on: what it has made, and a mask that wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x = given["x"]
        x = x + F.gelu(self.linear(self.norm(x))) * given["mask"][..., None]
        return {**given, "x": x, "depth": 1 + given["depth"]}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        places = self.places.weight[: tokens.shape[1]]
        return {"x": self.words(tokens) + places, "mask": tokens > 2, "places": (places, None), "depth": 1}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, given: dict[str, Any]) -> Tensor:
        assert given["depth"] == LAYERS - 1
        return self.head(given["x"] + given["places"][0])


def build_layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [First(), *(Layer() for _ in range(LAYERS - 2)), Last()]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def micro_batches(count: int, uneven: bool) -> list[tuple[Tensor, Tensor]]:
    """Pairs of tokens and labels; the last is shorter, and one in the middle longer, where they are uneven."""
    generator = torch.Generator().manual_seed(9)
    found = []
    for i in range(count):
        rows = 1 if uneven and i == count - 1 else 3
        columns = 7 if uneven and i == 1 and count > 2 else 5
        pair = torch.randint(0, 11, (2, rows, columns), generator=generator)
        found.append((pair[0], pair[1]))
    return found


@dataclass(frozen=True)
class Case:
    schedule: str
    ranks: int
    chunks: int
    micro_batches: int
    uneven: bool

    def placement(self) -> Placement:
        return Placement(self.ranks, self.chunks, "v" if self.schedule == "zbv" else "loop")

    def schedules(self) -> Sequence[PipeSchedule]:
        if self.schedule == "TrainSchedule":
            return [TrainSchedule(self.micro_batches, self.ranks, rank) for rank in range(self.ranks)]
        return lower(build_table(self.schedule, self.ranks, self.micro_batches, self.chunks))

    def inference(self) -> Sequence[PipeSchedule]:
        return lower(inference(self.placement(), self.micro_batches))


def layers_of(stage: int, stages: int) -> range:
    return range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)


def build_stages(case: Case, rank: int) -> list[nn.Module]:
    layers, placement = build_layers(), case.placement()
    stages = [placement.stage_of(rank, chunk) for chunk in range(placement.chunks)]
    return [nn.Sequential(*(layers[i] for i in layers_of(stage, placement.stages))) for stage in stages]


def gradients_of(case: Case, rank: int, stages: Sequence[nn.Module]) -> dict[str, Tensor]:
    """By the layer's number in the model and the parameter's name."""
    placement, found = case.placement(), {}
    for chunk, module in enumerate(stages):
        layers = layers_of(placement.stage_of(rank, chunk), placement.stages)
        for number, layer in zip(layers, module.children(), strict=True):
            for name, parameter in layer.named_parameters():
                assert parameter.grad is not None, (number, name)
                found[f"{number}.{name}"] = parameter.grad.clone()
    return found


@lru_cache(maxsize=32)
def _alone(count: int, uneven: bool) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and gradients of each micro-batch in one process, the loss divided by their number."""
    model = nn.Sequential(*build_layers())
    losses, gradients = [], []
    for tokens, labels in micro_batches(count, uneven):
        loss = loss_fn(model(tokens), labels)
        (loss / count).backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return losses, gradients


def expected(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Mean loss, and gradients summed in the order in which each stage's backwards come."""
    losses, gradients = _alone(case.micro_batches, case.uneven)
    placement = case.placement()
    totals: dict[str, Tensor] = {}
    for stage in range(placement.stages):
        layers = layers_of(stage, placement.stages)
        for micro_batch in _order(case, stage):
            for name, gradient in gradients[micro_batch].items():
                if int(name.split(".")[0]) in layers:
                    totals[name] = totals[name] + gradient if name in totals else gradient
    return sum(losses) / len(losses), totals


def _order(case: Case, stage: int) -> list[int]:
    if case.schedule == "TrainSchedule":
        return list(range(case.micro_batches))
    table = build_table(case.schedule, case.ranks, case.micro_batches, case.chunks)
    rank, chunk = table.placement.rank_of(stage), table.placement.chunk_of(stage)
    adding = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return [action.micro_batch for action in table.rows[rank] if action.chunk == chunk and action.kind in adding]


def data_of(case: Case, rank: int) -> Iterator[tuple[Tensor, Tensor]] | None:
    """For the ranks of the first and of the last stage."""
    placement = case.placement()
    if rank in (placement.rank_of(0), placement.rank_of(placement.stages - 1)):
        return iter(micro_batches(case.micro_batches, case.uneven))
    return None
