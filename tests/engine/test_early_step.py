"""Steps that are carried out while backward runs: the same bits as without, whatever happens before the step."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.engine.test_late_gradients import blocks_used_again
from tests.engine.test_offload import OPTIMIZERS, Net, outcome, tiers, unequal
from tests.engine.twins import SETTINGS, Setting, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.memory.nvme import NvmeTier, NvmeTransfer
from zero_strategy.optim.early import MOST_PATIENCE, Patience
from zero_strategy.optim.full_state import (
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from zero_strategy.sharding import GatheredParameters

FAR = 1e9
"""A norm that no gradient has: clipping takes no effect."""


class Run:
    """One engine in training, and what is noted of it."""

    def __init__(
        self, folder: Path, stage: int, dtype: torch.dtype | None, offload: dict[str, Any], optimizer: str, **more: Any
    ) -> None:
        self.folder = folder / f"of {offload.get('optimizer')}"
        config = load_config(stage=stage, units={"min_numel": 0}, rendezvous_seconds=20.0, offload=offload, **more)
        self.engine = ZeroEngine(Net(), config, compute_dtype=dtype)
        self.net, self.dtype, self.stage = self.engine.module, dtype or torch.float32, stage
        half = list(self.net.parameters())
        self.optimizer = OPTIMIZERS[optimizer]([{"params": half[:3]}, {"params": half[3:], "lr": 0.02}])
        self.engine.attach(self.optimizer)
        self.notes: dict[str, Any] = {}
        self.turn = 0

    def loss(self, more: bool = False) -> Tensor:
        self.turn += 1
        torch.manual_seed(100 * self.turn + self.engine.mesh.rank)
        return self.net(torch.randn(4, 37, dtype=self.dtype), more).float().square().mean()

    def backward(self, more: bool = False) -> None:
        loss = self.loss(more)
        self.engine.scale_loss(loss).backward()
        self.notes[f"loss {self.turn}"] = loss.item()

    def update(self, max_norm: float = FAR) -> None:
        self.notes[f"norm {self.turn}"] = str(self.engine.clip_grad_norm_(max_norm).item())  # nan, too, equals itself
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, max_norm: float = FAR) -> None:
        for _ in range(count):
            self.backward()
            self.update(max_norm)

    def early(self, what: Callable[[], object]) -> tuple[int, int]:
        """Steps adopted and steps redone while something was done; with `None` there are no early steps."""
        before = self.engine.early_steps
        what()
        after = self.engine.early_steps
        return after.committed - before.committed, after.redone - before.redone


Story = Callable[[Run], dict[str, tuple[int, int]]]
"""Trains, and says how many steps must have been adopted and redone; the same with and without early steps."""


def told(
    story: Story, stage: int, dtype: torch.dtype | None, folder: Path, tier: str, optimizer: str, **more: Any
) -> tuple[list[str], dict[str, tuple[int, int]]]:
    results, counts = [], dict[str, tuple[int, int]]()
    early = {"early_step": "on", "checksums": tier == "all"}
    for offload in (tiers(folder)["none"], tiers(folder)[tier] | early):
        run = Run(folder, stage, dtype, offload, optimizer, **more)
        counts = story(run)
        results.append(outcome(run.engine, run.optimizer) | run.notes)
        run.engine.detach()
    return unequal(results[1], results[0]), counts


def plain(run: Run) -> dict[str, tuple[int, int]]:
    return {"first": run.early(lambda: run.steps(1)), "others": run.early(lambda: run.steps(4))}


def accumulated(run: Run) -> dict[str, tuple[int, int]]:
    def steps(counts: list[int]) -> None:
        for count in counts:
            for part in range(count):
                with run.engine.no_sync() if part < count - 1 else contextlib.nullcontext():
                    run.backward()
            run.update()

    found = {"first": run.early(lambda: steps([3])), "alike": run.early(lambda: steps([3, 3, 3]))}
    return found | {"others": run.early(lambda: steps([1, 2, 2, 1, 1]))}


def clipped(run: Run) -> dict[str, tuple[int, int]]:
    run.steps(2)
    found = {"always": run.early(lambda: run.steps(6, 1e-3))}
    found["in turn"] = run.early(lambda: [run.steps(1, 1e-3 if turn % 2 else FAR) for turn in range(6)])
    run.steps(4)
    found["no more"] = run.early(lambda: run.steps(4))
    return found


def changed(run: Run) -> dict[str, tuple[int, int]]:
    """Hyper-parameters, gradients, weights and states that change at all times."""
    net, optimizer, found = run.net, run.optimizer, dict[str, tuple[int, int]]()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.steps(1)

    def scheduled() -> None:
        for _ in range(3):
            run.steps(1)
            scheduler.step()

    found["scheduler"] = run.early(scheduled)

    def between(change: Callable[[], object]) -> tuple[int, int]:
        def steps() -> None:
            run.backward()
            change()
            run.update()

        for sharded in run.engine.optimizers:
            if sharded.early is not None:
                sharded.early.patience = Patience()
        run.steps(1)
        return run.early(steps)

    def assign() -> None:
        net.scale.grad = torch.full_like(net.scale, 0.25)

    def drop() -> None:
        net.first.weight.grad = None

    def weights() -> None:
        with GatheredParameters(net.blocks[0].parameters(), modifier_rank=0), torch.no_grad():
            net.blocks[0].weight.mul_(0.5)

    def unseen() -> None:
        with GatheredParameters(net.blocks[0].parameters(), modifier_rank=0):
            net.blocks[0].weight.data.mul_(0.5)

    def master() -> None:
        safe_set_full_fp32_param(net.norm.bias, torch.linspace(-1, 1, 131))

    def state() -> None:
        moment = safe_get_full_optimizer_state(net.scale, "exp_avg")
        assert moment is not None
        safe_set_full_optimizer_state(net.scale, moment * 0.5, "exp_avg")

    def rate() -> None:
        optimizer.param_groups[1]["lr"] *= 0.5

    found["rate"] = between(rate)
    found["clamped"] = between(lambda: run.engine.clip_grad_value_(1e-4))
    found["assigned"] = between(assign)
    found["dropped"] = between(drop)
    found["zeroed"] = between(lambda: net.norm.bias.grad.zero_())
    found["set"] = between(lambda: safe_set_full_grad(net.blocks[0].bias, torch.linspace(-1, 1, 131)))
    found["weights"] = between(weights)
    if run.stage == 3 or run.dtype == torch.float32:  # else a master copy does not follow them
        found["unseen"] = between(unseen)
    found["master"] = between(master)
    found["state"] = between(state)
    found["nothing"] = between(lambda: None)
    return found


def skipped(run: Run) -> dict[str, tuple[int, int]]:
    """fp16: steps whose gradients overflow, and a scale that changes."""

    def steps(bad: tuple[int, ...], count: int) -> None:
        assert run.engine.scaler is not None
        for turn in range(count):
            loss = run.loss() * (1e30 if turn in bad else 1.0)
            run.engine.scale_loss(loss).backward()
            finite = run.engine.unscale_gradients(run.optimizer)
            run.update()
            run.engine.scaler.update(finite=finite)
            run.notes[f"scale {run.turn}"] = run.engine.scaler.scale

    return {"good": run.early(lambda: steps((), 4)), "bad": run.early(lambda: steps((1, 5), 12))}


def live(run: Run) -> dict[str, tuple[int, int]]:
    """Parameters that are used at times only, frozen and unfrozen; backwards that no step follows; closures."""
    found = dict[str, tuple[int, int]]()

    def at_times() -> None:
        for turn in range(6):
            run.backward(turn % 3 == 1)
            run.update()

    found["used at times"] = run.early(at_times)
    run.net.frozen.requires_grad_(True)
    found["unfrozen"] = run.early(lambda: run.steps(4))
    run.net.blocks[1].requires_grad_(False)
    found["frozen"] = run.early(lambda: run.steps(3))
    run.net.blocks[1].requires_grad_(True)
    run.steps(3)

    def for_nothing() -> None:
        run.backward()
        run.optimizer.zero_grad()
        run.backward()
        run.update()

    found["for nothing"] = run.early(for_nothing)
    run.steps(6)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        run.backward()
        return torch.tensor(0.0)

    run.optimizer.zero_grad()
    found["closure"] = run.early(lambda: [run.optimizer.step(closure) for _ in range(3)])
    run.optimizer.zero_grad()
    return found


def looked_at(run: Run) -> dict[str, tuple[int, int]]:
    """Between a backward and its step everybody sees what was before."""
    run.steps(3)
    before = outcome(run.engine, run.optimizer)
    run.backward()
    wrong = unequal(outcome(run.engine, run.optimizer), before)
    run.engine.save(run.folder)
    wrong += [f"saved {n}" for n, v in load_file(run.folder / "model.safetensors").items() if not v.equal(before[n])]
    with torch.no_grad():
        run.notes["evaluated"] = run.loss().item()
    run.notes["gradient"] = run.net.first.weight.grad.clone()
    wrong += [name for name, p in run.net.named_parameters() if run.stage < 3 and not torch.equal(p, before[name])]
    found = {"step": run.early(lambda: run.update())}
    run.notes["wrong"] = wrong
    assert not wrong
    return found


CASES: list[tuple[int, torch.dtype | None, str]] = [
    (0, torch.bfloat16, "nvme"),
    (1, None, "nvme"),
    (2, torch.bfloat16, "half"),
    (2, None, "cpu"),
    (3, None, "all"),
    (3, torch.bfloat16, "half, all"),
    (3, torch.bfloat16, "mixed too"),
]


def all_of(which: list[str], stage: int, dtype: torch.dtype | None, folder: Path, tier: str, **more: Any) -> Any:
    """Stories one after the other, by the same engine."""

    def story(run: Run) -> Any:
        return {name: globals()[name](run) for name in which}

    return told(story, stage, dtype, folder, tier, "adamw", **more)


@pytest.mark.parametrize("stage, dtype, tier", CASES)
def test_what_is_as_guessed_is_adopted(
    ranks: Launcher, tmp_path: Path, stage: int, dtype: torch.dtype | None, tier: str
) -> None:
    more = {"gradient_reduction": "per_step"} if tier in ("cpu", "mixed too") else {}
    for wrong, counts in ranks(2)(all_of, ["plain", "accumulated", "looked_at"], stage, dtype, tmp_path, tier, **more):
        assert wrong == []
        assert counts["plain"] == {"first": (0, 0), "others": (4, 0)}
        per_step = more or stage < 2  # where only the last backward of a step reduces, more of them are no surprise
        assert counts["accumulated"]["first"] == ((1, 0) if per_step else (0, 1))
        assert counts["accumulated"]["alike"] == ((3, 0) if per_step else (1, 0))
        assert counts["looked_at"] == {"step": (1, 0)}


@pytest.mark.parametrize("stage, dtype, tier", [(1, None, "nvme"), (3, torch.bfloat16, "all"), (2, None, "cpu")])
def test_what_is_not_is_redone(
    ranks: Launcher, tmp_path: Path, stage: int, dtype: torch.dtype | None, tier: str
) -> None:
    found = ranks(2)(all_of, ["changed", "live"], stage, dtype, tmp_path, tier)
    for wrong, counts in found:
        assert wrong == []
        changes = counts["changed"]
        assert changes["scheduler"] == (3, 0) and changes["nothing"] == (1, 0) and counts["live"]["closure"] == (3, 0)
        assert changes["rate"] == (0, 1) and changes["clamped"] == (0, 1)
    for name in ("assigned", "dropped", "zeroed", "set", "weights", "master", "state"):  # by a rank that has a part
        assert any(counts["changed"][name][1] for _, counts in found), name


@pytest.mark.parametrize("stage, dtype, tier", [(2, torch.bfloat16, "nvme"), (3, None, "all")])
def test_clipping_that_takes_effect_stops_the_guessing(
    ranks: Launcher, tmp_path: Path, stage: int, dtype: torch.dtype | None, tier: str
) -> None:
    for wrong, counts in ranks(2)(told, clipped, stage, dtype, tmp_path, tier, "adamw"):
        assert wrong == []
        assert counts["always"] == (0, 1) and counts["in turn"] == (0, 0) and counts["no more"] == (4, 0)


def test_steps_that_are_skipped_leave_nothing(ranks: Launcher, tmp_path: Path) -> None:
    scale = {"loss_scale": {"initial": 64.0, "growth_interval": 3}}
    for wrong, counts in ranks(2)(told, skipped, 2, torch.float16, tmp_path, "nvme", "adamw", **scale):
        assert wrong == [] and counts["good"][0] >= 2 and counts["bad"][1] >= 1


@pytest.mark.parametrize("world, replicate", [(2, 1), (4, 2)])
def test_gradients_that_come_late(ranks: Launcher, world: int, replicate: int) -> None:
    """A bucket that was finished, and taken early, gets more gradients in the same backward."""
    more = {"offload": {"optimizer": "cpu", "early_step": "on"}, "mesh": {"replicate": replicate}}
    settings = [Setting(setting.stage, setting.order, more) for setting in SETTINGS]
    for wrong in ranks(world)(play, partial(blocks_used_again, times=2, micro=2), settings, tolerance=1e-5):
        assert not wrong


class Gan(nn.Module):
    """Two networks and what they share, in one bucket or in several."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.other, self.shared = nn.Linear(33, 65), nn.Linear(33, 65), nn.Linear(65, 33)


