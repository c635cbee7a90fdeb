"""Folders of checkpoints: finding one, removing old ones, and what crashed saves left behind.

A temporary directory says who writes it, and so does a mark, a file that is there for a moment only. They go when
another save begins in the same folder and that process is gone for certain: it ran on this host, in this boot and in
this PID namespace, where its number is free or another process has it. In a container the same number is another
process, so whatever another namespace, boot or host left behind cannot be told from what it is still writing, and
stays, with a warning where it is likely to be a leftover.

What a checkpoint was before, and a directory that a host has sealed, have no such sign in them: from before that, until
they are removed, a mark of the save's token beside them says whose they are.

A folder is a checkpoint, its parent, a Hugging Face model, or one file.

A checkpoint is removed in two steps: it gets a name with a dot, which is no checkpoint any more, then its files go. A
crash between the two leaves no half checkpoint, and what it left goes at the next removal.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import uuid
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.disk import all_beside, beside, by_age, naming, remove, sync
from zero_strategy.checkpoint.layout import is_inner_path, parse_object
from zero_strategy.checkpoint.manifest import EXPORT, INDEX_NAME, LATEST_NAME, MANIFEST_NAME, RECEIPTS_NAME, Manifest
from zero_strategy.checkpoint.ranges import FOLDER_PREFIX, folder_of, rank_path
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_regular, read_text, size_of

OWNER_NAME = "owner.json"
MARK = ".seen"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"


def make_signed(directory: Path, *, exist_ok: bool = False) -> None:
    """Makes a directory, and its parents, and leaves this process's name in it.

    A kill in between leaves empty directories, which `remove_leftovers` removes, and might remove while they are new:
    they are made again.

    Raises:
        FileExistsError: If it is there, unless `exist_ok`.
    """
    mark = json.dumps(_this_process())  # before, so that there is next to no time in between
    while True:
        with suppress(FileNotFoundError):
            directory.mkdir(parents=True, exist_ok=exist_ok)
            # From here on it is this process's own, and may be there when it has to be made again.
            exist_ok = True
            with naming(directory / OWNER_NAME):
                (directory / OWNER_NAME).write_text(mark)
            return


def leave_mark(path: Path) -> None:
    """Writes a file that says that this process wrote it."""
    with naming(path):
        path.write_text(json.dumps(_this_process()))


def mark_name(token: str, rank: int) -> str:
    """A rank's mark in a folder of checkpoints, of a name that `remove_leftovers` knows."""
    return f"{MARK}.{token}.{rank}"


def remove_leftovers(parent: Path, receipts: str) -> None:
    """Removes what writers who are gone left behind, and warns of what may be a leftover and is kept.

    Args:
        parent: A folder of checkpoints.
        receipts: Name of the directory inside of a temporary one that its writer signed.
    """
    for path in parent.glob(".*.*.tmp"):
        _remove(path, _judge(path / receipts / OWNER_NAME))
        _remove_empty(path, receipts)
    for mark in parent.glob(f"{MARK}.*.*"):
        verdict = _judge(mark)
        for path in _marked(mark):
            if not (path / receipts / OWNER_NAME).exists() and not _may_be_needed(path):
                _remove(path, verdict)
        # Last, and not before all that it tells the owner of is gone.
        if not _marked(mark):
            _remove(mark, verdict)


def remove_leftovers_of(target: Path, receipts: str, keep: Collection[Path] = ()) -> None:
    """Removes what earlier saves of one checkpoint left behind: those of writers who are gone, and this process's.

    Args:
        target: The checkpoint that is saved next.
        receipts: Name of the directory inside of a temporary one that its writer signed.
        keep: Those that stay.
    """
    for path in all_beside(target, "tmp"):
        if path not in keep:
            verdict = _judge(path / receipts / OWNER_NAME)
            # A process saves a checkpoint once at a time: what it has left there is of a save that failed.
            _remove(path, verdict._replace(gone=verdict.gone or verdict.own))
            _remove_empty(path, receipts)
            if verdict.own:
                release_marks(path)


def release_marks(path: Path) -> None:
    """Removes the marks of the save that a directory is, or was, of; they stay while something of it is left."""
    for mark in _marks(path):
        if not _marked(mark):
            remove(mark)


def undecided(parent: Path) -> list[Path]:
    """Directories of saves in pieces that are sealed and that no host has renamed, nor ever will; for rank 0.

    Rank 0 is the first to rename. So where its piece is in such a directory and its process is gone, nobody has.
    """
    return [
        path
        for path in parent.glob(".*.*.tmp")
        if (path / MANIFEST_NAME).is_file()
        and (path / rank_path(folder_of(_token_of(path)), 0)).is_file()
        and any(_judge(mark).gone for mark in _marks(path))
    ]


def _token_of(path: Path) -> str:
    """The token of `.{target}.{token}.{suffix}`."""
    return path.name.split(".")[-2]


