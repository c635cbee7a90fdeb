"""Weights of float8 layers are gathered in float8, with the bits that their layers make of gathered values."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.float8 import float8_net, recipe
from tests.engine.nets import loss_of
from tests.engine.test_float8 import trained
from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, sharding
from zero_strategy.config import load_config
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.planning.model_shape import state_of
from zero_strategy.quantized.float8 import weights_cast_whole

FLOAT8: dict[str, Any] = {"communication": {"parameters": "float8"}}
SETTINGS = {
    "plain": FLOAT8,
    "kept after a forward": {**FLOAT8, "reshard_after_forward": False},
    "recomputed": {**FLOAT8, "activation_checkpointing": "full"},
    "recomputed in part": {**FLOAT8, "activation_checkpointing": "selective"},
}


@pytest.mark.parametrize("world", [2, 3])
def test_float8_gathers_have_the_bits_of_one_process(ranks: Launcher, world: int) -> None:
    settings = [Setting(3, "per_micro_batch", each) for each in SETTINGS.values()]
    for wrong in ranks(world)(play, partial(trained, name="tensorwise"), settings):
        assert not wrong


def test_compiled_units_that_gather_in_float8(ranks: Launcher) -> None:
    script = partial(trained, name="tensorwise", compiled="aot_eager")
    for wrong in ranks(2, timeout=200)(play, script, [Setting(3, "per_micro_batch", FLOAT8)], tolerance=1e-7):
        assert not wrong


class Penalised(nn.Module):
    """Its forward reads all parameters beside their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.on = float8_net(recipe("tensorwise")), True
        self.blocks = self.net.blocks

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if self.on:
            out = out + 0.01 * sum((p.square().sum() for p in self.net.parameters()), torch.zeros(()))
        return out


def with_readers(training: PlainTraining) -> None:
    """A penalty on all parameters in the forward, a scope around another, writes between steps and in a scope."""
    model = Penalised()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False))
    scope = sharding.GatheredParameters
    for step in range(4):
        x, model.on = training.data(step, 4, 6), step in (0, 3)
        if step == 1:
            with scope(list(model.parameters())):
                loss = loss_of(model(x))
        elif step == 2:
            with scope(list(model.parameters()), modifier_rank=0), torch.no_grad():
                model.blocks[0].up.weight.mul_(3.0)
                model.blocks[1].down.weight[0, 0] = 7.0  # a new largest value: another scale
            loss = loss_of(model(x))
        else:
            loss = loss_of(model(x))
        training.note(loss)
        training.backward(loss)
        training.step()
        training.zero_grad()
        with torch.inference_mode():
            training.note(model(training.data(50 + step, 4, 6)))
    training.note(*(value.clone() for value in training.module.state_dict().values()))


def test_values_that_others_read_and_write(ranks: Launcher) -> None:
    settings = [Setting(3, "per_micro_batch", each) for each in SETTINGS.values()]
    for wrong in ranks(2)(play, with_readers, settings):
        assert not wrong


def engine_of(model: nn.Module, config: dict[str, Any], dtype: torch.dtype | None = None) -> ZeroEngine:
    return ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}, **config}, compute_dtype=dtype)


def states(config: dict[str, Any], dtype: torch.dtype | None) -> tuple[list[Tensor], int]:
    """Losses and weights of three steps, and the bytes that this rank sent in gathers."""
    model = float8_net(recipe("tensorwise"))
    for layer in (model.first, model.last):
        layer.requires_grad_(False)
    engine = engine_of(model, config, dtype)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.02)
    engine.attach(optimizer)
    found, data = [], PlainTraining(Setting(3, "per_step"))
    engine.counters.reset()
    for step in range(3):
        loss = loss_of(model(data.data(step, 4, 6).to(dtype or torch.float32)).float())
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    sent = engine.counters.bytes["all_gather"]
    return found + list(engine.full_state_dict().values()), sent


def both(config: dict[str, Any], dtype: torch.dtype | None) -> tuple[bool, int, int]:
    (values, of_values), (others, of_float8) = (states(each, dtype) for each in (config, {**FLOAT8, **config}))
    return all(torch.equal(one, other) for one, other in zip(values, others, strict=True)), of_values, of_float8


@pytest.mark.parametrize("config", [{}, {"offload": {"optimizer": "cpu"}}, {"gradient_reduction": "per_step"}])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_bits_are_those_of_gathers_in_the_own_dtype(
    ranks: Launcher, config: dict[str, Any], dtype: torch.dtype | None
) -> None:
    for same, of_values, of_float8 in ranks(2)(both, config, dtype):
        assert same and of_float8 < of_values


def test_replicas_gather_in_float8(ranks: Launcher) -> None:
    for same, of_values, of_float8 in ranks(4)(both, {"mesh": {"replicate": 2}}, torch.bfloat16):
        assert same and of_float8 < of_values


