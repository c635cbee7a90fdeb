"""`engine.offload_states()` and `reload_states()`: states wait on the host while a script generates."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy
from tests.compat.scripts.old_script import data, net
from tests.engine.divided import loss_of, tokens
from tests.fsdp.test_tensor_parallel import begin
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.runtime.zero.config import OffloadDeviceEnum
from zero_strategy.compat.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from zero_strategy.pipeline import LayerSpec, PipelineModule

ALL = ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
CATEGORIES = {
    "optim_states": {"optimizer state"},
    "hp_params": {"master weights"},
    "lp_params": {"parameters"},
    "lp_grads": {"gradients"},
    "contiguous_grad_buffer": {"gradients", "gradient buckets"},
}
MICRO, ACCUMULATION, STEPS = 2, 2, 4


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """`initialize` starts a process group of one, which other tests shall not see."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start(stage: int, half: bool = False, **more: Any) -> ScriptEngine:
    config = {
        "stage": stage,
        "units": {"min_numel": 0},
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": half},
        **more,
    }
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=0.02, foreach=False)  # noqa: E731
    return zero_strategy.initialize(model=net(), optimizer=adamw, config=config)[0]


def batches(engine: ScriptEngine) -> list[tuple[Tensor, Tensor]]:
    dtype = next(engine.module.parameters()).dtype
    return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in engine.deepspeed_io(data())]


def tiers(engine: ScriptEngine) -> dict[str, dict[str, int]]:
    """Bytes asked, by tier and category; what stands for released parameters apart."""
    sums = engine.zero.ledger().sums("tier", "category")
    found: dict[str, dict[str, int]] = {"device": {}, "host": {}}
    for (tier, category), total in sums.items():
        if category not in ("handles", "buffers", "communication"):
            found[tier][category] = total.asked
    return found


def in_memory(engine: ScriptEngine) -> list[Tensor]:
    """Parameters and state, as far as this rank has them in memory."""
    model = engine.zero.model
    named = [pair for bucket in (*model.buckets, *model.gradients) for pair in bucket.held()]
    tensors = [tensor for category, tensor in named if category != "handles"]
    tensors += [value for one in model.optimizers for values in one.state.values() for value in values.values()]
    return [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]


def places(engine: ScriptEngine) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in in_memory(engine)}


def whole(engine: ScriptEngine) -> list[Tensor]:
    """Weights, master weights, moments and gradients, whole."""
    found = list(engine.state_dict().values())
    for parameter in engine.module.parameters():
        found.append(safe_get_full_fp32_param(parameter))
        for value in (safe_get_full_grad(parameter), safe_get_full_optimizer_state(parameter, "exp_avg")):
            found += [] if value is None else [value]
    return [value.clone() for value in found]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train(stage: int, half: bool, moves: list[list[str] | None]) -> list[Tensor]:
    """Steps of several micro-batches; before each micro-batch, states go to the host and come back."""
    engine = start(stage, half)
    for x, y in batches(engine)[: STEPS * ACCUMULATION]:
        for include in moves:
            check_round_trip(engine, include)
        engine.backward(engine(x, y))
        engine.step()
    return [*whole(engine), torch.tensor(engine.get_global_grad_norm())]


def check_round_trip(engine: ScriptEngine, include: list[str] | None) -> None:
    objects = [(parameter, parameter.grad) for parameter in engine.module.parameters()]
    before, occupied, values = tiers(engine), places(engine), [tensor.clone() for tensor in in_memory(engine)]
    engine.offload_states(include)
    there = tiers(engine)
    kinds = ALL if include is None else include
    moved = set().union(*(CATEGORIES[kind] for kind in kinds))
    total = sum(before["device"].values())
    assert sum(there["device"].values()) + sum(there["host"].values()) == total
    if include is None:
        assert not any(there["device"].values()), there
        assert not places(engine) & occupied, "what is on the host has memory of its own"
    assert all(not size or category in moved for category, size in there["host"].items())
    assert there["host"] == {c: size for c, size in before["device"].items() if c in there["host"]}
    assert alike(in_memory(engine), values), "what is on the host can be read"
    engine.reload_states()
    assert tiers(engine) == before
    assert alike(in_memory(engine), values)
    for (parameter, gradient), known in zip(objects, engine.module.parameters(), strict=True):
        assert parameter is known and gradient is known.grad


def both(stage: int, half: bool) -> bool:
    moves: list[list[str] | None] = [None, ["optim_states", "hp_params"], ["lp_params"], ALL[3:]]
    return alike(train(stage, half, moves), train(stage, half, []))


