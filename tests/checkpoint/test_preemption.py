"""Notice by a signal: all ranks save after the same step, whichever got it; what was saved goes on exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.launcher import Launcher, RankError
from tests.models import build, loss_fn, make_batch, param_groups
from zero_strategy.checkpoint import CheckpointReader
from zero_strategy.checkpoint.preemption import Preempted
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

STEPS = 5


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Run:
    """A loop of one's own with dropout, two micro-batches a step, and a loader that is only a number."""

    def __init__(self, stage: int, seed: int) -> None:
        self.model = build("transformer", 3)
        config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=10.0)
        self.engine = ZeroEngine(self.model, config)
        self.optimizer = torch.optim.AdamW(param_groups(self.model), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.engine.attach(self.optimizer)
        self.losses: dict[int, float] = {}
        self.model.embedding.register_forward_hook(lambda *args: F.dropout(args[2], 0.2))  # type: ignore[union-attr]
        torch.manual_seed(seed + rank())

    def train(
        self, first: int, between: Callable[[int], object] = lambda step: None, boundary: Callable[[], object] = int
    ) -> None:
        for step in range(first, STEPS):
            for part in range(2):
                loss = loss_fn(self.model, make_batch("transformer", 100 * step + 10 * part + rank(), 2))
                self.losses[step] = loss.item()
                if part:
                    between(step)
                    loss.backward()
                else:
                    with self.engine.no_sync():
                        loss.backward()
                    between(-step)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            boundary()

    def left(self) -> list[Any]:
        states = self.engine.full_optimizer_state(self.optimizer)
        return [self.losses, self.engine.full_state_dict(), states, self.scheduler.state_dict()["last_epoch"]]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(value, expected[key]) for key, value in found.items())
    return torch.equal(found, expected) if isinstance(found, torch.Tensor) else bool(found == expected)


def uninterrupted(stage: int) -> list[Any]:
    run = Run(stage, 7)
    run.train(0)
    return run.left()


def compare(run: Run, expected: list[Any], first: int) -> bool:
    found = run.left()
    expected = [{step: loss for step, loss in expected[0].items() if step >= first}, *expected[1:]]
    return all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


# ---- going on exactly ----


def resumed_by_hand(folder: Path, stage: int) -> list[bool]:
    """Saves in the middle of a run, and in the middle of a step, change nothing."""
    expected = uninterrupted(stage)
    run = Run(stage, 7)

    def save() -> None:
        run.engine.save_checkpoint(folder, client_state={}, lr_scheduler=run.scheduler)

    run.train(0, between=lambda step: run.engine.save(folder / "between") if step == -1 else None, boundary=save)
    again = Run(stage, 1000)
    again.engine.load_checkpoint(folder, "global_step2", lr_scheduler=again.scheduler)
    again.train(2)
    return [compare(run, expected, 0), compare(again, expected, 2)]


@pytest.mark.parametrize(("world", "stage"), [(2, 1), (2, 3), (1, 2)])
def test_a_loop_goes_on_bit_by_bit(tmp_path: Path, ranks: Launcher, world: int, stage: int) -> None:
    assert ranks(world)(resumed_by_hand, tmp_path, stage) == [[True, True]] * world


# ---- signals ----


def signalled(folder: Path, stage: int, number: int, culprits: list[int], place: int) -> dict[str, Any]:
    expected = uninterrupted(stage)
    run, ended = Run(stage, 7), ""
    before = signal.getsignal(number)

    def kick(step: int) -> None:
        if step == place and rank() in culprits:
            os.kill(os.getpid(), number)

    def save() -> None:
        run.engine.save_checkpoint(folder, "preempted", lr_scheduler=run.scheduler)

    try:
        with run.engine.save_on_signal(folder, save=save, at_call=True) as boundary:
            run.train(0, kick, boundary)
    except Preempted as error:
        ended = f"{type(error).__mro__[1].__name__} {error.code} {run.engine.steps.taken}"
    again = Run(stage, 1000)
    again.engine.load_checkpoint(folder, "preempted", lr_scheduler=again.scheduler)
    taken = again.engine.steps.taken
    again.train(taken)
    return {
        "ended": ended,
        "taken": taken,
        "went on": ended != "" or compare(run, expected, 0),
        "exact": compare(again, expected, taken),
        "restored": signal.getsignal(number) == before,
    }


