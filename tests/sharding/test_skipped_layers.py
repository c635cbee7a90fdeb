"""Ranks that skip different layers at stage 3, against plain replicas that skip the same ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.nets import loss_of
from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters

WIDTH, DEPTH = 6, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        given = x if other is None else x + other
        out: Tensor = x + self.down(torch.tanh(self.up(given)))
        return out


class Stack(nn.Module):
    """Layers of which each call uses those that `chosen` names."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(DEPTH)), nn.LayerNorm(WIDTH)
        self.tail = nn.ModuleList(Layer() for _ in range(2))
        self.chosen: Sequence[int] = range(DEPTH)
        self.again = again

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        states = [x]
        for layer in [self.layers[number] for number in self.chosen] + [self.tail[n % 2] for n in self.chosen[-1:]]:
            x = checkpoint(layer, x, other, use_reentrant=False) if self.again else layer(x, other)
            states.append(x)
        return self.norm(x), states


class Model(nn.Module):
    """An encoder and a decoder."""

    def __init__(self, again: bool = False, frozen: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
            self.encoder, self.decoder = Stack(again), Stack(again)
        if frozen:
            self.stem.requires_grad_(False)
            self.encoder.norm.requires_grad_(False)
            self.encoder.layers[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found, states = self.encoder(self.stem(x))
        out: Tensor = self.head(self.decoder(x, found)[0] + states[len(states) // 2])
        return out


ALL, NONE = tuple(range(DEPTH)), ()
CHOICES: list[list[tuple[Sequence[int], Sequence[int]]]] = [
    [(ALL, ALL), (ALL, ALL)],
    [((0, 1, 2), (1, 2, 3)), ((1, 3), (0, 2))],
    [(NONE, ALL), (ALL, NONE)],
    [((3,), (0,)), ((0,), (3,))],
    [(NONE, NONE), ((2,), (1,))],
    [(NONE, NONE), (NONE, NONE)],
    [((0, 2), (1, 3)), (ALL, (2, 3))],
]
"""By step and rank, layers of the encoder and of the decoder."""


def choose(training: PlainTraining, model: Model, step: int) -> None:
    model.encoder.chosen, model.decoder.chosen = CHOICES[step % len(CHOICES)][training.rank % 2]


def trains(training: PlainTraining, *, again: bool = False, frozen: bool = False, kind: str = "steps") -> None:
    model = Model(again, frozen)
    training.shard(model)
    training.attach(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9))
    for step in range(len(CHOICES)):
        if kind == "evaluation":
            choose(training, model, step + 1)
            with torch.no_grad():
                training.note(model(training.data(40 + step, 2, WIDTH)))
        losses = []
        for part in range(3):
            choose(training, model, step + part)
            with training.scope():
                losses.append(loss_of(model(training.data(3 * step + part, 2, WIDTH))))
            if kind == "accumulation":
                training.backward(losses.pop(), sync=part == 2)
            elif kind == "steps":
                training.backward(losses.pop())
        if kind == "one backward":
            training.backward(sum(losses, torch.zeros(())))
        elif kind == "late backwards":
            training.backward(losses[2], retain_graph=True)
            training.backward(losses[0])
            training.backward(losses[2] + losses[1])
        elif kind == "evaluation":
            training.backward(losses[1])
        training.note(*training.gradients())
        training.step()
        training.zero_grad()


def setting(**config: Any) -> Setting:
    units = {"min_numel": 0, "classes": ["Layer"], "may_skip": True}
    return Setting(3, "per_micro_batch", {"units": units, **config})


SETTINGS = [
    setting(),
    setting(prefetch=0),
    *(setting(activation_checkpointing={"mode": mode}) for mode in ("full", "selective")),
]


@pytest.mark.parametrize("kind", ["steps", "accumulation", "one backward", "late backwards", "evaluation"])
def test_ranks_that_skip_different_layers_train_as_plain_replicas(ranks: Launcher, kind: str) -> None:
    for wrong in ranks(2)(play, partial(trains, kind=kind), SETTINGS, tolerance=1e-5):
        assert not wrong


@pytest.mark.parametrize("more", [{"again": True}, {"frozen": True}], ids=str)
def test_skipped_layers_that_are_checkpointed_or_frozen(ranks: Launcher, more: dict[str, bool]) -> None:
    for kind in ("steps", "one backward"):
        for wrong in ranks(2)(play, partial(trains, kind=kind, **more), SETTINGS[:2], tolerance=1e-5):
            assert not wrong


def engine_of(model: nn.Module, **settings: Any) -> ZeroEngine:
    return ZeroEngine(
        model, load_config(stage=3, units={"min_numel": 0, "classes": ["Layer"], "may_skip": True}, **settings)
    )


def test_layers_in_another_order_are_refused_by_name(ranks: Launcher) -> None:
    model = Model()
    engine_of(model)
    model.encoder.chosen = (2, 1)
    with pytest.raises(RuntimeError, match=r"'encoder.layers.1' is used after 'encoder.layers.2' in one pass"):
        model(torch.ones(2, WIDTH))


def test_a_checkpoint_around_layers_that_may_be_skipped_is_refused(ranks: Launcher) -> None:
    model = Model()
    engine_of(model, prefetch=0)
    loss = checkpoint(model.encoder, torch.ones(2, WIDTH, requires_grad=True), use_reentrant=False)[0].sum()
    with pytest.raises(RuntimeError, match=r"a checkpoint may hold one layer of 'encoder.layers'"):
        loss.backward()


def test_second_derivatives_with_layers_that_may_be_skipped_are_refused(ranks: Launcher) -> None:
    model = Model()
    engine_of(model)
    loss = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(RuntimeError, match=r"units.may_skip knows no backward\(create_graph=True\)"):
        loss.backward(create_graph=True)


def test_what_may_skip_needs(ranks: Launcher) -> None:
    with pytest.raises(ValueError, match=r"units.may_skip: the model has no ModuleList with two units"):
        ZeroEngine(nn.Sequential(nn.Linear(2, 2)), load_config(stage=3, units={"min_numel": 0, "may_skip": True}))
    for name in ("reshard_after_forward", "reshard_after_backward"):
        with pytest.raises(ValueError, match=f"{name}=False keeps what a rank has used"):
            engine_of(Model(), **{name: False})


def test_layers_called_one_by_one_and_copies(ranks: Launcher) -> None:
    plain, model = Model(), Model()
    engine_of(model)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        for number in (3, 1, 1):
            assert torch.equal(model.decoder.layers[number](x), plain.decoder.layers[number](x))
        with GatheredParameters(model.parameters()):
            copied = copy.deepcopy(model)
    assert torch.equal(copied(x), plain(x))
