"""Keys of states, names of parameters and small files that are paths: nothing is read or written elsewhere."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tests.attack.rows import Attempt, Outcome, harmless, outcome, refused
from tests.checkpoint.kinds import content, make
from tests.checkpoint.piece_saving import on_hosts
from tests.checkpoint.piece_saving import save as save_pieces
from tests.checkpoint.saving import save
from tests.checkpoint.test_names import torch_file
from zero_strategy.checkpoint.disk import all_beside, remove
from zero_strategy.checkpoint.manifest import INDEX_NAME, LATEST_NAME
from zero_strategy.comm.store import FailedElsewhereError
from zero_strategy.convert.convert import TARGETS, convert, open_any

_LOUD = (ValueError, OSError, FailedElsewhereError)


def _names(victim: Path) -> dict[str, str]:
    return {
        "a path upwards": "../../x",
        "a path down and up": "a/../../../x",
        "a path below": "a/b",
        "an absolute path": str(victim),
        "NUL": "a\0b",
        "NUL at the end of a path": "../../x\0",
        "two dots": "..",
        "nothing": "",
        "a backslash": "..\\..\\x",
        "300 characters": "x" * 300,
        "100,000 characters": "x" * 100_000,
        "half of a pair": "a\udc80",
    }


def _tree(root: Path, without: Path) -> dict[str, str]:
    """Digest of every file below a folder, and "" of every folder; without those of a checkpoint and of its saves."""
    found = {}
    for place in sorted(root.rglob("*")):
        if not {place, *place.parents} & {without, *all_beside(without, "tmp")}:
            digest = hashlib.sha256(place.read_bytes()).hexdigest() if place.is_file() else ""
            found[str(place.relative_to(root))] = digest
    return found


def names(folder: Path, draw: random.Random, rounds: int) -> Iterator[Attempt]:
    """Files saved, converted or read under a name stay in their folder, or it is refused; all around stays as it was.

    Around are files that the names would lead to, with the suffixes that are added to names.
    """
    root = folder / "root"
    deep = root / "in" / "deep"
    deep.mkdir(parents=True)
    victims = [place / f"x{end}" for place in (root, root / "in", deep) for end in ("", ".pt", ".safetensors", ".json")]
    for victim in victims:
        torch.save({"precious": torch.ones(1)}, victim)
    before, out = _tree(root, deep / "out"), deep / "out"

    def tried(name: str, found: Outcome) -> Attempt:
        """Holds if nothing around has changed, and what is not done is refused."""
        after = _tree(root, out)
        for extra in ("in/deep/latest", "in/deep/latest_universal"):  # such a save writes it beside the checkpoint
            after.pop(extra, None)
            (root / extra).unlink(missing_ok=True)
        for made in (out, *all_beside(out, "tmp")):
            remove(made)
        if after != before:
            return Attempt(name, f"changed {sorted(set(after.items()) ^ set(before.items()))}"[:300])
        if found.error is not None and not isinstance(found.error, _LOUD):
            return Attempt(name, f"ended in {found}")
        return Attempt(name, "")

    values = {"w": torch.arange(4.0)}
    for what, name in _names(root / "x").items():
        savers: dict[str, Callable[[], object]] = {
            "a state": lambda: save(out, values, {"0": {name: values}}),  # noqa: B023
            "an optimizer": lambda: save(out, values, {name: {"exp_avg": values}}),  # noqa: B023
            "a small file": lambda: save(out, values, extra_files={name: b"x"}),  # noqa: B023
            "a parameter": lambda: save(out, {name: values["w"]}),  # noqa: B023
            "a state in pieces": lambda: save_pieces(on_hosts([out] * 2), values, {"0": {name: values}}),  # noqa: B023
            "a file in pieces": lambda: save_pieces(on_hosts([out] * 2), values, extra_files={name: b"x"}),  # noqa: B023
        }
        for kind, saver in savers.items():
            yield tried(f"{kind} is saved: {what}", outcome(saver))
        targets = TARGETS if rounds > 1 else draw.sample(TARGETS, 2)
        for target in targets:
            for place in ("weight", "state", "extra"):
                given = {"weight": "w", "state": "s", "extra": "e"} | {place: name}
                source = deep / "out.pt"  # in no digest: the name has that of the target before it
                try:
                    torch_file(source, **given)
                except UnicodeEncodeError:  # of half of a pair: torch cannot write it
                    continue
                found = outcome(lambda: convert(source, out, to_format=target))  # noqa: B023
                source.unlink()
                yield tried(f"converted to {target}: {what} as a {place}", found)
    yield from _read_elsewhere(folder / "read")


def _read_elsewhere(folder: Path) -> Iterator[Attempt]:
    """Small files that name another file: `latest`, an index of shards, the metadata of a directory of torch's."""
    folder.mkdir()
    native, sharded, dcp = (folder / kind for kind in ("native", "hf", "dcp"))
    for kind in (native, sharded, dcp):
        kind.mkdir()
        make(kind.name, kind)
    expected = content(native / "c")
    shutil.copytree(sharded / "c", folder / "x")
    index = json.loads((sharded / "c" / INDEX_NAME).read_text())
    metadata = pickle.loads((dcp / "c" / ".metadata").read_bytes())
    for what, name in _names(folder / "x" / "model.safetensors").items():
        if "\udc80" not in name:
            (native / LATEST_NAME).write_text(name)
            yield harmless(f"latest: {what}", outcome(lambda: content(native)), expected, errors=_LOUD)
        index["weight_map"] = dict.fromkeys(index["weight_map"], name)
        (sharded / "c" / INDEX_NAME).write_text(json.dumps(index))
        yield refused(f"an index: {what}", outcome(lambda: content(sharded / "c")), names=str(sharded))
        storage = {at: dataclasses.replace(info, relative_path=name) for at, info in metadata.storage_data.items()}
        forged = dataclasses.replace(metadata, storage_data=storage)
        try:
            (dcp / "c" / ".metadata").write_bytes(pickle.dumps(forged))
        except UnicodeEncodeError:
            continue
        yield refused(f"metadata: {what}", outcome(lambda: open_any(dcp / "c")), names=str(dcp), errors=_LOUD)
    (native / LATEST_NAME).unlink()
    os.mkfifo(native / LATEST_NAME)
    yield harmless("latest: a pipe", outcome(lambda: content(native)), expected, errors=_LOUD)
