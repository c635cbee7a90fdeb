"""Files in local directories: their folders, and what a crash leaves of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.checkpoint.piece_saving import remote, save
from tests.checkpoint.saving import same
from zero_strategy.checkpoint.storage import RemoteFolder, ensure_directory_exists
from zero_strategy.convert.convert import open_any

WEIGHTS = {"w": torch.arange(10.0)}


def test_the_directory_of_a_file_is_made_and_the_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a" / "b" / "states.pt"
    for given in (str(target), target):
        ensure_directory_exists(given)
        assert target.parent.is_dir() and not target.exists()
    monkeypatch.chdir(tmp_path)
    ensure_directory_exists("in_the_current_directory.pt")
    assert os.listdir() == ["a"]
    target.touch()
    with pytest.raises(OSError):
        ensure_directory_exists(target / "below" / "c.pt")


def test_a_put_that_fails_at_a_local_url_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    folder = RemoteFolder(f"file://{tmp_path}/run")
    folder.put("manifest.json", b"old")

    def fails(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        folder.put("manifest.json", b"new")
    assert folder.read("manifest.json") == b"old"
    assert os.listdir(tmp_path / "run") == ["manifest.json"]


def test_a_save_to_a_local_url_is_flushed_with_the_folders_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    flushed, fsync = set(), os.fsync

    def flush(fd: int) -> None:
        flushed.add(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", flush)
    save(remote(f"file://{tmp_path}/run/c", 2), WEIGHTS)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.stat().st_ino not in flushed]


def test_a_manifest_that_was_being_written_at_a_local_url_is_in_nobody_s_way(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "run" / "c").mkdir(parents=True)
    (tmp_path / "run" / "c" / ".manifest.json.abc.tmp").write_text("half")
    save(remote(f"file://{tmp_path}/run/c", 1), WEIGHTS, world_size=1)
    assert sorted(os.listdir(tmp_path / "run" / "c")) == ["manifest.json", "pieces-t"]
    assert same(open_any(f"file://{tmp_path}/run/c").full("w"), WEIGHTS["w"])