def all_stages() -> list[bool]:
    return [both(stage, half) for stage in range(4) for half in (False, True)]


def test_states_go_to_the_host_and_back_bit_by_bit(ranks: Launcher) -> None:
    for found in ranks(2)(all_stages):
        assert found == [True] * 8


def test_parameters_that_stay_whole_between_steps(ranks: Launcher) -> None:
    assert all(ranks(2)(in_place))


def in_place() -> bool:
    def run(moves: bool) -> list[Tensor]:
        engine = start(3, reshard_after_backward=False)
        for x, y in batches(engine)[: 2 * ACCUMULATION]:
            engine.backward(engine(x, y))
            engine.step()
            if moves:
                engine.offload_states()
                engine.reload_states()
        return whole(engine)

    return alike(run(True), run(False))


@pytest.mark.parametrize("stage", range(4))
def test_a_script_that_generates_between_steps(stage: int) -> None:
    """Weights stay: states that only the next step needs make room for a generator, which reads the weights."""
    engine = start(stage)
    (x, y), *rest = batches(engine)
    engine.backward(engine(x, y))
    engine.step()
    engine.offload_states(
        include=[
            OffloadStateTypeEnum.optim_states,
            OffloadStateTypeEnum.hp_params,
            OffloadStateTypeEnum.lp_grads,
            OffloadStateTypeEnum.contiguous_grad_buffer,
        ],
        device=OffloadDeviceEnum.cpu,
        pin_memory=True,
        non_blocking=True,
    )
    with torch.no_grad(), zero_strategy.sharding.GatheredParameters(list(engine.module.parameters())):
        assert all(parameter.isfinite().all() for parameter in engine.module.parameters())
        assert engine(x, y).isfinite()
    engine.offload_states([])  # nothing more
    engine.reload_states(non_blocking=True)
    engine.reload_states()
    for x, y in rest[:3]:
        engine.backward(engine(x, y))
        engine.step()
    assert engine.global_steps == 2


@pytest.mark.parametrize("stage", [0, 3])
def test_what_needs_states_says_how_they_come_back(stage: int, tmp_path: Any) -> None:
    engine = start(stage)
    first, second, third, *_ = batches(engine)
    engine.backward(engine(*first))
    loss = engine(*second)
    before = whole(engine)
    engine.offload_states()
    assert alike(whole(engine), before), "it can be read"
    optimizer, parameter = engine.optimizer, next(engine.module.parameters())
    assert optimizer is not None
    zero = engine.zero
    calls = [
        ("step()", engine.step),
        ("a forward", lambda: engine(*third)),
        ("backward()", lambda: engine.backward(loss)),
        ("a norm of gradients", lambda: zero.clip_grad_norm_(1.0)),
        ("clip_grad_value_()", lambda: zero.clip_grad_value_(1.0)),
        ("saving a checkpoint", lambda: engine.save_checkpoint(tmp_path)),
        ("loading a checkpoint", lambda: zero.load_weights(tmp_path)),
        ("load_state_dict()", lambda: engine.load_state_dict(engine.state_dict())),
        ("load_optimizer_state_dict()", lambda: zero.load_optimizer_state_dict(optimizer, optimizer.state_dict())),
        ("safe_set_full_fp32_param()", lambda: zero_strategy_set(parameter)),
        ("GatheredParameters(modifier_rank=...)", lambda: gather(parameter)),
        ("attaching an optimizer", lambda: zero.attach(torch.optim.SGD([parameter]))),
    ]
    for name, call in calls:
        with pytest.raises(RuntimeError, match="needs states that are on the host since offload_states") as error:
            call()
        assert str(error.value).startswith(name) and str(error.value).endswith("Call reload_states() first")
    assert alike(whole(engine), before)
    engine.reload_states()
    engine.step()
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1


def zero_strategy_set(parameter: nn.Parameter) -> None:
    from zero_strategy.optim.full_state import safe_set_full_fp32_param

    safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))


def gather(parameter: nn.Parameter) -> None:
    with zero_strategy.sharding.GatheredParameters(parameter, modifier_rank=0):
        raise AssertionError("not entered")


