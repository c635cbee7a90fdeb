"""Steps taken by the fused ops: the same bits as a fused optimizer over full parameters, at every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.engine.nets import loss_of, net
from tests.engine.trainings import SETTINGS, PlainTraining, ShardedTraining, play
from tests.launcher import Launcher
from zero_strategy import ops
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedLion, FusedSGD
from zero_strategy.optim.full_state import safe_get_full_grad

Make = Callable[[Iterable[Any]], Optimizer]
FUSED = tuple(replace(setting, config={"fused_optimizers": True}) for setting in SETTINGS)
BY_STAGE = tuple(setting for setting in FUSED if (setting.order == "per_step") == (setting.stage < 2))
"""Without the orders of summation that a stage does not have by itself, which no rule of a step knows."""

OURS: dict[str, Make] = {
    "adam": partial(FusedAdam, lr=0.05, weight_decay=0.1),
    "adamw": partial(FusedAdamW, lr=0.05, weight_decay=0.1),
    "adagrad": partial(FusedAdagrad, lr=0.05, initial_accumulator_value=0.1),
    "sgd": partial(FusedSGD, lr=0.1),
    "nesterov": partial(FusedSGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "lion": partial(FusedLion, lr=0.01, weight_decay=0.1),
}
THEIRS: dict[str, Make] = {
    "adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]


def make(training: PlainTraining, name: str, model: nn.Module, *, by_class: bool) -> Optimizer:
    """`by_class`: the sharded training is given torch's class, which the engine runs in the fused ops."""
    kinds = THEIRS if by_class and isinstance(training, ShardedTraining) else OURS
    return kinds[name](groups_of(model))


def train(training: PlainTraining, name: str, by_class: bool, clip: bool = True) -> None:
    model = net()
    model.spare = nn.Parameter(torch.ones(3))
    training.shard(model)
    optimizer = make(training, name, model, by_class=by_class)
    training.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(4):
        for micro in range(2):
            loss = loss_of(model(training.data(2 * step + micro, 2, 6)))
            loss = loss + model.spare.sum() if step == 2 else loss
            training.note(loss)
            training.backward(loss, sync=micro == 1)
        if clip:
            training.clip_exactly(0.5)
        training.step()
        scheduler.step()
        training.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("name", OURS)
def test_fused_optimizers_are_bit_equal_at_every_stage(ranks: Launcher, name: str) -> None:
    for wrong in ranks(2)(play, partial(train, name=name, by_class=False), BY_STAGE):
        assert not wrong


@pytest.mark.parametrize("name", THEIRS)
def test_classes_of_torch_take_the_fused_step(ranks: Launcher, name: str) -> None:
    """On state that is whole and that is divided: which rule a class has does not depend on more."""
    for wrong in ranks(2)(play, partial(train, name=name, by_class=True), [BY_STAGE[0], BY_STAGE[2], BY_STAGE[3]]):
        assert not wrong


def test_more_ranks(ranks: Launcher) -> None:
    for wrong in ranks(3)(play, partial(train, name="adamw", by_class=True), FUSED):
        assert not wrong


def lamb(training: PlainTraining) -> None:
    model = net()
    training.shard(model)
    training.attach(FusedLamb(groups_of(model), lr=0.05))
    for step in range(4):
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.step()
        training.zero_grad()


@pytest.mark.parametrize("world", [2, 4])
def test_lamb_has_the_trust_ratios_of_whole_parameters(ranks: Launcher, world: int) -> None:
    # The float64 sums of pieces and of full parameters differ in their last bit.
    for wrong in ranks(world)(play, lamb, FUSED, tolerance=1e-6):
        assert not wrong


def odd_uses_of_scaled_gradients(training: PlainTraining) -> None:
    """Clip, then do something else than one step."""
    model = net()
    training.shard(model)
    training.attach(FusedAdamW(model.parameters(), lr=0.05))
    first = next(model.parameters())

    def backward(step: int) -> None:
        training.backward(loss_of(model(training.data(step, 2, 6))))

    backward(0)
    training.clip_exactly(0.5)
    backward(1)  # on top of clipped gradients
    training.clip_exactly(0.7)
    training.note(training.gradient(first))
    training.step()
    training.note(training.gradient(first))  # still there, still clipped
    training.step()
    training.zero_grad()
    backward(2)
    training.clip_exactly(0.5)
    training.zero_grad()  # clipped for nothing
    backward(3)
    training.clip_exactly(0.5)
    training.clip_exactly(0.25)
    training.clip_value(0.01)
    training.step()
    training.zero_grad(set_to_none=False)
    backward(4)
    training.clip_exactly(0.5)
    training.assign(first, torch.ones_like(first))  # replaces the clipped gradient
    training.step()


