"""Two optimizers over one parameter, each with states of its own: alternating, on one gradient, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_fp32_param


def optimizers(model: nn.Module) -> list[Optimizer]:
    """Over all parameters, over most of them, and over some with two groups."""
    everything, blocks = list(model.parameters()), list(model.blocks.parameters())  # type: ignore[union-attr]
    groups = [{"params": blocks[:2], "lr": 0.03}, {"params": blocks[2:5]}]
    return [
        torch.optim.AdamW(everything, lr=0.02, foreach=False),
        torch.optim.SGD(blocks, lr=0.05, momentum=0.9, foreach=False),
        torch.optim.Adagrad(groups, lr=0.01, foreach=False),
    ]


def alternate(training: PlainTraining) -> None:
    model: Any = training.shard(net())
    made = optimizers(model)
    training.attach(*made)
    for step in range(7):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.note(loss)
        training.backward(loss)
        if step == 5:
            training.clip_value(0.1, optimizer=made[1])
        # One alone, then another, then two and three on the same gradient.
        training.step(*[made[:1], made[1:2], made[2:], made[:2], made[1:], made, made[::-1]][step])
        training.zero_grad(*made[: 1 + 2 * (step % 2)])  # by one is enough


def test_bit_equal_to_plain_torch_at_every_stage(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, alternate, [*DEFAULTS, KEPT]):
        assert not wrong


def clip_all(training: PlainTraining) -> None:
    """A norm of all gradients counts each once, and scales each once."""
    model: Any = training.shard(net())
    training.attach(*optimizers(model))
    for step in range(4):
        loss = loss_of(model(training.data(step, 2, 6)))
        training.backward(loss)
        if isinstance(training, ShardedTraining):
            training.note(training.own.grad_norm().value)
            training.own.clip_grad_norm_(0.05)
        else:
            training.settle()
            training.note(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        training.step()
        training.zero_grad()


def test_gradients_are_clipped_once(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, clip_all, DEFAULTS, tolerance=1e-6):
        assert not wrong


def skipped(stage: int) -> bool:
    """An infinite gradient of a parameter that both hold: neither steps."""
    model: Any = net()
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}, nonfinite_gradients="skip"))
    made = optimizers(model)
    engine.attach(*made)
    before = engine.full_state_dict()
    (loss_of(model(torch.ones(2, 6))) * float("inf")).backward()
    engine.clip_grad_norm_(1.0)
    for optimizer in made:
        optimizer.step()
    after = engine.full_state_dict()
    return all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("stage", [0, 3])
def test_both_skip_what_is_not_finite(ranks: Launcher, stage: int) -> None:
    assert all(ranks(2)(skipped, stage))


def masters(stage: int) -> list[bool]:
    """bf16: each optimizer finds in the master weights what the other has left there."""
    found: list[Any] = []
    for number in (0, stage):
        torch.manual_seed(0)
        model: Any = net()
        engine = ZeroEngine(model, load_config(stage=number, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
        made = optimizers(model)[:2]
        engine.attach(*made)
        for step in range(4):
            loss_of(model(torch.full((2, 6), 0.5 + step, dtype=torch.bfloat16))).backward()
            made[step % 2].step()
            made[0].zero_grad()
        found.append({**engine.full_state_dict(), "master": safe_get_full_fp32_param(model.blocks[0].up.weight)})
    return [torch.equal(found[0][name], found[1][name]) for name in found[0]]


@pytest.mark.parametrize("stage", [2, 3])
def test_master_weights_are_of_both(ranks: Launcher, stage: int) -> None:
    for equal in ranks(2)(masters, stage):
        assert all(equal)


def resumed(stage: int, folder: Path) -> list[bool]:
    """A run that is saved, and one that goes on from there, under another stage, too."""

    def begin(number: int) -> tuple[Any, ZeroEngine, list[Optimizer]]:
        model: Any = net()
        engine = ZeroEngine(model, load_config(stage=number, units={"min_numel": 0}))
        made = optimizers(model)
        engine.attach(*made)
        return model, engine, made

    def steps(model: Any, made: list[Optimizer], numbers: range) -> None:
        for step in numbers:
            loss_of(model(torch.full((2, 6), 0.5 + step))).backward()
            for optimizer in made[step % 3 :]:
                optimizer.step()
            made[0].zero_grad()

    model, engine, made = begin(stage)
    steps(model, made, range(4))
    engine.save_checkpoint(folder, tag="four")
    steps(model, made, range(4, 8))
    found = []
    for other in {stage, 1}:
        again, second, own = begin(other)
        second.load_checkpoint(folder)
        steps(again, own, range(4, 8))
        state, expected = second.full_state_dict(), engine.full_state_dict()
        found += [torch.equal(state[name], value) for name, value in expected.items()]
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_both_states_are_saved_and_resumed(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    for equal in ranks(2)(resumed, stage, tmp_path):
        assert equal and all(equal)


def offloaded() -> str:
    model = net()
    engine = ZeroEngine(model, load_config(stage=2, offload={"optimizer": "cpu"}, units={"min_numel": 0}))
    with pytest.raises(ValueError, match=r"are in two optimizers \(AdamW and SGD\).*offload.optimizer") as caught:
        engine.attach(*optimizers(model))
    return str(caught.value)


def test_offloaded_state_is_of_one_optimizer(ranks: Launcher) -> None:
    for text in ranks(2)(offloaded):
        assert "blocks.0" in text
