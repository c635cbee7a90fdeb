"""The script engine: accumulation, averaging put off, precision, counters, and what it says about mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

import zero_strategy
from tests.compat.scripts import plain
from tests.compat.scripts.old_script import data, net
from tests.launcher import Launcher
from zero_strategy.compat.deepspeed.schedules import WarmupLR
from zero_strategy.compat.deepspeed.scripts.data import RepeatingLoader
from zero_strategy.compat.deepspeed.scripts.engine import ScriptEngine
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.full_state import safe_get_full_fp32_param

LR, MICRO = 0.02, 2
Loss = Callable[[ScriptEngine, int], Tensor]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """`initialize` starts a process group of one, which other tests shall not see."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def start(stage: int, accumulation: int = 1, **more: Any) -> ScriptEngine:
    config = {
        "stage": stage, "units": {"min_numel": 0}, "barrier_seconds": 10.0,
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": accumulation, **more,
    }  # fmt: skip
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=LR, foreach=False)  # noqa: E731
    return zero_strategy.initialize(model=net(), optimizer=adamw, config=config)[0]


def micro_batches(engine: ScriptEngine) -> list[tuple[Tensor, Tensor]]:
    return list(engine.deepspeed_io(data()))


def weights(engine: ScriptEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


# ---- averaging that is put off ----


def put_off(how: str) -> list[float]:
    expected = plain.train(2, world=dist.get_world_size(), micro=MICRO, accumulation=3, lr=LR)["weights"]
    distances = []
    for stage in range(4):
        engine = start(stage, 3)
        for x, y in micro_batches(engine)[:6]:
            loss = engine(x, y)
            if how == "argument":  # even at the boundary: the step itself averages then
                engine.backward(loss, allreduce_gradients=False)
            elif how == "no_sync":
                with engine.no_sync():
                    engine.backward(loss)
            else:
                engine.backward(loss, release_loss=True)
            engine.step()
        distances.append(apart(weights(engine), expected))
    return distances


@pytest.mark.parametrize("how", ["argument", "no_sync", "always"])
def test_ranks_never_step_with_different_gradients(ranks: Launcher, how: str) -> None:
    for distances in ranks(2)(put_off, how):
        assert max(distances) < 2e-6, distances


def by_hand() -> float:
    """A script that averages itself, as it had to under DeepSpeed (stage 0, where gradients can be seen)."""
    engine = start(0)
    for x, y in micro_batches(engine)[:3]:
        engine.backward(engine(x, y), allreduce_gradients=False)
        for parameter in engine.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        engine.step()
    return apart(weights(engine), plain.train(3, world=dist.get_world_size(), micro=MICRO, lr=LR)["weights"])


def test_gradients_may_be_averaged_by_hand(ranks: Launcher) -> None:
    assert max(ranks(2)(by_hand)) < 2e-6


def sent_in_backward() -> list[tuple[int, int]]:
    """Elements, when averaging is put off, and when it is not."""
    found = []
    for stage in range(4):
        counts = []
        for allreduce in (False, True):
            engine = start(stage)
            (x, y), *_ = micro_batches(engine)
            loss = engine(x, y)
            before = engine.zero.counters.elements_sent
            engine.backward(loss, allreduce_gradients=allreduce)
            counts.append(engine.zero.counters.elements_sent - before)
        found.append((counts[0], counts[1]))
    return found


def test_gradients_wait_where_whole_ones_are_kept(ranks: Launcher) -> None:
    for found in ranks(2)(sent_in_backward):
        for put_off, at_once in found[:2]:
            assert put_off == 0 < at_once
        for put_off, at_once in found[2:]:
            assert put_off == at_once > 0


# ---- boundaries, counters, schedulers ----


def test_only_boundaries_change_weights() -> None:
    engine = start(2, 3)
    scheduler = WarmupLR(engine.optimizer, 0.01, LR, warmup_num_steps=4)  # type: ignore[arg-type]
    engine.lr_scheduler = scheduler
    first = weights(engine)
    for number, (x, y) in enumerate(micro_batches(engine)[:6]):
        assert engine.is_gradient_accumulation_boundary() == (number % 3 == 2)
        assert engine.get_global_grad_norm() is None or number >= 3
        engine.backward(engine(x, y))
        engine.step()
        assert engine.was_step_applied() == (number % 3 == 2)
        counts = (engine.micro_steps, engine.global_steps, engine.global_samples, scheduler.last_batch_iteration)
        steps = (number + 1) // 3
        assert counts == (number + 1, steps, steps * 6, steps - 1)
    assert apart(weights(engine), first) > 1e-4 and engine.get_lr() == scheduler.get_last_lr()


def test_a_boundary_can_be_said() -> None:
    engine = start(1, 4)
    (x, y), *_ = micro_batches(engine)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, y), scale_wrt_gas=False)
    engine.step()
    expected = plain.train(1, world=1, micro=MICRO, lr=LR)
    assert apart(weights(engine), expected["weights"]) < 2e-6
    assert engine.get_global_grad_norm() == pytest.approx(expected["norms"][0], rel=1e-5)  # without clipping