def test_gradients_that_wait_for_their_factor(ranks: Launcher) -> None:
    for wrong in ranks(2)(play, odd_uses_of_scaled_gradients, FUSED):
        assert not wrong


# ------------------------------------------------------------------------------------------- low precision


def low_precision(stage: int, dtype: torch.dtype, fused: bool) -> dict[str, Tensor]:
    order = {"gradient_reduction": "per_micro_batch", "fused_optimizers": fused, "units": {"min_numel": 0}}
    model = net()
    engine = ZeroEngine(model, load_config(stage=stage, **order), compute_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.attach(optimizer)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = loss_of(model(torch.randn(2, 6, generator=generator).to(dtype)).float())
        engine.scale_loss(loss).backward()
        engine.unscale_gradients(optimizer)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    for _, parameter in engine.model.names():
        place = engine.model.place(parameter)
        assert place is not None
        bucket = place[0]
        assert torch.equal(bucket.master.values.to(dtype), bucket.weights.values)
    return engine.full_state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_same_at_every_stage_and_close_to_torch(ranks: Launcher, dtype: torch.dtype) -> None:
    expected = ranks(2)(low_precision, 0, dtype, True)[0]
    for stage in (1, 2, 3):
        for found in ranks(2)(low_precision, stage, dtype, True):
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    for name, value in ranks(2)(low_precision, 2, dtype, False)[0].items():
        torch.testing.assert_close(value, expected[name], rtol=0.02, atol=1e-3)


# ------------------------------------------------------------------------------------------------ opt out


def calls_of(fused: bool, options: dict[str, Any]) -> int:
    """Number of runs of the fused op."""
    model = net()
    engine = ZeroEngine(model, load_config(stage=2, fused_optimizers=fused))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6))).backward()
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert safe_get_full_grad(next(model.parameters())) is not None
    return sum(event.count for event in profile.key_averages() if event.key == "zero_strategy::adam_")


def test_what_the_user_chose_is_what_runs(ranks: Launcher) -> None:
    assert ranks(2)(calls_of, True, {}) == [1, 1]
    assert ranks(2)(calls_of, False, {}) == [0, 0]
    for chosen in ({"foreach": False}, {"foreach": True}, {"fused": False}, {"amsgrad": True}):
        assert ranks(2)(calls_of, True, chosen) == [0, 0], chosen
    native = ops.ensure("cpu").path is not None  # else torch's own fused kernels are the faster ones
    assert ranks(2)(calls_of, True, {"fused": True}) == [int(native)] * 2
    assert ranks(2)(calls_of, False, {"fused": True}) == [0, 0]


def without_master_weights() -> str:
    model = net()
    config = load_config(stage=2, precision={"master_weights": False})
    engine = ZeroEngine(model, config, compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="FusedAdamW keeps float32 master weights") as info:
        engine.attach(FusedAdamW(model.parameters()))
    return str(info.value)


def test_a_contradiction_about_master_weights_is_named(ranks: Launcher) -> None:
    assert all("torch.optim class" in message for message in ranks(2)(without_master_weights))


def master_of_a_lone_optimizer() -> tuple[bool, float]:
    """A fused optimizer that trained by itself hands its master weights over."""
    model = net().to(torch.bfloat16)
    optimizer = FusedAdamW(model.parameters(), lr=1e-4)
    loss_of(model(torch.ones(2, 6, dtype=torch.bfloat16)).float()).backward()
    optimizer.step()
    optimizer.zero_grad()
    masters = {id(p): optimizer.state[p]["master"].clone() for p in model.parameters()}
    engine = ZeroEngine(model, load_config(stage=0))
    engine.attach(optimizer)
    equal = True
    for _, parameter in engine.model.names():
        place = engine.model.place(parameter)
        assert place is not None
        bucket, index = place
        cut = bucket.piece_of[index]
        mine = bucket.master.read(cut.offset, cut.offset + cut.numel)
        equal &= torch.equal(mine, masters[id(parameter)].reshape(-1))
    return equal, ops.l2norm(list(masters.values()))[0].item()


def test_master_weights_are_handed_over(ranks: Launcher) -> None:
    assert all(equal and norm > 0 for equal, norm in ranks(1)(master_of_a_lone_optimizer))
