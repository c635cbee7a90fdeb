"""Modules as people write them: recurrent, parametrised, working in place, hooked, with weights changed by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.engine.nets import Block, loss_of, net, seeded
from tests.engine.trainings import DEFAULTS, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

SOME = [Setting(0, "per_step"), Setting(2, "per_micro_batch"), Setting(3, "per_micro_batch")]


class Stack(nn.Module):
    """Units of any kind, between a first and a last layer."""

    def __init__(self, make: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(6, 6)
        self.parts = nn.ModuleList(make() for _ in range(2))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = self.call(part, x)
        return self.last(x)


def plainly(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part(x)
    return out


def as_sequence(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part(x[None])[0]
    return out[0] if out.dim() == 3 else out


def attended(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part(x[None], x[None], x[None], need_weights=False)[0][0]
    return out


def embedded(part: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = part((x.sum(1).abs() * 10).long() % 7) + x
    return out


def with_backward_hooks() -> nn.Module:
    block = Block()
    block.register_full_backward_hook(lambda module, given, got: tuple(None if g is None else g * 0.5 for g in given))
    block.up.register_full_backward_pre_hook(lambda module, got: tuple(g * 2 for g in got))
    return block


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(6, 6, num_layers=2), as_sequence),
    "gru": (lambda: nn.GRU(6, 6, bidirectional=False, batch_first=True), as_sequence),
    "attention": (lambda: nn.MultiheadAttention(6, 2, batch_first=True), attended),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), plainly),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 6)), plainly),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(6, 6)), plainly),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 6)), plainly),
    "sparse embedding": (lambda: nn.Embedding(7, 6, sparse=True, padding_idx=0), embedded),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), plainly),
    "prelu": (lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU()), plainly),
    "backward hooks": (with_backward_hooks, plainly),
}


def stack(training: PlainTraining, kind: str) -> None:
    make, call = MODULES[kind]
    model = seeded(Stack, make, call)
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False))
    for step in range(3):
        loss = loss_of(model(training.data(step, 3, 6)))
        training.note(loss)
        training.backward(loss)
        training.note(training.clip(0.5))
        training.step()
        training.zero_grad()
    model.eval()
    with torch.no_grad():
        training.note(model(training.data(9, 3, 6)))


@pytest.mark.parametrize("kind", MODULES)
def test_ordinary_modules(ranks: Launcher, kind: str) -> None:
    # The norm before a clip is a float32 in torch and a float64 here; spectral_norm iterates on what came of it.
    for wrong in ranks(2)(play, partial(stack, kind=kind), SOME, tolerance=1e-5):
        assert not wrong


class Eager(nn.Module):
    """A unit that begins with an operation in place on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = self.layer(self.act(x))
        if scale is not None:
            scale += 1.0
            x = x * scale
        return x


