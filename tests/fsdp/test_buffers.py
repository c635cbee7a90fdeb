"""Buffers that forwards change are those of DistributedDataParallel on every rank, also after a load."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.nets import seeded
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


class Ranges(nn.Module):
    """Scales by a running range of its input, which it also replaces, as quantised models do; counts in an integer."""

    def __init__(self, assigns: bool = False) -> None:
        super().__init__()
        self.register_buffer("high", torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("used", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("constant", torch.arange(4.0), persistent=False)
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                new = 0.9 * self.high + 0.1 * x.abs().max()
                if self.assigns:
                    self.high = new
                else:
                    self.high.copy_(new)
                self.seen += len(x) + (dist.get_rank() if dist.is_initialized() else 0)
                self.used[int(x.argmax()) % 3] = True
        return x / self.high


class Codebook(nn.Module):
    """A running codebook that it reads and writes through `data`, as public VQ-VAEs do, or through numpy."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 18).view(3, 6))
        self.register_buffer("sizes", torch.ones(3))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x.detach(), self.codes).argmin(1)
        if self.training:
            hits = nn.functional.one_hot(near, 3).float()
            self.sizes.data.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            new = 0.9 * self.codes + 0.1 * (hits.t() @ x.detach()) / self.sizes[:, None]
            if self.way == "data":
                self.codes.data.copy_(new)
            elif self.way == "assigned":
                self.codes.data = new
            else:
                self.codes.numpy()[:] = new.numpy()
        return x + self.codes[near]