def _marks(path: Path) -> list[Path]:
    """The marks beside a save's directory."""
    return list(path.parent.glob(f"{MARK}.{glob.escape(_token_of(path))}.*"))


def _marked(mark: Path) -> list[Path]:
    """All beside a mark that is of its save."""
    token = glob.escape(_token_of(mark))
    return [path for suffix in ("tmp", "old") for path in mark.parent.glob(f".*.{token}.{suffix}")]


def _may_be_needed(path: Path) -> bool:
    """True for what may be the only copy of a checkpoint, though its process is gone."""
    token = _token_of(path)
    if path.suffix == ".old":  # between two renames there is no target
        return not os.path.lexists(path.with_name(path.name[1:].removesuffix(f".{token}.old")))
    # Sealed and not renamed: other hosts may have renamed theirs.
    return (path / folder_of(token)).is_dir()


class _Verdict(NamedTuple):
    """Verdict on a mark's process: it has ended, it is this one, or why that cannot be known (to warn of)."""

    gone: bool = False
    own: bool = False
    doubt: str = ""


def _remove(path: Path, verdict: _Verdict) -> None:
    if verdict.gone:
        remove(path)
    elif verdict.doubt:
        warnings.warn(
            f"{path} may be what a killed save left behind, or a save under way: {verdict.doubt}. It is kept; remove "
            "it when no job saves into this folder",
            stacklevel=4,
        )


def _remove_empty(path: Path, receipts: str) -> None:
    """Removes the directories that a writer made who was killed before it signed them: nothing is in them."""
    for directory in (path / receipts, path):
        # `rmdir` refuses what has anything in it, which may be somebody's.
        with suppress(OSError):
            directory.rmdir()


def _judge(mark: Path) -> _Verdict:
    try:
        owner = bounded_json.parse(read_text(mark), str(mark))
        pid, same_host = int(owner["pid"]), owner["host"] == socket.gethostname()
        started, boot, namespace = str(owner["started"]), owner.get("boot"), owner.get("pid_namespace")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Verdict()  # not signed yet, or none of ours
    here = _this_process()
    # No warning: on a shared file system other hosts' saves are mostly under way.
    if not same_host:
        return _Verdict()
    if owner == here:
        return _Verdict(own=True)
    if not (boot and namespace):
        return _Verdict(doubt="its mark does not say in which boot and PID namespace its process ran")
    if boot != here["boot"]:
        return _Verdict(doubt="its process ran in another boot, or on another machine of this name")
    if namespace != here["pid_namespace"]:
        return _Verdict(doubt="its process ran in another container (PID namespace), whose processes are not seen here")
    now = _started(pid)
    if now == _UNKNOWN or started == _UNKNOWN:
        return _Verdict(doubt=f"process {pid} cannot be looked at")
    # The same number with another start is another process.
    return _Verdict(gone=now != started)


def _this_process() -> dict[str, int | str]:
    """Identity of this process among all that ever ran on hosts of this name; "" for what cannot be known."""
    pid = os.getpid()
    boot = namespace = ""
    try:
        boot = _BOOT_ID.read_text().strip()
        if int(os.readlink("/proc/self")) == pid:  # else /proc shows the processes of another namespace
            namespace = os.readlink("/proc/self/ns/pid")
    except (OSError, ValueError):
        pass
    return {
        "host": socket.gethostname(),
        "boot": boot,
        "pid_namespace": namespace,
        "pid": pid,
        "started": _started(pid) or _UNKNOWN,
    }


def _started(pid: int) -> str | None:
    """Start of a process, for numbers are used again: ticks since the boot; None if there is no process."""
    try:
        # Field 22 of proc(5), counted behind the name, in which anything may be, parentheses too.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        pass
    try:  # another user's may be hidden
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):
        pass
    return _UNKNOWN


SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Location:
    """Place of weights.

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
        found = _moved_to_shadow(found)
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
        aliases = bounded_json.parse(metadata.get("aliases", "{}"), source)
    except ValueError:
        return {}
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        return {}
    return aliases


def _moved_to_shadow(target: Path) -> Path:
    """The place of a checkpoint whose replacement was cut off between two renames."""
    # The newest: earlier ones are of earlier crashes.
    for path in reversed(all_beside(target, "old")):
        if (path / MANIFEST_NAME).is_file():
            message = f"{target} is missing; reading what it was before a save that crashed: {path}"
            warnings.warn(message, stacklevel=2)
            return path
    raise ValueError(f"{target}: no such file or directory")


def _follow_latest(parent: Path, fall_back: bool) -> Path:
    name = read_text(parent / LATEST_NAME).strip()
    # What anybody may have written leads nowhere else.
    if not is_inner_path(name) or "/" in name:
        raise ValueError(f"{parent / LATEST_NAME}: {name!r} is not the name of a directory beside it")
    target = parent / name
    try:
        target = target if target.exists() else _moved_to_shadow(target)
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
    for manifest in reversed(by_age(filter(Path.is_file, manifests))):
        try:
            Manifest.load(manifest.parent)
        # Damaged, or removed while it was looked at.
        except (ValueError, FileNotFoundError):
            continue
        return manifest.parent
    return None


def looks_saved(directory: Path) -> bool:
    """True if a directory is a checkpoint of ours or has weights in it, complete or not."""
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


_SUFFIX = "removed"
_OWN, _PUBLISHED = "zero_strategy", "publication.json"


@dataclass(frozen=True)
class Found:
    """A checkpoint in a folder.

    Attributes:
        path: Its directory.
        step: Optimizer steps taken, if it says so.
        saved_at: When it was completed, in nanoseconds; only the order matters.
        complete: Whether its manifest is valid and all its files are there.
        is_latest: Whether `latest` names it.
        bytes: Its size.
        is_export: Whether it is weights for others, which are neither counted nor removed.
    """

    path: Path
    step: int | None
    saved_at: int
    complete: bool = True
    is_latest: bool = False
    bytes: int = 0
    is_export: bool = False


def which_to_remove(checkpoints: Sequence[Found], keep_last: int, keep_every: int = 0) -> list[Found]:
    """Chooses, without looking at any file.

    Only complete checkpoints of a training count, and only they are chosen. The newest complete one and the one that
    `latest` names always stay.

    Args:
        checkpoints: All of a folder.
        keep_last: How many of the newest stay; 0 keeps all.
        keep_every: Those whose step is a multiple of this stay, too; 0 keeps none for its step.

    Returns:
        Those that may go, oldest first.

    Raises:
        ValueError: If a number is negative.
    """
    if keep_last < 0 or keep_every < 0:
        raise ValueError(f"keep_last={keep_last} and keep_every={keep_every} must not be negative")
    if keep_last == 0:
        return []
    complete = sorted((found for found in checkpoints if found.complete and not found.is_export), key=_age)
    return [found for found in complete[:-keep_last] if not found.is_latest and not _is_kept(found, keep_every)]


def is_export(manifest: Manifest) -> bool:
    """True of weights for others: `save_pretrained`, published versions."""
    own = manifest.user.get(_OWN)
    # By its file: versions that were published before there was the entry.
    return (isinstance(own, Mapping) and bool(own.get(EXPORT))) or _PUBLISHED in manifest.files


def find_checkpoints(directory: str | os.PathLike[str]) -> list[Found]:
    """All checkpoints of ours in a folder, oldest first, those that are not complete included.

    What has no manifest is none of ours, or is still being written, and is left out.
    """
    parent = Path(directory)
    latest = _latest(parent)
    found = []
    for path in parent.iterdir():
        # A link, such as `last`, is another name of a checkpoint that is found by its own.
        if path.name.startswith(".") or path.is_symlink() or not (path / MANIFEST_NAME).is_file():
            continue
        try:
            saved_at = (path / MANIFEST_NAME).stat().st_mtime_ns
        except FileNotFoundError:  # removed meanwhile
            continue
        try:
            manifest = Manifest.load(path)
        # Listed as incomplete: such a one neither counts as kept nor is it removed.
        except (ValueError, OSError):
            found.append(Found(path, None, saved_at, complete=False, is_latest=path.name == latest))
            continue
        step = manifest.counters.get("global_steps")
        size, step = sum(manifest.files.values()), step if type(step) is int else None
        found.append(Found(path, step, saved_at, True, path.name == latest, size, is_export(manifest)))
    return sorted(found, key=_age)


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Removes checkpoints, and what earlier removals in their folders left behind in a crash.

    Raises:
        OSError: If one cannot be renamed; those before it are gone, it and those after it are whole.
    """
    parents = set()
    for path in paths:
        aside = beside(path, uuid.uuid4().hex[:12], _SUFFIX)
        os.rename(path, aside)
        # Before its files go: a loss of power must not bring the name back with half of them.
        sync(path.parent)
        remove(aside)
        parents.add(path.parent)
    for parent in parents:
        # Only names that a removal has given, which nobody opens any more: also those of another process.
        for left in parent.glob(f".*.{_SUFFIX}"):
            remove(left)


def prune(directory: str | os.PathLike[str], keep_last: int, keep_every: int = 0) -> list[Found]:
    """Removes what `which_to_remove` chooses in a folder; returns it."""
    chosen = which_to_remove(find_checkpoints(directory), keep_last, keep_every)
    remove_checkpoints(found.path for found in chosen)
    return chosen


def _age(found: Found) -> tuple[int, int, str]:
    return found.saved_at, -1 if found.step is None else found.step, found.path.name


def _is_kept(found: Found, keep_every: int) -> bool:
    return keep_every > 0 and found.step is not None and found.step % keep_every == 0


def _latest(parent: Path) -> str | None:
    try:
        return read_text(parent / LATEST_NAME).strip()
    except (OSError, ValueError):
        return None
