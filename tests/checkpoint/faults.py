"""Random damage to the files of a checkpoint, and what an error about it must name."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint import MANIFEST_NAME
from zero_strategy.checkpoint.layout import read_layout


@dataclass(frozen=True)
class Fault:
    """One damaged checkpoint.

    Attributes:
        kind: What was done.
        files: Relative paths of the files that are not what they were.
        tensor: The tensor whose bytes alone were hit.
    """

    kind: str
    files: tuple[str, ...]
    tensor: str | None = None

    def is_named_by(self, text: str) -> bool:
        """True if an error says which file, and which tensor where one was hit."""
        return any(file in text for file in self.files) and (self.tensor is None or f"'{self.tensor}'" in text)


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def tensor_at(path: Path, byte: int) -> str | None:
    """The tensor that has this byte of an intact file; None in a header, or in a file without tensors."""
    if path.suffix != ".safetensors":
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        layout = read_layout(fd, path.name, str(path))
    finally:
        os.close(fd)
    for name, spec in layout.specs.items():
        if layout.offsets[name] <= byte < layout.offsets[name] + spec.nbytes:
            return name
    return None


def flip(directory: Path, other: Path, draw: random.Random) -> Fault:
    """One bit of one file."""
    name = draw.choice([name for name in files_of(directory) if (directory / name).stat().st_size])
    content = bytearray((directory / name).read_bytes())
    bit = draw.randrange(8 * len(content))
    fault = Fault("flip", (name,), tensor_at(directory / name, bit // 8))
    content[bit // 8] ^= 1 << bit % 8
    (directory / name).write_bytes(content)
    return fault


def truncate(directory: Path, other: Path, draw: random.Random) -> Fault:
    """The end of one file; of the tensors that lose bytes the first is the one to be named."""
    name = draw.choice([name for name in files_of(directory) if (directory / name).stat().st_size])
    size = draw.randrange((directory / name).stat().st_size)
    fault = Fault("truncate", (name,), tensor_at(directory / name, size))
    os.truncate(directory / name, size)
    return fault


def lose(directory: Path, other: Path, draw: random.Random) -> Fault:
    """A whole file."""
    name = draw.choice(files_of(directory))
    (directory / name).unlink()
    return Fault("lose", (name,))


def swap(directory: Path, other: Path, draw: random.Random) -> Fault:
    """The contents of two files; half the time of two of the same size, if there are such."""
    contents = {name: (directory / name).read_bytes() for name in files_of(directory)}
    pairs = [(a, b) for a in contents for b in contents if a < b and contents[a] != contents[b]]
    alike = [(a, b) for a, b in pairs if len(contents[a]) == len(contents[b])]
    a, b = draw.choice(alike if alike and draw.random() < 0.5 else pairs)
    (directory / a).write_bytes(contents[b])
    (directory / b).write_bytes(contents[a])
    return Fault("swap", (a, b))


def exchange(directory: Path, other: Path, draw: random.Random) -> Fault:
    """One file with that of another checkpoint of the same model."""
    names = [name for name in files_of(directory) if (other / name).read_bytes() != (directory / name).read_bytes()]
    name = draw.choice(names)
    (directory / name).write_bytes((other / name).read_bytes())
    # Another checkpoint's manifest is whole in itself: the files that are not as it says are those to blame.
    return Fault("exchange", tuple(files_of(directory)) if name == MANIFEST_NAME else (name,))


FAULTS: tuple[Callable[[Path, Path, random.Random], Fault], ...] = (flip, truncate, lose, swap, exchange)
