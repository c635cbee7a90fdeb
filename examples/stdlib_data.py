"""Real text that every machine has: the source of its own Python standard library, as bytes."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})
VALIDATION_SHARE = 0.05


@dataclass(frozen=True)
class Corpus:
    """The two halves of the text, as uint8 tensors."""

    train: Tensor
    validation: Tensor


def source_files(root: Path) -> list[Path]:
    """Every ``*.py`` below ``root`` but installed packages and tests, relative to it, in a fixed order."""
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted((path for path in relative if SKIPPED_FOLDERS.isdisjoint(path.parts)), key=Path.as_posix)


def is_validation(relative: Path) -> bool:
    """True if a file is held out: decided by its name alone, so that the split is the same everywhere."""
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") < VALIDATION_SHARE * 2**64


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library (or the ``*.py`` files below ``root``) and split it by file."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train, validation = bytearray(), bytearray()
    for relative, text in _readable(root):
        (validation if is_validation(relative) else train).extend(text)
    if not train or not validation:
        raise FileNotFoundError(f"{root} holds too few *.py files to train and to validate on")
    return Corpus(torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8))


def _readable(root: Path) -> Iterator[tuple[Path, bytes]]:
    for relative in source_files(root):
        try:
            yield relative, (root / relative).read_bytes()
        except OSError:  # a dangling link or a file of another user
            continue


class _Windows(Dataset[Tensor]):
    """Windows of ``block_size`` bytes and the byte after them, by index."""

    def __init__(self, text: Tensor, count: int, block_size: int) -> None:
        self.text, self.count, self.length = text, count, block_size + 1
        if len(text) < self.length:
            raise ValueError(f"a text of {len(text)} bytes has no window of {self.length} bytes")

    def __len__(self) -> int:
        return self.count

    def start(self, index: int) -> int:
        """Start of window ``index``."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")  # so that `for window in windows` ends
        start = self.start(index)
        return self.text[start : start + self.length].long()


class RandomWindows(_Windows):
    """Window ``i`` lies at a random place that depends on the seed and on ``i`` alone.

    Read in order by a DistributedSampler, a run draws the same windows under every strategy, and the same
    windows per optimizer step for every number of ranks with the same global batch.
    """

    def __init__(self, text: Tensor, count: int, block_size: int, seed: int) -> None:
        super().__init__(text, count, block_size)
        self.seed = seed

    def start(self, index: int) -> int:
        return int(np.random.default_rng((self.seed, index)).integers(len(self.text) - self.length + 1))


class EvenWindows(_Windows):
    """Windows evenly spaced over the whole text: a fixed validation set."""

    def start(self, index: int) -> int:
        return index * (len(self.text) - self.length) // max(self.count - 1, 1)
