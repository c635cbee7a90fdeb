"""Optimizer state in files: the same bits as in memory, whatever the stage, the optimizer and the sizes."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.launcher import Launcher
from zero_strategy.config import load_config, resolve
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.gathered_parameters import GatheredParameters
from zero_strategy.offload.file_queues import IO_VARIABLE
from zero_strategy.offload.tier import DeviceCopies, NvmeTier, NvmeTransfer
from zero_strategy.optim import FusedAdamW, FusedLamb, FusedLion
from zero_strategy.optim.full_state import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from zero_strategy.optim.offloaded import OffloadedStep
from zero_strategy.optim.streamed import StreamedStep

SMALL = 1 << 16
"""Staging bytes that make chunks of 1024 elements."""


class Net(nn.Module):
    """Parameters of all kinds: larger than several chunks, odd, 0-d, empty, tied, frozen, unused at some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(37, 131)
        self.blocks = nn.ModuleList([nn.Linear(131, 131) for _ in range(2)])
        self.norm = nn.LayerNorm(131)
        self.frozen = nn.Linear(131, 131).requires_grad_(False)
        self.sometimes = nn.Linear(131, 131)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor, more: bool) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = torch.relu(block(x)) * self.scale
        if more:
            x = self.sometimes(x)
        x = self.frozen(x)
        return nn.functional.linear(x, self.first.weight.t()) + self.empty.sum()


class Own(Optimizer):
    """A user's, of one state, which it makes in its first step and replaces in every one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    count = self.state[p].get("count", 0) + 1
                    slow = p.grad.sign() + 0.5 * self.state[p].get("slow", torch.zeros_like(p))
                    self.state[p] = {"slow": slow, "count": count}
                    p.sub_(slow, alpha=group["lr"] / count)
                    p.grad.zero_()


class Made(Optimizer):
    """A user's, whose constructor makes its states, as torch's Adagrad did until 2.13."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"sum": torch.full_like(p, 0.5), "count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["count"] += 1
                    self.state[p]["sum"].add_(p.grad * p.grad)  # one rounding each: addcmul_ has others in its tail
                    p.sub_(group["lr"] * (p.grad / self.state[p]["sum"].sqrt()))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "lion": lambda p: FusedLion(p, lr=0.001),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True, momentum=0.9),
    "own": lambda p: Own(p),
    "own, states made at once": lambda p: Made(p),
    "adamw in bf16": lambda p: FusedAdamW(p, lr=0.01, moment_dtype="bfloat16"),
}


def make(
    stage: int, optimizer: str, dtype: torch.dtype | None, offload: dict[str, Any]
) -> tuple[ZeroEngine, Optimizer]:
    common = {"units": {"min_numel": 0}, "barrier_seconds": 20.0, "elementwise_optimizers": ["Own", "Made"]}
    config = load_config(stage=stage, offload=offload, **common)
    engine = ZeroEngine(Net(), config, compute_dtype=dtype)
    half = list(engine.module.parameters())
    made = OPTIMIZERS[optimizer]([{"params": half[:3]}, {"params": half[3:], "lr": 0.02}])
    engine.attach(made)
    return engine, made