def test_the_returned_loss_is_divided_and_may_let_go_of_the_graph() -> None:
    engine = start(0, 4)
    (x, y), *_ = micro_batches(engine)
    loss = engine(x, y)
    returned = engine.backward(loss, retain_graph=True)
    assert torch.allclose(returned, loss / 4) and returned.grad_fn is not None
    assert engine.backward(loss, release_loss=True).grad_fn is None


def test_the_scheduler_gets_its_arguments() -> None:
    engine = start(0)
    engine.lr_scheduler = WarmupLR(engine.optimizer, 0.0, LR, 4)  # type: ignore[arg-type]
    (x, y), *_ = micro_batches(engine)
    engine.backward(engine(x, y))
    engine.step(lr_kwargs={"last_batch_iteration": 2})
    assert engine.lr_scheduler.last_batch_iteration == 2


def test_a_scheduler_has_one_owner_under_accumulation() -> None:
    engine = start(1, 2)
    engine.lr_scheduler = WarmupLR(engine.optimizer, 0.0, LR, 4)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="both the engine and the script step the WarmupLR"):
        for x, y in micro_batches(engine):
            engine.backward(engine(x, y))
            engine.step()
            engine.lr_scheduler.step()


def test_accumulation_begins_anew_after_a_load(tmp_path: Path) -> None:
    """Saved between two updates, and gone on from with more micro-batches per update."""
    engine = start(1, 2)
    for x, y in micro_batches(engine)[:3]:
        engine.backward(engine(x, y))
        engine.step()
    engine.save_checkpoint(tmp_path)
    other = start(1, 4)
    other.load_checkpoint(tmp_path)
    for number, (x, y) in enumerate(micro_batches(other)[:4], 1):
        assert other.is_gradient_accumulation_boundary() == (number == 4)
        other.backward(other(x, y))
        other.step()
    assert other.global_steps == 2


def test_script_scheduler_has_one_owner() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    engine, *_ = zero_strategy.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=BASE)
    for _ in range(3):
        engine.backward(engine(*data()[:2]))
        engine.step()
    scheduler.step()
    engine.backward(engine(*data()[:2]))
    with pytest.raises(RuntimeError, match="both the engine and the script step the StepLR"):
        engine.step()


class Wrapped:
    """A script's own scheduler around torch's."""

    def __init__(self, *schedulers: Any) -> None:
        self.schedulers = schedulers

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()


def test_a_scheduler_is_of_the_optimizer_that_is_trained_with() -> None:
    step_lr = torch.optim.lr_scheduler.StepLR
    model = net()
    used, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    wrong = Wrapped(step_lr(other, 1))
    with pytest.raises(ValueError, match=r"the Wrapped changes .* of another optimizer \(SGD\) than the one"):
        zero_strategy.initialize(model=model, optimizer=used, lr_scheduler=wrong, config=BASE)
    model = net()
    used, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    both = Wrapped(step_lr(other, 1), step_lr(used, 1))
    engine, *_ = zero_strategy.initialize(model=model, optimizer=used, lr_scheduler=both, config=BASE)
    for scheduler, lr in ((both, 0.01), (step_lr(used, 1), 0.001), (step_lr(other, 1), None)):
        engine.lr_scheduler = scheduler
        engine.backward(engine(*data()[:2]))
        if lr is None:
            with pytest.raises(ValueError, match="the StepLR changes the learning rates of another optimizer"):
                engine.step()
        else:
            engine.step()
            assert engine.get_lr() == [pytest.approx(lr)]


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_has_one_owner(stage: int) -> None:
    engine = start(stage)
    assert engine.optimizer is not None
    (x, y), *_ = micro_batches(engine)
    engine.backward(engine(x, y))
    before = weights(engine)
    with pytest.raises(RuntimeError, match=r"both the engine and the script step the AdamW: .* Drop optimizer\.step"):
        engine.optimizer.step()
    assert apart(weights(engine), before) == 0
    engine.step()  # as if nothing had happened
    assert apart(weights(engine), plain.train(1, world=1, micro=MICRO, lr=LR)["weights"]) < 2e-6