def codebook(way: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Codebook(way), nn.Linear(6, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def ranges(assigns: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Ranges(assigns), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


MODELS = {
    "batch_norm": batch_norm, "ranges": partial(ranges, False), "assigned": partial(ranges, True), "spectral": spectral,
    "codebook": partial(codebook, "data"), "codebook_assigned": partial(codebook, "assigned"),
    "codebook_numpy": partial(codebook, "numpy"),
}  # fmt: skip


def data(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator) * (1 + rank) + rank


def trained(name: str, config: dict[str, Any], folder: str, micro: int = 1) -> dict[str, float]:
    """Differences from DDP of losses, evaluation after each step, and of what a loaded model gives."""
    rank = dist.get_rank()
    plain = seeded(MODELS[name])  # type: ignore[arg-type]
    model = copy.deepcopy(plain)
    ddp = nn.parallel.DistributedDataParallel(plain)
    engine = ZeroEngine(model, load_config(units={"min_numel": 1}, **config))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, foreach=False)
    ours = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    engine.attach(ours)
    found = {"loss": 0.0, "evaluation": 0.0, "loaded": 0.0}

    def evaluation(module: nn.Module) -> Tensor:
        module.eval()
        with torch.no_grad():
            values: Tensor = module(torch.ones(2, 6))
        module.train()
        return values

    for step in range(4):
        for part in range(micro):
            x, last = data(2 * step + part, rank), part == micro - 1
            losses = []
            for wrapped, scope in ((ddp, ddp.no_sync), (model, engine.no_sync)):
                with torch.enable_grad() if last else scope():
                    loss = wrapped(x).square().mean() / micro
                    loss.backward()
                losses.append(loss.detach())
            found["loss"] = max(found["loss"], float((losses[0] - losses[1]).abs()))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        found["evaluation"] = max(found["evaluation"], float((evaluation(ddp) - evaluation(model)).abs().max()))
    engine.save(folder)
    again = seeded(MODELS[name], seed=1)  # type: ignore[arg-type]
    other = ZeroEngine(again, load_config(units={"min_numel": 1}, **config))
    other.load(folder, optimizers=False)
    found["loaded"] = float((evaluation(model) - evaluation(again)).abs().max())
    return found


# Every model at every stage; at one of them, another for each model, a step is a single micro-batch.
@pytest.mark.parametrize(
    "name, stage, micro",
    [
        (name, stage, 1 if stage == (number + 2) % 4 else 2)
        for number, name in enumerate(MODELS)
        for stage in (0, 1, 2, 3)
    ],
)
def test_buffers_are_those_of_ddp(ranks: Launcher, name: str, stage: int, micro: int, tmp_path: Path) -> None:
    for found in ranks(2)(trained, name, {"stage": stage}, str(tmp_path / "saved"), micro):
        assert max(found.values()) < 2e-6, found


def sent(config: dict[str, Any], make: Callable[[], nn.Module] = batch_norm) -> list[int]:
    """Broadcasts in a step of training, in one of evaluation mode, and in a forward that is not followed by a step."""
    model = seeded(make)  # type: ignore[arg-type]
    engine = ZeroEngine(model, load_config(units={"min_numel": 1}, **config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    calls = []
    for mode in (True, False, False):
        model.train(mode)
        before = engine.counters.calls["broadcast"]
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls.append(engine.counters.calls["broadcast"] - before)
    return calls


def test_nothing_is_sent_where_no_buffer_has_changed(ranks: Launcher) -> None:
    assert ranks(2)(sent, {"stage": 2}) == [[2, 0, 0], [0, 0, 0]]  # float32 and int64, counted where they are sent from
    assert ranks(2)(sent, {"stage": 2, "broadcast_buffers": False}) == [[0, 0, 0], [0, 0, 0]]
    # A module of the user's own may have written to its scale without a count, and not to its mask.
    assert ranks(2)(sent, {"stage": 2}, scaled) == [[1, 0, 0], [0, 0, 0]]


def own_statistics() -> tuple[list[float], list[float]]:
    """Statistics with `broadcast_buffers` off, and with it."""
    found = []
    for shares in (False, True):
        model = seeded(batch_norm)  # type: ignore[arg-type]
        ZeroEngine(model, load_config(stage=2, broadcast_buffers=shares))
        model(data(0, dist.get_rank())).sum().backward()
        found.append(model[1].running_mean.tolist())  # type: ignore[index]
    return found[0], found[1]


def test_ranks_may_keep_their_own_buffers(ranks: Launcher) -> None:
    (first, shared), (last, also) = ranks(2)(own_statistics)
    assert first != last and shared == also == first


class Observer(nn.Module):
    """Keeps what it saw, as much as there was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.values = torch.cat([self.values, x.flatten()[: 1 + dist.get_rank()]])
        return x


def grown() -> list[float]:
    model = nn.Sequential(nn.Linear(6, 6), Observer())
    ZeroEngine(model, load_config(stage=2))
    for step in range(2):
        model(data(step, dist.get_rank())).sum().backward()
    values: list[float] = model[1].values.tolist()  # type: ignore[union-attr, operator]
    return values


def test_a_buffer_that_grows_differently_is_rank_0s(ranks: Launcher) -> None:
    first, last = ranks(2)(grown)
    assert first == last and len(first) == 2


class Cached(nn.Module):
    """Holds a buffer that the first rank gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = None if dist.get_rank() == 0 else torch.ones(3)
        return x


def given_up() -> bool:
    model: Any = nn.Sequential(nn.Linear(6, 6), Cached())
    ZeroEngine(model, load_config(stage=2))
    model(data(0, dist.get_rank())).sum().backward()
    model.train()
    model[1].forward = lambda x: x
    model(data(1, dist.get_rank()))
    return model[1].seen is None


def test_a_buffer_that_rank_0_gives_up_goes_on_all(ranks: Launcher) -> None:
    assert ranks(2)(given_up) == [True, True]


def other_shape() -> str:
    model = nn.Sequential(nn.Linear(6, 6))
    model.register_buffer("table", torch.zeros(3 + dist.get_rank()))
    try:
        ZeroEngine(model, load_config(stage=2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_buffers_of_another_shape_are_named(ranks: Launcher) -> None:
    for text in ranks(2)(other_shape):
        assert "buffer table: shape (3,)" in text and "(4,)" in text


class Scaled(nn.Module):
    """Multiplies by a constant that it saves, and that a graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.mask


def scaled() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 3))


def retained(make: Callable[[], nn.Module]) -> bool:
    """A second backward through one graph, of modules in training, as DDP allows it."""
    model = seeded(make)  # type: ignore[arg-type]
    ZeroEngine(model, load_config(stage=2))
    loss = model(data(0, dist.get_rank())).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return True


@pytest.mark.parametrize("make", [batch_norm, scaled])
def test_a_graph_may_be_gone_through_twice(ranks: Launcher, make: Callable[[], nn.Module]) -> None:
    assert all(ranks(2)(retained, make))