def train(engine: ZeroEngine, optimizer: Optimizer, steps: range) -> list[float]:
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in steps:
        torch.manual_seed(100 * step + engine.mesh.rank)
        loss = engine.module(torch.randn(4, 37, dtype=dtype), step % 3 == 1).float().square().mean()
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outcome(engine: ZeroEngine, optimizer: Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = dict(engine.full_state_dict())
    for name, values in engine.full_optimizer_state(optimizer).items():
        found |= {f"{name} {key}": value for key, value in values.items()}
    found |= {f"{name} master": safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    return found


def unequal(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    wrong = [f"{name} is on one side only" for name in actual.keys() ^ expected.keys()]
    for name in actual.keys() & expected.keys():
        a, b = actual[name], expected[name]
        same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(b, Tensor) else a == b
        if not same:
            wrong.append(f"{name}: {str(a)[:40]} {str(b)[:40]}")
    return wrong


def tiers(folder: Path) -> dict[str, dict[str, Any]]:
    files = {"optimizer": "nvme", "nvme_path": [str(folder)], "staging_bytes": SMALL, "probe_seconds": 0}
    host = {"optimizer": "cpu", "staging_bytes": SMALL, "probe_seconds": 0}
    return {
        "none": {},
        "nvme": files,
        "all": files | {"parameters": "nvme"},
        "cpu": host,
        "all cpu": host | {"parameters": "cpu"},
        "half": files | {"optimizer_ratio": 0.5},
        "half cpu": host | {"optimizer_ratio": 0.3},
        "half, all": files | {"parameters": "nvme", "optimizer_ratio": 0.6},
        "gradients in memory": files | {"gradients": "cpu"},
        "gradients in files": host | {"gradients": "nvme", "nvme_path": [str(folder)], "optimizer_ratio": 0.5},
        "kept": host | {"optimizer_ratio": 0.0},
        "mixed": files | {"parameters": "cpu"},
        "resident": files | {"parameters": "nvme", "resident_bytes": 180_000},
        "half resident": files | {"parameters": "nvme", "optimizer_ratio": 0.5, "resident_bytes": 40_000},
        "mixed too": files | host | {"parameters": "nvme"},
    }


STEPS = 5
"""In the second and the last all parameters are used; in those between, one has state and no gradient."""


def trained(offload: dict[str, Any], stage: int, optimizer: str, dtype: torch.dtype | None, steps: int) -> Any:
    engine, made = make(stage, optimizer, dtype, offload)
    losses = train(engine, made, range(steps))
    found = outcome(engine, made) | {"losses": losses}
    engine.detach()
    return found


@functools.cache
def in_memory(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The run that all tiers are compared with; once in each rank's process, which is one of always as many."""
    return run({}, *arguments)


def unlike_memory(run: Callable[..., dict[str, Any]], folder: Path, tier: str, *arguments: Any) -> list[str]:
    """Differences between a run in a tier and the same in memory."""
    return unequal(run(tiers(folder)[tier], *arguments), in_memory(run, *arguments))


def compare(
    stage: int, optimizer: str, dtype: torch.dtype | None, folder: Path, tier: str = "nvme", steps: int = STEPS
) -> list[str]:
    return unlike_memory(trained, folder, tier, stage, optimizer, dtype, steps)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_files_give_the_bits_of_memory(ranks: Launcher, tmp_path: Path, stage: int, dtype: torch.dtype | None) -> None:
    for wrong in ranks(2)(compare, stage, "adamw", dtype, tmp_path):
        assert wrong == []


# Where files or memory hold both (all, all cpu) and where some of it stays (resident), in both dtypes.
PARAMETERS_OFF = [
    pytest.param(world, tier, dtype, id=f"{world}-{tier}-{name}")
    for world, tier, names in (
        (1, "all", ["fp32"]),
        (3, "all", ["fp32", "bf16"]),
        (2, "all cpu", ["fp32", "bf16"]),
        (2, "mixed", ["bf16"]),
        (2, "mixed too", ["fp32"]),
        (2, "resident", ["fp32", "bf16"]),
        (2, "half resident", ["bf16"]),
    )
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16))
    if name in names
]


@pytest.mark.parametrize("world, tier, dtype", PARAMETERS_OFF)
def test_parameters_off_the_device_too(
    ranks: Launcher, tmp_path: Path, world: int, tier: str, dtype: torch.dtype | None
) -> None:
    for wrong in ranks(world)(compare, 3, "adamw", dtype, tmp_path, tier):
        assert wrong == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_host_memory_gives_the_same_bits(ranks: Launcher, tmp_path: Path, stage: int) -> None:
    for dtype in (None, torch.bfloat16):
        for wrong in ranks(2)(compare, stage, "adamw", dtype, tmp_path, "cpu"):
            assert wrong == []


LOW, BOTH = (torch.bfloat16,), (None, torch.bfloat16)
PARTS = {
    (0, "half"): LOW, (1, "half cpu"): BOTH, (2, "half"): BOTH, (3, "half"): (None,), (3, "half, all"): BOTH,
    (2, "kept"): BOTH,
}  # fmt: skip
"""By stage and tier, the dtypes: every tier has both."""


@pytest.mark.parametrize("stage, tier", PARTS)
def test_any_part_of_the_state_may_stay_on_the_device(ranks: Launcher, tmp_path: Path, stage: int, tier: str) -> None:
    for dtype in PARTS[stage, tier]:
        for wrong in ranks(2)(compare, stage, "adamw", dtype, tmp_path, tier):
            assert wrong == []


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS.keys() - {"adamw, fused"}))
def test_every_optimizer(ranks: Launcher, tmp_path: Path, optimizer: str) -> None:
    # Three ranks divide unevenly; what a step does to a chunk does not depend on where its slice begins.
    world = 3 if optimizer in ("adamw", "own", "rmsprop") else 2
    for number, dtype in ((world, None), (1, torch.bfloat16)):
        for wrong in ranks(number)(compare, 2, optimizer, dtype, tmp_path):
            assert wrong == []