def test_a_model_has_one_engine() -> None:
    model = net()
    zero_strategy.initialize(model=model, config=BASE)
    with pytest.raises((RuntimeError, ValueError), match="engine"):
        zero_strategy.initialize(model=model, config=BASE)


# ---- precision ----


def in_half(stage: int) -> dict[str, Any]:
    """fp16: an overflow in the second step skips it, and the scheduler stays where it is."""
    engine = start(stage, fp16={"enabled": True}, loss_scale={"initial": 1024.0})
    engine.lr_scheduler = scheduler = WarmupLR(engine.optimizer, 0.01, LR, warmup_num_steps=8)  # type: ignore[arg-type]
    seen = []
    for number, (x, y) in enumerate(micro_batches(engine)[:3]):
        loss = engine(x.half(), y)
        if number == 1 and engine.global_rank == 0:
            loss = loss * float("inf")
        before = weights(engine)
        engine.backward(loss)
        engine.step()
        moved = apart(weights(engine), before) > 0
        seen.append((moved, engine.was_step_applied(), engine.loss_scale, scheduler.last_batch_iteration))
    assert engine.skipped_steps == 1 and engine.global_steps == 3 and engine.fp16_enabled()
    return {"seen": seen, "dtypes": {value.dtype for value in weights(engine).values()}}


def in_half_everywhere() -> list[dict[str, Any]]:
    return [in_half(stage) for stage in range(4)]


def test_an_overflow_skips_the_step_and_holds_the_scheduler(ranks: Launcher) -> None:
    for results in ranks(2)(in_half_everywhere):
        for found in results:
            assert found["seen"] == [(True, True, 1024.0, 0), (False, False, 512.0, 0), (True, True, 512.0, 1)]
            assert found["dtypes"] == {torch.float16}


