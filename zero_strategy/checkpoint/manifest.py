"""The manifest: contents of a checkpoint, and the sign that it is complete.

It is written last. A directory without a valid one is no checkpoint.

The standard module turns tuples into lists, integer keys into strings and NaN into a token that other parsers reject,
and on reading keeps the last of two equal keys. A manifest must do none of these: see `encode`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from zero_strategy.checkpoint.layout import (
    DTYPE_NAMES,
    DTYPES,
    is_inner_path,
    parse_object,
    tensors_cut_off,
)
from zero_strategy.checkpoint.ranges import Checksums, PieceTable, rank_path
from zero_strategy.runtime.host_bytes import checksum_of
from zero_strategy.runtime.regular_files import odd_entry, open_regular, read_regular, size_of
from zero_strategy.runtime.shown import brief

AVERAGE = "average"
"""Kind of state that is a running average of a weight; and its entry in the engine's user metadata."""
EXPORT = "export"
"""Entry in the engine's user metadata of weights for others: an export, or a published version."""
AVERAGE_BUFFERS_NAME = "average_buffers.pt"
"""Averages of buffers, by name."""
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
"""The file of a folder of checkpoints that names the last one."""
INDEX_NAME = "model.safetensors.index.json"
RECEIPTS_NAME = ".written"
"""Directory of the ranks' records of what they wrote; marks a checkpoint that is still being written."""
FORMAT = "zero_strategy.checkpoint"
VERSION = 2
# The first match counts, so nothing that users chose may stand before it in the text.
_OWN_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"')
_BLANK = b'"checksum": "0000000000000000"'
Scalar = None | bool | int | float | str
FileKind = Literal["model"] | tuple[str, str]
"""Weights, or the (optimizer, state kind) of optimizer state."""
T = TypeVar("T")


