"""Units used in every way a model may use them: twice, never, out of order, nested, checkpointed, called directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.nets import Block, Net, loss_of, net, seeded
from tests.engine.trainings import KEPT, PlainTraining, Script, Setting, play
from tests.launcher import Launcher

STAGE_3 = [
    Setting(3, "per_micro_batch"),
    Setting(3, "per_micro_batch", {"prefetch": 0}),
    Setting(3, "per_micro_batch", {"prefetch": 2, "reshard_after_forward": False}),
    KEPT,
]
SOME = [Setting(0, "per_step"), Setting(2, "per_micro_batch"), *STAGE_3]


def train(training: PlainTraining, model: nn.Module, call: Callable[[int, Tensor], Tensor], steps: int = 3) -> None:
    """`call(step, x)` gives the output of a step."""
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(steps):
        output = call(step, training.data(step, 2, 6))
        training.note(output)
        training.backward(loss_of(output))
        training.step()
        training.zero_grad()


# ------------------------------------------------------------------------------------------- order and number


class Ordered(nn.Module):
    """Runs its units in the order that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return x


ORDERS = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0), (0, 0, 1, 1), (2, 0, 2, 0), (1,), (0, 1, 2, 3), (3, 3, 3)]


def any_order_and_number(training: PlainTraining) -> None:
    model = seeded(Ordered)
    train(training, model, lambda step, x: model(x, ORDERS[step]), steps=len(ORDERS))


def order_changes_between_training_and_evaluation(training: PlainTraining) -> None:
    model = seeded(Ordered)

    def call(step: int, x: Tensor) -> Tensor:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                training.note(model(x, ORDERS[-1 - step]).clone())
        return model(x, ORDERS[step])

    train(training, model, call, steps=len(ORDERS))


class Nested(nn.Module):
    """Units inside units."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(6, 6)
            self.inner = nn.ModuleList(Block() for _ in range(2))
            self.after = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            for block in self.inner:
                x = block(x)
            return self.after(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Outer() for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def nested_units(training: PlainTraining) -> None:
    model = seeded(Nested)
    train(training, model, lambda step, x: model(x))


class Recursive(nn.Module):
    """A unit that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if depth == 0 else self(x, depth - 1) + x


def a_unit_that_calls_itself(training: PlainTraining) -> None:
    model = nn.Sequential(seeded(Recursive), seeded(Recursive, seed=1))
    train(training, model, lambda step, x: model[1](model[0](x, step), 2))


def parts_called_directly(training: PlainTraining) -> None:
    """Nobody calls the root's forward."""
    model = net()

    def call(step: int, x: Tensor) -> Tensor:
        x = model.stem(x)
        for block in list(model.blocks)[step % 2 :]:
            x = block(x)
        return model.head(x)

    train(training, model, call, steps=4)


def parts_called_in_a_scope(training: PlainTraining) -> None:
    """A training step that uses the root's own parameters itself."""
    model = net()

    def call(step: int, x: Tensor) -> Tensor:
        with training.scope():
            x = model.stem(x)
            for block in model.blocks:
                x = block(x)
            return model.head(x) * model.scale

    train(training, model, call)


EXACT: list[tuple[Script, list[Setting]]] = [
    (any_order_and_number, SOME),
    (order_changes_between_training_and_evaluation, SOME),
    (nested_units, [*SOME, Setting(3, "per_micro_batch", {"units": {"classes": ["Outer", "Block"]}})]),
    (nested_units, [Setting(3, "per_micro_batch", {"units": {"patterns": ["layers.?", "layers.1.inner.0"]}})]),
    (a_unit_that_calls_itself, SOME),
    (parts_called_directly, SOME),
    (parts_called_in_a_scope, SOME),
]


@pytest.mark.parametrize("script, settings", EXACT)
def test_units_in_any_order_and_number(ranks: Launcher, script: Script, settings: list[Setting]) -> None:
    for wrong in ranks(2)(play, script, settings):
        assert not wrong


# ----------------------------------------------------------------------------------------- inputs and outputs


class Named(NamedTuple):
    value: Tensor
    other: Tensor


@dataclass
class Record:
    value: Tensor
    other: list[Tensor]


