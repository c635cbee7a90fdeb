"""Removals when a new checkpoint is there: old ones, and what crashed saves left behind."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import zero_strategy
from tests.checkpoint.saving import plan_of, save, slices
from tests.checkpoint.test_background_saves import digests, make, train
from tests.launcher import Launcher
from zero_strategy.checkpoint import CheckpointReader, CheckpointWriter
from zero_strategy.checkpoint import disk as disk_module
from zero_strategy.checkpoint.folders import OWNER_NAME, leave_mark, make_signed, mark_name, remove_leftovers
from zero_strategy.checkpoint.manifest import RECEIPTS_NAME
from zero_strategy.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def save_each_step(folder: Path, asynchronous: bool) -> None:
    model, engine, optimizer = make(2, keep_last=2, keep_every=4)
    for step in range(9):
        train(model, optimizer, step)
        engine.save_checkpoint(folder, asynchronous=asynchronous)
    engine.saver.finish()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_and_every_nth_stay(tmp_path: Path, ranks: Launcher, asynchronous: bool) -> None:
    ranks(2)(save_each_step, tmp_path, asynchronous)
    assert names(tmp_path) == [f"global_step{step}" for step in (4, 8, 9)]
    assert (tmp_path / "latest").read_text() == "global_step9\n"


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep_every is 4, checkpoint\.keep_last is 0"):
        load_config(checkpoint={"keep_every": 4})
    with pytest.raises(ValueError, match=r"checkpoint\.keep_last.*save_top_k"):
        zero_strategy.ZeroStrategy(checkpoint={"keep_last": 2})


def leftover(folder: Path, name: str, pid: int, host: str = "", started: str = "0", **more: str | None) -> Path:
    path = folder / f".{name}.abc.tmp"
    (path / RECEIPTS_NAME).mkdir(parents=True)
    leave_mark(mark := path / RECEIPTS_NAME / OWNER_NAME)
    owner = json.loads(mark.read_text()) | {"host": host or socket.gethostname(), "pid": pid, "started": started}
    mark.write_text(json.dumps({key: value for key, value in (owner | more).items() if value is not None}))
    return path


def test_the_mark_of_a_process_killed_while_ranks_asked_what_they_share_goes(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from zero_strategy.checkpoint.folders import leave_mark, mark_name;"
        f"leave_mark(Path({str(tmp_path)!r}) / mark_name('abc', 1))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    leave_mark(mine := tmp_path / mark_name("def", 0))
    (empty := tmp_path / mark_name("ghi", 0)).touch()  # not written yet
    assert (tmp_path / mark_name("abc", 1)).exists()
    remove_leftovers(tmp_path, RECEIPTS_NAME)
    assert sorted(tmp_path.iterdir()) == sorted([mine, empty])


WEIGHTS = {"w": torch.arange(10.0)}


def replaced_and_not_cleaned_up(folder: Path) -> CheckpointWriter:
    writer = CheckpointWriter(folder / "c", rank=0, world_size=1, token="two", cleans_later=True)
    writer.prepare(plan_of(WEIGHTS))
    writer.write("model", slices(WEIGHTS, 0, 1))
    writer.commit(plan_of(WEIGHTS).manifest(world_size=1, stage=0))
    return writer


def _killed(folder: Path, when: str) -> None:
    gc.freeze()  # process groups of earlier tests are not this process's to end
    if when == "naming the latest":
        os.replace = lambda source, target: os._exit(9)  # type: ignore[assignment]
    if when == "between two renames":
        disk_module._exchange = lambda first, second: False
        rename = os.rename
        os.rename = lambda source, target: rename(source, target) if target.suffix == ".old" else os._exit(9)  # type: ignore[assignment]
    replaced_and_not_cleaned_up(folder)
    os._exit(9)


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("when", ["cleaning up", "naming the latest"])
def test_what_a_checkpoint_was_before_goes_when_its_save_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, exchange: bool
) -> None:
    save(tmp_path / "c", WEIGHTS)
    if not exchange:
        monkeypatch.setattr(disk_module, "_exchange", lambda first, second: False)
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, when))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert f".c.two.{'tmp' if exchange else 'old'}" in names(tmp_path)
    save(tmp_path / "d", WEIGHTS)  # another one
    assert names(tmp_path) == ["c", "d"]


def test_what_a_checkpoint_was_before_stays_while_it_is_the_only_one(tmp_path: Path) -> None:
    save(tmp_path / "c", WEIGHTS)
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, "between two renames"))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    save(tmp_path / "d", WEIGHTS)
    with pytest.warns(UserWarning, match="c is missing; reading what it was before"):
        assert CheckpointReader(tmp_path / "c").full("w").equal(WEIGHTS["w"])
    save(tmp_path / "c", WEIGHTS)
    save(tmp_path / "d", WEIGHTS)
    assert names(tmp_path) == ["c", "d"]


def test_what_a_living_save_has_not_removed_yet_is_its_own_to_remove(tmp_path: Path) -> None:
    save(tmp_path / "c", WEIGHTS)
    writer = replaced_and_not_cleaned_up(tmp_path)
    for tag in ("d", "c"):
        save(tmp_path / tag, WEIGHTS)
        assert (tmp_path / ".c.two.tmp").exists()
    writer.clean_up()
    assert names(tmp_path) == ["c", "d"]


def test_what_was_made_and_not_signed_goes(tmp_path: Path) -> None:
    (tmp_path / ".a.abc.tmp" / RECEIPTS_NAME).mkdir(parents=True)  # killed before its writer signed it,
    (tmp_path / ".b.abc.tmp").mkdir()  # or even before
    remove_leftovers(tmp_path, RECEIPTS_NAME)
    assert not list(tmp_path.iterdir())


def test_removals_of_another_job_take_nothing_of_a_directory_that_is_being_signed(tmp_path: Path) -> None:
    over = threading.Event()

    def another_job() -> None:
        while not over.is_set():
            remove_leftovers(tmp_path, RECEIPTS_NAME)

    thread = threading.Thread(target=another_job)
    thread.start()
    try:
        for number in range(200):
            make_signed(mine := tmp_path / f".t.{number}.tmp" / RECEIPTS_NAME)
            assert json.loads((mine / OWNER_NAME).read_text())["pid"] == os.getpid()
            shutil.rmtree(mine.parent, ignore_errors=True)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("tag", ["a", "another"])
@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ({"boot": "another"}, "in another boot"),
        ({"pid_namespace": "pid:[1]"}, "in another container"),
        ({"boot": None, "pid_namespace": None}, "does not say in which boot"),  # of an earlier version
        ({"pid_namespace": ""}, "does not say in which boot"),
    ],
)
def test_in_doubt_nothing_goes_and_a_warning_says_why(
    tmp_path: Path, owner: dict[str, str | None], reason: str, tag: str
) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    kept = leftover(tmp_path, tag, int(dead.stdout), **owner)
    _, engine, _ = make(0)
    with pytest.warns(UserWarning, match=f"{re.escape(str(kept))} may be .*{reason}.* It is kept; remove it when"):
        engine.save(tmp_path / "a")
    assert kept.exists() and digests(tmp_path / "a")


@pytest.mark.parametrize("tag", ["slow", "quick"])
def test_a_job_in_another_container_leaves_a_running_save_alone(tmp_path: Path, tag: str) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("PID namespaces cannot be made here")
    code = (
        "from pathlib import Path; from tests.checkpoint.test_background_saves import make;"
        f"_, engine, _ = make(0); engine.save(Path({str(tmp_path)!r}) / {tag!r})"
    )
    write = CheckpointWriter.write_all
    found: list[subprocess.CompletedProcess[str]] = []

    def wait_for_another_job(writer: CheckpointWriter, *args: object, **kwargs: object) -> None:
        found.append(subprocess.run([*unshare, sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True))
        write(writer, *args, **kwargs)  # type: ignore[arg-type]

    _, engine, _ = make(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_all", wait_for_another_job)
        engine.save(tmp_path / "slow")
    (other,) = found
    assert other.returncode == 0, other.stderr
    assert "in another container" in other.stderr
    assert digests(tmp_path / "slow") and digests(tmp_path / tag)


def test_only_what_dead_processes_of_this_host_left_goes(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    gone = leftover(tmp_path, "a", int(dead.stdout))
    again = leftover(tmp_path, "b", os.getpid(), started="1")  # a number that is used again
    foreign = leftover(tmp_path, "c", int(dead.stdout), host="another")
    unsigned = tmp_path / ".d.abc.tmp"
    unsigned.mkdir()
    (unsigned / "of_somebody").touch()
    model, engine, _ = make(0)
    seen = []
    write = CheckpointWriter.write_all

    def nested(writer: CheckpointWriter, *args: object, **kwargs: object) -> None:
        if not seen:  # a save into the same folder while this one is under way
            seen.append(writer.temporary)
            other = CheckpointWriter(tmp_path / "other", rank=0, world_size=1, token="t")
            other.prepare(writer._prepared_plan())
            other.abandon()
        write(writer, *args, **kwargs)  # type: ignore[arg-type]

    CheckpointWriter.write_all = nested  # type: ignore[method-assign, assignment]
    try:
        engine.save(tmp_path / "now")
    finally:
        CheckpointWriter.write_all = write  # type: ignore[method-assign]
    assert not gone.exists() and not again.exists() and foreign.exists() and unsigned.exists()
    assert digests(tmp_path / "now") and torch.is_tensor(next(model.parameters()))