def held_and_planned() -> tuple[Any, Any, int, int]:
    """Entries of the ledger and of the plan; the most bytes of gather buffers in a forward, and the plan's peak."""
    config = load_config(stage=3, units={"min_numel": 0}, prefetch=0, **FLOAT8)
    with torch.device("meta"):
        shape = float8_net(recipe("tensorwise"))
    model, found = float8_net(recipe("tensorwise")), list[int]()
    engine = ZeroEngine(model, config, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    engine.attach(optimizer)

    def look(*_: Any) -> None:
        found.append(sum(each.untyped_storage().nbytes() for bucket in engine.model.buckets for each in held(bucket)))

    model.blocks[1].down.register_forward_hook(look)
    for _ in range(2):
        loss_of(model(torch.ones(4, 6, dtype=torch.bfloat16)).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = config.plan(
        shape,
        world_size=2,
        compute_dtype=torch.bfloat16,
        optimizer=state_of(optimizer),
        device="cpu",
        snapshots=False,
    )
    ledger = plan.ledger(dist.get_rank())
    (peak,) = [entry.taken for entry in ledger.merged() if entry.category == "gather buffers"]
    return engine.ledger().merged(), ledger.held().merged(), max(found), peak


def held(bucket: ParameterBucket) -> list[Tensor]:
    return [tensor for category, tensor in bucket.held() if category == "gather buffers"]


def test_the_plan_of_float8_gathers_is_the_ledger(ranks: Launcher) -> None:
    for ledger, plan, measured, peak in ranks(2)(held_and_planned):
        assert ledger == plan
        assert measured == peak


def ends() -> list[object]:
    """A copy inside of a forward, and the remains of gathers once a module is plain again."""
    model = float8_net(recipe("tensorwise"))
    engine = engine_of(model, {**FLOAT8, "reshard_after_forward": False})
    errors: list[str] = []
    inside: list[str] = []

    def copied(*_: Any) -> None:
        inside.append(type(model.blocks[0].up.weight).__name__)
        try:
            copy.deepcopy(model)
        except RuntimeError as error:
            errors.append(str(error))

    handle = model.blocks[0].register_forward_hook(copied)
    x = torch.ones(4, 6)
    loss_of(model(x)).backward()
    handle.remove()
    before = model(x).detach()
    engine.close(gather=True)
    left = [name for name, layer in model.named_modules() if "weight" in vars(layer)]
    other = copy.deepcopy(model)
    return [bool(errors) and "released" in errors[0], *inside, left, torch.equal(before, other(x))]


def test_nothing_of_it_is_left_of_a_closed_engine(ranks: Launcher) -> None:
    assert ranks(2)(ends) == [[True, "ReleasedParameter", [], True]] * 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stage": 2}, r"stage is 2: only stage 3 gathers"),
        ({"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}, r"offload.parameters is 'cpu'"),
        ({"stage": 3, "mesh": {"tensor": 2}}, r"mesh.tensor is 2: weights are cast whole"),
        ({"stage": 3, "reshard_after_backward": False}, r"reshard_after_backward is False"),
        ({"stage": 3, "units": {"may_skip": True}}, r"units.may_skip is True"),
    ],
)
def test_what_has_no_place_for_float8_gathers_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"communication.parameters is 'float8', and {named}"):
        load_config(**FLOAT8, **changes)


def by_rows() -> tuple[list[str], bool]:
    """Warnings about layers that cast by row, and whether they train as ever."""
    model = float8_net(recipe("rowwise"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine_of(model, FLOAT8)
    loss_of(model(torch.ones(4, 6))).backward()
    return [str(each.message) for each in told if "float8" in str(each.message)], "weight" in vars(model.blocks[0].up)


def test_layers_that_cast_by_row_are_warned_about(ranks: Launcher) -> None:
    (told, shown), (silent, other) = ranks(2)(by_rows)
    assert len(told) == 1 and "no layer of Net casts its weight by one scale" in told[0]
    assert not silent and not shown and not other


def test_only_weights_that_one_layer_has_are_found() -> None:
    model = float8_net(recipe("tensorwise"))
    model.blocks[1].up.weight = model.blocks[0].up.weight  # tied: two layers, which cast it each for itself
    found = {id(layer) for layer in weights_cast_whole(model).values()}
    assert found == {id(model.blocks[0].down), id(model.blocks[1].down)}


def bytes_of_gathers() -> list[tuple[int, int, int]]:
    """Of each bucket of float8 weights: bytes sent by a gather of codes, of bf16 values, and the slice's elements."""
    model = float8_net(recipe("tensorwise"))
    engine = engine_of(model, FLOAT8, torch.bfloat16)
    with torch.no_grad():
        model(torch.ones(4, 6, dtype=torch.bfloat16))  # makes the scales
    found = []
    for bucket in engine.model.buckets:
        if bucket.codes is not None:
            sent = []
            for form in (bucket.codes, bucket):
                engine.counters.reset()
                form.start_unshard()
                form.finish_unshard()
                form.release()
                sent.append(engine.counters.bytes["all_gather"])
            found.append((*sent, bucket.layout.slice_numel))
    return found


def test_a_gather_in_float8_is_a_byte_for_each_element(ranks: Launcher) -> None:
    for found in ranks(2)(bytes_of_gathers):
        assert found == [(numel, 2 * numel, numel) for *_, numel in found]
        assert sum(numel for *_, numel in found) == 2 * 2 * 16 * 32 // 2, "the weights of two blocks, divided"
