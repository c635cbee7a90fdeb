"""Full parameters on demand: state dicts, copies, `GatheredParameters`, `Init`, and guards on what is released."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.engine.live import live_bytes, only_new
from tests.engine.nets import Net, loss_of, net
from tests.engine.trainings import Setting, ShardedTraining
from tests.launcher import Launcher, RankError
from zero_strategy import fsdp as sharding
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import ShardedParameter, is_released
from zero_strategy.optim import full_state

STAGE_3 = Setting(3, "per_micro_batch")


def setting_of(stage: int, **config: Any) -> Setting:
    return Setting(stage, "per_step" if stage < 2 else "per_micro_batch", config)


def sharded_net(stage: int = 3, **config: Any) -> tuple[ShardedTraining, Net]:
    training, model = ShardedTraining(setting_of(stage, **config)), net()
    training.shard(model)
    return training, model


def trained(stage: int) -> tuple[ShardedTraining, Net]:
    training, model = sharded_net(stage)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05))
    train_one(training, model)
    return training, model


def train_one(training: ShardedTraining, model: nn.Module, step: int = 0) -> Tensor:
    loss = loss_of(model(training.data(step, 2, 6)))
    loss.backward()
    training.step()
    training.zero_grad()
    return loss.detach()


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "no error"


# --------------------------------------------------------------------------------------------- at rest, stage 3


def at_rest() -> dict[str, Any]:
    training, model = trained(3)
    shapes = {name: tuple(p.shape) for name, p in net().named_parameters()}
    found: dict[str, Any] = {
        "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes,
        "released": all(is_released(p) for p in model.parameters()),
        "storages": max(p.untyped_storage().nbytes() for p in model.blocks.parameters()),
    }
    with torch.no_grad():
        found["written"] = message_of(lambda: model.blocks[1].up.weight.fill_(0.0))
    found["again"] = bool(torch.isfinite(model(training.data(0, 2, 6))).all())
    training.reset()
    training.own.clip_grad_norm_(1.0)
    model.zero_grad()
    with torch.no_grad():
        found["evaluated"] = bool(torch.isfinite(model(training.data(0, 2, 6))).all())
        found["scalar"] = message_of(lambda: nn.init.constant_(model.scale, 1.0))
    return found


def test_released_parameters_keep_their_shape_and_refuse_writes(ranks: Launcher) -> None:
    for found in ranks(2)(at_rest):
        assert found["shapes"] and found["released"] and found["again"] and found["evaluated"]
        assert found["storages"] <= 64
        assert "blocks.1.up.weight" in found["written"] and "GatheredParameters" in found["written"]
        assert "'scale'" in found["scalar"]


# --------------------------------------------------------------------------------- state dicts, copies, casts


def state_dicts(stage: int) -> dict[str, Any]:
    training, model = trained(stage)
    state = model.state_dict()
    block = model.blocks[1].state_dict()
    head = {name: value.clone() for name, value in model.head.state_dict().items()}
    plain = net(seed=9)
    plain.load_state_dict(state)
    found: dict[str, Any] = {
        "finite": all(bool(value.isfinite().all()) for value in state.values()),
        "part": all(torch.equal(value, state[f"blocks.1.{name}"]) for name, value in block.items()),
        "head": all(torch.equal(value, state[f"head.{name}"]) for name, value in head.items()),
        "same model": torch.equal(plain(training.data(1, 2, 6)), model(training.data(1, 2, 6))),
    }
    kept = {name: value.clone() for name, value in state.items()}
    train_one(training, model, 5)
    model.load_state_dict(kept)
    found["loaded"] = torch.equal(plain(training.data(1, 2, 6)), model(training.data(1, 2, 6)))
    other = net(seed=4)
    model.blocks[2].load_state_dict(other.blocks[2].state_dict())
    plain.blocks[2].load_state_dict(other.blocks[2].state_dict())
    found["part loaded"] = torch.equal(plain(training.data(1, 2, 6)), model(training.data(1, 2, 6)))
    found["assign"] = message_of(lambda: model.load_state_dict(kept, assign=True))
    bad = {name: value for name, value in kept.items() if name != "head.bias"}
    found["missing"] = message_of(lambda: model.load_state_dict(bad))
    found["mismatch"] = message_of(lambda: model.load_state_dict({**kept, "head.bias": torch.zeros(5)}))
    found["goes on"] = bool(torch.isfinite(train_one(training, model, 6)))
    found["pinned"] = [unit.pinned for unit in training.own.model.units]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_dicts_are_whole_on_all_ranks(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(state_dicts, stage):
        for key in ("finite", "part", "head", "same model", "loaded", "part loaded", "goes on"):
            assert found[key], key
        assert "assign" in found["assign"]
        assert "head.bias" in found["missing"] and "head.bias" in found["mismatch"]
        assert set(found["pinned"]) == {0}


def copies(stage: int) -> dict[str, Any]:
    training, model = trained(stage)

    def save_and_load() -> nn.Module:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded: nn.Module = torch.load(buffer, weights_only=False)
        return loaded

    ways: dict[str, Callable[[], nn.Module]] = {
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
        "save": save_and_load,
        "part": lambda: copy.deepcopy(model.blocks[0].up),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(model).module,
    }
    found: dict[str, Any] = {f"{way} released": message_of(make) for way, make in ways.items()}
    with sharding.GatheredParameters(model.parameters()):
        made = {way: make() for way, make in ways.items()}
    x = training.data(1, 2, 6)
    part = made.pop("part")
    found["part"] = all(bool(p.isfinite().all()) for p in part.parameters())
    outputs = model(x)
    for way, duplicate in made.items():
        found[way] = torch.equal(duplicate(x), outputs)
        optimizer = torch.optim.SGD(duplicate.parameters(), lr=0.1)
        if training.rank == 0:  # a copy trains alone, and may be cast
            loss_of(duplicate(x)).backward()
            optimizer.step()
            duplicate.double()
            duplicate(x.double())
            duplicate.state_dict()
    found["original"] = torch.equal(model(x), outputs) and model.head.weight.dtype == torch.float32
    found["goes on"] = bool(torch.isfinite(train_one(training, model, 6)))
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_copies_are_refused_while_released_and_independent_otherwise(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(copies, stage):
        for key, value in found.items():
            if not key.endswith("released"):
                assert value is True, key
            elif stage == 3:
                assert "'scale' is released" in value or "'blocks.0.up.weight' is released" in value, key
            else:
                assert value == "no error", key


def moves(stage: int) -> dict[str, str]:
    _, model = trained(stage)
    calls: dict[str, Callable[[], object]] = {
        "cpu": model.cpu,
        "float": model.float,
        "same": lambda: model.to("cpu", torch.float32),
        "half": model.half,
        "double": model.double,
        "dtype": lambda: model.to(torch.bfloat16),
        "meta": lambda: model.to("meta"),
        "part": model.blocks[1].up.half,
        "empty": lambda: model.to_empty(device="cpu"),
    }
    found = {name: message_of(call) for name, call in calls.items()}
    found["finite"] = str(all(bool(value.isfinite().all()) for value in model.state_dict().values()))
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_casts_and_moves_are_refused_by_name(ranks: Launcher, stage: int) -> None:
    for found in ranks(2)(moves, stage):
        assert found.pop("finite") == "True"
        found.pop("empty")
        for name, message in found.items():
            if name in ("cpu", "float", "same"):
                assert message == "no error", name
            else:
                assert "is sharded" in message and "parameter '" in message, name


# ------------------------------------------------------------------------------------------- GatheredParameters


def gathered(stage: int, dtype: torch.dtype | None) -> dict[str, Any]:
    model = net()
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=5.0)
    engine = ZeroEngine(model, config, compute_dtype=dtype)
    training = ShardedTraining(STAGE_3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine.attach(optimizer)
    x = training.data(0, 2, 6).to(dtype or torch.float32)
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()
    found: dict[str, Any] = {}
    masters = {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    with sharding.GatheredParameters(model.blocks[1].parameters()):
        found["finite"] = all(bool(p.isfinite().all()) for p in model.blocks[1].parameters())
    with sharding.GatheredParameters(iter([model.head.weight, model.scale]), modifier_rank=1), torch.no_grad():
        model.head.weight[1] = 3.0 + training.rank
        model.scale.fill_(7.0 + training.rank)
    with sharding.GatheredParameters(model.blocks[0].up.bias, modifier_rank=0), torch.no_grad():
        model.blocks[0].up.bias.zero_()
    with sharding.GatheredParameters(nn.Parameter(torch.zeros(2)), modifier_rank=0):
        pass
    with sharding.GatheredParameters([*model.parameters()], modifier_rank=0, enabled=False):
        pass
    try:
        with sharding.GatheredParameters(model.head.weight, modifier_rank=1), torch.no_grad():
            model.head.weight.fill_(-1.0)
            raise KeyError("inside")
    except KeyError:
        found["nested"] = "left"
    found["rank"] = message_of(lambda: sharding.GatheredParameters(model.scale, modifier_rank=9).__enter__())
    after = {name: full_state.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    expected = {name: value.clone() for name, value in masters.items()}
    expected["head.weight"][1] = 4.0
    expected["scale"].fill_(8.0)
    expected["blocks.0.up.bias"].zero_()
    if stage < 3:  # full parameters are changed in place, whatever happens then
        expected.pop("head.weight")
    found["wrong"] = [name for name, value in expected.items() if not torch.equal(value, after[name])]
    state = model.state_dict()
    cast = {name: value.to(dtype or torch.float32) for name, value in after.items()}
    found["parameters"] = [n for n, v in cast.items() if not torch.equal(v, state[n]) and n in expected]
    loss_of(model(x)).backward()
    optimizer.step()
    found["bytes"] = engine.state_bytes()["parameters"]
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gathered_parameters_are_changed_by_one_rank(ranks: Launcher, stage: int, dtype: torch.dtype | None) -> None:
    for found in ranks(2)(gathered, stage, dtype):
        assert found["finite"] and found["nested"] == "left"
        assert "modifier_rank 9" in found["rank"]
        assert not found["wrong"], "values, also of masters that nobody changed"
        assert not found["parameters"]


def as_arrays() -> list[bool]:
    """Numpy views of gathered parameters: what they hold then and after a step, and what training makes of it."""
    training, model = trained(3)
    x = training.data(1, 2, 6)
    with sharding.GatheredParameters(model.parameters()):
        arrays = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        outputs = model(x)
    found = [torch.equal(model(x), outputs)]
    train_one(training, model, 1)
    found += [torch.equal(torch.from_numpy(arrays[name]), expected[name]) for name in arrays]
    other, plain = trained(3)
    train_one(other, plain, 1)
    now, right = training.own.full_state_dict(), other.own.full_state_dict()
    found += [torch.equal(now[name], right[name]) for name in now]
    found.append(all(is_released(p) for p in model.parameters()))
    return found


def test_numpy_views_of_gathered_parameters_keep_their_values(ranks: Launcher) -> None:
    for found in ranks(2)(as_arrays):
        assert all(found)


def on_rank_0_only(call: str, late: bool) -> tuple[str, float]:
    training, model = sharded_net(barrier_seconds=1.0)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(net().state_dict()),
        "gathered": lambda: sharding.GatheredParameters(model.scale).__enter__(),
        "save": lambda: training.own.save("/nonexistent"),
    }
    start = time.monotonic()
    if training.rank == 0:
        return message_of(calls[call]), time.monotonic() - start
    time.sleep(2.5 if late else 0.0)
    return (message_of(calls[call]) if late else "not called"), time.monotonic() - start


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict", "gathered", "save"])
def test_a_call_on_one_rank_only_is_an_error_within_seconds(ranks: Launcher, call: str) -> None:
    (message, seconds), _ = ranks(2)(on_rank_0_only, call, False)
    assert "rank(s) [1] did not come" in message and seconds < 10


def test_a_rank_that_comes_too_late_does_not_hang(ranks: Launcher) -> None:
    first, second = ranks(2)(on_rank_0_only, "state_dict", True)
    assert "did not come" in first[0]
    assert "rank(s) [0]" in second[0] and second[1] < 5


# ---------------------------------------------------------------------------------------------------------- Init


class Weighed(nn.Linear):
    """Notes how many bytes are alive whenever it is initialised."""

    peak = 0

    def reset_parameters(self) -> None:
        super().reset_parameters()
        Weighed.peak = max(Weighed.peak, live_bytes())


class Deep(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(Weighed(width, width), nn.LayerNorm(width)) for _ in range(6))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("fixed", torch.arange(4.0))
        self.blocks[3][0].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def built_in_slices(stage: int) -> dict[str, Any]:
    with only_new():
        return built_new_in_slices(stage)


def built_new_in_slices(stage: int) -> dict[str, Any]:
    torch.manual_seed(1 + dist.get_rank())  # every rank draws other numbers; rank 0's count
    before, Weighed.peak = live_bytes(), 0
    with sharding.Init():
        model = Deep()
    found: dict[str, Any] = {
        "slices": all(isinstance(p, ShardedParameter) for p in model.parameters()),
        "buffer": model.fixed.tolist(),
        "frozen": not model.blocks[3][0].weight.requires_grad,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    objects = [id(p) for p in model.parameters()]
    engine = ZeroEngine(model, load_config(stage=stage, units={"min_numel": 0}))
    found["whole"] = sum(4 * p.numel() for p in model.parameters())
    found["peak"], found["rest"] = Weighed.peak - before, live_bytes() - before
    found["identity"] = [id(p) for p in model.parameters()] == objects
    found["tie"] = model.head.weight is model.embedding.weight
    found["weights"] = engine.full_state_dict()
    engine.attach(optimizer)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(4):
        loss = model(torch.randint(0, 16, (2, 3), generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found["losses"] = losses
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_init(ranks: Launcher, stage: int) -> None:
    first, second = ranks(2)(built_in_slices, stage)
    for found in (first, second):
        assert found["slices"] and found["identity"] and found["tie"] and found["frozen"]
        assert found["buffer"] == [0.0, 1.0, 2.0, 3.0]
        assert found["losses"] == first["losses"] and all(value == value for value in found["losses"])
        assert all(torch.equal(value, first["weights"][name]) for name, value in found["weights"].items())
        block = found["whole"] / 6
        if stage == 3:
            assert found["peak"] <= 0.5 * found["whole"] + 3 * block, "at most the slices and a block at a time"
            assert found["rest"] <= 0.55 * found["whole"]
    weight = first["weights"]["blocks.0.0.weight"]
    assert weight.abs().max() <= 1 / 8 and weight.std() > 0.05, "the module's own initialisation"


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def no_reset() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    return message_of(lambda: ZeroEngine(model, load_config(stage=3)))


def test_meta_parameters_without_reset_parameters_name_the_module(ranks: Launcher) -> None:
    for message in ranks(2)(no_reset):
        assert "'1'" in message and "Bare" in message and "reset_parameters" in message


# ---------------------------------------------------------------------------------------------- whole state


def whole_state(stage: int) -> dict[str, Any]:
    training, model = sharded_net(stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    found: dict[str, Any] = {}
    p = model.blocks[1].up.weight
    found["no optimizer"] = message_of(lambda: full_state.safe_get_full_optimizer_state(p, "exp_avg"))
    training.attach(optimizer)
    found["none yet"] = full_state.safe_get_full_optimizer_state(p, "exp_avg") is None
    found["no gradient"] = full_state.safe_get_full_grad(p) is None
    loss_of(model(training.data(0, 2, 6))).backward()
    gradient = full_state.safe_get_full_grad(p)
    assert gradient is not None
    full_state.safe_set_full_grad(model.scale, torch.tensor(0.25))
    full_state.safe_set_full_grad(p, gradient * 2)
    again = full_state.safe_get_full_grad(p)
    found["gradient"] = again is not None and torch.equal(again, gradient * 2)
    training.step()
    moment = full_state.safe_get_full_optimizer_state(p, "exp_avg")
    scalar = full_state.safe_get_full_optimizer_state(model.scale, "exp_avg")
    step = full_state.safe_get_full_optimizer_state(p, "step")
    found["moment"] = moment is not None and torch.allclose(moment, 0.1 * 2 * gradient, rtol=1e-6)
    found["scalar"] = scalar is not None and scalar.shape == () and abs(float(scalar) - 0.025) < 1e-7
    found["step"] = step is not None and float(step) == 1.0
    full_state.safe_set_full_optimizer_state(p, torch.full_like(gradient, 0.5), "exp_avg")
    full_state.safe_set_full_fp32_param(p, torch.full_like(gradient, 2.0))
    moment = full_state.safe_get_full_optimizer_state(p, "exp_avg")
    found["set"] = moment is not None and bool((moment == 0.5).all())
    found["value"] = bool((model.state_dict()["blocks.1.up.weight"] == 2.0).all())
    found["whole value"] = bool((full_state.safe_get_full_fp32_param(p) == 2.0).all())
    found["shape"] = message_of(lambda: full_state.safe_set_full_fp32_param(p, torch.zeros(3)))
    found["foreign"] = message_of(lambda: full_state.safe_get_full_fp32_param(nn.Parameter(torch.zeros(2))))
    found["key"] = message_of(lambda: full_state.safe_set_full_optimizer_state(p, gradient, "momentum"))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_state_is_read_and_written(ranks: Launcher, stage: int) -> None:
    for world in (2, 3):
        by_rank = ranks(world)(whole_state, stage)
        for found in by_rank:
            assert "no attached optimizer" in found.pop("no optimizer")
            assert "(3,)" in found.pop("shape") and "(2,)" in found.pop("foreign")
            found.pop("key")
            assert all(found.values()), found


def test_an_error_of_one_rank_reaches_the_test(ranks: Launcher) -> None:
    """The oracle of the tests above: a rank that raises alone fails the run."""
    with pytest.raises(RankError):
        ranks(2)(raise_on_rank_1)


def raise_on_rank_1() -> None:
    if ShardedTraining(STAGE_3).rank:
        raise RuntimeError("rank 1")


def backward_through_a_value_that_was_set(stage: int, local: bool) -> str:
    training, model = sharded_net(stage)
    parameter = model.get_parameter("blocks.1.up.weight")
    loss = loss_of(model(training.data(0, 2, 6)))
    if local:
        full_state.safe_set_local_fp32_param(parameter, full_state.safe_get_local_fp32_param(parameter) * 2)
    else:
        full_state.safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
    return message_of(loss.backward)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_through_a_value_that_was_set_is_an_error(ranks: Launcher, stage: int, local: bool) -> None:
    for text in ranks(2)(backward_through_a_value_that_was_set, stage, local):
        assert "modified by an inplace operation" in text
