"""Ranks that skip different layers at stage 3, against plain replicas that skip the same ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
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

    def choose(self, row: int, rank: int) -> None:
        self.encoder.chosen, self.decoder.chosen = CHOICES[row % len(CHOICES)][rank % 2]

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


class Block(nn.Module):
    """A layer with parameters of its own and layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.chosen: Sequence[int] = ()
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            again: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return again
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale(x)
        for number in self.chosen:
            out = self.inner[number](out)
        return out


class Chain(nn.Module):
    """A module with a list of its own that is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Encoder(nn.Module):
    """Blocks that ranks skip, between modules that they do not skip."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.blocks = Chain(), nn.ModuleList(Block() for _ in range(3))
        self.bridge, self.adapter = Layer(), Chain()
        self.chosen: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for number in self.chosen:
            x = self.blocks[number](x)
        out: Tensor = self.adapter(self.bridge(x))
        return out


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = Encoder(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.encoder(x))
        return out


class Nested(nn.Module):
    """Lists within lists, and beside the modules that hold others."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.stem, self.around, self.head = nn.Linear(WIDTH, WIDTH), Around(), nn.Linear(WIDTH, 3)

    def choose(self, row: int, rank: int) -> None:
        encoder = self.around.encoder
        encoder.chosen, inner = NESTED_CHOICES[row % len(NESTED_CHOICES)][rank % 2]
        for block in encoder.blocks:
            assert isinstance(block, Block)
            block.chosen = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.around(self.stem(x)))
        return out


NESTED_CHOICES: list[list[tuple[Sequence[int], Sequence[int]]]] = [
    [((0, 1, 2), (0, 1)), ((0, 1, 2), (0, 1))],
    [((0, 2), (0,)), ((1,), (1,))],
    [((2,), ()), ((0, 1), (0, 1))],
    [((1,), (0, 1)), ((0,), ())],
]
"""By step and rank, blocks, and layers inside of each."""

STEPS, PARTS = 3, 3
"""So many that they come to every row of choices."""


def trains(training: PlainTraining, *, make: Callable[[], Model | Nested] = Model, kind: str = "steps") -> None:
    model = make()
    training.shard(model)
    training.attach(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9))
    for step in range(STEPS):
        if kind == "evaluation":
            model.choose(PARTS * step + 2, training.rank)
            with torch.no_grad():
                training.note(model(training.data(40 + step, 2, WIDTH)))
        losses = []
        for row in range(PARTS * step, PARTS * step + PARTS):
            model.choose(row, training.rank)
            with training.scope():
                losses.append(loss_of(model(training.data(row, 2, WIDTH))))
            if kind == "accumulation":
                training.backward(losses.pop(), sync=row % PARTS == 2)
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


def setting(*classes: str, **config: Any) -> Setting:
    units = {"min_numel": 0, "classes": list(classes or ["Layer"]), "may_skip": True}
    return Setting(3, "per_micro_batch", {"units": units, **config})


PLAIN, ALONE = setting(), setting(prefetch=0)
FULL, SELECTIVE = (setting(activation_checkpointing={"mode": mode}) for mode in ("full", "selective"))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("steps", [PLAIN, ALONE, FULL, SELECTIVE]),
        ("accumulation", [PLAIN, FULL]),
        ("one backward", [PLAIN, ALONE, FULL]),
        ("late backwards", [PLAIN, ALONE]),
        ("evaluation", [PLAIN, SELECTIVE]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_skip_different_layers_train_as_plain_replicas(
    ranks: Launcher, kind: str, settings: list[Setting]
) -> None:
    for wrong in ranks(2)(play, partial(trains, kind=kind), settings, tolerance=1e-5):
        assert not wrong


@pytest.mark.parametrize("more", [{"again": True}, {"frozen": True}], ids=str)
def test_skipped_layers_that_are_checkpointed_or_frozen(ranks: Launcher, more: dict[str, bool]) -> None:
    for kind, where in (("steps", PLAIN), ("one backward", ALONE)):
        for wrong in ranks(2)(play, partial(trains, make=partial(Model, **more), kind=kind), [where], tolerance=1e-5):
            assert not wrong


OUTER = setting("Layer", "Block", "Around")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("steps", [PLAIN, OUTER, setting("Layer", "Block", "Encoder", prefetch=3)]),
        ("one backward", [setting("Layer", "Block", prefetch=0)]),
        ("late backwards", [OUTER]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_skipped_layers_with_lists_inside_and_beside(ranks: Launcher, kind: str, settings: list[Setting]) -> None:
    for wrong in ranks(2)(play, partial(trains, make=Nested, kind=kind), settings, tolerance=1e-5):
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


def test_a_checkpoint_around_a_layer_that_holds_units_is_refused(ranks: Launcher) -> None:
    model = Nested()
    ZeroEngine(
        model, load_config(stage=3, units={"min_numel": 0, "classes": ["Layer", "Block"], "may_skip": True}, prefetch=0)
    )
    encoder = model.around.encoder
    encoder.chosen = (0,)
    block = encoder.blocks[0]
    assert isinstance(block, Block)
    block.chosen, block.again = (0, 1), True
    loss = encoder(torch.ones(2, WIDTH, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"one layer of 'around.encoder.blocks' that has no units inside"):
        loss.backward()


def test_second_derivatives_with_layers_that_may_be_skipped_are_refused(ranks: Launcher) -> None:
    model = Model()
    engine_of(model)
    loss = model(torch.ones(2, WIDTH)).sum()
    with pytest.raises(RuntimeError, match=r"units.may_skip knows no backward\(create_graph=True\)"):
        loss.backward(create_graph=True)


def test_what_may_skip_needs(ranks: Launcher) -> None:
    with pytest.raises(ValueError, match=r"units.may_skip: the model has no ModuleList with two members"):
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
