"""Readers and writers of weights gathered as layers cast them: they find values, and graphs find the form they had."""

from __future__ import annotations

import pickle
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.float8 import convert_to_float8_training

from tests.engine.float8 import WIDTH, float8_net, plain_net, recipe
from tests.engine.nets import loss_of
from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, sharding

FORMS = ("float8", "autocast")


def coded(form: str) -> dict[str, Any]:
    """Settings of gathers in a form."""
    return {"communication": {"parameters": form}}


def casts(form: str) -> AbstractContextManager[Any]:
    """Context of a forward whose layers cast their weights to that form."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if form == "autocast" else nullcontext()


class Reading(nn.Module):
    """A unit whose forward uses its layer as `kind` says, besides calling it twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "clamped before" or self.kind == "clamped after":
            return self._clamped(x)
        out: Tensor = self.up(torch.tanh(self.up(x)))
        if self.kind == "sum":
            out = out + self.up.weight.sum() * 0.1
        elif self.kind == "transposed":
            out = out + x @ self.up.weight.t()
        elif self.kind == "parts":
            out = out + self.up.weight[:1].square().sum() + nn.functional.linear(x, self.up.weight)
        elif self.kind == "attention":
            out = out + self.attention(out[None], out[None], out[None])[0][0]
        elif self.kind == "swapped":
            others = {"weight": self.up.weight * 2}
            out = out + torch.func.functional_call(self.up, others, (x,))
        elif self.kind == "checkpoint":
            out = out + checkpoint(self.up, out, use_reentrant=False)
        elif self.kind == "reentrant":
            out = out + checkpoint(self.up, out, use_reentrant=True)
        return out

    def _clamped(self, x: Tensor) -> Tensor:
        before = self.up(x) if self.kind == "clamped after" else x
        with torch.no_grad():
            self.up.weight.data.clamp_(-0.1, 0.1)
        out: Tensor = x + self.up(torch.tanh(before.detach()))
        return out


class Readers(nn.Module):
    """Two such units."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reading(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def readers(kind: str, form: str) -> Readers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Readers(kind)
    if form == "float8":
        convert_to_float8_training(net, config=recipe("tensorwise"))
    return net


def reading(training: PlainTraining, kind: str, form: str) -> None:
    model = readers(kind, form)
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    for step in range(3):
        with casts(form):
            loss = loss_of(model(training.data(step, 4, WIDTH)))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        with torch.no_grad(), casts(form):
            training.note(model(training.data(50 + step, 4, WIDTH)))


KINDS = (
    "sum", "transposed", "parts", "attention", "swapped", "checkpoint", "reentrant", "clamped before", "clamped after",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_who_reads_a_weight_beside_its_layer_finds_values(ranks: Launcher, kind: str, form: str) -> None:
    # A nested backward of a reentrant checkpoint sums gradients of several uses in another order, whatever is gathered.
    tolerance = 1e-7 if kind == "reentrant" else 0.0
    for wrong in ranks(2)(
        play, partial(reading, kind=kind, form=form), [Setting(3, "per_micro_batch", coded(form))], tolerance
    ):
        assert not wrong


class Steps:
    """An engine and its optimizer, and losses of ranks' own batches."""

    def __init__(self, config: dict[str, Any], form: str = "float8") -> None:
        self.form = form
        self.model = float8_net(recipe("tensorwise")) if form == "float8" else plain_net()
        self.engine = ZeroEngine(self.model, {"stage": 3, "units": {"min_numel": 0}, **config})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.engine.attach(self.optimizer)
        self._data = PlainTraining(Setting(3, "per_micro_batch"))

    def loss(self, number: int) -> Tensor:
        with casts(self.form):
            return loss_of(self.model(self._data.data(number, 4, 6)))

    def whole(self) -> Any:
        return sharding.GatheredParameters(list(self.model.parameters()))

    def step(self) -> list[Tensor]:
        self.optimizer.step()
        self.optimizer.zero_grad()
        return list(self.engine.full_state_dict().values())


