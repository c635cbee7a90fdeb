"""Checkpoints of every kind, damaged, replaced or forged."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.attack.rows import Attempt, harmless, outcome, refused
from tests.checkpoint.kinds import KINDS, content, files_of, make, named
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, seal
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.convert.convert import open_any

_LOUD = (ValueError, OSError)
_UNCHECKED = re.compile(r"\.pt$|\.bin$|\.ckpt$|\.distcp$|safetensors$")
"""Files of other formats, which have no checksums of their values: a flipped bit of one is a value."""
_UNLISTED = re.compile(r"(custom_checkpoint|random_states)_\d+\.pkl")
"""Files that Accelerate lists nowhere: one that is gone was never there."""


def _flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(max(file.stat().st_size, 1)))


def _noise(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.randrange(1, 20)):
        at = draw.randrange(max(len(data), 1))
        data[at : at + draw.randrange(5)] = draw.randbytes(draw.randrange(5))
    file.write_bytes(data)


def _gone(file: Path, draw: random.Random) -> None:
    file.unlink()


def _pipe(file: Path, draw: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _device(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _circle(file: Path, draw: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _holes(file: Path, draw: random.Random) -> None:
    """Larger than memory, and nothing on the disk."""
    file.unlink()
    file.touch()
    os.truncate(file, 1 << 42)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    _flip, _cut, _noise, _gone, _pipe, _folder, _device, _circle, _holes
)  # fmt: skip


def damages(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """One file of a checkpoint is damaged: it is refused, or what is read is what was saved.

    Values of formats without checksums may be others; they may not hang, nor end in an error of another kind.
    """
    for kind in sorted(KINDS):
        (folder / kind).mkdir()
        place = make(kind, folder / kind)
        whole, expected = folder / f"{kind}-whole", content(named(kind, place))
        os.rename(place, whole)
        for number in range(rounds):
            for damage in draw.sample(DAMAGES, 3) if rounds == 1 else DAMAGES:
                (shutil.copytree if whole.is_dir() else shutil.copy)(whole, place)
                file = draw.choice(files_of(place))
                name = f"{kind}: {damage.__name__[1:]} of {file.relative_to(folder / kind)}"
                damage(file, draw)
                found = outcome(lambda: content(named(kind, place)))  # noqa: B023
                unchecked = _UNCHECKED.search(file.name) or (damage is _gone and _UNLISTED.fullmatch(file.name))
                if damage in (_flip, _noise):  # a bare pickle
                    unchecked = unchecked or kind == "older_torch" or file.name == ".metadata"
                if found.error is None and kind not in ("native", "pieces", "url") and unchecked:
                    yield Attempt(name, "")
                else:
                    yield harmless(f"{name} ({number})", found, expected, errors=_LOUD)
                shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink(missing_ok=True)


def forged_manifests(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Manifests whose own checksum is right, and whose entries lead elsewhere, lack something or are of other kinds."""
    whole = make("native", folder)
    text = (whole / MANIFEST_NAME).read_text()
    entries = json.loads(text)
    step = next(iter(entries["optimizers"]["0"]["scalars"]))
    forged: dict[str, Callable[[dict[str, object]], object]] = {
        "a step counter is gone": lambda m: m["optimizers"]["0"]["scalars"].pop(step),  # type: ignore[index]
        "a file outside": lambda m: m["files"].update({"../../x": 3}),  # type: ignore[attr-defined]
        "an absolute file": lambda m: m["files"].update({"/etc/passwd": 3}),  # type: ignore[attr-defined]
        "a file of 2^60 bytes": lambda m: m["files"].update({n: 1 << 60 for n in m["files"]}),  # type: ignore[attr-defined]
        "weights that are a list": lambda m: m.update(weights=[]),
        "null for everything": lambda m: m.update({key: None for key in m if key not in ("format", "version")}),
        "a shape of 2^60": lambda m: [w.update(shape=[1 << 60]) for w in m["weights"].values()],  # type: ignore[attr-defined]
        "a tie of a tie": lambda m: m["aliases"].update({"a": "b", "b": "a"}),  # type: ignore[attr-defined]
        "1,000 levels": lambda m: m["user"].update(deep=json.loads("[" * 900 + "]" * 900)),  # type: ignore[attr-defined]
        "scalars that are text": lambda m: m["optimizers"]["0"].update(scalars={step: "x"}),  # type: ignore[index]
        "a state's file outside": lambda m: m["optimizers"]["0"]["states"].update(exp_avg="../../x"),  # type: ignore[index]
        "another version": lambda m: m.update(version=99),
    }
    for name, change in forged.items():
        made = json.loads(text)
        change(made)
        (whole / MANIFEST_NAME).write_bytes(seal((json.dumps(made, indent=1) + "\n").encode()))
        yield refused(f"opened: {name}", outcome(lambda: content(whole)), names=str(whole))
        yield refused(f"verified: {name}", outcome(lambda: _problems(whole)), names=str(whole))
    for name, raw in {"100,000 levels": b"[" * 100_000, "no UTF-8": b"\xff\xfe{}", "empty": b""}.items():
        (whole / MANIFEST_NAME).write_bytes(raw)
        yield refused(f"opened: {name}", outcome(lambda: content(whole)), names=str(whole))


