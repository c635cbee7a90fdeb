"""`close(gather=True)` gives a plain module back: values, hooks, memory, and what plain torch can do with it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.engine.live import live_bytes, only_new
from tests.engine.nets import loss_of, net
from tests.engine.trainings import DEFAULTS, KEPT, PlainTraining, Setting, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=False)


def train_one(training: PlainTraining, step: int) -> None:
    loss = loss_of(training.module(training.data(step, 2, 6)))
    training.note(loss)
    training.backward(loss)
    training.step()
    training.zero_grad()


def footprint(module: nn.Module) -> dict[str, Any]:
    """All that somebody may have set on the modules and parameters of a model."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        own = {
            key: len(value) if hasattr(value, "__len__") else value
            for key, value in vars(part).items()
            if key not in ("_parameters", "_buffers", "_modules", "training")
        }
        found[name] = own
    for name, p in module.named_parameters():
        hooks = len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())
        found[f"{name}, a parameter"] = (type(p), hooks, p.requires_grad, p.is_leaf, p.dtype, tuple(p.shape))
    return found


class Counts(nn.Module):
    """A net with a buffer that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.net(x)
        return found


# ------------------------------------------------------------------------------------------------- the module


def closed(setting: Setting, config: dict[str, Any]) -> list[str]:
    """Faults of a module after its engine was closed with gather, by the reference of full_state_dict()."""
    wrong = []
    plain = Counts()
    before, parameters = footprint(plain), dict(plain.named_parameters())
    engine = ZeroEngine(plain, load_config({**setting.config, "stage": setting.stage, **config}))
    optimizer = adamw(plain.parameters())
    engine.attach(optimizer)
    generator = torch.Generator().manual_seed(engine.mesh.rank)
    for _ in range(2):
        loss_of(plain(torch.randn(2, 6, generator=generator))).backward()
        optimizer.step()
    whole = engine.full_state_dict()  # gradients of the last step are there still
    engine.close(gather=True)
    after = footprint(plain)
    wrong += [
        f"{key}: {before.get(key)} -> {after.get(key)}" for key in before | after if before.get(key) != after.get(key)
    ]
    for name, p in plain.named_parameters():
        if p is not parameters[name] or not torch.equal(p, whole[name]) or p.grad is not None:
            wrong.append(f"{name}: another object, other values, or a gradient")
        if p.untyped_storage().nbytes() != p.nbytes or not p.is_contiguous():
            wrong.append(f"{name} shares memory")
    if not torch.equal(plain.calls, whole["calls"]) or float(plain.calls) != 2:
        wrong.append("calls")
    copied = copy.deepcopy(plain)
    copied.double().load_state_dict({key: value.double() for key, value in whole.items()}, assign=True)
    engine.close(), engine.close(gather=True)  # nothing more
    return wrong


@pytest.mark.parametrize("setting", [*DEFAULTS, KEPT], ids=str)
def test_a_closed_engine_leaves_a_plain_module(ranks: Launcher, setting: Setting) -> None:
    assert ranks(2)(closed, setting, {}) == [[], []]


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpointed_units_have_their_forward_again(ranks: Launcher, stage: int) -> None:
    config = {"activation_checkpointing": {"mode": "full"}, "units": {"min_numel": 1}}
    assert ranks(2)(closed, Setting(stage, "per_step"), config) == [[], []]


def goes_on(training: PlainTraining) -> None:
    """An engine, then plain torch with the same optimizer, then another engine at another stage with its state."""
    model = net()
    training.shard(model)
    training.attach(optimizer := adamw(model.parameters()))
    train_one(training, 0)
    train_one(training, 1)
    if isinstance(training, ShardedTraining):
        training.own.close(gather=True, optimizers=True)
    loss_of(model(training.data(7, 2, 6).zero_() + 1)).backward()  # the same on all ranks
    optimizer.step()
    optimizer.zero_grad()
    training.shard(model)
    if isinstance(training, ShardedTraining):
        training.optimizers.clear()
        training.attach(optimizer)
    train_one(training, 2)
    train_one(training, 3)
    training.note(*model.state_dict().values())


def test_plain_torch_and_another_engine_go_on(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, goes_on):
        assert not wrong


def by_ddp(stage: int) -> bool:
    """DistributedDataParallel trains a module that an engine has let go as it does a copy of that."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=stage))
    engine.attach(optimizer := adamw(model.parameters()))
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    engine.close(gather=True)
    results = []
    for each in (copy.deepcopy(model), model):
        wrapped = DistributedDataParallel(each)
        second = adamw(each.parameters())
        for _ in range(2):
            loss_of(wrapped(torch.ones(2, 6) * (engine.mesh.rank + 1))).backward()
            second.step()
            second.zero_grad()
        results.append(each.state_dict())
    return all(torch.equal(results[0][key], results[1][key]) for key in results[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_ddp_goes_on(ranks: Launcher, stage: int) -> None:
    assert ranks(2)(by_ddp, stage) == [True, True]


# ------------------------------------------------------------------------------------------------- memory


def held_after(stage: int) -> dict[str, Any]:
    """Bytes that live beside the parameters, and parts of the engine that are alive, while the user holds it."""
    with only_new():
        model = net(width=64)
        engine = ZeroEngine(model, load_config(stage=stage))
        engine.attach(optimizer := adamw(model.parameters()))
        loss_of(model(torch.ones(2, 64))).backward()
        optimizer.step()
        refs = {f"bucket {n}": weakref.ref(b) for n, b in enumerate(engine.model.buckets)}
        refs |= {f"flat {n}": weakref.ref(b.flat) for n, b in enumerate(engine.model.buckets)}
        refs |= {f"gradients {n}": weakref.ref(b) for n, b in enumerate(engine.model.gradients)}
        refs["model"] = weakref.ref(engine.model)
        engine.close(gather=True)
        gc.collect()
        alive = [name for name, ref in refs.items() if ref() is not None]
        parameters = sum(p.nbytes for p in model.parameters())
        return {"alive": alive, "extra": live_bytes() - parameters, "parameters": parameters}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_bucket_memory_is_held_by_a_closed_engine(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(held_after, stage):
        assert [name for name in found["alive"] if name.startswith("flat")] == [], found
        assert found["extra"] < 0.02 * found["parameters"], found


# ------------------------------------------------------------------------------------------------- refusals


def message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refusals(stage: int) -> dict[str, str]:
    found = {}
    model = net()
    engine = ZeroEngine(model, load_config(stage=stage))
    engine.attach(optimizer := adamw(model.parameters()))
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    with GatheredParameters(model.parameters()):
        found["inside"] = message(lambda: engine.close(gather=True))
    found["second"] = message(lambda: ZeroEngine(model, load_config(stage=stage)))
    engine.offload_states()
    found["moved"] = message(lambda: engine.close(gather=True))
    engine.reload_states()
    engine.close(gather=True, reason="a test closed it")
    for name in ("full_state_dict", "state_bytes", "grad_norm", "reset", "check_optimizers"):
        found[name] = message(getattr(engine, name))
    found["attach"] = message(lambda: engine.attach(optimizer))
    loss_of(model(torch.ones(2, 6))).backward()
    found["step"] = message(optimizer.step)
    optimizer.load_state_dict(adamw(model.parameters()).state_dict())
    found["loaded"] = message(optimizer.step)
    other = net()
    another = ZeroEngine(other, load_config(stage=stage))
    another.close()
    found["closed"] = message(lambda: another.close(gather=True))
    pairs = zip(other.parameters(), net().parameters(), strict=True)
    found["whole"] = str(stage < 3 and all(torch.equal(p, q) for p, q in pairs))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_an_ended_engine_refuses(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(refusals, stage):
        assert "inside of a forward, or of GatheredParameters" in found["inside"]
        assert "is sharded by another engine" in found["second"] and "close(gather=True)" in found["second"]
        assert "reload_states()" in found["moved"]
        for name in ("full_state_dict", "state_bytes", "grad_norm", "reset", "check_optimizers", "attach"):
            assert "this engine has ended: a test closed it" in found[name], (name, found)
        assert "a test closed it" in found["step"] and "load_state_dict" in found["step"]
        assert found["loaded"] == "no error"
        if stage == 3:
            assert "each rank kept its slices" in found["closed"]
        else:
            assert found["closed"] == "no error" and found["whole"] == "True"
