"""Saves in the background: the same bytes as a save at once, whatever training does meanwhile, and failures for all."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launcher import Launcher, RankError
from tests.models import Transformer, build, loss_fn, make_batch, param_groups
from zero_strategy.checkpoint import CheckpointReader, CheckpointWriter
from zero_strategy.checkpoint.save_job import SaveJob
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.comm.store import SaveBoard
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def make(stage: int, **checkpoint: Any) -> tuple[nn.Module, ZeroEngine, torch.optim.Optimizer]:
    model = build("transformer", 3)
    settings = {"timeout_seconds": 5.0, **checkpoint}
    config = load_config(stage=stage, units={"min_numel": 0}, barrier_seconds=10.0, checkpoint=settings)
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(param_groups(model))
    engine.attach(optimizer)
    return model, engine, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_fn(model, make_batch("transformer", 10 * step + rank(), 2)).backward()
    optimizer.step()
    optimizer.zero_grad()


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*.safetensors"))
    }


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class HeldBack:
    """Keeps this process's writers from writing until it is told."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self._write = CheckpointWriter.write_all

    def __enter__(self) -> HeldBack:
        write, go = self._write, self.go

        def late(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
            assert go.wait(30)
            write(writer, *args, **kwargs)

        CheckpointWriter.write_all = late  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        CheckpointWriter.write_all = self._write  # type: ignore[method-assign]


# ---- what is saved ----


def saved_while_training(folder: Path, stage: int) -> dict[str, Any]:
    model, engine, optimizer = make(stage)
    train(model, optimizer, 0)
    engine.save(folder / "now")
    with HeldBack() as held:
        pending = engine.save(folder / "later", asynchronous=True)
        for step in range(1, 4):
            train(model, optimizer, step)
        early = (pending.done(), (folder / "later").exists(), engine.saver.busy())
        held.go.set()
        pending.wait()
    engine.save(folder / "after")
    return {"early": early, "snapshot": engine.saver.snapshot_bytes, "state": engine.state_bytes()}


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 3), (3, 2)])
def test_background_save_holds_the_state_of_the_call(tmp_path: Path, ranks: Launcher, world: int, stage: int) -> None:
    run: Any = ranks(world) if world > 1 else None
    found = run(saved_while_training, tmp_path, stage) if run else [saved_while_training(tmp_path, stage)]
    assert [result["early"] for result in found] == [(False, False, True)] * world
    assert digests(tmp_path / "later") == digests(tmp_path / "now") != digests(tmp_path / "after")
    assert verify(tmp_path / "later").problems == ()
    assert (tmp_path / "latest").read_text() == "after\n"


# ---- one at a time ----


def second_save(folder: Path, while_saving: str) -> dict[str, Any]:
    model, engine, optimizer = make(2, while_saving=while_saving)
    train(model, optimizer, 0)
    found: dict[str, Any] = {}
    with HeldBack() as held:
        engine.save(folder / "first", asynchronous=True)
        if rank() == 1 and while_saving == "refuse":  # the other rank decides for this one too
            time.sleep(0.1)
        threading.Timer(0.5, held.go.set).start() if while_saving == "wait" else None
        found["second"] = message_of(lambda: engine.save(folder / "second", asynchronous=True))
        found["first is there"] = (folder / "first").exists()
        held.go.set()
    found["third"] = message_of(lambda: engine.save(folder / "third"))
    engine.saver.wait()
    return found


def test_a_second_save_waits(tmp_path: Path, ranks: Launcher) -> None:
    for found in ranks(2)(second_save, tmp_path, "wait"):
        assert found == {"second": "", "first is there": True, "third": ""}
    assert all(verify(tmp_path / name).problems == () for name in ("first", "second", "third"))


def test_a_second_save_is_refused_on_all_ranks(tmp_path: Path, ranks: Launcher) -> None:
    found = ranks(2)(second_save, tmp_path, "refuse")
    for result in found:
        assert "second: the last checkpoint is still being written (by ranks [" in result["second"]
        assert "checkpoint.while_saving" in result["second"]
    assert not (tmp_path / "second").exists()


# ---- failures ----


