"""Hosts that die while a checkpoint in pieces is committed: every host has the old one or the new one, never neither.

Hosts are directories; a death is a process that ends, or a rank that stops, at a chosen step.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.piece_saving import jobs_of, on_hosts, run_jobs, save
from tests.checkpoint.saving import plan_of, same
from zero_strategy.checkpoint import Manifest, disk, piece_writer
from zero_strategy.checkpoint.disk import remove
from zero_strategy.checkpoint.folders import remove_leftovers
from zero_strategy.checkpoint.manifest import RECEIPTS_NAME
from zero_strategy.checkpoint.piece_writer import HostPieceWriter
from zero_strategy.comm.store import SaveBoard
from zero_strategy.convert.convert import open_any

OLD = {"w": torch.arange(10.0)}
NEW = {"w": -torch.arange(10.0)}
STEPS = ["_put", "_seal", "_rename", "_point"]


def hosts(root: Path) -> list[Path]:
    """Three ranks on two hosts."""
    return [root / "a" / "c", root / "b" / "c", root / "b" / "c"]


def saves(root: Path) -> list[str]:
    return [Manifest.load(root / host / "c").save for host in "ab"]


def names(root: Path) -> list[set[str]]:
    return [{path.name for path in (root / host).iterdir()} for host in "ab"]


def _dies(root: Path, step: str, after: bool) -> None:
    gc.freeze()  # process groups of earlier tests are not this process's to end
    original: Callable[..., None] = getattr(HostPieceWriter, step)

    def deadly(writer: HostPieceWriter, *args: object) -> None:
        if after:
            original(writer, *args)
        os._exit(9)

    setattr(HostPieceWriter, step, deadly)
    run_jobs(jobs_of(on_hosts(hosts(root), "new"), NEW, world_size=3))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_each_step_there_is_the_old_or_the_new(tmp_path: Path, step: str, after: bool) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    process = multiprocessing.get_context("fork").Process(target=_dies, args=(tmp_path, step, after))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    found = saves(tmp_path)
    assert set(found) <= {"old", "new"}
    if step in ("_put", "_seal"):
        assert found == ["old", "old"]
    if "new" in found:  # then all hosts have it, perhaps without its name
        for host, save_ in zip("ab", found, strict=True):
            assert save_ == "new" or Manifest.load(tmp_path / host / ".c.new.tmp").save == "new"
    save(on_hosts(hosts(tmp_path), "newer"), NEW, world_size=3)
    assert saves(tmp_path) == ["newer", "newer"]
    assert names(tmp_path) == [{"c", "latest"}] * 2


@pytest.mark.parametrize("step", ["prepare", "write_files", "write_all", "_seal"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, rank: int
) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    original: Callable[..., None] = getattr(HostPieceWriter, step)

    def fails(writer: HostPieceWriter, *args: object, **options: object) -> None:
        if writer.rank == rank:
            raise OSError(5, "the disk is gone")
        original(writer, *args, **options)

    monkeypatch.setattr(HostPieceWriter, step, fails)
    failures = run_jobs(jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3))
    assert sorted(failures) == [0, 1, 2] and all("the disk is gone" in str(error) for error in failures.values())
    monkeypatch.undo()
    assert saves(tmp_path) == ["old", "old"]
    save(on_hosts(hosts(tmp_path), "newer"), NEW, world_size=3)
    assert saves(tmp_path) == ["newer", "newer"]
    assert names(tmp_path) == [{"c", "latest"}] * 2


def test_a_directory_that_the_leader_takes_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has made the temporary directory, and nothing in it, when its host's leader removes empty leftovers."""
    made = Path.mkdir

    def late(path: Path, *args: Any, **options: Any) -> None:
        made(path, *args, **options)
        if path.name.endswith(".tmp"):
            monkeypatch.undo()
            remove_leftovers(path.parent, RECEIPTS_NAME)
            assert not path.exists()

    monkeypatch.setattr(Path, "mkdir", late)
    board = SaveBoard(2, 3, 5.0, "test", dist.HashStore())
    writer = on_hosts(hosts(tmp_path), "new")(2, board)
    assert isinstance(writer, HostPieceWriter)
    writer.prepare(plan_of(OLD))
    assert [path.name for path in writer.temporary.iterdir()] == [writer.folder]