class Opaque:
    """A container that nobody knows how to look into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Shaped(nn.Module):
    """A unit with an output of the kind asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.side = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, kind: str, extra: Any = None) -> Any:
        y = torch.tanh(self.layer(x))
        if extra is not None:
            y = y + extra["shift"][0]
        z = self.side(y) * y
        kinds: dict[str, Callable[[], Any]] = {
            "tensor": lambda: z,
            "tuple": lambda: (z, y),
            "list": lambda: [None, "text", [z], 3],
            "dict": lambda: {"value": z, "other": {"deep": y}},
            "named": lambda: Named(z, y),
            "dataclass": lambda: Record(z, [y]),
            "opaque": lambda: Opaque(z),
            "view": lambda: z[:, :],
            "same": lambda: x + 0 * z,
        }
        return kinds[kind]()


def value_of(output: Any) -> Tensor:
    if isinstance(output, (Record, Opaque, Named)):
        return output.value
    if isinstance(output, dict):
        return output["value"]
    if isinstance(output, tuple):
        return output[0]
    return output[2][0] if isinstance(output, list) else output


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shaped() for _ in range(3))

    def forward(self, x: Tensor, kind: str, extra: Any = None) -> Any:
        output: Any = None
        for part in self.parts:
            output = part(x=x, kind=kind, extra=extra)
            x = value_of(output)
        return output


KINDS = ("tensor", "tuple", "list", "dict", "named", "dataclass", "opaque", "view", "same")


def outputs_of_every_kind(training: PlainTraining) -> None:
    model = seeded(Shapes)
    train(training, model, lambda step, x: value_of(model(x, kind=KINDS[step])), steps=len(KINDS))


def inputs_inside_containers(training: PlainTraining) -> None:
    """The only input that needs a gradient is inside a keyword argument."""
    model = seeded(Shapes)

    def call(step: int, x: Tensor) -> Tensor:
        shift = training.data(50 + step, 2, 6).requires_grad_(step > 0)
        output = model(x, kind="dict", extra={"shift": [shift, None]})
        return output["value"] + output["other"]["deep"]

    train(training, model, call)


def only_one_output_is_used(training: PlainTraining) -> None:
    model = seeded(Shapes)
    train(training, model, lambda step, x: model(x, kind="tuple")[1 - step % 2])


def output_changed_in_place(training: PlainTraining) -> None:
    model = seeded(Ordered)

    def call(step: int, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x).mul_(0.9)
            x += 0.1
        return x

    train(training, model, call)


class Router(nn.Module):
    """A unit that leaves a part of the loss in an attribute, as mixtures of experts do."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.penalty = late, torch.zeros(())
        self.gate, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.late:
            y = torch.tanh(self.layer(x))
        self.penalty = (torch.tanh(self.gate(y)) @ self.gate.weight).square().mean()
        return y if self.late else torch.tanh(self.layer(y))


def a_loss_left_in_an_attribute(training: PlainTraining) -> None:
    model = nn.Sequential(seeded(Router, False), seeded(Router, True, seed=1), seeded(Router, True, seed=2))
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        loss = loss_of(model(training.data(step, 2, 6))) + sum(part.penalty for part in model)
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


class Penalised(nn.Module):
    """An activation that leaves a part of the loss behind, by a weight of the layer before it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layers = [layer]  # not as a child

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        self.penalty = (y @ self.layers[0].weight).square().mean()  # its backward comes before that of the output
        return y