def in_turn(folder: Path, tier: str, units: list[str]) -> tuple[list[str], int]:
    """Two optimizers that step one after the other, of one backward each, then of one for both."""
    results, counts = [], []
    for offload in (tiers(folder)["none"], tiers(folder)[tier] | {"early_step": "on"}):
        config = load_config(stage=2, units={"patterns": units}, rendezvous_seconds=20.0, offload=offload)
        engine = ZeroEngine(Gan(), config, compute_dtype=torch.bfloat16)
        net = engine.module
        optimizers = [
            torch.optim.AdamW([*net.one.parameters(), net.shared.weight], lr=0.01),
            torch.optim.AdamW([*net.other.parameters(), net.shared.bias], lr=0.02),
        ]
        engine.attach(*optimizers)
        for turn in range(10):
            for part, (optimizer, branch) in enumerate(zip(optimizers, (net.one, net.other), strict=True)):
                torch.manual_seed(100 * turn + 10 * part + engine.mesh.rank)
                loss = net.shared(branch(torch.randn(4, 33, dtype=torch.bfloat16))).float().square().mean()
                loss.backward()
                if turn < 6:
                    optimizer.step()
                    optimizer.zero_grad()
            if turn >= 6:
                engine.clip_grad_norm_(FAR)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found = dict(engine.full_state_dict())
        for optimizer in optimizers:
            for name, values in engine.full_optimizer_state(optimizer).items():
                found |= {f"{name} {key}": value for key, value in values.items()}
        results.append(found)
        counts.append(engine.early_steps.committed)
        engine.detach()
    return unequal(results[1], results[0]), counts[1]