def test_what_another_rank_makes_meanwhile_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails before there is a temporary directory clears up while another of its host makes it."""
    unlink = Path.unlink

    def late(path: Path, missing_ok: bool = False) -> None:
        path.mkdir()
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", late)
    remove(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_rename_that_fails_on_one_host_is_told_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    original = piece_writer.replace_directory

    def fails(source: Path, target: Path, aside: Path, **options: bool) -> Path | None:
        if target.parent.name == "b":
            raise OSError(5, "the disk is gone")
        return original(source, target, aside, **options)

    monkeypatch.setattr(piece_writer, "replace_directory", fails)
    failures = run_jobs(jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3))
    assert sorted(failures) == [0, 1, 2]
    assert saves(tmp_path) == ["new", "old"]
    assert Manifest.load(tmp_path / "b" / ".c.new.tmp").save == "new"
    assert same(open_any(tmp_path / "a" / "c").read("w", 0, 3), NEW["w"][:3])


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("host", ["a", "b"])
def test_a_rename_that_cannot_be_flushed_is_told_of_and_counts_on_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, exchange: bool
) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    original = disk.sync

    def fails(path: Path) -> None:
        if path == tmp_path / host:
            raise OSError(5, "the disk is gone")
        original(path)

    monkeypatch.setattr(disk, "sync", fails)
    if not exchange:
        monkeypatch.setattr(disk, "_exchange", lambda first, second: False)
    with pytest.warns(UserWarning, match=f"{host}/c is there, but its name could not be flushed.*the disk is gone"):
        save(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3, update_latest=False)
    assert saves(tmp_path) == ["new", "new"]
    # What had the name may get it back with a loss of power.
    beside = tmp_path / host / f".c.new.{'tmp' if exchange else 'old'}"
    assert Manifest.load(beside).save == "old"
    monkeypatch.undo()
    save(on_hosts(hosts(tmp_path), "newer"), NEW, world_size=3)
    assert names(tmp_path) == [{"c", "latest"}] * 2


def test_rank_0_interrupted_behind_its_rename_keeps_what_the_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    original = HostPieceWriter._rename

    def interrupted(writer: HostPieceWriter) -> None:
        original(writer)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostPieceWriter, "_rename", interrupted)
    assert sorted(run_jobs(jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3))) == [0, 1, 2]
    monkeypatch.undo()
    assert Manifest.load(tmp_path / "a" / ".c.new.tmp").save == Manifest.load(tmp_path / "b" / "c").save == "old"
    assert names(tmp_path) == [{"c", "latest", ".c.new.tmp"}, {"c", "latest"}]  # without a mark: no leftover
    save(on_hosts(hosts(tmp_path), "newer"), NEW, world_size=3)
    assert names(tmp_path) == [{"c", "latest"}] * 2


def test_a_latest_that_one_host_cannot_write_is_told_of_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    (tmp_path / "a" / "latest").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"a/c is saved, but the file latest .*Is a directory"):
        save(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3)
    assert saves(tmp_path) == ["new", "new"]
    assert (tmp_path / "b" / "latest").read_text() == "c\n"
    assert names(tmp_path) == [{"c", "latest"}] * 2


@pytest.mark.parametrize("after", [False, True])
def test_what_a_killed_save_has_sealed_goes_with_a_save_of_another_name_unless_a_host_shows_it(
    tmp_path: Path, after: bool
) -> None:
    """Rank 0 is the first to rename: while its own is sealed nobody has."""
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    process = multiprocessing.get_context("fork").Process(target=_rank_0_dies, args=(tmp_path, after))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    others = [directory.with_name("d") for directory in hosts(tmp_path)]
    save(on_hosts(others, "other"), OLD, world_size=3)
    if not after:
        assert saves(tmp_path) == ["old", "old"]
        assert names(tmp_path) == [{"c", "d", "latest"}] * 2
        return
    assert saves(tmp_path) == ["new", "old"]
    assert names(tmp_path) == [{"c", "d", "latest"}, {"c", "d", "latest", ".c.new.tmp", ".seen.new.1"}]
    assert Manifest.load(tmp_path / "b" / ".c.new.tmp").save == "new"
    save(on_hosts(hosts(tmp_path), "newer"), NEW, world_size=3)
    assert names(tmp_path) == [{"c", "d", "latest"}] * 2


def _rank_0_dies(root: Path, after: bool) -> None:
    gc.freeze()
    original = HostPieceWriter._rename

    def deadly(writer: HostPieceWriter) -> None:
        if after:
            original(writer)
        os._exit(9)

    HostPieceWriter._rename = deadly  # type: ignore[method-assign]
    run_jobs(jobs_of(on_hosts(hosts(root), "new"), NEW, world_size=3))


def test_what_was_replaced_is_removed_when_nobody_waits_for_it_any_more(tmp_path: Path) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    jobs = jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3)
    assert not run_jobs(jobs)
    assert [Manifest.load(tmp_path / host / ".c.new.tmp").save for host in "ab"] == ["old", "old"]
    for job in jobs:
        job.clean_up()
    assert saves(tmp_path) == ["new", "new"]
    assert names(tmp_path) == [{"c", "latest"}] * 2


def test_pieces_that_overlap_or_leave_a_hole_cannot_be_committed(tmp_path: Path) -> None:
    save(on_hosts(hosts(tmp_path), "old"), OLD, world_size=3)
    jobs = jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3)
    jobs[1] = replace(jobs[1], pieces=jobs[0].pieces)
    failures = run_jobs(jobs)
    assert len(failures) == 3 and "overlap" in str(failures[0])
    jobs = jobs_of(on_hosts(hosts(tmp_path), "new"), NEW, world_size=3)
    jobs[1] = replace(jobs[1], pieces=())
    assert "written by no rank: 'w'" in str(run_jobs(jobs)[0])
    assert saves(tmp_path) == ["old", "old"]
