"""Files of torch.save whose pickles take for ever to hash, print or walk, and whose zip files are damaged."""

from __future__ import annotations

import random
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.attack.commands import run
from tests.attack.rows import Attempt, harmless, outcome, refused
from zero_strategy.convert.convert import open_any, state_of

_LEVELS = 60


def _shared(levels: int = _LEVELS) -> bytes:
    """Opcodes of a tuple that holds another one twice, which holds a third one twice, ..."""
    code = b"K\x01K\x01\x86\x94"
    for number in range(levels - 1):
        code += b"h" + bytes([number]) + b"\x86\x94"
    return code


def _text(value: bytes) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value


_GLOBAL = {name: b"c" + name.replace(".", "\n").encode() + b"\n" for name in ("builtins.set", "torch.Size")}
_ORDERED = b"ccollections\nOrderedDict\n"

PICKLES = {
    "a value": b"}" + _text(b"a") + _shared() + b"s",
    "a key": b"}" + _shared() + b"K\x01s",
    "keys": b"}(" + _shared() + b"K\x01u",
    "a dict's key": b"(" + _shared() + b"K\x01d",
    "a member of a set": b"\x8f(" + _shared() + b"\x90",
    "a member of a frozen set": b"(" + _shared() + b"\x91",
    "a persistent id": _shared() + b"Q",
    "an argument of a set": _GLOBAL["builtins.set"] + b"(]" + _shared() + b"atR",
    "a size": _GLOBAL["torch.Size"] + b"(" + _shared() + b"tR",
    "a pair of an OrderedDict": _ORDERED + b"(](" + _shared() + b"K\x01tatR",
    "lists that share": b"]\x94" + b"".join(b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(_LEVELS)),
    "a list that holds itself": b"]\x94h\x00a",
    "100,000 lists": b"]" * 100_000 + b"a" * 99_999,
    "a memo of 2^31": b"K\x01r\xff\xff\xff\x7f",
    "a call of os.system": b"cos\nsystem\n(X\x04\x00\x00\x00truetR",
    "a module by its name": b"\x8c\x02os\x8c\x06system\x93(X\x04\x00\x00\x00truetR",
    "a number of 2^20 digits": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20),
    "a text of 2^60": b"\x8d" + struct.pack("<Q", 1 << 60),
    "nothing": b"",
    "an empty stack": b"0",
    "a name with an escape sequence": b"c\x1b[31m\nx\n(tR",
}


def _zipped(place: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(place, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", sys.byteorder)


def bombs(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Each is refused by name, in seconds, by the reader and by `checkpoint inspect`."""
    for number, (name, code) in enumerate(PICKLES.items()):
        for protocol in (b"\x80\x04", b""):
            place = folder / f"pickle-{number}-{len(protocol)}.pt"
            _zipped(place, protocol + code + b".")
            yield refused(f"opened: {name}", outcome(lambda: _loaded(place)), names=place.name)  # noqa: B023
        older = folder / f"older-{number}.pt"
        older.write_bytes(b"\x80\x02" + code + b".")
        yield refused(f"older: {name}", outcome(lambda: _loaded(older)), names=older.name)  # noqa: B023
        found = run(["checkpoint", "inspect", str(place)])
        yield Attempt(f"inspected: {name}", found.wrong or ("" if found.status == 2 else f"status {found.status}"))


def _loaded(place: Path) -> dict[str, bytes]:
    state = state_of(open_any(place))
    return {name: tensor.load().numpy().tobytes() for name, tensor in state.weights.items()}


def zips(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """A file with some bits flipped, or cut off: the values that were saved, or a ValueError that names it."""
    place = folder / "w.pt"
    torch.save({"a": torch.randn(64, 64), "b": torch.ones(3)}, place)
    whole, expected = place.read_bytes(), _loaded(place)
    compressed = folder / "compressed.pt"
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    yield refused("a compressed entry", outcome(lambda: _loaded(compressed)), names=compressed.name)
    for number in range(60 * rounds):
        content = bytearray(whole)
        # Most of the file is values: the ends, where pickle and directory are, are hit as often.
        span = draw.choice([(0, 700), (len(whole) - 900, len(whole)), (0, len(whole))])
        for _ in range(draw.randrange(1, 3)):
            content[draw.randrange(*span)] ^= 1 << draw.randrange(8)
        if draw.random() < 0.1:
            del content[draw.randrange(len(content)) :]
        place.write_bytes(content)
        yield harmless(f"file {number}", outcome(lambda: _loaded(place)), expected)
        if number % 10 == 0:
            yield Attempt(f"inspected {number}", run(["checkpoint", "inspect", str(place)]).wrong)