def around_scopes(steps: Steps) -> list[Tensor]:
    """Forwards and backwards on both sides of scopes that hold values, some backwards twice."""
    loss = steps.loss(0)
    with steps.whole():
        loss.backward(retain_graph=True)
    loss.backward()
    found = steps.step()
    with steps.whole():
        loss = steps.loss(1)
    loss.backward(retain_graph=True)
    steps.loss(2).backward()
    loss.backward()
    found += steps.step()
    with steps.whole():
        loss = steps.loss(3)
        loss.backward(retain_graph=True)
    loss.backward()
    return found + steps.step()


def in_any_order(steps: Steps) -> list[Tensor]:
    """Two graphs at once, one of which has values since somebody reads them; an evaluation before their backwards."""
    found = []
    for order in (1, -1):
        first, read = steps.loss(0), steps.loss(1)
        reader = steps.model.blocks[0].register_forward_hook(
            lambda block, args, out: out + block.up.weight.square().sum() * 0.1
        )
        read = steps.loss(2)
        reader.remove()
        with torch.no_grad():
            found.append(steps.loss(3))
        for loss in [first, read][::order]:
            loss.backward()
        found += steps.step()
    return found


def unfrozen(steps: Steps) -> list[Tensor]:
    """A weight that is frozen in an evaluation and a forward, and trained after it."""
    weight = steps.model.blocks[0].up.weight
    weight.requires_grad_(False)
    with torch.inference_mode():
        found = [steps.loss(0).clone()]
    steps.loss(1).backward()
    found += steps.step()
    weight.requires_grad_(True)
    steps.loss(2).backward()
    return found + steps.step()


def after_an_error(steps: Steps) -> list[Tensor]:
    """A forward and a backward that raise, and steps after them."""
    up: Any = steps.model.blocks[1]

    def fail(*_: Any) -> None:
        raise OSError("no")

    for handle in (up.register_forward_hook(fail), up.register_full_backward_hook(fail)):
        with pytest.raises(OSError, match="no"):
            steps.loss(0).backward()
        steps.engine.reset()
        handle.remove()
    steps.optimizer.zero_grad()
    steps.loss(1).backward()
    return steps.step()


def written_between(steps: Steps) -> list[Tensor]:
    """Values that change, past torch's counts, between a forward and its backward, or after a layer in a forward."""
    blocks, found = steps.model.blocks, []

    def clamp(block: Any, *_: Any) -> None:
        block.up.weight.data.clamp_(-0.1, 0.1)

    # Autocast's copies have the values of their forward: what comes later makes them unknown, which is an error.
    for number in range(4 if steps.form == "float8" else 2):
        after = blocks[0].register_forward_hook(clamp) if number == 0 else None
        if number == 1:
            after = blocks[1].register_full_backward_pre_hook(clamp)
        loss = steps.loss(2 * number)
        if number == 2:
            with sharding.GatheredParameters(list(steps.model.parameters()), modifier_rank=0):
                blocks[0].up.weight.data[0, 0] = 7.0  # a new largest value: another scale
        if number == 3:
            reader = blocks[0].register_forward_hook(clamp)
            with torch.no_grad():
                found.append(steps.loss(2 * number + 1))
            reader.remove()
        loss.backward()
        if after is not None:
            after.remove()
        found += steps.step()
    return found


def clamp_up(block: Any, *_: Any) -> None:
    block.up.weight.data.clamp_(-0.1, 0.1)


def written_before_use(steps: Steps) -> list[Tensor]:
    """Values that a forward changes, past torch's counts, before layers use them, and others after a backward."""
    blocks, found = steps.model.blocks, []
    for number in range(3):
        writer = blocks[number % 2].register_forward_pre_hook(clamp_up)
        loss = steps.loss(number)
        writer.remove()
        loss.backward()
        if number == 1:
            with sharding.GatheredParameters(list(steps.model.parameters()), modifier_rank=0):
                blocks[0].up.weight.data[0, 0] = 7.0
        found += steps.step()
    return found


