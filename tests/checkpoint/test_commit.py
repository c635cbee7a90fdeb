"""A checkpoint appears whole or not at all, and the one before it stays until then."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import plan_of, same, save, slices
from zero_strategy.checkpoint import CheckpointReader, CheckpointWriter, Piece
from zero_strategy.checkpoint import disk as replace
from zero_strategy.cli import main

OLD = {"w": torch.arange(10.0)}
NEW = {"w": -torch.arange(10.0)}


def writers(directory: Path, world_size: int = 2) -> list[CheckpointWriter]:
    plan = plan_of(NEW)
    group = [CheckpointWriter(directory, rank=r, world_size=world_size, token="t") for r in range(world_size)]
    for writer in group:
        writer.prepare(plan)
    return group


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_existing_target_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD, extra_files={"old.txt": b""})
    save(tmp_path / "c", NEW)
    assert same(CheckpointReader(tmp_path / "c").full("w"), NEW["w"])
    assert names(tmp_path) == ["c", "latest"]
    assert names(tmp_path / "c") == ["manifest.json", "model.safetensors"]


def test_replacement_where_names_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "_exchange", lambda first, second: False)
    test_existing_target_is_replaced_and_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (shutil.rmtree, "no such file"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: os.truncate(path / "model.safetensors", 10), "has 10 bytes"),
        (lambda path: (path / "manifest.json").write_bytes(b"{}"), "format is None"),
    ],
)
def test_a_damaged_latest_gives_way_to_the_newest_complete_one_loudly(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    for step in (1, 2, 3, 4):
        weights = {"w": torch.full((3,), float(step))}
        save(tmp_path / f"step-{step}", weights, {"0": {"exp_avg": weights}})
        time = 1_000_000_000 * step
        os.utime(tmp_path / f"step-{step}" / "manifest.json", ns=(time, time))
    os.truncate(tmp_path / "step-3" / "model.safetensors", 20)
    spoil(tmp_path / "step-4")
    with pytest.warns(UserWarning, match=f"latest names step-4.*{why}.*taking .*step-2 instead"):
        reader = CheckpointReader(tmp_path)
    assert reader.full("w").tolist() == [2.0] * 3
    with pytest.raises(ValueError, match="step-4"):  # asked for by name
        CheckpointReader(tmp_path / "step-4")
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) != 0  # what `latest` names, and nothing instead
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"step-{step}")
    with pytest.raises(ValueError, match="step-4"):
        CheckpointReader(tmp_path)


def test_latest_names_the_newest(tmp_path: Path) -> None:
    save(tmp_path / "step-1", OLD)
    save(tmp_path / "step-2", NEW)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    assert CheckpointReader(tmp_path).directory == tmp_path / "step-2"
    group = writers(tmp_path / "best", world_size=1)
    group[0].write("model", slices(NEW, 0, 1))
    group[0].commit(plan_of(NEW).manifest(world_size=1, stage=0), update_latest=False)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(ValueError, match="not the name of a directory"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("phase", ["prepare", "write", "commit"])
def test_a_crash_leaves_the_old_checkpoint(tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", OLD)
    group = writers(tmp_path / "c")
    if phase != "prepare":
        group[0].write("model", slices(NEW, 0, 2))
    if phase == "commit":
        group[1].write("model", slices(NEW, 1, 2))
        monkeypatch.setattr("zero_strategy.checkpoint.writer.replace_directory", _crash)
        with pytest.raises(KeyboardInterrupt):
            group[0].commit(plan_of(NEW).manifest(world_size=2, stage=0))
        monkeypatch.undo()
    assert same(CheckpointReader(tmp_path).full("w"), OLD["w"])
    if phase != "commit":
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            CheckpointReader(group[0].temporary)
    save(tmp_path / "c", NEW)  # the next save, under another token, cleans up
    assert names(tmp_path) == ["c", "latest"]


def _crash(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_crash_between_two_renames_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD)
    (tmp_path / "c").rename(tmp_path / ".c.t.old")
    for path in (tmp_path / "c", tmp_path):
        with pytest.warns(UserWarning, match="a save that crashed"):
            assert same(CheckpointReader(path).full("w"), OLD["w"])
    save(tmp_path / "c", NEW)
    assert names(tmp_path) == ["c", "latest"]


def test_failed_second_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", OLD)
    monkeypatch.setattr(replace, "_exchange", lambda first, second: False)
    with pytest.raises(FileNotFoundError):
        replace.replace_directory(tmp_path / "absent", tmp_path / "c", tmp_path / ".c.t.old")
    assert same(CheckpointReader(tmp_path / "c").full("w"), OLD["w"])


def test_abandon_removes_the_temporary_directory(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD)
    group = writers(tmp_path / "c")
    group[0].abandon()
    assert names(tmp_path) == ["c", "latest"]
    with pytest.raises(RuntimeError, match="prepare"):
        group[0].write("model", [])


def test_siblings_of_other_targets_are_left_alone(tmp_path: Path) -> None:
    other = writers(tmp_path / "c.d")[0]
    save(tmp_path / "c", NEW)
    assert other.temporary.exists()


def test_a_directory_that_is_no_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="not a checkpoint"):
        writers(tmp_path / "home")
    assert names(tmp_path) == ["home"]
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", NEW)


def test_a_directory_with_somebody_else_s_manifest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "my web app"}')
    with pytest.raises(ValueError, match=r"app/manifest\.json is of no checkpoint"):
        writers(tmp_path / "app")
    assert names(tmp_path) == ["app"]
    save(tmp_path / "c", OLD)
    os.truncate(tmp_path / "c" / "manifest.json", 100)  # a damaged one of ours is
    save(tmp_path / "c", NEW)
    assert same(CheckpointReader(tmp_path / "c").full("w"), NEW["w"])


def test_a_latest_that_cannot_be_written_is_told_of_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    for weights in (OLD, NEW):
        with pytest.warns(UserWarning, match=r"c is saved, but the file latest .*Is a directory"):
            save(tmp_path / "c", weights)
        assert same(CheckpointReader(tmp_path / "c").full("w"), weights["w"])
    assert names(tmp_path) == ["c", "latest"]


def test_cleaning_up_after_a_save_leaves_what_the_next_save_has_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint has no other name for a moment, where names cannot be exchanged."""
    monkeypatch.setattr(replace, "_exchange", lambda first, second: False)
    save(tmp_path / "c", OLD)
    (tmp_path / ".c.earlier.old").mkdir()  # of a crash
    writer = CheckpointWriter(tmp_path / "c", rank=0, world_size=1, token="one", cleans_later=True)
    writer.prepare(plan_of(NEW))
    writer.write("model", slices(NEW, 0, 1))
    writer.commit(plan_of(NEW).manifest(world_size=1, stage=0))
    (tmp_path / "c").rename(tmp_path / ".c.two.old")
    writer.clean_up()
    assert names(tmp_path) == [".c.two.old", "latest"]