def test_bf16_has_float32_master_weights() -> None:
    engine = start(3, bf16={"enabled": True})
    model = net()
    zero = ZeroEngine(model, load_config(stage=3, units={"min_numel": 0}), compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    zero.attach(optimizer)
    for x, y in micro_batches(engine)[:3]:
        engine.backward(engine(x.bfloat16(), y))
        engine.step()
        model(x.bfloat16(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(engine.module.parameters(), model.parameters(), strict=True):
        master = safe_get_full_fp32_param(mine)
        assert mine.dtype == torch.bfloat16 and master.dtype == torch.float32
        assert torch.equal(master, safe_get_full_fp32_param(other))


# ---- data ----


def shares() -> list[int]:
    engine = start(1)
    sampler = DistributedSampler(data(), num_replicas=dist.get_world_size(), rank=dist.get_rank())
    rows = torch.cat([x for x, _ in micro_batches(engine)])
    assert torch.equal(rows, data()[list(sampler)][0])
    return list(sampler)


def test_each_rank_has_its_share_of_the_data(ranks: Launcher) -> None:
    first, second = ranks(2)(shares)
    assert sorted(first + second) == list(range(len(data())))


def test_collate_fn_makes_the_batches() -> None:
    config = {"stage": 0, "train_batch_size": 3}
    _, optimizer, loader, scheduler = zero_strategy.initialize(
        model=net(), training_data=data(), collate_fn=len, config=config
    )
    assert optimizer is None and scheduler is None and next(iter(loader)) == 3  # type: ignore[arg-type]


def test_a_repeating_loader_begins_again() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1] and iter(loader) is loader
    with pytest.raises(ValueError, match="list has no batches"):
        next(RepeatingLoader([]))


# ---- the module behind it, checkpoints ----


def test_what_is_the_module_s_is_found() -> None:
    engine = start(0)
    assert engine.head is engine.module.head and not engine.eval().training and engine.train().training
    assert [id(p) for p in engine.parameters()] == [id(p) for p in engine.module.parameters()]
    assert set(engine.state_dict()) == set(net().state_dict())
    engine.load_state_dict({name: torch.zeros_like(value) for name, value in net().state_dict().items()})
    assert all(not value.any() for value in engine.state_dict().values())
    with pytest.raises(AttributeError, match="neither ScriptEngine nor the module Net has an attribute 'tail'"):
        _ = engine.tail
    assert engine.get_lr() == [LR] and engine.get_mom() == [(0.9, 0.999)] and engine.device.type == "cpu"
    assert engine.local_rank == 0 and engine.loss_scale == 1.0 and not engine.bfloat16_enabled()


def test_checkpoints_carry_counters_and_client_state(tmp_path: Path) -> None:
    engine = start(1, 2)
    for x, y in micro_batches(engine)[:5]:
        engine.backward(engine(x, y))
        engine.step()
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    other = start(3, 2)
    path, client = other.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step2") and client == {"epoch": 3}
    assert (other.micro_steps, other.global_steps, other.global_samples) == (4, 2, 8)
    assert apart(weights(other), weights(engine)) == 0
    fresh = start(0, 2)
    assert fresh.load_checkpoint(tmp_path, load_optimizer_states=False)[0] == path and fresh.global_steps == 0
    with pytest.warns(UserWarning, match="no checkpoint found"):
        assert start(0).load_checkpoint(tmp_path / "none") == (None, {})


def test_a_folder_that_holds_only_logs_is_the_first_start(tmp_path: Path) -> None:
    engine = start(2)
    (tmp_path / "train.log").write_text("epoch 0")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.1.host.1.0").write_bytes(b"\x18\0\0\0")
    with pytest.warns(UserWarning, match=f"{re.escape(str(tmp_path))}: no checkpoint found"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step0"), {"epoch": 1})


# ---- initialize ----

BASE: dict[str, Any] = {"stage": 0, "train_batch_size": 2}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}


def test_an_optimizer_object_stays_the_same_and_a_scheduler_may_be_made() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    half = lambda found: torch.optim.lr_scheduler.StepLR(found, 1, 0.5)  # noqa: E731
    engine, returned, _, scheduler = zero_strategy.initialize(
        {"local_rank": 0}, model, optimizer, model.parameters(), lr_scheduler=half, config_params=BASE
    )
    assert returned is optimizer and engine.module is model and isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    engine.backward(engine(*data()[:2]))
    engine.step()
    assert engine.get_lr() == [0.05] and engine.get_mom() == [0.9]


def test_param_groups_go_into_the_config_s_optimizer() -> None:
    model = net()
    groups = [{"params": [p for p in model.parameters() if p.dim() == dim], "lr": dim / 10} for dim in (1, 2)]
    engine, *_ = zero_strategy.initialize(model=model, model_parameters=groups, config={**BASE, **ADAM})
    assert engine.get_lr() == [0.1, 0.2]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unit:
    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size


class Megatron:
    """Newer names; ranks that are not data-parallel may be those of a pipeline."""

    def __init__(self, tensor: int, data: int) -> None:
        self.tensor, self.data = tensor, data

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_data_parallel_world_size(self) -> int:
        return self.data


def test_a_model_parallel_unit_of_one_is_accepted() -> None:
    zero_strategy.initialize(model=net(), mpu=Unit(1), config=BASE)
    zero_strategy.initialize(model=net(), mpu=Megatron(1, 1), config=BASE)
    for unit, message in (
        (Unit(2), r"mpu.get_model_parallel_world_size\(\) is 2"),
        (Megatron(2, 1), r"mpu.get_tensor_model_parallel_world_size\(\) is 2"),
        (Megatron(1, 4), r"mpu.get_data_parallel_world_size\(\) is 4, and there are 1 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_strategy.initialize(model=net(), mpu=unit, config=BASE)


class OfAMesh:
    """A unit over a device mesh, as scripts with `parallelize_module` have one."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def get_model_parallel_world_size(self) -> int:
        return int(self.mesh["tp"].size())

    def get_data_parallel_world_size(self) -> int:
        return int(self.mesh["dp"].size())


def feed_forward() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def with_a_unit(stage: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = feed_forward()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    config = {"stage": stage, "units": {"min_numel": 0}, "train_micro_batch_size_per_gpu": 2, **ADAM}
    samples = list(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    engine, _, loader, _ = zero_strategy.initialize(
        model=model, mpu=OfAMesh(mesh), training_data=samples, config=config
    )
    assert loader is not None
    for x in loader:
        engine.backward(engine(x).square().mean())
        engine.step()
    shape = (engine.dp_world_size, engine.mp_world_size, engine.train_batch_size(), engine.global_steps)
    return engine.zero.full_state_dict(), shape


def test_a_model_parallel_unit_of_a_divided_model(ranks: Launcher) -> None:
    plainly = feed_forward()
    optimizer = torch.optim.AdamW(plainly.parameters(), lr=0.1, weight_decay=0.0)
    samples = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        optimizer.zero_grad()
        plainly(samples[order[4 * step : 4 * step + 4]]).square().mean().backward()
        optimizer.step()
    for stage in (0, 3):
        for weights, shape in ranks(4)(with_a_unit, stage):
            assert shape == (2, 2, 4, 3)
            for name, value in plainly.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda m: {}, "no config: pass"),
        (lambda m: {"config": BASE, "config_params": BASE}, "config and config_params are given"),
        (lambda m: {"config": BASE, "args": {"deepspeed_config": "x.json"}}, r"config and args.deepspeed_config"),
        (
            lambda m: {
                "config": {**BASE, **ADAM, "scheduler": {"type": "WarmupLR"}},
                "lr_scheduler": torch.optim.lr_scheduler.StepLR,
            },
            r"lr_scheduler=\.\.\.\) and the config's scheduler 'WarmupLR'",
        ),
        (lambda m: {"config": {**BASE, "scheduler": {"type": "WarmupLR"}}}, "a scheduler, but no optimizer"),
        (lambda m: {"config": BASE, "optimizer": sgd(m), "model_parameters": [m.head.weight]}, "1 parameters and"),
        (lambda m: {"config": BASE, "optimizer": sgd(net())}, "not a parameter of the sharded module"),
        (lambda m: {"config": {"stage": 0}, "training_data": data()}, "the config says no batch size"),
        (
            lambda m: {
                "config": {**BASE, **ADAM},
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd(m), 1),
            },
            r"the StepLR changes the learning rates of another optimizer \(SGD\) than the one .* \(FusedAdamW\), whose",
        ),
        (lambda m: {"config": {**BASE, **ADAM}, "model_parameters": iter(())}, "model_parameters is empty"),
        (lambda m: {"config": {**BASE, **ADAM}, "model": m.requires_grad_(False)}, "no trainable parameters"),
    ],
)
def test_sources_that_disagree_are_named(arguments: Callable[[Any], dict[str, Any]], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        zero_strategy.initialize(**{"model": model, **arguments(model)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "must be a torch module, not NoneType"),
        ({"model": nn.DataParallel(nn.Linear(1, 1))}, "pass the .module of DataParallel"),
        ({"dist_init_required": "no"}, "dist_init_required must be None, True or False, not 'no'"),
        ({"collate_fn": 3}, "collate_fn must be callable, not 3"),
        ({"mpu": object()}, "mpu must have get_model_parallel_world_size"),
        ({"args": {"local_rank": "first"}}, "args.local_rank must be an integer, not 'first'"),
        ({"optimizer": 3}, "must be a torch optimizer or a callable, not int"),
        ({"optimizer": list}, "returned a list"),
        ({"training_data": Endless()}, "a dataset with a length"),
        ({"lr_scheduler": 3, "optimizer": torch.optim.SGD}, r"lr_scheduler must have step\(\), and int has none"),
    ],
)
def test_arguments_of_another_kind_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        zero_strategy.initialize(**{"model": net(), "config": BASE, **arguments})


def test_a_step_in_the_wrong_place_is_named() -> None:
    engine = start(0)
    with engine.no_sync(), pytest.raises(RuntimeError, match=r"step\(\) inside of no_sync\(\)"):
        engine.step()
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\)"):
        engine.backward(torch.ones(2, requires_grad=True))
    without = zero_strategy.initialize(model=net(), config=BASE)[0]
    with pytest.raises(RuntimeError, match="no optimizer"):
        without.backward(without(*data()[:2]))
    with pytest.raises(RuntimeError, match="no optimizer"):
        without.step()