@dataclass(frozen=True)
class WeightRecord:
    """Dtype, shape and file (path relative to the checkpoint) of one weight."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class OptimizerRecord:
    """Saved state of one optimizer.

    Attributes:
        states: state kind, such as "exp_avg" -> its file.
        scalars: parameter name -> state key, such as "step" -> value; floats come back bit for bit.
        param_groups: hyper-parameters of each group; tuples come back as tuples.
    """

    states: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    param_groups: Sequence[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Attributes:
        files: relative path of every other file -> bytes.
        weights: name -> record, each tensor under its first name only.
        aliases: further name of a tied tensor -> first name.
        optimizers: optimizer name -> record.
        counters: steps, epochs and the like.
        world_size: ranks that saved; for information.
        stage: ZeRO stage that saved; for information.
        user: anything that JSON can hold.
        checksums: of all bytes of the files.
        save: what tells this save from any other.
        pieces: where the bytes of the files are, if not in these files themselves.
    """

    files: Mapping[str, int]
    weights: Mapping[str, WeightRecord]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, OptimizerRecord] = field(default_factory=dict)
    counters: Mapping[str, Scalar] = field(default_factory=dict)
    world_size: int = 1
    stage: int = 0
    user: Mapping[str, Any] = field(default_factory=dict)
    checksums: Checksums = field(default_factory=Checksums)
    save: str = ""
    pieces: PieceTable | None = None

    def to_json(self) -> bytes:
        """The manifest's text.

        Raises:
            TypeError, ValueError: naming the entry that JSON cannot hold without loss, or that is malformed.
        """
        # The own checksum among the first: see `_OWN_CHECKSUM`.
        content = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": "0" * 16,
            "world_size": self.world_size,
            "stage": self.stage,
            "save": self.save,
            "counters": encode(self.counters, "counters"),
            "aliases": dict(self.aliases),
            "optimizers": {name: _encode_optimizer(name, entry) for name, entry in self.optimizers.items()},
            "user": encode(self.user, "user"),
            "files": dict(self.files),
            "weights": {
                name: {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "file": entry.file}
                for name, entry in self.weights.items()
            },
            "checksums": self.checksums.to_json(),
        }
        if self.pieces is not None:
            content["pieces"] = self.pieces.to_json()
        text = seal(_in_lines(content).encode())
        self.from_json(text, "manifest")  # what could not be read back must not be written
        return text

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Manifest:
        """Parses and checks a manifest.

        Args:
            data: the text.
            source: its file, for errors.

        Raises:
            ValueError: naming `source` and the entry, if anything is missing, unknown or malformed.
        """
        content = parse_object(data, source)
        # Format and version before the checksum, which other formats and later versions may not have.
        if content.get("format") != FORMAT:
            raise ValueError(f"{source}: format is {content.get('format')!r}, expected {FORMAT!r}")
        if content.get("version") != VERSION:
            raise ValueError(f"{source}: format version {content.get('version')!r}; this package reads {VERSION}")
        _check_own_checksum(data, source)
        try:
            table = content.pop("pieces", None)
            _keys(content, set(_FIELDS) | {"format", "version", "checksum"}, "manifest")
            pieces = None if table is None else _read("pieces", PieceTable.from_json, table)
            manifest = cls(pieces=pieces, **{key: parse(content[key], key) for key, parse in _FIELDS.items()})
            _check_references(manifest)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        return manifest

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads the manifest of a checkpoint.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        path = directory / MANIFEST_NAME
        if size_of(path) is None:
            raise ValueError(f"{directory}: not a complete checkpoint: it has no {MANIFEST_NAME}{odd_entry(directory)}")
        return cls.from_json(read_regular(path), str(path))

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Reads the manifest of a checkpoint and checks that its files are there in full length.

        Pieces of other hosts may be missing, but not all pieces.

        Raises:
            ValueError: naming the file and what is wrong with it.
        """
        manifest = cls.read(directory)
        # Each host has the pieces of its own ranks.
        if manifest.pieces is not None:
            _check_some_pieces(manifest.pieces, directory)
            return manifest
        for name, size in manifest.files.items():
            actual = size_of(directory / name)
            if actual is None:
                raise ValueError(f"{directory}: file {name} is missing{manifest.lost(directory, name)}")
            if actual != size:
                lost = manifest.lost(directory, name)
                raise ValueError(f"{directory}: file {name} has {actual} bytes, the manifest says {size}{lost}")
        return manifest

    def lost(self, directory: Path, name: str) -> str:
        """For the end of a message about a file that is missing or cut off: which tensors that concerns."""
        names = sorted(self.checksums.tensors.get(name, {}))
        try:
            fd = open_regular(directory / name)
        except (OSError, ValueError):
            return listed(names)
        try:
            return listed(tensors_cut_off(fd, name) if names else [])
        except ValueError:  # of the header, too, something is gone
            return listed(names)
        finally:
            os.close(fd)


def listed(names: Sequence[str], most: int = 5) -> str:
    """The end of a message that names tensors, such as "; lost: 'a', 'b' and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"; lost: {', '.join(map(repr, names[:most]))}{more}" if names else ""


def _in_lines(content: Mapping[str, Any]) -> str:
    """JSON with a line per entry of its objects: readable, and much faster than the encoder that indents."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def seal(text: bytes) -> bytes:
    """A manifest's text with its own checksum, which is that of the text where the checksum is all zeros."""
    blank = _OWN_CHECKSUM.sub(_BLANK, text, count=1)
    return blank.replace(_BLANK, f'"checksum": "{checksum_of(blank)}"'.encode(), 1)


def _check_own_checksum(data: bytes, source: str) -> None:
    found = _OWN_CHECKSUM.search(data)
    if found is None:
        raise ValueError(f"{source}: is damaged: it lacks its own checksum")
    actual = checksum_of(_OWN_CHECKSUM.sub(_BLANK, data, count=1))
    if actual.encode() != found[1]:
        raise ValueError(f"{source}: is damaged: its checksum is {actual}, it says {found[1].decode()}")


def _encode_optimizer(name: str, entry: OptimizerRecord) -> dict[str, Any]:
    where = f"optimizers.{name}"
    return {
        "states": dict(entry.states),
        "param_groups": encode(list(entry.param_groups), f"{where}.param_groups"),
        "scalars": encode(entry.scalars, f"{where}.scalars"),
    }