def test_free_space_is_checked_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="100 are free") as error:
        writers(tmp_path / "c")
    assert error.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
    save(tmp_path / "c", NEW)
    assert same(CheckpointReader(tmp_path / "c").full("w"), NEW["w"])


def test_a_failed_write_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = writers(tmp_path / "c")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left.*'w'") as error:
        group[0].write("model", slices(NEW, 0, 2))
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="written by no rank: 'w'"):
        group[0].commit(plan_of(NEW).manifest(world_size=2, stage=0))


@pytest.mark.parametrize(
    ("piece", "error", "message"),
    [
        (Piece("v", 0, torch.zeros(1)), ValueError, "'v' is not in the checkpoint plan"),
        (Piece("w", 5, torch.zeros(6)), ValueError, r"\[5, 11\).*'w'"),
        (Piece("w", -1, torch.zeros(2)), ValueError, r"\[-1, 1\).*'w'"),
        (Piece("w", 2, torch.zeros(2)), ValueError, r"\[2, 4\) of tensor 'w' overlap \[0, 5\)"),
        (Piece("w", 5, torch.zeros(2, dtype=torch.float64)), TypeError, "'w' has dtype torch.float64"),
        (Piece("w", 5, torch.zeros(2, 1)), TypeError, "'w' must be 1-D"),
        (Piece("w", 5, torch.zeros(1).expand(3)), TypeError, "'w' must be 1-D and contiguous"),
        (Piece("w", 5, torch.zeros(2, device="meta")), TypeError, "'w' is on the meta device"),
    ],
)
def test_bad_pieces_are_refused(tmp_path: Path, piece: Piece, error: type[Exception], message: str) -> None:
    group = writers(tmp_path / "c")
    group[0].write("model", slices(NEW, 0, 2))
    with pytest.raises(error, match=message):
        group[0].write("model", [piece])
    with pytest.raises(ValueError, match="no file kind"):
        group[0].write(("adam", "exp_avg"), [piece])


def test_ranks_that_overlap_or_leave_a_hole_cannot_commit(tmp_path: Path) -> None:
    manifest = plan_of(NEW).manifest(world_size=2, stage=0)
    group = writers(tmp_path / "overlap")
    group[0].write("model", slices(NEW, 0, 2))
    group[1].write("model", [Piece("w", 4, NEW["w"][4:])])
    with pytest.raises(ValueError, match=r"\[4, 10\) of tensor 'w' overlap \[0, 5\)"):
        group[0].commit(manifest)
    group = writers(tmp_path / "hole")
    group[0].write("model", slices(NEW, 0, 2))
    group[1].write("model", [Piece("w", 6, NEW["w"][6:])])
    with pytest.raises(ValueError, match=r"'w' in model.safetensors \(1 of 10 elements\)"):
        group[0].commit(manifest)
    assert not (tmp_path / "hole").exists()


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "model.safetensors", "manifest.json", ""])
def test_extra_files_stay_inside_and_apart(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="extra file"):
        save(tmp_path / "c", NEW, extra_files={path: b""})


def test_a_manifest_of_another_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not describe the plan"):
        group = writers(tmp_path / "c")
        group[0].commit(plan_of({"v": NEW["w"]}).manifest(world_size=2, stage=0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: CheckpointWriter(root / "c", rank=2, world_size=2), "rank 2"),
        (lambda root: CheckpointWriter(root / "c", rank=0, world_size=1, token="a.b"), "token 'a.b'"),
        (lambda root: CheckpointReader(root / "absent"), "no such file"),
        (lambda root: CheckpointReader(root), "not a complete checkpoint"),
    ],
)
def test_wrong_arguments(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


def test_a_checkpoint_replaced_while_open_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD)
    reader = CheckpointReader(tmp_path / "c")
    save(tmp_path / "c", NEW)
    with pytest.raises(ValueError, match="replaced or changed"):
        reader.read("w")


def test_a_file_of_that_name_is_replaced(tmp_path: Path) -> None:
    """As a run meets it that goes on from another strategy's `last.ckpt`."""
    (tmp_path / "last.ckpt").write_bytes(b"a whole file")
    save(tmp_path / "last.ckpt", NEW)
    assert same(CheckpointReader(tmp_path / "last.ckpt").full("w"), NEW["w"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "latest"]