@pytest.mark.parametrize("units", [["one", "other", "shared"], []], ids=["apart", "in one bucket"])
def test_two_optimizers_in_turn(ranks: Launcher, tmp_path: Path, units: list[str]) -> None:
    for wrong, committed in ranks(2)(in_turn, tmp_path, "nvme", units):
        assert wrong == []
        assert committed > 8 if units else committed == 0


class BadDrive(NvmeTier):
    """Refuses writes of early steps, or all others, while it is told to."""

    refuses: str | None = None

    def write(self, record: str, memory: Tensor) -> NvmeTransfer:
        early = threading.current_thread().name == "zero-early-step"
        if self.refuses == ("early" if early else "others"):
            raise OSError(errno.EIO, "injected", record)
        return super().write(record, memory)


def drive_of(run: Run) -> dict[str, Any]:
    store = run.engine.offloaded.optimizer
    assert store is not None
    store.tier.__class__ = BadDrive
    return vars(store.tier)


def failing(folder: Path, tier: str) -> tuple[list[str], list[str]]:
    """A drive that fails during backward: told by the step, which has changed nothing."""
    found, said = [], []
    for bad in (False, True):
        run = Run(folder, 2, torch.bfloat16, tiers(folder)[tier] | {"early_step": "on"}, "adamw")
        run.steps(3)
        if bad:
            before, drive = outcome(run.engine, run.optimizer), drive_of(run)
            for how in ("step", "no step"):
                drive["refuses"] = "early"
                run.backward()
                if how == "step":
                    with pytest.raises(OSError, match="injected") as caught:
                        run.update()
                    said.append(str(caught.value))
                drive["refuses"] = None
                run.engine.reset()
                run.optimizer.zero_grad()
                said += unequal(outcome(run.engine, run.optimizer), before)
            run.turn = 3
        run.steps(3)
        found.append(outcome(run.engine, run.optimizer))
        run.engine.detach()
    return said, unequal(found[1], found[0])