def _check_some_pieces(pieces: PieceTable, directory: Path) -> None:
    present = 0
    for rank, (size, _) in pieces.ranks.items():
        name = rank_path(pieces.folder, rank)
        actual = size_of(directory / name)
        if actual is None:
            continue
        present += 1
        if actual != size:
            raise ValueError(f"{directory}: file {name} has {actual} bytes, the manifest says {size}")
    if not present:
        raise ValueError(f"{directory}: none of its {len(pieces.ranks)} pieces is here ({pieces.folder}/rank-*)")


def _check_references(manifest: Manifest) -> None:
    if manifest.pieces is not None:
        _check_logical_files(manifest, manifest.pieces)
    if manifest.checksums.files.keys() != manifest.files.keys():
        differing = sorted(manifest.checksums.files.keys() ^ manifest.files.keys())
        raise ValueError(f"either a checksum without a file, or a file without a checksum: {differing}")
    referenced = [(f"weight {name!r}", entry.file) for name, entry in manifest.weights.items()]
    for optimizer, entry in manifest.optimizers.items():
        referenced += [(f"state {kind!r} of optimizer {optimizer!r}", p) for kind, p in entry.states.items()]
    for what, path in referenced:
        if path not in manifest.files:
            raise ValueError(f"{what} is in {path!r}, which is not among the files")
    for optimizer, entry in manifest.optimizers.items():
        _check_step_counters(optimizer, entry, manifest.checksums)
    for alias, name in manifest.aliases.items():
        if name not in manifest.weights or alias in manifest.weights:
            raise ValueError(f"alias {alias!r} of {name!r} does not lead from a free name to a weight")


_STEP = "step"
_MASTER = "master"


def _check_step_counters(optimizer: str, entry: OptimizerRecord, checksums: Checksums) -> None:
    """Raises ValueError if a parameter's moments are there without their step counter, which others of the kind have.

    An optimizer would begin its bias correction anew for that one, and train other values.
    """
    moments: dict[str, list[str]] = {}
    for kind, path in entry.states.items():
        if kind not in (_MASTER, AVERAGE):
            for name in checksums.tensors.get(path, {}):
                moments.setdefault(name, []).append(kind)
    counted = {tuple(moments[name]) for name, keys in entry.scalars.items() if _STEP in keys and name in moments}
    for name, kinds in moments.items():
        if tuple(kinds) in counted and _STEP not in entry.scalars.get(name, {}):
            there = ", ".join(kinds)
            raise ValueError(f"optimizers.{optimizer}.scalars lacks the {_STEP!r} of {brief(name)}, which has {there}")


def _check_logical_files(manifest: Manifest, pieces: PieceTable) -> None:
    if clash := sorted(pieces.layouts.keys() & pieces.owners.keys()):
        raise ValueError(f"pieces has {clash} among the files with tensors and among the small ones")
    if (known := pieces.layouts.keys() | pieces.owners.keys()) != manifest.files.keys():
        raise ValueError(f"pieces and files differ in {sorted(known ^ manifest.files.keys())}")
    for path, layout in pieces.layouts.items():
        if manifest.files[path] != layout.size or manifest.checksums.files.get(path) != checksum_of(layout.header):
            raise ValueError(f"the layout of {path} in pieces does not give the file's size and header")
    listed_in: dict[str, set[str]] = {}
    for name, entry in manifest.weights.items():
        if entry.file not in pieces.layouts or name not in pieces.layouts[entry.file].specs:
            raise ValueError(f"weights has {brief(name)} in {entry.file}, and pieces has no such tensor there")
        spec = pieces.layouts[entry.file].specs[name]
        if (spec.dtype, spec.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"weights.{name} is {entry.dtype} {entry.shape}, its pieces of {entry.file} are those of a tensor "
                f"{spec.dtype} {spec.shape}"
            )
        listed_in.setdefault(entry.file, set()).add(name)
    for path, names in listed_in.items():
        if unlisted := sorted(pieces.layouts[path].specs.keys() - names):
            raise ValueError(f"pieces has tensors of {path} that weights does not list: {unlisted}")