def in_place_on_the_input(training: PlainTraining) -> None:
    model = nn.Sequential(nn.Linear(6, 6), *(seeded(Eager, seed=number) for number in range(2)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model[0] = nn.Linear(6, 6)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        x = model[0](training.data(step, 2, 6))
        scale = model[0](training.data(20 + step, 2, 6)) * 0.1
        loss = loss_of(model[2](model[1](x, scale)) + scale)
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


def test_modules_that_know_each_other() -> None:
    """A child that several have, and one that has its parent: each is looked at once in a forward."""
    model = nn.Sequential(seeded(Eager, seed=0), seeded(Eager, seed=1))
    engine = ZeroEngine(model, load_config(stage=3, units={"classes": ["Eager"]}))
    model[0].shared = model[0].again = model[0].layer
    model[0].parent = model
    x = torch.ones(2, 6, requires_grad=True)
    model(x * 1).sum().backward()
    assert x.grad is not None and engine.grad_norm().value > 0
    engine.close()


def test_a_unit_may_change_its_input_in_place(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, in_place_on_the_input, SOME):
        assert not wrong


# --------------------------------------------------------------------------------------- weights changed by hand


def weights_changed_in_place(training: PlainTraining) -> None:
    """Weight clipping, re-initialisation, an average copied in: all ranks alike, parameters whole (stages 0 to 2)."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(4):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()
        with torch.no_grad():
            if step == 0:
                for p in model.parameters():
                    p.clamp_(-0.2, 0.2)
            elif step == 1:
                model.head.weight.copy_(torch.ones(3, 6))
                model.scale.data.fill_(0.7)
            elif step == 2:
                nn.init.constant_(model.blocks[1].up.bias, 0.25)
        training.note(model(training.data(30, 2, 6)))


def test_weights_changed_in_place(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, weights_changed_in_place, [s for s in DEFAULTS if s.stage < 3]):
        assert not wrong


def low_precision_weights_changed(stage: int) -> dict[str, Any]:
    """A change of a bf16 parameter must reach its fp32 master weight, or be refused."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    with torch.no_grad():
        model.head.weight.fill_(2.0)
    try:
        loss_of(model(torch.ones(2, 6, dtype=torch.bfloat16)).float()).backward()
        optimizer.step()
    except RuntimeError as error:
        return {"error": str(error), "kept": False}
    kept = bool((engine.full_state_dict()["head.weight"].float() - 2.0).abs().max() < 0.1)
    return {"error": "", "kept": kept}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_low_precision_weights_changed_in_place_are_not_lost(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(low_precision_weights_changed, stage):
        assert found["kept"] or "head.weight" in found["error"]


# --------------------------------------------------------------------------------- unfrozen where nobody looks


def unfrozen_and_called_directly(training: PlainTraining) -> None:
    """Unfrozen between steps, and the root's forward is never called."""
    model = net()
    model.blocks[0].requires_grad_(False)
    training.shard(model)
    training.attach(torch.optim.Adagrad(model.blocks.parameters(), lr=0.05, foreach=False))
    model.stem.requires_grad_(False)
    model.head.requires_grad_(False)
    model.scale.requires_grad_(False)
    for step in range(4):
        model.blocks[0].requires_grad_(step % 2 == 1)
        x = training.data(step, 2, 6)
        for block in model.blocks:
            x = block(x)
        training.backward(loss_of(x))
        training.step()
        training.zero_grad()


def test_unfrozen_and_called_directly(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, unfrozen_and_called_directly, DEFAULTS):
        assert not wrong


def unfrozen_in_low_precision(stage: int) -> list[str]:
    """State that an optimizer makes at once (Adagrad) outlives the making of a master weight."""
    training = ShardedTraining(Setting(stage, "per_micro_batch"))
    model = net()
    model.blocks[0].requires_grad_(False)
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, foreach=False, initial_accumulator_value=0.5)
    engine.attach(optimizer)
    for step in range(3):
        model.blocks[0].requires_grad_(step > 0)
        loss_of(model(training.data(step, 2, 6).bfloat16()).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_optimizer_state(optimizer)
    assert all(bool(values["sum"].min() >= 0.5) for values in state.values())
    steps = {name: int(values["step"]) for name, values in state.items()}
    return [name for name, count in steps.items() if count != (2 if name.startswith("blocks.0") else 3)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_unfrozen_in_low_precision(ranks: Launcher, stage: int) -> None:
    for wrong in ranks(2)(unfrozen_in_low_precision, stage):
        assert not wrong


# ------------------------------------------------------------------------------------------- buffers and copies


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("spread", torch.arange(6.0).expand(3, 6))
        self.register_buffer("shared", self.spread)
        self.register_buffer("none", None)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int16))
        self.register_buffer("turned", torch.randn(2, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.spread[0] * self.flag + self.turned.sum()


def awkward_buffers(training: PlainTraining) -> None:
    model = seeded(Buffered)
    training.shard(model)
    training.attach(torch.optim.SGD(model.parameters(), lr=0.01, foreach=False))
    for step in range(2):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()


def test_awkward_buffers(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, awkward_buffers, DEFAULTS):
        assert not wrong