class Activated(nn.Module):
    """A unit whose activation changes while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(6, 6), nn.Tanh()
        self.notes = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.layer(x))
        if self.notes:
            self.activation.penalty = (y @ self.layer.weight).square().mean()
        return y


def a_loss_left_in_a_part_that_came_later(training: PlainTraining) -> None:
    model = nn.Sequential(seeded(Activated), seeded(Activated, seed=1), seeded(Activated, seed=2))
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(4):
        if step == 1:
            model[0].activation = Penalised(model[0].layer)
        if step == 2:
            model[1].notes = True
        loss = loss_of(model(training.data(step, 2, 6)))
        loss = loss + sum(part.activation.penalty for part in model if hasattr(part.activation, "penalty"))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()


CONTAINERS: list[Script] = [
    outputs_of_every_kind,
    inputs_inside_containers,
    only_one_output_is_used,
    output_changed_in_place,
    a_loss_left_in_an_attribute,
    a_loss_left_in_a_part_that_came_later,
]


@pytest.mark.parametrize("script", CONTAINERS, ids=lambda script: script.__name__)
def test_inputs_and_outputs_of_any_kind(ranks: Launcher, script: Script) -> None:
    """Stages at which units have hooks: 2 for their gradients, 3 for all; what is prefetched plays no part."""
    for wrong in ranks(2)(play, script, [SOME[1], STAGE_3[0], *STAGE_3[2:]]):
        assert not wrong


# --------------------------------------------------------------------------------------------- checkpointing


class Checkpointed(nn.Module):
    """Activation checkpointing around a unit, inside one, or around several."""

    class Inside(nn.Module):
        def __init__(self, run: Callable[..., Tensor]) -> None:
            super().__init__()
            self.run, self.block, self.last = run, Block(), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.run(self.block, x))

    def __init__(self, where: str, reentrant: bool) -> None:
        super().__init__()
        run = partial(checkpoint, use_reentrant=reentrant)
        self.where, self.run = where, run
        self.stem = nn.Linear(6, 6)
        make = partial(self.Inside, run) if where == "inside" else Block
        self.blocks = nn.ModuleList(make() for _ in range(4))
        self.head = nn.Linear(6, 6)

    def pair(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number + 1](self.blocks[number](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)))

    def middle(self, x: Tensor) -> Tensor:
        if self.where == "several":
            return self.run(self.pair, 2, self.run(self.pair, 0, x))
        if self.where == "twice":  # the same units in two segments of one backward
            return self.run(self.pair, 2, self.run(self.pair, 0, self.run(self.pair, 0, x)))
        for number, block in enumerate(self.blocks):
            inside = self.where == "inside" or (self.where == "mixed" and number % 2)
            x = block(x) if inside else self.run(block, x)
        return x


def checkpointed(training: PlainTraining, where: str, reentrant: bool) -> None:
    model = seeded(Checkpointed, where, reentrant)
    train(training, model, lambda step, x: model(x.requires_grad_()))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "inside", "several", "twice", "mixed"])
def test_activation_checkpointing(ranks: Launcher, where: str, reentrant: bool) -> None:
    # A re-entrant backward is several backwards, each of which is reduced by itself: equal up to rounding.
    tolerance = 1e-5 if reentrant else 0.0
    script = partial(checkpointed, where=where, reentrant=reentrant)
    # One backward of all is nothing new to stages that release no unit; several are.
    for wrong in ranks(2)(play, script, SOME if reentrant else STAGE_3, tolerance):
        assert not wrong


# ------------------------------------------------------------------------------------------------ exceptions


class Fragile(Net):
    """Raises in the midst of forward or backward when told to."""

    fail = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        if self.fail == "forward":
            raise MemoryError("in forward")
        x = self.blocks[1](x)
        if self.fail == "backward":
            x.register_hook(self._raise)
        return self.head(self.blocks[2](x)) * self.scale

    @staticmethod
    def _raise(_: Tensor) -> None:
        raise MemoryError("in backward")


def exceptions_and_reset(training: PlainTraining) -> None:
    model = seeded(Fragile)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step, fail in enumerate(["", "forward", "", "backward", "backward", "forward", ""]):
        model.fail = fail
        try:
            loss = loss_of(model(training.data(step, 2, 6)))
            (loss if fail else loss * 1.0).backward() if fail else training.backward(loss)
        except MemoryError:
            training.reset()
            model.zero_grad()
            training.reset()
            continue
        assert not fail
        training.note(loss)
        training.step()
        training.zero_grad()


def test_training_goes_on_after_an_exception_and_reset(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, exceptions_and_reset, SOME):
        assert not wrong


# ------------------------------------------------------------------------------------------- one tensor, given twice


class Attending(nn.Module):
    """Units that get one tensor as several arguments, and look whether it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)[None]
        for layer in self.layers:
            y = layer(y, y, value=y, need_weights=False)[0]
        return y[0]


def one_tensor_as_several_arguments(training: PlainTraining) -> None:
    model = seeded(Attending)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        train(training, model, lambda step, x: model(x).float())


def test_a_tensor_that_a_unit_gets_twice_stays_one(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, one_tensor_as_several_arguments, SOME[2:4]):
        assert not wrong
