"""Differences between two checkpoints beside their tensors: what the trainings were set to, and how far they had come.

Counters, ties, hyper-parameters, numbers of optimizers, the loss scale, random states, and whatever a framework or the
user saved along. Paths of files in the last are left out: two runs have two folders. What only tells who saved, and in
how many files, is told as a sentence and is no difference.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.agreement import REFERENCES
from zero_strategy.checkpoint.folders import SINGLE_NAME
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.manifest import AVERAGE, INDEX_NAME, Manifest
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.cli.diff_found import Comparison, Difference, is_native, short, tensor_difference
from zero_strategy.cli.diff_tensors import Tally
from zero_strategy.convert.pickle_globals import Record
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import OWN_KEY
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.host_bytes import checksum_of

_TOKENS = {"accelerate": "save"}
"""Entries of frameworks that tell one save from any other."""
_OF_RANK = re.compile(r"(^|/)rank-([0-9]+)")
_RANDOM = re.compile(re.escape(random_state.DIRECTORY) + r"/rank-([0-9]+)\.json")
_MOST_ENTRIES = 3
"""Entries of a list that are told one by one."""


def compare_records(a: StateReader, b: StateReader, found: Comparison, *, weights_only: bool, tolerance: int) -> None:
    """Add all that differs beside the tensors.

    Args:
        a: One.
        b: The other.
        found: What it is added to.
        weights_only: Ties alone.
        tolerance: In ulps, of tensors in files of frameworks.

    Raises:
        ValueError: If a file is damaged.
    """
    walk = _Walk(found.differences, tolerance)
    if _tied(a) != _tied(b):
        walk.values("ties", "", dict(a.aliases), dict(b.aliases))
    if weights_only or not (a.has_manifest and b.has_manifest):
        return
    walk.values("counters", "", dict(a.manifest.counters), dict(b.manifest.counters))
    _optimizers(walk, a.manifest, b.manifest)
    native = is_native(a) and is_native(b)
    own_a, own_b = (_own(reader.manifest) for reader in (a, b))
    scales = own_a.get("loss_scaler"), own_b.get("loss_scaler")
    # Other formats may have no place for it.
    if native or None not in scales:
        walk.values("loss scale", "", scales[0] or {}, scales[1] or {})
    if native:
        for key, where in ((REFERENCES, "frozen weights by reference"), (AVERAGE, "running averages")):
            walk.values(where, "", own_a.get(key) or {}, own_b.get(key) or {})
        walk.values("dtypes of numbers", "", own_a.get("scalar_dtypes", []), own_b.get("scalar_dtypes", []))
        walk.values("user", "", _of_user(a.manifest), _of_user(b.manifest), paths=False)
        _small_files(walk, a, b, found.layout)
    if walk.paths:
        found.layout.append(f"{walk.paths} path(s) of files among what frameworks saved differ")


def layout_notes(a: StateReader, b: StateReader) -> Iterator[str]:
    """Sentences on who saved the two, and in how many files, where that differs."""
    if not (is_native(a) and is_native(b)):
        if is_native(a) != is_native(b):
            side = "B" if is_native(a) else "A"
            yield f"{side} is of another format or weights alone, which do not tell who saved them"
        return
    one, other = a.manifest, b.manifest
    if (one.world_size, one.stage) != (other.world_size, other.stage):
        yield f"A was saved by {_savers(one)}, B by {_savers(other)}"
    if (one.pieces is None) != (other.pieces is None):
        yield f"{'A' if one.pieces else 'B'} is in pieces, a file for each rank; the other is in shared files"
    files = [len({record.file for record in each.weights.values()}) for each in (one, other)]
    if files[0] != files[1]:
        yield f"A has its weights in {files[0]} file(s), B in {files[1]}"


def _savers(manifest: Manifest) -> str:
    return f"{manifest.world_size} rank(s) at stage {manifest.stage}"


def _tied(reader: StateReader) -> set[frozenset[str]]:
    """Sets of names of one tensor, whichever of them it is stored under."""
    groups: dict[str, set[str]] = {}
    for alias, name in reader.aliases.items():
        groups.setdefault(name, {name}).add(alias)
    return {frozenset(names) for names in groups.values()}


def _own(manifest: Manifest) -> Mapping[str, Any]:
    own = manifest.user.get(OWN_KEY, {})
    return own if isinstance(own, Mapping) else {}


def _of_user(manifest: Manifest) -> dict[str, Any]:
    return {
        key: {k: v for k, v in value.items() if k != _TOKENS.get(key)} if isinstance(value, Mapping) else value
        for key, value in manifest.user.items()
        if key != OWN_KEY
    }


def _optimizers(walk: _Walk, a: Manifest, b: Manifest) -> None:
    for name in dict.fromkeys([*a.optimizers, *b.optimizers]):
        mine, theirs = a.optimizers.get(name), b.optimizers.get(name)
        if mine is None or theirs is None:
            walk.add("optimizers", name, "only in A" if theirs is None else "only in B")
            continue
        groups = [{str(i): dict(group) for i, group in enumerate(each.param_groups)} for each in (mine, theirs)]
        walk.values(f"optimizer {name} groups", "", *groups)
        walk.values(f"optimizer {name} numbers", "", dict(mine.scalars), dict(theirs.scalars))


def _small_files(walk: _Walk, a: StateReader, b: StateReader, layout: list[str]) -> None:
    """Compare files without weights and states: of each rank where as many saved, else of all alike only."""
    others = [_without_tensors(reader.manifest) for reader in (a, b)]
    of_ranks = [{path for path in paths if _OF_RANK.search(path)} for paths in others]
    if of_ranks[0] != of_ranks[1] and a.manifest.world_size != b.manifest.world_size:
        others = [[path for path in paths if not _OF_RANK.search(path)] for paths in others]
        layout.append("states that each rank has of its own (random numbers, loaders) are not compared")
    for path in dict.fromkeys([*others[0], *others[1]]):
        if path not in others[0] or path not in others[1]:
            walk.add("files", path, "only in A" if path in others[0] else "only in B")
            continue
        # Read where the manifests say that they are equal, too: a reader compares them with their checksums.
        contents = a.extra(path), b.extra(path)
        if contents[0] == contents[1]:
            continue
        if (rank := _RANDOM.fullmatch(path)) and _compare_random(walk, int(rank[1]), path, *contents):
            continue
        try:
            values = [_parsed(path, content) for content in contents]
        except (ValueError, OSError):
            digests = [f"{len(content)} bytes, checksum {checksum_of(content)}" for content in contents]
            walk.add(path, "", "record", *digests)
            continue
        # Equal values may have been written in other bytes.
        walk.values(path, "", *values, paths=False)


def _without_tensors(manifest: Manifest) -> list[str]:
    with_tensors = {record.file for record in manifest.weights.values()} | {INDEX_NAME, SINGLE_NAME}
    with_tensors |= {path for record in manifest.optimizers.values() for path in record.states.values()}
    return [path for path in sorted(manifest.files) if path not in with_tensors]


def _parsed(path: str, content: bytes) -> Any:
    """Contents of a file of JSON, or of one that `torch.save` wrote, without running anything that it says.

    Raises:
        ValueError: If it is neither.
    """
    if path.endswith(".json"):
        return bounded_json.parse(content, path)
    return load_restricted(io.BytesIO(content))


def _compare_random(walk: _Walk, rank: int, path: str, mine: bytes, theirs: bytes) -> bool:
    """Compare two random states; False if one is none of ours."""
    where = f"random state of rank {rank}"
    try:
        states = [bounded_json.parse(content, path) for content in (mine, theirs)]
        described = [{str(key): _generator(key, value) for key, value in state.items()} for state in states]
    except (ValueError, AttributeError, TypeError, RuntimeError):
        return False
    for key in dict.fromkeys([*described[0], *described[1]]):
        a, b = (each.get(key, "not there") for each in described)
        if a != b:
            walk.add(where, key, "record", a, b)
    return True


def _generator(key: str, value: Any) -> str:
    """A generator's state in words that are equal where the states are."""
    digest = f"state {checksum_of(repr(value).encode())}"
    if key != "torch":
        return digest
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8))
    return f"seed {generator.initial_seed()}, {digest}"