def of_a_pipeline(moves: bool) -> list[Tensor]:
    torch.manual_seed(0)
    module = PipelineModule(
        layers=[LayerSpec(nn.Linear, 4, 8), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 8, 1)],
        num_stages=dist.get_world_size(),
        loss_fn=nn.functional.mse_loss,
    )
    samples = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = zero_strategy.initialize(model=module, training_data=samples, config=config)
    losses = []
    for _ in range(3):
        losses.append(engine.train_batch())  # type: ignore[attr-defined]
        if moves:
            engine.offload_states()
            with pytest.raises(RuntimeError, match=r"^train_batch\(\) needs states that are on the host"):
                engine.train_batch()  # type: ignore[attr-defined]
            engine.reload_states()
    return [*losses, *module.parameters()]


def pipelines() -> bool:
    return alike(of_a_pipeline(True), of_a_pipeline(False))


def test_moved_states_pipeline(ranks: Launcher) -> None:
    assert all(ranks(2)(pipelines))


def with_tensor_parallel_layers(stage: int, moves: bool) -> list[Tensor]:
    model, engine, optimizer, copy = begin(stage, 2)
    for step in range(2):
        loss_of(model, tokens(copy, step, 0)).backward()
        if moves:
            engine.offload_states()
            engine.reload_states()
        optimizer.step()
        if moves:
            engine.offload_states()
            engine.reload_states()
        optimizer.zero_grad()
    return list(engine.full_state_dict().values())


def divided() -> list[bool]:
    runs = [[with_tensor_parallel_layers(stage, moves) for moves in (True, False)] for stage in (0, 3)]
    return [alike(*run) for run in runs]


def test_tensor_parallel_layers(ranks: Launcher) -> None:
    assert ranks(2)(divided) == [[True, True]] * 2


def test_an_engine_without_a_script() -> None:
    model = net()
    engine = ZeroEngine(model, load_config(stage=2, units={"min_numel": 0}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    engine.attach(optimizer)
    x, y = data()[0]
    loss = model(x[None], y[None])
    engine.offload_states(["lp_grads"])
    with pytest.raises(RuntimeError, match=r"^a backward needs states .*: lp_grads. Call reload_states"):
        loss.backward()
    engine.reload_states()
    model(x[None], y[None]).backward()
    engine.offload_states(["optim_states"])
    with pytest.raises(RuntimeError, match=r"^an optimizer's step needs states .*: optim_states. Call reload_states"):
        optimizer.step()
    before = [parameter.clone() for parameter in model.parameters()]
    engine.reload_states()
    optimizer.step()
    assert not alike(before, list(model.parameters()))


def test_gradients_that_are_removed_meanwhile_stay_away() -> None:
    engine = start(0)
    first, second, third, *_ = batches(engine)
    engine.backward(engine(*first))
    engine.offload_states()
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    engine.reload_states()
    other = start(0)
    for one in (engine, other):
        one.micro_steps = 0
        for batch in (second, third):
            one.backward(one(*batch))
            one.step()
    assert alike(whole(engine), whole(other))


def test_arguments_that_are_not_accepted() -> None:
    engine = start(1, offload={"optimizer": "cpu"})
    for error, message, arguments in (
        (TypeError, r"a list of kinds of state, such as \['optim_states'\]", {"include": "optim_states"}),
        (ValueError, "no state 'gradients'; accepted: optim_states, hp_params", {"include": ["gradients"]}),
        (ValueError, r"device='nvme'\) is not done; accepted: 'cpu'", {"device": "nvme"}),
        (ValueError, "cannot move optim_states, hp_params: by offload.optimizer they are off", {}),
    ):
        with pytest.raises(error, match=message):
            engine.offload_states(**arguments)  # type: ignore[arg-type]
    engine.offload_states(["lp_params"])
    engine.reload_states()
    with zero_strategy.sharding.GatheredParameters(list(engine.module.parameters())):
        with pytest.raises(RuntimeError, match="inside of a forward, or of GatheredParameters"):
            engine.offload_states(["lp_params"])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_that_states_have_left_is_free(stage: int, half: bool) -> None:
    engine = start(stage, half)
    for inputs, labels in batches(engine)[: ACCUMULATION + 1]:
        engine.backward(engine(inputs, labels))
        engine.step()
    gradients = [parameter.grad for parameter in engine.module.parameters()]  # somebody may hold them
    left = [tensor.untyped_storage() for tensor in in_memory(engine)]
    assert len(left) > 4
    engine.offload_states()
    gc.collect()
    nobodys = torch.empty(1).untyped_storage()
    holders = [torch._C._storage_Use_Count(each._cdata) for each in left]
    assert holders == [torch._C._storage_Use_Count(nobodys._cdata)] * len(left)
    kept = zip(gradients, engine.module.parameters(), strict=True)
    assert all(gradient is parameter.grad for gradient, parameter in kept)