@pytest.mark.parametrize(
    ("stage", "number", "culprits", "place"),
    [
        (1, signal.SIGTERM, [0], 2),
        (3, signal.SIGTERM, [1], -2),
        (2, signal.SIGTERM, [0, 1], 2),
        (3, signal.SIGUSR1, [1], 2),
        (1, signal.SIGUSR1, [0, 1], -2),
    ],
)
def test_all_ranks_save_after_the_same_step(
    tmp_path: Path, ranks: Launcher, stage: int, number: int, culprits: list[int], place: int
) -> None:
    ended = "SystemExit 143 3" if number == signal.SIGTERM else ""
    for found in ranks(2)(signalled, tmp_path, stage, number, culprits, place):
        assert found == {"ended": ended, "taken": 3, "went on": True, "exact": True, "restored": True}


def both_kinds(folder: Path) -> list[Any]:
    """One rank is to save, the other to end: all save and end. Inside of `optimizer.step()`."""
    run = Run(2, 7)

    def kick(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM if rank() else signal.SIGUSR1)

    try:
        with run.engine.save_on_signal(folder / "c"):
            run.train(0, kick)
    except Preempted:
        again = Run(3, 1000)
        counters = again.engine.load(folder / "c").manifest.counters
        return [run.engine.steps.taken, counters["global_steps"], run.scheduler.last_epoch, run.engine.steps.wanted()]
    return []


def test_one_is_to_save_the_other_to_end(tmp_path: Path, ranks: Launcher) -> None:
    assert ranks(2)(both_kinds, tmp_path) == [[2, 2, 1, 0]] * 2


def late(folder: Path) -> None:
    """The signal finds no step any more: it does what it did before."""
    run = Run(1, 7)
    with run.engine.save_on_signal(folder / "c"):
        run.train(4)
        os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path, ranks: Launcher) -> None:
    with pytest.raises(RankError, match="by signal SIGTERM"):
        ranks(2)(late, tmp_path)
    assert not (tmp_path / "c").exists()


def test_handlers_of_others_are_called_and_come_back(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        run = Run(0, 7)
        with run.engine.save_on_signal(tmp_path / "c", signals=[signal.SIGUSR1]):
            run.train(3, lambda step: os.kill(os.getpid(), signal.SIGUSR1) if step == 3 else None)
        assert came == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert CheckpointReader(tmp_path / "c").manifest.counters["global_steps"] == 1


def test_the_main_thread_only(tmp_path: Path) -> None:
    errors: list[str] = []
    run = Run(0, 7)

    def enter() -> None:
        try:
            with run.engine.save_on_signal(tmp_path):
                pass
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in errors[0]


# ---- a process of its own ----

SCRIPT = textwrap.dedent(
    """
    import sys, time, torch
    from zero_strategy.engine import ZeroEngine
    model = torch.nn.Linear(8, 8)
    engine = ZeroEngine(model, dict(stage=2))
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    with engine.save_on_signal(sys.argv[2] + "/c"):
        for step in range(10_000):
            model(torch.ones(2, 8)).sum().backward()
            if step == 2:
                print("stepping", flush=True)
            while step == 2 and sys.argv[1] == "stuck":
                time.sleep(0.1)
                if engine.steps.terminating:
                    print("noted", flush=True)
                    time.sleep(60)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
    print("not reached")
    """
)


def start(how: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", SCRIPT, how, str(folder)]
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "stepping\n"
    return process


def test_sigterm_ends_the_process_with_a_checkpoint(tmp_path: Path) -> None:
    process = start("steps", tmp_path)
    process.terminate()
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (143, ""), errors
    assert verify(tmp_path / "c").problems == ()


def test_the_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    process = start("stuck", tmp_path)
    process.terminate()
    assert process.stdout is not None and process.stdout.readline() == "noted\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and not (tmp_path / "c").exists()
