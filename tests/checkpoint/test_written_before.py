"""Checkpoints that an earlier version wrote load as they were, bit for bit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.saving import same
from tests.checkpoint.written_before.write import ARCHIVE, KINDS, load_all
from tests.launcher import Launcher


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written_before")
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return folder


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same to the last bit."""
    different = found.keys() ^ expected.keys()
    for name in found.keys() & expected.keys():
        a, b = found[name], expected[name]
        equal = same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        if not equal:
            different.add(name)
    return sorted(different)


@pytest.mark.parametrize(
    ("world", "names"), [(2, list(KINDS)), (3, ["stage 2, bfloat16", "pieces", "Trainer"])], ids=["same", "another"]
)
def test_an_earlier_version_s_checkpoints_load_bit_for_bit(
    ranks: Launcher, root: Path, world: int, names: list[str]
) -> None:
    for found in ranks(world, timeout=180)(load_all, root, names):
        for name in names:
            expected = torch.load(root / name / "expected.pt", weights_only=True)
            assert len(expected) > 30
            assert not differing(found[name], expected), name