def _keys(value: Any, expected: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    if missing := expected - value.keys():
        raise ValueError(f"{where} lacks {sorted(missing)}")
    if unknown := value.keys() - expected:
        raise ValueError(f"{where} has the unknown keys {sorted(unknown)}")


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{where} is {value!r}, expected a count")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is {value!r}, expected a string")
    return value


def _scalar(value: Any, where: str) -> Scalar:
    result = _decode(value, where)
    if not isinstance(result, Scalar):
        raise ValueError(f"{where} is {value!r}, expected a single value")
    return result


def _decode(value: Any, where: str) -> Any:
    return _read(where, decode, value)


def _read(where: str, parse: Callable[[Any], T], value: Any) -> T:
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _mapping(parse: Callable[[Any, str], T]) -> Callable[[Any, str], dict[str, T]]:
    def parse_mapping(value: Any, where: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        return {key: parse(item, f"{where}.{key}") for key, item in value.items()}

    return parse_mapping


def _files(value: Any, where: str) -> dict[str, int]:
    files = _mapping(_count)(value, where)
    for path in files:
        if not is_inner_path(path):
            raise ValueError(f"{where} has {path!r}, which is not a path inside the checkpoint")
    return files


def _weight(value: Any, where: str) -> WeightRecord:
    _keys(value, {"dtype", "shape", "file"}, where)
    dtype = DTYPES.get(_text(value["dtype"], f"{where}.dtype"))
    if dtype is None:
        raise ValueError(f"{where} has the unknown dtype {value['dtype']!r}")
    if not isinstance(value["shape"], list):
        raise ValueError(f"{where}.shape is no list")
    shape = tuple(_count(size, f"{where}.shape") for size in value["shape"])
    return WeightRecord(dtype, shape, _text(value["file"], f"{where}.file"))


def _optimizer(value: Any, where: str) -> OptimizerRecord:
    _keys(value, {"states", "scalars", "param_groups"}, where)
    groups = _decode(value["param_groups"], f"{where}.param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"{where}.param_groups is no list of objects")
    return OptimizerRecord(
        states=_mapping(_text)(value["states"], f"{where}.states"),
        scalars=_mapping(_mapping(_scalar))(value["scalars"], f"{where}.scalars"),
        param_groups=groups,
    )


_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "files": _files,
    "weights": _mapping(_weight),
    "aliases": _mapping(_text),
    "optimizers": _mapping(_optimizer),
    "counters": _mapping(_scalar),
    "world_size": _count,
    "stage": _count,
    "save": _text,
    "user": _mapping(_decode),
    "checksums": lambda value, where: Checksums.from_json(value),
}
_FLOAT = "$float"
_TUPLE = "$tuple"


def encode(value: object, where: str) -> Any:
    """Translates a value into what the json module writes without loss.

    Finite floats need no care: json writes the shortest digits that read back as the same double.

    Args:
        value: None, bool, int, float, str, or a list, tuple or string-keyed mapping of such.
        where: path of the value, for errors.

    Returns:
        The same value with tuples and non-finite floats wrapped in one-key mappings.

    Raises:
        TypeError: if a value or a key has a type that JSON would change or cannot hold.
        ValueError: if a key begins with "$", which is reserved for the wrappers.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        # Of subclasses the plain number: the repr of NumPy's floats, say, is no number's text.
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {_key(key, where): encode(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} has type {type(value).__name__}; a manifest holds only None, bool, int, float, str, "
        "and lists, tuples and string-keyed mappings of these"
    )


def decode(value: Any) -> Any:
    """Undoes `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        # No user's mapping looks like this: its keys do not begin with a dollar.
        if value.keys() == {_FLOAT}:
            return float(value[_FLOAT])
        if value.keys() == {_TUPLE}:
            return tuple(decode(item) for item in value[_TUPLE])
        return {key: decode(item) for key, item in value.items()}
    return value


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; keys must be strings")
    if key.startswith("$"):
        raise ValueError(f"{where} has the key {key!r}; keys beginning with '$' are reserved")
    return key
