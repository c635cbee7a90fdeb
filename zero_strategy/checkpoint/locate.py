"""Finds what a path given by a user means: a checkpoint, its parent, a Hugging Face model, or one file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint.exact_json import parse_object
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, RECEIPTS_NAME, Manifest
from zero_strategy.checkpoint.names import is_inner_path
from zero_strategy.checkpoint.pieces import FOLDER_PREFIX
from zero_strategy.checkpoint.plan import INDEX_NAME
from zero_strategy.checkpoint.replace import all_beside
from zero_strategy.runtime.regular_files import read_regular, read_text, size_of

SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Location:
    """Where weights are.

    Attributes:
        directory: directory that the paths are relative to.
        manifest: None for weights that are no checkpoint of ours.
        weight_files: paths of the files with weights.
        weight_map: name -> file, where an index says so.
    """

    directory: Path
    manifest: Manifest | None
    weight_files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None


def locate(path: str | os.PathLike[str]) -> Location:
    """Resolves a path to a checkpoint or to plain weights.

    Args:
        path: a checkpoint directory, its parent with a `latest` file, a Hugging Face model directory, or
            one safetensors file.

    Returns:
        What was found.

    Raises:
        ValueError: naming the path, if it is none of these or is an incomplete checkpoint.
    """
    found = checkpoint_directory(path)
    if found.is_file():
        return Location(found.parent, None, (found.name,))
    if not (found / MANIFEST_NAME).exists() and _is_plain_model(found):
        return _plain_model(found)
    manifest = Manifest.load(found)
    if manifest.pieces is not None:
        raise ValueError(
            f"{found}: a checkpoint of pieces; open it with open_any, or make an ordinary one of it with "
            "`zero-strategy checkpoint merge`"
        )
    files = dict.fromkeys(entry.file for entry in manifest.weights.values())
    weight_map = {name: entry.file for name, entry in manifest.weights.items()}
    return Location(found, manifest, tuple(files), weight_map)


def checkpoint_directory(path: str | os.PathLike[str], *, fall_back: bool = True) -> Path:
    """The path itself, or what its `latest` names, or what a cut-off replacement of it left.

    Args:
        path: what the user gave.
        fall_back: where `latest` names what is no complete checkpoint, warn and take the newest complete one beside it.

    Raises:
        ValueError: if there is nothing.
    """
    found = Path(os.path.abspath(path))
    if not found.exists():
        found = _moved_aside(found)
    latest = found / LATEST_NAME
    # A directory of that name, or a link to one, is somebody's own; anything else there is to be a file.
    if found.is_dir() and not (found / MANIFEST_NAME).exists() and latest.exists() and not latest.is_dir():
        found = _follow_latest(found, fall_back)
    return found


def parse_aliases(metadata: Mapping[str, str], source: str) -> dict[str, str]:
    """The tied names in the header metadata of a safetensors file.

    Only our own files have them; what another tool keeps under that key is ignored.
    """
    try:
        aliases = json.loads(metadata.get("aliases", "{}"))
    except ValueError:
        return {}
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        return {}
    return aliases


def _moved_aside(target: Path) -> Path:
    """The place of a checkpoint whose replacement was cut off between two renames."""
    for path in reversed(all_beside(target, "old")):
        if (path / MANIFEST_NAME).is_file():
            message = f"{target} is missing; reading what it was before a save that crashed: {path}"
            warnings.warn(message, stacklevel=2)
            return path
    raise ValueError(f"{target}: no such file or directory")


def _follow_latest(parent: Path, fall_back: bool) -> Path:
    name = read_text(parent / LATEST_NAME).strip()
    if not is_inner_path(name) or "/" in name:
        raise ValueError(f"{parent / LATEST_NAME}: {name!r} is not the name of a directory beside it")
    target = parent / name
    try:
        target = target if target.exists() else _moved_aside(target)
        if fall_back:
            Manifest.load(target)
    except ValueError as error:
        other = newest_complete(parent) if fall_back else None
        if other is None:
            raise
        message = f"{parent / LATEST_NAME} names {name}, which cannot be loaded ({error}); taking {other} instead"
        warnings.warn(message, stacklevel=4)
        return other
    return target


def newest_complete(parent: Path) -> Path | None:
    """The checkpoint whose manifest is the newest of those with all their files; names with a dot are unfinished."""
    manifests = [path / MANIFEST_NAME for path in parent.iterdir() if not path.name.startswith(".")]
    for manifest in sorted(filter(Path.is_file, manifests), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        try:
            Manifest.load(manifest.parent)
        except ValueError:
            continue
        return manifest.parent
    return None


def looks_saved(directory: Path) -> bool:
    """Whether a directory is a checkpoint of ours or has weights in it, complete or not."""
    files = (MANIFEST_NAME, INDEX_NAME, RECEIPTS_NAME, "optimizer")
    return any((directory / name).exists() for name in files) or any(
        any(directory.glob(pattern)) for pattern in ("*.safetensors", f"{FOLDER_PREFIX}*")
    )


def _is_plain_model(directory: Path) -> bool:
    # These two exist only in our checkpoints: without a manifest such a one is not plain but incomplete.
    if (directory / RECEIPTS_NAME).exists() or (directory / "optimizer").exists():
        return False
    return (directory / SINGLE_NAME).is_file() or (directory / INDEX_NAME).is_file()


def _plain_model(directory: Path) -> Location:
    if (directory / SINGLE_NAME).is_file():  # where both are there, Hugging Face's loaders take this one
        return Location(directory, None, (SINGLE_NAME,))
    source = str(directory / INDEX_NAME)
    weight_map = parse_object(read_regular(directory / INDEX_NAME), source).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{source}: has no weight_map")
    files = dict.fromkeys(weight_map.values())
    for file in files:
        if not is_inner_path(file):
            raise ValueError(f"{source}: {file!r} is not the path of a file beside it")
        if size_of(directory / file) is None:
            raise ValueError(f"{directory}: file {file} is missing")
    return Location(directory, None, tuple(files), weight_map)