class _Walk:
    """A walk through two values at once, which notes what differs.

    Args:
        differences: What is added to.
        tolerance: In ulps, of tensors.

    Attributes:
        paths: Number of paths that differ and were left out.
    """

    def __init__(self, differences: list[Difference], tolerance: int) -> None:
        self.differences, self.paths = differences, 0
        self._tolerance = tolerance

    def add(self, where: str, name: str, what: str, a: str = "", b: str = "") -> None:
        """Note a difference."""
        self.differences.append(Difference(where, name, what, a, b))

    def values(self, where: str, name: str, a: Any, b: Any, *, paths: bool = True) -> None:
        """Compare two values, entry by entry.

        Args:
            where: Place of both.
            name: Way to them there.
            a: One.
            b: The other.
            paths: Texts that are paths of files count, too.
        """
        if isinstance(a, Record) and isinstance(b, Record):
            a, b = _fields(a), _fields(b)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            self._mappings(where, name, a, b, paths)
        elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self._tensors(where, name, a, b)
        elif isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
            self._lists(where, name, a, b, paths)
        elif not _equal(a, b):
            if not paths and _is_path(a) and _is_path(b):
                self.paths += 1
            else:
                self.add(where, name, "record", short(a), short(b))

    def _mappings(self, where: str, name: str, a: Mapping[Any, Any], b: Mapping[Any, Any], paths: bool) -> None:
        for key in dict.fromkeys([*a, *b]):
            inner = f"{name}.{key}" if name else str(key)
            if key in a and key in b:
                self.values(where, inner, a[key], b[key], paths=paths)
            elif not paths and _is_path(key):
                self.paths += 1
            else:
                value = short(a[key] if key in a else b[key])
                self.add(where, inner, *(("only in A", value, "") if key in a else ("only in B", "", value)))

    def _lists(self, where: str, name: str, a: Sequence[Any], b: Sequence[Any], paths: bool) -> None:
        inner, differing = _Walk([], self._tolerance), 0
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            before = len(inner.differences)
            inner.values(where, f"{name}[{number}]", x, y, paths=paths)
            differing += len(inner.differences) > before
        self.paths += inner.paths
        if differing > _MOST_ENTRIES:
            first = inner.differences[0]
            self.differences.append(
                Difference(where, first.name, first.what, first.a, first.b, differing, len(a), places=first.places)
            )
        else:
            self.differences += inner.differences

    def _tensors(self, where: str, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        specs = TensorSpec.of("a", a), TensorSpec.of("b", b)
        tally = Tally(a.shape, tolerance=self._tolerance) if a.shape == b.shape else None
        if tally is not None:
            tally.add(0, a.contiguous().reshape(-1), b.contiguous().reshape(-1))
        found = tensor_difference(where, name, *specs, tally)
        if found is not None:
            self.differences.append(found)


def _fields(record: Record) -> dict[str, Any]:
    return {
        "class": record.full_name,
        "arguments": record.arguments,
        "state": record.state,
        "entries": record.entries,
        "elements": record.elements,
    }


def _equal(a: Any, b: Any) -> bool:
    """True for values of one type that are equal; NaN is, and zeros of two signs are not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return bool(a == b)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and "/" in value
