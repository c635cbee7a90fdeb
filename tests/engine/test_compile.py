"""torch.compile of units and of whole models: the same training as uncompiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.engine.nets import loss_of, net
from tests.engine.trainings import PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher

SETTINGS = [Setting(0, "per_step"), Setting(2, "per_micro_batch"), Setting(3, "per_micro_batch")]
WARM = 200
"""Seconds: compiling is slow on a busy machine."""


def compiled(training: PlainTraining, what: str, when: str, backend: str = "aot_eager") -> None:
    """Only the engine's training is compiled."""
    torch._dynamo.reset()
    model = net(depth=2)
    own = isinstance(training, ShardedTraining)

    def compile_it() -> None:
        if own and what == "units":
            for block in model.blocks:
                block.compile(backend=backend)
        elif own and what == "in place":
            model.compile(backend=backend)

    if when == "before":
        compile_it()
    training.shard(model)
    if when == "after":
        compile_it()
    call: nn.Module = torch.compile(model, backend=backend) if own and what == "wrapped" else model
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(3):
        loss = loss_of(call(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        training.clip(1.0)
        training.step()
        training.zero_grad()
        with torch.no_grad():
            training.note(call(training.data(20 + step, 2, 6)))


WAYS = [("units", "before"), ("units", "after"), ("in place", "after"), ("wrapped", "after")]


@pytest.mark.parametrize("what, when", WAYS)
def test_compiled_models_train_the_same(ranks: Launcher, what: str, when: str) -> None:
    """At stage 3, which gathers what is compiled, and by turns at stage 0 or 2, which leave the parameters whole."""
    script = partial(compiled, what=what, when=when)
    settings = [SETTINGS[WAYS.index((what, when)) % 2], SETTINGS[2]]
    for wrong in ranks(2, timeout=WARM)(play, script, settings, tolerance=1e-6):
        assert not wrong


def test_inductor(ranks: Launcher) -> None:
    script = partial(compiled, what="units", when="after", backend="inductor")
    for wrong in ranks(2, timeout=WARM)(play, script, SETTINGS[2:], tolerance=1e-5):
        assert not wrong