def written_after_use() -> str:
    """The error of a backward after an evaluation that writes to what its forward under autocast has used."""
    steps = Steps(coded("autocast"), "autocast")
    loss = steps.loss(0)
    steps.model.blocks[0].register_forward_hook(clamp_up)
    with torch.no_grad():
        steps.loss(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_copy_of_autocast_that_is_gone_is_named(ranks: Launcher) -> None:
    for error in ranks(2)(written_after_use):
        assert "blocks.0." in error and "kept nowhere" in error and "take 'values'" in error


def packed(steps: Steps) -> list[Tensor]:
    """Saved tensors go through hooks: as another tensor, in another dtype, by a file's way."""
    found: list[Tensor] = []

    def pickled(tensor: Tensor) -> bytes:
        return pickle.dumps(tensor.detach())

    ways: list[tuple[Any, Any]] = [
        (lambda tensor: tensor.detach(), lambda tensor: tensor),
        (lambda tensor: (tensor.dtype, tensor.to(torch.float64)), lambda kept: kept[1].to(kept[0])),
        (pickled, pickle.loads),
    ]
    for number, (pack, unpack) in enumerate(ways):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = steps.loss(number)
        with steps.whole() if number == 0 else nullcontext():
            loss.backward()
        found += steps.step()
    return found


def unevenly_evaluated(steps: Steps) -> list[Tensor]:
    """An evaluation of which rank 1 has one batch more, after and before trainings, and inside of one."""
    found: list[Tensor] = []
    for number in range(2):
        loss = steps.loss(number)
        with torch.no_grad():
            for batch in range(2 + dist.get_rank()):
                with steps.engine.shared_step():
                    steps.loss(10 + batch)
            steps.engine.drain()
        loss.backward()
        found += steps.step()
        steps.loss(20 + number).backward()
        found += steps.step()
    return found


def both_ways(script: Any, form: str) -> tuple[bool, int]:
    """True if a script has the same results with gathers of values and of codes, and the number of results."""
    values, codes = (script(Steps(config, form)) for config in ({}, coded(form)))
    return all(torch.equal(one, other) for one, other in zip(values, codes, strict=True)), len(values)


SCRIPTS = [
    around_scopes, in_any_order, unfrozen, after_an_error, written_between, written_before_use, packed,
    unevenly_evaluated,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_backward_finds_the_form_that_its_forward_had(ranks: Launcher, script: Any, form: str) -> None:
    for same, count in ranks(2)(both_ways, script, form):
        assert same and count >= 13


def refused(form: str) -> list[str]:
    """Errors of a backward after a step, after a write, and of float8's second derivatives."""
    errors = []
    steps = Steps(coded(form), form)
    for kind in ("step", "write", "write past counts"):
        first, second = steps.loss(0), steps.loss(1)
        weight: Any = steps.model.blocks[0].up.weight
        if kind == "step":
            first.backward()
            steps.step()
        else:
            with sharding.GatheredParameters(list(steps.model.parameters()), modifier_rank=0), torch.no_grad():
                (weight if kind == "write" else weight.data).mul_(2.0)
        found = (kind, form) == ("write past counts", "float8")
        with nullcontext() if found else pytest.raises(RuntimeError) as caught:
            second.backward()
        errors.append("" if caught is None else str(caught.value))
        steps.engine.reset()
    if form == "float8":
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(steps.loss(2), steps.model.blocks[0].up.weight, create_graph=True)
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("form", FORMS)
def test_backwards_that_would_find_other_weights_are_refused(ranks: Launcher, form: str) -> None:
    for after_step, after_write, past, *second in ranks(2)(refused, form):
        # A float8 layer casts the values that its backward finds; autocast's copy is of its forward.
        assert past == "" if form == "float8" else "kept nowhere" in past
        assert "modified by an inplace operation" in after_step
        assert "modified by an inplace operation" in after_write
        for twice in second:
            assert "create_graph=True" in twice and "communication.parameters" in twice


def compiled_part(how: str, form: str) -> tuple[bool, int]:
    """As `both_ways`, with a part of each block compiled."""

    def script(steps: Steps) -> list[Tensor]:
        for block in steps.model.blocks:
            if how == "layer":
                block.up.compile(backend="eager")
            elif how == "replaced":
                block.up = torch.compile(block.up, backend="eager")
            else:
                block.norm.register_forward_hook(
                    torch.compile(lambda norm, args, out, b=block: out + b.up(out)[:, :WIDTH], backend="eager")
                )
        found = []
        for number in range(2):
            steps.loss(number).backward()
            found += steps.step()
        return found

    return both_ways(script, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["layer", "replaced", "function"])
def test_compiled_parts_of_units_compute_with_values(ranks: Launcher, how: str, form: str) -> None:
    for same, count in ranks(2, timeout=200)(compiled_part, how, form):
        assert same and count >= 13
