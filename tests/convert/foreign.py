"""Plain torch trainings whose states the importers must find again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.checkpoint.saving import same
from tests.engine.nets import loss_of
from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.convert.portable import (
    PortableOptimizer,
    PortableState,
    StoredTensor,
    loaded,
    portable_of,
    write_portable,
)

WIDTH = 6
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Model(nn.Module):
    """Ties, a buffer, a frozen parameter, an unused one, layers of equal shape."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH - 1)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(0.5) if scalar else torch.full((1,), 0.5))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: torch.Tensor = self.frozen(self.head(self.norm(x))) * self.scale
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, by dimension, as is usual."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


def build(seed: int = 0, scalar: bool = True) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(scalar)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss = loss_of(model(x.to(next(model.parameters()).dtype)).float())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(make: MakeOptimizer = adamw, steps: int = 3) -> tuple[Model, torch.optim.Optimizer]:
    model = build()
    optimizer = make(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def check(
    state: PortableState, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, ties: bool = True
) -> None:
    """Every weight, tie, moment, number and hyper-parameter; where formats know no ties, each name has its tensor."""
    expected = model.state_dict()
    assert state.weights.keys() | state.aliases.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(loaded(state.weights[state.aliases.get(name, name)]), tensor), name
    names = {p: name for name, p in model.named_parameters()}
    assert len(state.aliases) == (len(expected) - len(names) - len(list(model.buffers())) if ties else 0)
    if optimizer is None:
        return
    (found,) = state.optimizers
    for mine, theirs in zip(found.param_groups, optimizer.param_groups, strict=True):
        assert mine["params"] == [names[p] for p in theirs["params"]]
        assert {k: v for k, v in mine.items() if k not in ("params", "param_names")} == {
            k: v for k, v in theirs.items() if k not in ("params", "param_names")
        }
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        kept = {kind: loaded(tensors[name]) for kind, tensors in found.kinds.items() if name in tensors}
        numbers = found.scalars.get(name, {})
        assert kept.keys() | numbers.keys() == values.keys()
        for key, value in values.items():
            if key in kept:
                assert same(kept[key], value), (name, key)
            else:
                assert numbers[key] == (value.item() if isinstance(value, torch.Tensor) else value)
    assert {name for tensors in found.kinds.values() for name in tensors} == {names[p] for p in optimizer.state}


def our_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, **rest: Any) -> PortableState:
    """The training's state as a checkpoint of ours, written without any importer."""
    names = {p: name for name, p in model.named_parameters()}
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    everywhere = model.state_dict(keep_vars=True)
    first = {id(t): name for name, t in reversed(everywhere.items())}
    state = PortableState(
        weights={name: StoredTensor.of(name, tensors[name]) for name in everywhere if name in tensors},
        aliases={name: first[id(t)] for name, t in everywhere.items() if first[id(t)] != name},
        **rest,
    )
    mine = PortableOptimizer(scalar_dtypes={"step": "float32"})
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if key == "step":
                mine.scalars.setdefault(names[parameter], {})[key] = value.item()
            else:
                mine.kinds.setdefault(key, {})[names[parameter]] = StoredTensor.of(names[parameter], value)
    mine.param_groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    state.optimizers = [mine]
    write_portable(state, directory)
    return portable_of(CheckpointReader(directory))
