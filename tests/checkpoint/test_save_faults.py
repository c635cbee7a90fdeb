"""Faults of the disk and of the caller: a clear error on every rank, and the checkpoint before it stays as it was."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.killable import digest
from tests.engine.nets import Net
from tests.launcher import Launcher
from tests.models import build, loss_fn, make_batch
from zero_strategy.checkpoint.load import open_together
from zero_strategy.checkpoint.save_job import PendingSave
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.config import load_config
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mounts and resource limits")
BACKGROUND = [False, True]
CHECKPOINT_BYTES = 330_000
"""More than what the model's checkpoint takes, less than twice of it."""
SMALL_DISK = 320 * 4096
"""Bytes of a disk that a test may fill, in pages: one of its own, never the machine's."""


# ----------------------------------------------------------------------------------------------- on every rank


def make(seed: int = 3) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    model = build("transformer", seed)
    config = load_config(stage=3, units={"min_numel": 0}, barrier_seconds=10.0, checkpoint={"max_file_bytes": 20_000})
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    engine.attach(optimizer)
    return engine, optimizer


def step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_fn(engine.module, make_batch("transformer", number, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def error_of(call: Callable[[], Any]) -> str:
    try:
        result = call()
        if isinstance(result, PendingSave):
            result.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def under_fault(good: str, target: str, again: str, fault: str, background: bool) -> dict[str, Any]:
    """A save in peace, one under a fault, one after it; what the fault's said."""
    engine, optimizer = make()
    step(engine, optimizer, 0)
    engine.save(good)
    saved = digest(engine)
    step(engine, optimizer, 1)
    with FAULTS[fault](Path(target)):
        said = error_of(lambda: engine.save(target, asynchronous=background))
        dist.barrier()
    step(engine, optimizer, 2)
    assert not verify(good).problems
    engine.load(good)
    assert digest(engine) == saved
    step(engine, optimizer, 1)
    assert error_of(lambda: engine.save(again, asynchronous=background)) == ""
    assert not verify(again).problems
    return {"said": said, "beside": sorted(path.name for path in Path(good).parent.iterdir())}


@contextlib.contextmanager
def small_files_on_rank_1(target: Path) -> Iterator[None]:
    """The kernel refuses rank 1 what lies beyond 2000 bytes of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def vanishing(target: Path) -> Iterator[None]:
    """Remove the name of a file in writing, as if it were on a mount that went away."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            # With a file in it, for an empty one is made again.
            for path in target.parent.glob(f".{target.name}.*.tmp/*.safetensors"):
                path.parent.rename(target.parent / "gone")
                return
            time.sleep(0.0002)

    watcher = threading.Thread(target=watch)
    if dist.get_rank() == 0:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if dist.get_rank() == 0:
            watcher.join()
            shutil.rmtree(target.parent / "gone")
        dist.barrier()


def as_it_is(target: Path) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


FAULTS: dict[str, Callable[[Path], AbstractContextManager[None]]] = {
    "small files": small_files_on_rank_1,
    "vanishing": vanishing,
    "as it is": as_it_is,
}


# ------------------------------------------------------------------------------------------------------- disks


@contextlib.contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """A file system of the test's own."""
    place.mkdir()
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def small_disk(place: Path, size: int) -> AbstractContextManager[Path]:
    return mounted(place, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def all_said(results: list[dict[str, Any]], *words: str) -> None:
    for rank, found in enumerate(results):
        for word in words:
            assert word in found["said"], (rank, found["said"])


@pytest.mark.parametrize("background", BACKGROUND)
def test_a_disk_too_small_for_another_checkpoint(ranks: Launcher, tmp_path: Path, background: bool) -> None:
    with small_disk(tmp_path / "disk", CHECKPOINT_BYTES) as disk:
        where = (str(disk / "good"), str(disk / "next"), str(tmp_path / "again"), "as it is", background)
        results = ranks(2)(under_fault, *where)
        all_said(results, "are free", str(disk))
        assert results[0]["beside"] == ["good", "latest"]


@pytest.mark.parametrize("background", BACKGROUND)
@pytest.mark.parametrize("fault", ["small files", "vanishing"])
def test_faults_in_the_middle_of_a_save(ranks: Launcher, tmp_path: Path, fault: str, background: bool) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    where = (str(folder / "good"), str(folder / "next"), str(folder / "next"), fault, background)
    results = ranks(2)(under_fault, *where)
    all_said(results, "File too large" if fault == "small files" else ".next.")
    assert results[0]["beside"] == ["good", "latest", "next"]


def test_a_target_that_exists_stays_through_a_failed_save(ranks: Launcher, tmp_path: Path) -> None:
    results = ranks(2)(under_fault, *[str(tmp_path / "good")] * 2, str(tmp_path / "again"), "small files", False)
    all_said(results, "File too large")


@pytest.mark.parametrize("background", BACKGROUND)
def test_a_read_only_directory(ranks: Launcher, tmp_path: Path, background: bool) -> None:
    (tmp_path / "source").mkdir()
    with mounted(tmp_path / "view", "--bind", "-o", "ro", str(tmp_path / "source")) as view:
        where = (str(tmp_path / "good"), str(view / "next"), str(tmp_path / "again"), "as it is", background)
        results = ranks(2)(under_fault, *where)
        all_said(results, "Read-only file system", str(view))


@pytest.mark.parametrize(("blocker", "message"), [("file", "Not a directory"), ("folder", "is not a checkpoint")])
def test_something_else_in_the_way(ranks: Launcher, tmp_path: Path, blocker: str, message: str) -> None:
    target = tmp_path / "x" / "next" if blocker == "file" else tmp_path / "x"
    if blocker == "file":
        (tmp_path / "x").write_text("precious")
    else:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "thesis.tex").write_text("precious")
    where = (str(tmp_path / "good"), str(target), str(tmp_path / "again"), "as it is", False)
    all_said(ranks(2)(under_fault, *where), message, str(tmp_path / "x"))
    assert (tmp_path / "x" if blocker == "file" else tmp_path / "x" / "thesis.tex").read_text() == "precious"


def fill_and_save(folder: str, bytes_left: int) -> dict[str, Any]:
    """Saves with so many bytes of the disk left."""
    engine, optimizer = make()
    step(engine, optimizer, 0)
    filler = Path(folder, "filler")
    if dist.get_rank() == 0:
        free = shutil.disk_usage(folder).free
        assert free <= SMALL_DISK, f"{folder} is on a disk that others use too: {free} bytes of it are free"
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - bytes_left)
    dist.barrier()
    said = error_of(lambda: engine.save(Path(folder, "next")))
    dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    if said:
        assert sorted(path.name for path in Path(folder).iterdir()) == []
        assert error_of(lambda: engine.save(Path(folder, "next"))) == ""
    assert not verify(Path(folder, "next")).problems
    return {"said": said}


def test_the_last_bytes_of_a_disk(ranks: Launcher, tmp_path: Path) -> None:
    """Wherever the space ends - in the files, the receipts, the manifest - the save fails on all ranks, or is whole."""
    with small_disk(tmp_path / "ample", SMALL_DISK) as disk:
        ranks(2)(fill_and_save, str(disk), 2 * CHECKPOINT_BYTES)
        needed = sum(path.stat().st_size for path in (disk / "next").rglob("*"))
    outcomes = []
    for number, spare in enumerate((-1, 0, 8, 16, 24, 32, 48, 200)):
        with small_disk(tmp_path / str(number), SMALL_DISK) as disk:
            results = ranks(2)(fill_and_save, str(disk), needed // 4096 * 4096 + spare * 4096)
        outcomes.append({bool(found["said"]) for found in results})
        for found in results:
            assert not found["said"] or "space" in found["said"] or "are free" in found["said"], found["said"]
    assert all(len(outcome) == 1 for outcome in outcomes), "an error on one rank, none on another"
    assert outcomes[0] == {True} and outcomes[-1] == {False}


# ------------------------------------------------------------------------------------------------------ loading


def another_model(folder: str) -> dict[str, Any]:
    engine, optimizer = make()
    step(engine, optimizer, 0)
    engine.save(folder)
    other = Net(3)
    of_other = ZeroEngine(other, load_config(stage=3))
    of_other.attach(torch.optim.AdamW(other.parameters()))
    before = digest(of_other)
    said = error_of(lambda: of_other.load(folder))
    assert digest(of_other) == before, "the weights were touched"
    return {"said": said}


def test_a_checkpoint_of_another_model(ranks: Launcher, tmp_path: Path) -> None:
    results = ranks(2)(another_model, str(tmp_path / "saved"))
    all_said(results, "missing", "stem.weight", "unexpected", "position")


def different_directories(folder: str, saving: bool) -> dict[str, Any]:
    engine, optimizer = make()
    for number in range(2):
        step(engine, optimizer, number)
        engine.save(Path(folder, f"step-{number}"))
    mine = Path(folder, f"step-{dist.get_rank()}")
    return {"said": error_of(lambda: engine.save(mine) if saving else engine.load(mine))}


@pytest.mark.parametrize("saving", [True, False])
def test_ranks_that_name_different_directories(ranks: Launcher, tmp_path: Path, saving: bool) -> None:
    all_said(ranks(2)(different_directories, str(tmp_path), saving), "step-0", "step-1")
    for number in range(2):
        assert not verify(tmp_path / f"step-{number}").problems


def open_on_one_rank(folder: str) -> dict[str, Any]:
    engine, _ = make()
    engine.save(folder)
    place = folder if dist.get_rank() == 0 else f"{folder}-not-there"
    return {"said": error_of(lambda: open_together(engine, lambda: open_any(place)))}


def test_what_one_rank_cannot_open_is_an_error_on_all(ranks: Launcher, tmp_path: Path) -> None:
    all_said(ranks(2)(open_on_one_rank, str(tmp_path / "saved")), "saved-not-there", "no such file")