def test_a_drive_that_fails_meanwhile(ranks: Launcher, tmp_path: Path) -> None:
    ((said, wrong),) = ranks(1)(failing, tmp_path, "gradients in memory")
    assert len(said) == 1 and "injected" in said[0] and wrong == []


def half_adopted(folder: Path) -> tuple[list[str], list[str]]:
    """A step that adopts what was carried out early, and fails at what was not."""
    found, said = [], []
    for bad in (False, True):
        run = Run(folder, 2, None, tiers(folder)["gradients in memory"] | {"early_step": "on"}, "adamw")
        run.steps(3)
        if bad:
            run.engine.save(run.folder)
            run.backward(True)  # a parameter that had no gradient before: its bucket is redone
            drive_of(run)["refuses"] = "others"
            for _ in range(2):
                with pytest.raises((OSError, RuntimeError), match=r"injected|stopped half-way") as caught:
                    run.update()
                said.append(type(caught.value).__name__)
                store = run.engine.offloaded.optimizer
                assert store is not None
                vectors = [v for name, v in store.vectors.items() if "blocks" in name and v.twice]
                assert vectors and all(store.tier.is_torn(vector.record(0)) for vector in vectors)  # adopted ones, too
                drive_of(run)["refuses"] = None
                run.engine.reset()
                run.optimizer.zero_grad()
                run.backward()
            run.optimizer.zero_grad()
            run.engine.load(run.folder)
            run.turn = 3
        run.steps(3)
        found.append(outcome(run.engine, run.optimizer))
        run.engine.detach()
    return said, unequal(found[1], found[0])