def forged_pieces(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """The same of a checkpoint in pieces: places, shapes and step counters that do not belong together."""
    whole = make("pieces", folder)
    text = (whole / MANIFEST_NAME).read_text()
    weights = json.loads(text)["weights"]
    name = next(each for each, record in weights.items() if len(record["shape"]) == 2)

    def slices(manifest: Any) -> list[str]:
        found: list[str] = manifest["pieces"]["slices"][weights[name]["file"]][name]
        return found

    forged: dict[str, Callable[[Any], object]] = {
        "another shape": lambda m: m["weights"][name].update(shape=[*weights[name]["shape"], 1]),
        "another dtype": lambda m: m["weights"][name].update(dtype="I32"),
        "a weight that has no pieces": lambda m: m["weights"].update(ghost=weights[name]),
        "a weight that is not listed": lambda m: m["weights"].pop(name),
        "a slice beyond its file": lambda m: slices(m).__setitem__(0, slices(m)[0].rpartition(":")[0] + f":{10**17}"),
        "a slice twice": lambda m: slices(m).append(slices(m)[-1]),
        "a slice of a rank that did not save": lambda m: slices(m).append("0:1:77:4096"),
        "a step counter of one alone": lambda m: m["optimizers"]["0"].update(scalars={name: {"step": 1.0}}),
        "a folder elsewhere": lambda m: m["pieces"].update(folder="../../x"),
        "an absolute folder": lambda m: m["pieces"].update(folder="/etc"),
        "a small file elsewhere": lambda m: m["pieces"]["owners"].update({"../../x": 0}),
        "layouts of nothing": lambda m: m["pieces"].update(layouts={}),
    }
    for what, change in forged.items():
        made = json.loads(text)
        change(made)
        (whole / MANIFEST_NAME).write_bytes(seal((json.dumps(made, indent=1) + "\n").encode()))
        yield refused(f"opened: {what}", outcome(lambda: content(whole)), names=str(whole))
        yield refused(f"verified: {what}", outcome(lambda: _problems(whole)), names=str(whole))
    (whole / MANIFEST_NAME).write_text(text)
    for file in sorted(whole.rglob("rank-*")):
        kept = file.read_bytes()
        file.unlink()
        yield refused(f"{file.name} is gone", outcome(lambda: _problems(whole)), names=file.name)
        file.write_bytes(kept)


def _problems(folder: Path) -> None:
    """Raises ValueError with what `verify` finds."""
    if found := verify(folder).problems:
        raise ValueError(f"{folder}: {found}")


_ODD = {
    "an escape sequence": "a\x1b]0;title\x07\x1b[31mred",
    "line breaks": "a\r\nINFO all checks passed",
    "a path upwards": "../../../../up",
    "an absolute path": "/etc/passwd",
    "half of a pair": "a\udc80",
    "turned text": "a\u202eb",
    "nothing": "",
    "4,000 characters": "x" * 4000,
}


def names_of_tensors(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Names in files of others: what is printed has nothing in it that a terminal acts on, and no file is made outside.

    A name with a line break makes no line of its own.
    """
    from tests.attack.commands import run

    for number, (what, name) in enumerate(_ODD.items()):
        place = folder / f"names-{number}"
        place.mkdir()
        torch.save({name: torch.ones(3), "b": torch.ones(2)}, place / "w.pt")
        files = ["w.pt"]
        if "\udc80" not in name:
            (place / "st").mkdir()
            save_file({name: torch.ones(3), "b": torch.ones(2)}, place / "st/model.safetensors")
            files.append("st")
        for file in files:
            for command in ("inspect --tensors", "verify", "convert", "diff"):
                first, *options = command.split()
                others = [str(place / f"out-{file}")] if first == "convert" else []
                others = [str(place / "w.pt")] if first == "diff" else others
                found = run(["checkpoint", first, str(place / file), *others, *options])
                yield Attempt(f"{command} of {file} with {what}", found.wrong)
    outside = sorted(path.name for path in folder.parent.iterdir() if path != folder and path.name == "up")
    yield Attempt("nothing outside of the folder", f"{outside}" if outside else "")


def open_descriptors(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Files that are refused are closed."""
    place = make("torch", folder)
    place.write_bytes(place.read_bytes()[:-300])
    outcome(lambda: open_any(place))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        outcome(lambda: open_any(place))
    after = len(os.listdir("/proc/self/fd"))
    yield Attempt("20 refused files", "" if after <= before else f"{before} descriptors, then {after}")
