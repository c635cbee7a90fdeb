"""Making the directories of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_strategy.checkpoint.storage import ensure_directory_exists


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