def test_an_optimizer_of_which_nothing_is_in_the_tier(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(compare, 1, "sgd", None, tmp_path, "cpu", steps=3) == [[]]


def save_and_go_on(folder: Path, source: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Train, save, train on; and the same from the checkpoint under another setting."""
    engine, optimizer = make(3, "adamw", torch.bfloat16, source)
    train(engine, optimizer, range(3))
    engine.save(folder / "saved", asynchronous=True).wait()
    straight = train(engine, optimizer, range(3, 6))
    expected = outcome(engine, optimizer) | {"losses": straight}
    engine.detach()
    engine, optimizer = make(3, "adamw", torch.bfloat16, target)
    train(engine, optimizer, range(2))
    engine.load(folder / "saved")
    return unequal(outcome_after(engine, optimizer), expected)


def outcome_after(engine: ZeroEngine, optimizer: Optimizer) -> dict[str, Any]:
    losses = train(engine, optimizer, range(3, 6))
    return outcome(engine, optimizer) | {"losses": losses}


CROSSINGS = [
    ("none", "none"),
    ("nvme", "none"),
    ("none", "nvme"),
    ("nvme", "all"),
    ("all", "none"),
    ("all cpu", "resident"),
    ("half", "half, all"),
]


@pytest.mark.parametrize("source, target", CROSSINGS)
def test_checkpoints_know_no_tiers(ranks: Launcher, tmp_path: Path, source: str, target: str) -> None:
    for wrong in ranks(2)(save_and_go_on, tmp_path, tiers(tmp_path)[source], tiers(tmp_path)[target]):
        assert wrong == []


def edited(offload: dict[str, Any], stage: int) -> dict[str, Any]:
    """Training between edits of weights, states and whole modules."""
    engine, optimizer = make(stage, "adamw", torch.bfloat16, offload)
    train(engine, optimizer, range(2))
    for p in (engine.module.first.weight, engine.module.norm.bias, engine.module.scale):
        safe_set_full_fp32_param(p, safe_get_full_fp32_param(p) * 1.5)
        moment = safe_get_full_optimizer_state(p, "exp_avg")
        assert moment is not None
        safe_set_full_optimizer_state(p, moment * 0.25, "exp_avg")
    with GatheredParameters(engine.module.blocks[0].parameters(), modifier_rank=0), torch.no_grad():
        engine.module.blocks[0].weight.mul_(0.5)
    state = {name: value * 0.9 for name, value in engine.full_state_dict().items() if "blocks.1" in name}
    engine.module.load_state_dict(state, strict=False)
    train(engine, optimizer, range(2, 4))
    whole = engine.optimizer_state_dict(optimizer)
    engine.load_optimizer_state_dict(optimizer, whole)
    engine.module.frozen.requires_grad_(True)
    train(engine, optimizer, range(4, 6))
    found = outcome(engine, optimizer)
    engine.detach()
    return found


@pytest.mark.parametrize("stage, tier", [(2, "nvme"), (3, "all"), (3, "half, all"), (3, "resident")])
def test_edits_reach_the_files(ranks: Launcher, tmp_path: Path, stage: int, tier: str) -> None:
    for wrong in ranks(2)(unlike_memory, edited, tmp_path, tier, stage):
        assert wrong == []


def with_gradients(offload: dict[str, Any], stage: int) -> dict[str, Any]:
    """All that is done to gradients between a backward and a step."""
    engine, optimizer = make(stage, "adamw", torch.bfloat16, offload)
    net, found = engine.module, dict[str, Any]()
    for step in range(6):
        for part in range(3):
            torch.manual_seed(100 * step + 10 * part + engine.mesh.rank)
            loss = net(torch.randn(4, 37, dtype=torch.bfloat16), step % 2 == 1).float().square().mean()
            with engine.no_sync() if step == 3 and part == 0 else contextlib.nullcontext():
                loss.backward()
            if step == 1 and part == 0:
                net.first.weight.grad = None
            if step == 2 and part == 1:
                net.norm.bias.grad.zero_()
        if step == 2:
            engine.clip_grad_value_(1e-3)
        if step == 3:
            net.scale.grad = torch.full_like(net.scale, 0.25)
        if step == 4:
            safe_set_full_grad(net.blocks[0].bias, torch.linspace(-1, 1, 131))
        found[f"norm {step}"] = engine.clip_grad_norm_(0.5)
        found[f"gradient {step}"] = net.blocks[1].weight.grad.clone()
        found[f"full {step}"] = safe_get_full_grad(net.first.weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 4)
        if step == 4:
            found["zeroed"] = float(net.first.weight.grad.abs().sum())
    results = outcome(engine, optimizer) | found
    engine.detach()
    return results


GRADIENTS = [(2, "nvme"), (3, "all"), (2, "gradients in memory"), (3, "gradients in files"), (3, "resident")]


@pytest.mark.parametrize("stage, tier", GRADIENTS)
def test_gradients_in_tiers_take_all_that_others_do(ranks: Launcher, tmp_path: Path, stage: int, tier: str) -> None:
    for wrong in ranks(2)(unlike_memory, with_gradients, tmp_path, tier, stage):
        assert wrong == []


def test_whole_gradients_cannot_leave_the_device() -> None:
    with pytest.raises(ValueError, match=r"offload.gradients is 'cpu' .* gradient_reduction is 'per_step'"):
        resolve(load_config(stage=1, offload={"optimizer": "cpu", "gradients": "cpu"}), 2)
    with pytest.raises(ValueError, match=r"offload.gradients is 'cpu' and offload.optimizer is 'none'"):
        load_config(stage=2, offload={"gradients": "cpu"})
    assert resolve(load_config(stage=1, offload={"optimizer": "cpu"}), 2).config.offload.gradients == "none"
    assert resolve(load_config(stage=2, offload={"optimizer": "cpu"}), 2).config.offload.gradients == "cpu"


def fused_too(folder: Path) -> list[str]:
    results = []
    for optimizer in ("adamw", "adamw, fused"):
        engine, made = make(2, optimizer, torch.bfloat16, tiers(folder)["cpu"])
        train(engine, made, range(5))
        results.append(outcome(engine, made))
    return unequal(results[1], results[0])


def test_an_implementation_of_torch_is_the_same_algorithm(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(fused_too, tmp_path) == [[]]


def as_on_a_device(folder: Path) -> list[str]:
    """Gradients and weights go through copies, as they do where the host cannot use the device's memory."""
    results = []
    for dtype in (None, torch.bfloat16):
        for tier in ("none", "cpu", "half cpu"):
            engine, optimizer = make(2, "adamw", dtype, tiers(folder)[tier])
            method = engine.optimizers[0]._method
            if isinstance(method, OffloadedStep):
                assert engine.offloaded.optimizer is not None
                method._step = StreamedStep(engine.offloaded.optimizer, DeviceCopies(torch.device("cpu")))
            train(engine, optimizer, range(5))
            results.append(outcome(engine, optimizer))
    return [wrong for i in (1, 2, 4, 5) for wrong in unequal(results[i], results[i // 3 * 3])]


def test_weights_that_are_copied_back(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(2)(as_on_a_device, tmp_path):
        assert wrong == []


def looked_at(folder: Path, tier: str) -> list[str]:
    """Values read between a backward and a step leave nothing old behind; nor does a load right before a step."""
    engine, optimizer = make(3, "adamw", torch.bfloat16, tiers(folder)[tier])
    train(engine, optimizer, range(2))
    engine.save(folder / "before")
    wrong = []
    for round_ in range(2):
        torch.manual_seed(round_)
        engine.module(torch.randn(4, 37, dtype=torch.bfloat16), True).float().square().mean().backward()
        if round_ == 0:
            engine.save(folder / "between")  # reads every slice through the cache
        else:
            engine.load(folder / "before")  # writes them through it
        optimizer.step()
        optimizer.zero_grad()
        engine.save(folder / "after")
        saved = load_file(folder / "after" / "model.safetensors")
        whole = engine.full_state_dict()
        wrong += [f"{round_} {name}" for name, value in whole.items() if not torch.equal(saved[name], value)]
        masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters() if p.requires_grad}
        wrong += [f"{round_} master {n}" for n, m in masters.items() if not torch.equal(m.to(torch.bfloat16), whole[n])]
    return wrong


@pytest.mark.parametrize("tier", ["all", "mixed", "mixed too"])
def test_no_old_chunk_stays_in_memory(ranks: Launcher, tmp_path: Path, tier: str) -> None:
    for wrong in ranks(2)(looked_at, tmp_path, tier):
        assert wrong == []


def changed_minds(folder: Path) -> list[str]:
    said = []
    for change in ("option", "float64"):
        engine, optimizer = make(2, "adamw", None, tiers(folder)["cpu"])
        if change == "option":
            train(engine, optimizer, range(1))
            engine.module(torch.ones(4, 37), True).sum().backward()
            optimizer.param_groups[0]["amsgrad"] = True
        else:
            module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).double().requires_grad_(False)])
            config = load_config(stage=2, units={"min_numel": 0}, offload=tiers(folder)["cpu"])
            engine = ZeroEngine(module, config)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            engine.attach(optimizer)
            module[1].requires_grad_(True)
        try:
            optimizer.step()
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_changes_after_attaching_is_refused_as_before_it(ranks: Launcher, tmp_path: Path) -> None:
    option, wide = ranks(1)(changed_minds, tmp_path)[0]
    assert "AdamW has no state ['max_exp_avg_sq']" in option and "float64" in wide


class FullDrive(NvmeTier):
    """Refuses writes after a number of them."""

    left = 1 << 30

    def write(self, record: str, memory: Tensor) -> NvmeTransfer:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "injected", record)
        return super().write(record, memory)


def interrupted(folder: Path, tier: str) -> tuple[list[str], list[str]]:
    """A drive that fails: state of two steps is refused until a checkpoint is loaded; lost gradients come again."""
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)["none"])
    train(engine, optimizer, range(3))
    engine.save(folder / "saved")
    train(engine, optimizer, range(3, 6))
    expected = outcome(engine, optimizer)
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)[tier])
    store, said = engine.offloaded.optimizer, []
    assert store is not None
    train(engine, optimizer, range(2))
    whole, store.tier.__class__ = store.tier.__class__, FullDrive
    vars(store.tier)["left"] = 7
    for _ in range(2):
        try:
            train(engine, optimizer, range(2, 3))
        except (OSError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
            engine.reset()
            optimizer.zero_grad()
    store.tier.__class__ = whole
    if tier == "nvme":  # the gradients' turn comes first
        train(engine, optimizer, range(2, 3))
    else:
        engine.load(folder / "saved")
    train(engine, optimizer, range(3, 6))
    return said, unequal(outcome(engine, optimizer), expected)


def test_a_step_that_fails_half_way(ranks: Launcher, tmp_path: Path) -> None:
    ((said, wrong),) = ranks(1)(interrupted, tmp_path, "gradients in memory")
    assert (
        "injected" in said[0] and "PartialRecordError" in said[1] and "half-way" in said[1] and "checkpoint" in said[1]
    )
    assert "injected" in said[1], "the cause"
    assert wrong == []


def test_gradients_that_cannot_be_written(ranks: Launcher, tmp_path: Path) -> None:
    ((said, wrong),) = ranks(1)(interrupted, tmp_path, "nvme")
    assert all("injected" in each and "gradients" in each for each in said) and len(said) == 2
    assert wrong == []


@contextlib.contextmanager
def last_write_failed(folder: Path) -> Iterator[tuple[ZeroEngine, Optimizer]]:
    """An engine after four steps: the last write behind the fourth has failed, and nobody has met that yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(IO_VARIABLE, "python")
        engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)["gradients in memory"])
        real, calls, limit = os.pwritev, list[int](), [1 << 30]

        def write(fd: int, memory: list[memoryview], at: int) -> int:
            calls.append(at)
            if len(calls) == limit[0]:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, memory, at)

        patch.setattr(os, "pwritev", write)
        train(engine, optimizer, range(2))
        for step in (2, 3):  # which update the same parameters
            engine.offloaded.settle()
            limit[0] = len(calls) if step == 3 else limit[0]
            calls.clear()
            train(engine, optimizer, range(step, step + 1))
        yield engine, optimizer


def failed_behind(folder: Path) -> tuple[list[str], list[str]]:
    """The last write of a step fails after the step has returned: the next one says so and changes nothing."""
    engine, optimizer = make(2, "adamw", torch.bfloat16, tiers(folder)["none"])
    train(engine, optimizer, range(3))
    engine.save(folder / "saved")
    train(engine, optimizer, range(3, 6))
    expected = outcome(engine, optimizer)
    said: list[str] = []
    with last_write_failed(folder) as (engine, optimizer):
        weights = engine.full_state_dict()
        for _ in range(2):
            try:
                train(engine, optimizer, range(5, 6))
            except (OSError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
                engine.reset()
                optimizer.zero_grad()
                said += unequal(engine.full_state_dict(), weights) if len(said) == 1 else []
        engine.load(folder / "saved")
        train(engine, optimizer, range(3, 6))
        return said, unequal(outcome(engine, optimizer), expected)


def test_a_write_that_fails_behind_a_step(ranks: Launcher, tmp_path: Path) -> None:
    (((told, partially_applied), wrong),) = ranks(1)(failed_behind, tmp_path)
    assert told.startswith("OSError") and "write of" in told and "Input/output error" in told
    assert partially_applied.startswith("PartialRecordError") and "checkpoint" in partially_applied and wrong == []
    assert "Input/output error" in partially_applied, "the cause"


def failing_writes(folder: Path) -> tuple[list[str], list[int]]:
    """Each write of a backward's gradients fails once, those after the backward's last gradient with them."""
    engine, optimizer = make(2, "adamw", None, tiers(folder)["gradients in files"])
    train(engine, optimizer, range(1))
    tier, said = engine.offloaded.gradients.tier, []
    wrong, expected = [], dict[str, Any]()
    for left in range(-1, 12):
        if left >= 0:
            whole, tier.__class__ = tier.__class__, FullDrive
            vars(tier)["left"] = left
            try:
                engine.module(torch.full((4, 37), 3.0), True).square().mean().backward()
            except OSError as error:
                said.append(str(error))
            tier.__class__ = whole
            engine.reset()
            optimizer.zero_grad()
        engine.module(torch.ones(4, 37), True).square().mean().backward()
        found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters() if p.requires_grad}
        expected = expected or found
        if unequal(found, expected):
            wrong.append(left)
        optimizer.zero_grad()
    return said, wrong


def test_gradients_of_a_backward_that_failed_are_gone(ranks: Launcher, tmp_path: Path) -> None:
    ((said, wrong),) = ranks(1)(failing_writes, tmp_path)
    assert len(said) > 8 and wrong == []


def zeroed_after_a_norm_of_nan(folder: Path) -> list[str]:
    """Zeros are zeros, whatever the gradients before them were yet to be multiplied by."""
    wrong = []
    for stage, tier in ((1, "none"), (2, "none"), (2, "nvme"), (3, "half")):
        engine, optimizer = make(stage, "adamw", None, tiers(folder)[tier])
        engine.module(torch.full((4, 37), math.nan), True).square().mean().backward()
        assert engine.clip_grad_norm_(1.0).isnan()
        optimizer.zero_grad(set_to_none=False)
        engine.module(torch.ones(4, 37), True).square().mean().backward()
        if not safe_get_full_grad(engine.module.first.weight).isfinite().all():
            wrong.append(f"stage {stage}, {tier}")
    return wrong


def test_zeroing_ends_a_clip_by_nan(ranks: Launcher, tmp_path: Path) -> None:
    for wrong in ranks(2)(zeroed_after_a_norm_of_nan, tmp_path):
        assert wrong == []


def odd_orders(folder: Path) -> list[str]:
    """Orders of a norm that there are not leave nothing behind."""
    said = []
    for order in (0, -1.0, math.nan):
        engine, optimizer = make(2, "adamw", None, tiers(folder)["nvme"])
        for again in range(2):
            engine.module(torch.ones(4, 37), True).square().mean().backward()
            if again == 0:
                with pytest.raises(ValueError, match="norm_type must be positive or inf"):
                    engine.clip_grad_norm_(1.0, order)
        optimizer.step()
        said.append("stepped")
    return said


def test_an_order_that_is_refused_is_forgotten(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(odd_orders, tmp_path) == [["stepped"] * 3]


class Coupled(torch.optim.SGD):
    """A step that looks at all of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=0.1)