def failing(folder: Path, culprit: int, surface: str) -> dict[str, Any]:
    """One rank's disk fails in the background."""
    model, engine, optimizer = make(3)
    train(model, optimizer, 0)
    engine.save(folder / "c")
    before = digests(folder / "c")
    train(model, optimizer, 1)
    write = CheckpointWriter.write_all

    def broken(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        if rank() == culprit:
            raise OSError(28, "No space left on device", "/somewhere")
        write(writer, *args, **kwargs)

    CheckpointWriter.write_all = broken  # type: ignore[method-assign]
    try:
        pending = engine.save(folder / "c", asynchronous=True)
        deadline = time.monotonic() + 20
        while not pending.done() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        CheckpointWriter.write_all = write  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    if surface == "step":
        found["error"] = message_of(lambda: train(model, optimizer, 2))
    elif surface == "wait":
        found["error"] = message_of(pending.wait)
    else:
        found["error"] = message_of(lambda: engine.save(folder / "d"))
        dist.barrier()
    optimizer.zero_grad()
    found["once"] = message_of(lambda: train(model, optimizer, 3))
    found["again"] = message_of(lambda: engine.save(folder / "e"))
    found["old one"] = digests(folder / "c") == before and not list(folder.glob(".c.*"))
    return found


@pytest.mark.parametrize("surface", ["step", "wait", "save"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_is_raised_on_all_ranks(tmp_path: Path, ranks: Launcher, culprit: int, surface: str) -> None:
    found = ranks(2)(failing, tmp_path, culprit, surface)
    assert found[culprit]["error"].startswith("OSError: [Errno 28] No space left on device")
    other = found[1 - culprit]["error"]
    assert other.startswith(f"FailedElsewhereError: failed on other rank(s): {{{culprit}: ") and "No space" in other
    for result in found:
        assert (result["once"], result["again"], result["old one"]) == ("", "", True)


@contextlib.contextmanager
def without_threads(name: str) -> Iterator[None]:
    """As where a process may have no more threads, for those of this name."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", refused):
        yield


def no_thread(folder: Path, name: str, asynchronous: bool) -> list[str]:
    """Rank 1 cannot start a thread of this name: what is said, what the next step says, and a save after that."""
    model, engine, optimizer = make(3, timeout_seconds=30.0)
    train(model, optimizer, 0)
    with without_threads(name) if rank() == 1 else contextlib.nullcontext():
        found = [message_of(lambda: engine.save(folder / "c", asynchronous=asynchronous))]
        engine.saver.rest()
    assert not engine.saver.busy()
    found += [message_of(lambda: train(model, optimizer, 1))]
    optimizer.zero_grad()
    return [*found, message_of(lambda: engine.save(folder / "d"))]


@pytest.mark.parametrize("name, asynchronous", [("checkpoint", True), ("checkpoint-alive", False)])
def test_a_thread_that_cannot_start_fails_the_save_on_all_ranks(
    tmp_path: Path, ranks: Launcher, name: str, asynchronous: bool
) -> None:
    found = ranks(2)(no_thread, tmp_path, name, asynchronous)
    for said, stepping, again in found:
        told, quiet = (stepping, said) if asynchronous else (said, stepping)
        assert "can't start new thread" in told and quiet == again == ""
    assert not (tmp_path / "c").exists() and verify(tmp_path / "d").problems == ()


def test_without_a_thread_what_a_save_at_once_replaced_is_removed_at_once(tmp_path: Path) -> None:
    _, engine, _ = make(0)
    engine.save(tmp_path / "c")
    engine.saver.finish()
    with without_threads("checkpoint"):
        engine.save(tmp_path / "c")
    engine.saver.finish()
    assert sorted(os.listdir(tmp_path)) == ["c", "latest"] and verify(tmp_path / "c").problems == ()


def test_saves_at_once_leave_nothing_to_be_called_at_exit(tmp_path: Path) -> None:
    _, engine, _ = make(0)
    before = atexit._ncallbacks()  # type: ignore[attr-defined]
    for _ in range(3):
        engine.save(tmp_path / "c")
    assert atexit._ncallbacks() == before  # type: ignore[attr-defined]


def failing_write(writer: CheckpointWriter, *_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "/somewhere")


def test_a_save_that_failed_at_once_does_not_hide_removals_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, _ = make(0)
    go, order, clean_up = threading.Event(), list[str](), SaveJob.clean_up

    def watched(job: SaveJob) -> None:
        name = Path(job.writer.target).name
        if name == "first":
            assert go.wait(20)
        clean_up(job)
        order.append(name)

    monkeypatch.setattr(SaveJob, "clean_up", watched)
    engine.save(tmp_path / "first")
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_all", failing_write)
        with pytest.raises(OSError, match="No space"):
            engine.save(tmp_path / "second")
    engine.save(tmp_path / "third")
    time.sleep(0.2)
    go.set()
    engine.saver.finish()
    assert order == ["first", "third"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_to_follow_a_save_does_not_follow_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    _, engine, _ = make(0)
    done: list[str] = []

    def ask() -> list[str]:
        done.clear()
        engine.saver.then(lambda: done.append("there"))
        engine.saver.then(lambda: done.append("failed"), failed=True)
        return list(done)

    assert ask() == ["there"]  # none yet
    engine.save(tmp_path / "c")
    assert ask() == ["there"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_all", failing_write)
        with pytest.raises(OSError, match="No space"):
            engine.save(tmp_path / "d", asynchronous=asynchronous)
            engine.saver.wait()
    assert ask() == ["failed"]
    engine.save(tmp_path / "e")
    assert ask() == ["there"]


def failing_later_on_one(folder: Path) -> list[str]:
    """The failure becomes known while rank 0 is between two steps: both ranks raise before the same step."""
    model, engine, optimizer = make(2)
    train(model, optimizer, 0)
    write = CheckpointWriter.write_all
    go = threading.Event()

    def broken(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        go.wait(20)
        if rank() == 1:
            raise OSError(5, "Input/output error")
        write(writer, *args, **kwargs)

    CheckpointWriter.write_all = broken  # type: ignore[method-assign]
    steps = []
    try:
        engine.save(folder / "c", asynchronous=True)
        for step in range(1, 400):
            if step == 3:
                go.set()
            steps.append(message_of(lambda step=step: train(model, optimizer, step)))  # type: ignore[misc]
            optimizer.zero_grad()
            if steps[-1]:
                break
    finally:
        go.set()
        CheckpointWriter.write_all = write  # type: ignore[method-assign]
    return [str(len(steps)), steps[-1]]


def test_all_ranks_raise_before_the_same_step(tmp_path: Path, ranks: Launcher) -> None:
    first, second = ranks(2)(failing_later_on_one, tmp_path)
    assert first[0] == second[0]
    assert "Input/output error" in first[1] and "Input/output error" in second[1]


def late(folder: Path, stopped: bool) -> str:
    """Rank 1 writes much later than the time-out; as if its process had been `stopped`, or for its disk alone."""
    _, engine, _ = make(3, timeout_seconds=1.5)
    write, alive = CheckpointWriter.write_all, SaveBoard.alive

    def slow(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        if rank() == 1:
            time.sleep(5)
        write(writer, *args, **kwargs)

    CheckpointWriter.write_all = slow  # type: ignore[method-assign]
    if stopped and rank() == 1:
        SaveBoard.alive = lambda board: contextlib.nullcontext()  # type: ignore[method-assign, assignment]
    try:
        return message_of(lambda: engine.save(folder / "c"))
    finally:
        CheckpointWriter.write_all = write  # type: ignore[method-assign]
        SaveBoard.alive = alive  # type: ignore[method-assign]


def test_a_rank_that_is_gone_is_named_in_time(tmp_path: Path, ranks: Launcher) -> None:
    first, second = ranks(2)(late, tmp_path, True)
    assert first.startswith("RankLostError: rank 1 has not written its part") and "checkpoint.timeout_seconds" in first
    assert "rank 1 has not written" in second or "No such file" in second
    assert not (tmp_path / "c").exists() and not list(tmp_path.glob(".c.*"))


def killed(folder: Path, asynchronous: bool) -> None:
    """Rank 1, while it writes; `checkpoint.timeout_seconds` is far away."""
    _, engine, _ = make(3, timeout_seconds=300.0)

    def end(writer: CheckpointWriter, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank() == 1:
        CheckpointWriter.write_all = end  # type: ignore[method-assign]
    engine.save(folder / "c", asynchronous=asynchronous)
    engine.saver.finish()
    time.sleep(60)  # rank 1, until its own thread kills it


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_killed_is_not_waited_for(tmp_path: Path, ranks: Launcher, asynchronous: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, grace=20.0)(killed, tmp_path, asynchronous)
    assert caught.value.failures[1].kind == "died"
    first = caught.value.failures[0]
    assert first.kind == "raised" and "rank 1 has not written its part of the checkpoint: its process has" in first.text
    assert not (tmp_path / "c").exists()


def test_a_rank_whose_disk_is_slow_is_waited_for(tmp_path: Path, ranks: Launcher) -> None:
    assert ranks(2)(late, tmp_path, False) == ["", ""]
    assert verify(tmp_path / "c").problems == ()


# ---- interruptions ----


def interrupted(folder: Path) -> dict[str, Any]:
    """A Ctrl-C while the program waits for the save: the next save must not reuse memory that is still read."""
    model, engine, optimizer = make(2)
    train(model, optimizer, 0)
    engine.save(folder / "expected")
    found: dict[str, Any] = {}
    with HeldBack() as held:
        engine.save(folder / "first", asynchronous=True)
        previous = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            engine.saver.wait()
        except KeyboardInterrupt:
            found["still busy"] = engine.saver.busy()
        finally:
            signal.signal(signal.SIGALRM, previous)
        train(model, optimizer, 1)
        threading.Timer(0.3, held.go.set).start()
        engine.save(folder / "second", asynchronous=True)
    engine.saver.wait()
    return found


def test_an_interrupted_wait_forgets_nothing(tmp_path: Path) -> None:
    assert interrupted(tmp_path) == {"still busy": True}
    assert digests(tmp_path / "first") == digests(tmp_path / "expected") != digests(tmp_path / "second")


def loads_at_once(folder: Path) -> Any:
    model, engine, optimizer = make(1)
    train(model, optimizer, 0)
    engine.save_checkpoint(folder, "a", {"x": 1}, asynchronous=True)
    return engine.load_checkpoint(folder)[1]


def test_loading_waits_for_the_save_under_way(tmp_path: Path, ranks: Launcher) -> None:
    assert ranks(2)(loads_at_once, tmp_path) == [{"x": 1}, {"x": 1}]


def failing_afterwards(folder: Path) -> list[str]:
    """Failure after a save on one rank: a warning there, and no difference between ranks."""
    model, engine, optimizer = make(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with HeldBack():
            engine.save(folder / "c", asynchronous=True)
            if rank() == 0:
                engine.saver.then(lambda: (_ for _ in ()).throw(PermissionError("not yours")))
        train(model, optimizer, 0)
        engine.saver.wait()
    return [str(warning.message) for warning in caught if "not yours" in str(warning.message)]


def test_what_follows_a_save_cannot_fail_it(tmp_path: Path, ranks: Launcher) -> None:
    first, second = ranks(2)(failing_afterwards, tmp_path)
    assert len(first) == 1 and "after saving" in first[0] and second == []


# ---- the end of the process ----

SCRIPT = textwrap.dedent(
    """
    import sys, time, torch
    from zero_strategy.checkpoint import CheckpointWriter
    from zero_strategy.engine import ZeroEngine
    how, folder = sys.argv[1:]
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    engine = ZeroEngine(model, dict(stage=2))
    engine.attach(torch.optim.AdamW(model.parameters()))
    write = CheckpointWriter.write_all
    def slow(*args, **kwargs):
        time.sleep(0.5)
        if how == "fails":
            raise OSError(28, "No space left on device")
        write(*args, **kwargs)
    CheckpointWriter.write_all = slow
    engine.save(folder + "/c", asynchronous=True)
    print("saving", flush=True)
    if how == "killed":
        time.sleep(60)
    if how == "raises":
        raise KeyError("something else")
    """
)


def end_of_process(how: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", SCRIPT, how, str(folder)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_the_process_ends_when_the_checkpoint_is_there(tmp_path: Path, how: str) -> None:
    process = end_of_process(how, tmp_path)
    _, errors = process.communicate(timeout=60)
    assert ("something else" in errors) == (how == "raises") == bool(process.returncode), errors
    assert verify(tmp_path / "c").problems == ()


def test_a_failure_is_told_at_exit(tmp_path: Path) -> None:
    _, errors = end_of_process("fails", tmp_path).communicate(timeout=60)
    assert "No space left on device" in errors
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    process = end_of_process("killed", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "saving\n"
    process.terminate()
    process.communicate(timeout=60)
    assert not (tmp_path / "c").exists()
    with pytest.raises(ValueError, match="no such file"):
        CheckpointReader(tmp_path / "c")


# ---- tags, client state, counters, random state ----


def tagged(folder: Path) -> dict[str, Any]:
    model, engine, optimizer = make(3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found: dict[str, Any] = {"nothing": engine.load_checkpoint(folder / "none")}
    for step in range(2):
        train(model, optimizer, step)
        scheduler.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3, "seen": torch.arange(3)}, lr_scheduler=scheduler)
    random.seed(100 + rank())
    np.random.seed(200 + rank())
    torch.manual_seed(300 + rank())
    engine.save_checkpoint(folder, "named", {"epoch": 4}, save_latest=False)
    drawn = (random.random(), float(np.random.rand()), torch.rand(2).tolist())
    found["refused"] = message_of(lambda: engine.save_checkpoint(folder, "bad/tag"))
    found["object"] = message_of(lambda: engine.save_checkpoint(folder, "x", {"lock": Transformer}))
    engine.mesh.barrier.timeout = 2.0
    found["differ"] = message_of(lambda: engine.save_checkpoint(folder, f"tag{rank()}", save_latest=False))
    _, engine, optimizer = make(1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    path, client = engine.load_checkpoint(folder, lr_scheduler=other_scheduler)
    found["path"], found["epoch"], found["seen"] = path, client["epoch"], client["seen"].tolist()
    found["steps"], found["rates"] = engine.steps.taken, other_scheduler.get_last_lr() == scheduler.get_last_lr()
    found["named"] = engine.load_checkpoint(folder, "named")
    found["random"] = (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == drawn
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_tags_and_client_state(tmp_path: Path, ranks: Launcher, world: int) -> None:
    run: Any = ranks(world) if world > 1 else None
    with pytest.warns(UserWarning, match="no checkpoint found") if world == 1 else _nothing():
        results = run(tagged, tmp_path) if run else [tagged(tmp_path)]
    for found in results:
        assert found["nothing"] == (None, {})
        assert (found["path"], found["epoch"], found["seen"]) == (str(tmp_path / "global_step2"), 3, [0, 1, 2])
        assert found["steps"] == 2 and found["rates"]
        assert found["named"] == (str(tmp_path / "named"), {"epoch": 4}) and found["random"]
        assert "tag 'bad/tag'" in found["refused"]
        assert found["object"].startswith("TypeError: client_state['lock']: not plain data")
        assert "Transformer" in found["object"]
        if world > 1:
            assert "tag0" in found["differ"] and "tag1" in found["differ"]
    assert (tmp_path / "latest").read_text() == "global_step2\n"


def started_again(folder: Path) -> list[str | None]:
    """Result of `load_checkpoint(folder)` as a job is started again and again: the path's name, or the error."""
    found: list[str | None] = []

    def start() -> None:
        _, engine, _ = make(3)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                path = engine.load_checkpoint(folder)[0]
            found.append(path and Path(path).name)
        except ValueError as error:
            found.append(str(error).partition(":")[2])
        engine.mesh.barrier.wait_for_all("tried")

    model, engine, optimizer = make(3)
    if rank() == 0:
        (folder / "logs").mkdir()
        (folder / ".global_step1.0123.tmp").mkdir()  # of a first save that was killed
        (folder / ".global_step1.0123.tmp" / "model.safetensors").touch()
    engine.mesh.barrier.wait_for_all("made")
    start()
    for step in range(2):
        train(model, optimizer, step)
        engine.save_checkpoint(folder).wait()
    start()
    if rank() == 0:
        (folder / "latest").unlink()  # as if a kill had come right before it was written
    engine.mesh.barrier.wait_for_all("removed")
    start()
    if rank() == 0:
        (folder / "global_step2" / "manifest.json").unlink()
        (folder / "global_step2").rename(folder / "damaged")
        shutil.rmtree(folder / "global_step1")
    engine.mesh.barrier.wait_for_all("removed")
    start()
    folder = folder / "damaged"
    start()
    return found


def test_a_folder_without_latest(tmp_path: Path, ranks: Launcher) -> None:
    for found in ranks(2)(started_again, tmp_path):
        assert found[:4] == [None, "global_step2", "global_step2", None]
        assert found[4] is not None and "not a complete checkpoint" in found[4]


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def draws(folder: Path, save: bool) -> list[float]:
    _, engine, _ = make(2)
    if save:
        torch.manual_seed(7 + rank())
        engine.save(folder / "c")
    else:
        engine.load(folder / "c")
    return [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]


def test_random_state_of_another_number_of_ranks_is_drawn_by_a_rule(tmp_path: Path, ranks: Launcher) -> None:
    saved = ranks(2)(draws, tmp_path, True)
    assert [found[:2] for found in ranks(2)(draws, tmp_path, False)] == [found[:2] for found in saved]
    three = ranks(3)(draws, tmp_path, False)
    assert three == ranks(3)(draws, tmp_path, False)
    assert len({tuple(found) for found in [*three, *saved]}) == 5
