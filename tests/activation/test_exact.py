"""With every mode, stage and number of ranks training has the bits of plain torch that keeps everything."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.activation.unit_nets import WIDTH, Adapters, Strange, Transformer, seeded
from tests.engine.nets import loss_of
from tests.engine.trainings import PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from tests.reference import Order
from zero_strategy.activation.offload import ActivationStore, model_storages

MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "every_n": {"mode": "every_n", "every_n": 2},
}
ORDERS: tuple[Order, ...] = ("per_step", "per_step", "per_micro_batch", "per_micro_batch")
STAGES: dict[int, dict[str, tuple[int, ...]]] = {
    1: {"full": (1, 3), "selective": (0, 3), "every_n": (2, 3)},
    2: {"full": (0, 2, 3), "selective": (1, 2, 3), "every_n": (0, 1, 3)},
}
"""By number of ranks and mode. Stage 3, which gathers units to compute them again, with all; each other stage with each
mode on one number of ranks, and on two ranks with two of them."""


def settings(world: int) -> list[Setting]:
    return [
        Setting(stage, ORDERS[stage], {"activation_checkpointing": MODES[name]})
        for name, stages in STAGES[world].items()
        for stage in stages
    ]


def trains(training: PlainTraining, build: type[nn.Module], shape: tuple[int, ...], accumulate: bool = True) -> None:
    """Two micro-batches, the forward twice before a backward, evaluation in between, gradients and buffers noted."""
    torch.manual_seed(7 + training.rank)
    model = seeded(build)
    training.shard(model)
    training.attach(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, foreach=False))
    for step in range(3):
        for micro in range(2 if accumulate else 1):
            x = training.data(10 * step + micro, *shape)
            output = model(x)
            if step == 1:
                output = output + model(x * 0.5)
            training.note(output, torch.rand(2))
            training.backward(loss_of(output), sync=not accumulate or micro == 1)
            training.note(torch.rand(2))  # backward leaves the generator where it was
        training.note(*[training.gradient(p) for p in model.parameters() if p.requires_grad])
        training.step()
        training.zero_grad()
        model.eval()
        with torch.no_grad():
            training.note(model(training.data(50 + step, *shape)))
        model.train()
        training.note(*model.buffers())
        if (
            isinstance(model, Strange) and training.setting.order == "per_step"
        ):  # stage 3 gives units lists of their own
            training.note(list(model.log))


NETS = [(Transformer, (2, 5, WIDTH)), (Strange, (4, WIDTH)), (Adapters, (2, 5, WIDTH))]


@pytest.mark.parametrize("net, shape", NETS, ids=lambda value: getattr(value, "__name__", ""))
def test_checkpointing_one_rank(net: type[nn.Module], shape: tuple[int, ...], ranks: Launcher) -> None:
    (wrong,) = ranks(1)(play, partial(trains, build=net, shape=shape), settings(1))
    assert not wrong


@pytest.mark.parametrize("net, shape", NETS, ids=lambda value: getattr(value, "__name__", ""))
def test_checkpointing_two_ranks(net: type[nn.Module], shape: tuple[int, ...], ranks: Launcher) -> None:
    for wrong in ranks(2)(play, partial(trains, build=net, shape=shape), settings(2)):
        assert not wrong


def compiled(training: PlainTraining, when: str, move: bool = False) -> None:
    """Units are compiled, before or after they are sharded; no dropout, whose numbers a compiler draws differently."""
    torch._dynamo.reset()
    model = seeded(Transformer, 2, WIDTH, 0.0)
    own = isinstance(training, ShardedTraining)
    for moment in ("before", "after"):
        if own and moment == when:
            for block in model.blocks:
                block.compile(backend="aot_eager")
        if moment == "before":
            training.shard(model)
    if isinstance(training, ShardedTraining) and move:
        training.own.activations.store = ActivationStore(torch.device("cpu"), model_storages(training.own.model))
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    for step in range(3):
        output = model(training.data(step, 30, 5, WIDTH))
        training.note(output)
        training.backward(loss_of(output))
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_units(when: str, ranks: Launcher) -> None:
    """Products are kept by what runs inside of the compiled code, so `selective` is with both; others are with one."""
    modes = [MODES["selective"], MODES["full"] if when == "before" else {"mode": "budget", "budget": 0.7}]
    settings = [Setting(3, "per_micro_batch", {"activation_checkpointing": mode}) for mode in modes]
    (wrong,) = ranks(1, timeout=200)(play, partial(compiled, when=when), settings, tolerance=1e-6)
    assert not wrong


def test_compiled_units_whose_activations_move(ranks: Launcher) -> None:
    modes = [{"mode": "none"}, MODES["full"]]
    host = {"offload": {"activations": "cpu"}}
    settings = [Setting(3, "per_micro_batch", {"activation_checkpointing": mode, **host}) for mode in modes]
    script = partial(compiled, when="before", move=True)
    (wrong,) = ranks(1, timeout=200)(play, script, settings, tolerance=1e-6)
    assert not wrong
