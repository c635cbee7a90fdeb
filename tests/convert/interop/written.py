"""Checkpoints that the real DeepSpeed wrote, kept in an archive; and the script that makes them."""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
ARCHIVE = Path(__file__).parents[1] / "data" / "deepspeed.tar.xz"
LEFT_OUT = {"z2_frozen_left_out": frozenset({"base.weight", "base.bias"})}
"""Weights that a case was told not to save."""


@cache
def script() -> ModuleType:
    """`scripts/make_deepspeed_checkpoints.py`; it imports deepspeed only when it writes."""
    spec = importlib.util.spec_from_file_location("made", ROOT / "scripts" / "make_deepspeed_checkpoints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["made"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def cases() -> list[str]:
    """Names of the kept cases."""
    with tarfile.open(ARCHIVE) as archive:
        return sorted({member.name.split("/")[0] for member in archive})


def unpack(folder: Path) -> Path:
    """All cases, each in a directory of its own."""
    with tarfile.open(ARCHIVE) as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    return folder