def test_a_step_that_fails_after_it_has_adopted_something_is_torn(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(1)(half_adopted, tmp_path) == [(["OSError", "TornRecordError"], [])]


def attempts(guesses: str) -> str:
    """Which of a row of guesses, right or wrong, are tried."""
    patience, found = Patience(), ""
    for guess in guesses:
        found += "+" if patience.tries else "-"
        patience.learn(guess == "r")
    return found


def test_patience() -> None:
    assert attempts("rrrr") == "++++"
    assert attempts("wrrrwrrr") == "+--++--+"  # two in a row after the first; the one that was right takes one off
    assert attempts("wwwwww") == "+-----"
    assert attempts("wrwrwrwr") == "+-------"
    assert attempts("w" + "rrw" * 30).count("+") == 2
    lasting = Patience()
    for _ in range(20):
        lasting.learn(False)
        while not lasting.tries:
            lasting.learn(True)
    assert lasting._asked == MOST_PATIENCE


SCRIPT = """
import atexit, os, signal, sys, threading
import torch
import torch._dynamo  # the first optimizer loads it, in each of the processes
import torch.distributed as dist
from torch import nn
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

folder, statuses = sys.argv[1], {}
for how in ("end", "raise", "kill", "fork", "detach"):
    child = os.fork()
    if child == 0:
        break
    statuses[how] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    print(statuses)
    sys.exit()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
offload = dict(optimizer="nvme", nvme_path=[folder], probe_seconds=0, staging_bytes=1 << 19, early_step="on")
module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
engine = ZeroEngine(module, load_config(stage=2, units={"min_numel": 0}, offload=offload))
optimizer = torch.optim.AdamW(module.parameters())
engine.attach(optimizer)
for _ in range(2):
    module(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
module(torch.ones(2, 256)).sum().backward()
assert any(thread.name == "zero-early-step" for thread in threading.enumerate())
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "raise":
    raise ValueError("on purpose")
if how == "fork":
    if os.fork() == 0:  # a process group's threads would be waited for by an exit that goes all the way
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.wait()[1] == 0
    optimizer.step()
    assert engine.early_steps.committed == 2, engine.early_steps
if how == "detach":
    engine.detach()
"""


def test_a_process_that_ends_meanwhile(tmp_path: Path) -> None:
    script = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == "{'end': 0, 'raise': 1, 'kill': -9, 'fork': 0, 'detach': 0}\n", ended.stderr
    assert ended.stderr.count("Error") == 1 and "on purpose" in ended.stderr and not list(tmp_path.iterdir())