def refusals(folder: Path) -> list[str]:
    nvme = {"optimizer": "nvme", "nvme_path": [str(folder)], "probe_seconds": 0}
    said = []
    for make_optimizer, options in (
        (lambda p: FusedLamb(p, lr=0.1), {}),
        (lambda p: Coupled(p), {"stage": 0}),
        (lambda p: Own(p), {"stage": 0}),
        (lambda p: torch.optim.AdamW(p, lr=0.1, differentiable=True), {}),
        (lambda p: torch.optim.AdamW(p, lr=0.1), {"precision": {"master_weights": False}}),
    ):
        config = load_config(**{"stage": 2, "offload": nvme} | options)
        engine = ZeroEngine(Net(), config, compute_dtype=torch.bfloat16)
        try:
            engine.attach(make_optimizer(engine.module.parameters()))
        except ValueError as error:
            said.append(str(error))
    return said


def test_optimizers_that_need_all_of_their_state_are_refused(ranks: Launcher, tmp_path: Path) -> None:
    lamb, coupled, graph, master = ranks(1)(refusals, tmp_path)[0]
    assert "FusedLamb" in lamb and "trust ratio" in lamb and "offload.optimizer: none" in lamb
    assert "Coupled" in coupled and "in pieces" in coupled and "elementwise_optimizers" in coupled
    assert "AdamW" in graph and "differentiable" in graph and "master_weights" in master
