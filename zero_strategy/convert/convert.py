"""Conversion from any checkpoint to any other, the registry of foreign formats, and opening any of them.

Each module here has `detect(path: Path) -> bool`, `read(path: Path, **options) -> PortableState`, or
`write(state: PortableState, path: Path, **options) -> None`, or all of them. They are imported when they are asked for.

A checkpoint is this package's, plain Hugging Face weights, or another library's.

One module reads it, another writes it, tensor by tensor.
"""

from __future__ import annotations

import inspect
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from zero_strategy.checkpoint.disk import beside, remove, sync
from zero_strategy.checkpoint.folders import checkpoint_directory, looks_saved, newest_complete
from zero_strategy.checkpoint.layout import TensorSpec, is_inner_path
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.plan import DEFAULT_MAX_FILE_BYTES
from zero_strategy.checkpoint.ranges import FOLDER_PREFIX
from zero_strategy.checkpoint.reader import CheckpointReader, StateReader
from zero_strategy.checkpoint.storage import Folder, RemoteFolder, is_remote, newest_complete_at, remote_checkpoint
from zero_strategy.convert.portable import (
    PortableReader,
    PortableState,
    Progress,
    StoredTensor,
    loaded,
    portable_of,
    without_averages,
    write_portable,
)
from zero_strategy.quantized.entries import check_foreign, kept_in_dtype
from zero_strategy.runtime.regular_files import read_text

_HERE = "zero_strategy.convert"


LIGHTNING = "lightning"
"""The one foreign format that has running averages."""


@dataclass(frozen=True)
class Format:
    """One foreign format.

    Attributes:
        name: As on the command line.
        module: Where its functions are.
        what: One line for people.
        reads: Whether `read` exists.
        writes: Whether `write` exists.
        whole: Whether it lets its target appear whole or not at all.
    """

    name: str
    module: str
    what: str
    reads: bool = True
    writes: bool = False
    whole: bool = False

    def load(self) -> ModuleType:
        """The module.

        Raises:
            ImportError: If it, or a library that it needs, is missing.
        """
        return import_module(f"{_HERE}.{self.module}")


_ALL = (
    Format("deepspeed-universal", "universal", "DeepSpeed's universal checkpoint", writes=True, whole=True),
    Format("deepspeed", "deepspeed", "a checkpoint of DeepSpeed: any ZeRO stage, pipelines, tensor parallel ranks"),
    Format("accelerate", "accelerate", "a state directory of Accelerate: DDP or FSDP"),
    Format(LIGHTNING, "lightning", "a checkpoint of Lightning: .ckpt, or a directory of FSDP (read)", writes=True),
    Format("dcp", "dcp", "a directory of torch.distributed.checkpoint", writes=True),
    Format("torch", "torch_file", "a file of torch.save with a state dict and, maybe, optimizer states", writes=True),
)

FORMATS: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in _ALL})
"""By name, in the order in which they are detected: one that contains another comes first."""


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: If there is none; lists those there are.
    """
    if name not in FORMATS:
        raise ValueError(f"unknown checkpoint format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def detect(path: Path) -> Format | None:
    """The foreign format that a path has, or None."""
    for entry in _ALL:
        if not entry.reads:
            continue
        try:
            module = entry.load()
        except ModuleNotFoundError as error:
            if error.name != f"{_HERE}.{entry.module}":
                raise
            continue
        if module.detect(path):
            return entry
    return None


NATIVE = "native"
"""The name of our own format; plain safetensors weights belong to it."""


def open_any(
    path: str | os.PathLike[str], verify: bool = True, source: str | None = None, **options: Any
) -> StateReader:
    """Opens a checkpoint.

    Args:
        path: A directory or a file.
        verify: Compare checksums, where the checkpoint has any: ours.
        source: The format, one of `FORMATS` or "native"; None finds it out.
        options: For the format's `read`, such as `tag`.

    Raises:
        ValueError: Naming the path, if there is nothing, it is damaged, or is of no known format.
    """
    if is_remote(path):
        return open_remote(os.fspath(path), verify=verify)
    entry = foreign_format(path) if source is None else None if source == NATIVE else format_named(source)
    if entry is None:
        return open_native(path, verify=verify)
    if not entry.reads:
        raise ValueError(f"{os.fspath(path)}: the format {entry.name!r} can be written only")
    found = Path(os.path.abspath(path))
    if not found.exists():
        raise ValueError(f"{found}: no such file or directory")
    return PortableReader(entry.load().read(found, **options), found)


def open_native(path: str | os.PathLike[str], *, verify: bool = True) -> StateReader:
    """Opens a checkpoint of ours, in ordinary files or in pieces, or plain weights.

    Raises:
        ValueError: As `CheckpointReader`.
    """
    found = checkpoint_directory(path)
    if found.is_dir() and any(found.glob(f"{FOLDER_PREFIX}*")):
        manifest = Manifest.load(found)
        if manifest.pieces is not None:
            return PieceReader(Folder(found), manifest, found, verify=verify)
    return CheckpointReader(found, verify=verify)


def open_remote(url: str, *, verify: bool = True) -> PieceReader:
    """Opens a checkpoint in an object store.

    Raises:
        ValueError: If there is none at the URL, or it is not one of pieces.
        ImportError: If fsspec, or what it needs for the URL, is not installed.
    """
    folder, manifest = remote_checkpoint(RemoteFolder(url))
    return PieceReader(folder, manifest, folder.url, verify=verify)


def state_of(reader: StateReader) -> PortableState:
    """The portable state behind an open checkpoint."""
    if isinstance(reader, PortableReader):
        return reader.state
    return portable_of(reader)


def checkpoint_in(path: str | os.PathLike[str]) -> str | None:
    """Checkpoint of a folder, or of a checkpoint itself, for callers that name none in it.

    Returns:
        "" for the path itself: a file, a folder with `latest`, or a checkpoint of any kind, be it damaged. Of a folder
        without `latest` (a first save that was killed right before it wrote that) the name of the newest complete
        checkpoint in it. None if there is nothing, or other things only, such as logs.

    Raises:
        OSError: If it cannot be looked into.
    """
    if is_remote(path):
        folder = RemoteFolder(os.fspath(path))
        names = folder.names()
        if MANIFEST_NAME in names or LATEST_NAME in names:
            return ""
        newest = newest_complete_at(folder)
        return None if newest is None else newest[0].url.rpartition("/")[2]
    found = Path(path)
    if not found.is_dir():
        return "" if found.exists() else None
    if (found / LATEST_NAME).is_file() or looks_saved(found) or foreign_format(found) is not None:
        return ""
    complete = newest_complete(found)
    return None if complete is None else complete.name


def foreign_format(path: str | os.PathLike[str]) -> Format | None:
    """The foreign format of a path; None if it is ours, plain weights, or nothing that is known."""
    found = Path(path)
    if not found.exists() or found.suffix == ".safetensors" or _is_ours(found):
        return None
    return detect(found)


def _is_ours(found: Path) -> bool:
    """True if it is a checkpoint of ours, or the folder of one; others have a file `latest`, too."""
    if (found / MANIFEST_NAME).exists():
        return True
    try:
        named = read_text(found / LATEST_NAME).strip()
    except (OSError, ValueError):
        return False
    return is_inner_path(named) and (found / named / MANIFEST_NAME).is_file()


HF = "hf"
"""Hugging Face: safetensors files and their index, nothing else."""

TARGETS = (NATIVE, HF, *(name for name, entry in FORMATS.items() if entry.writes))
SOURCES = (NATIVE, *(name for name, entry in FORMATS.items() if entry.reads))

_BESIDE = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt")
"""What a Hugging Face model has beside its weights, and goes along to another directory of that kind."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    from_format: str | None = None,
    to_format: str = NATIVE,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    weights_only: bool = False,
    names: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> PortableState:
    """Converts a checkpoint; the target appears whole or not at all.

    Args:
        source: A checkpoint of any kind.
        target: The new one; nothing of that name exists.
        from_format: One of `SOURCES`; None finds it out.
        to_format: One of `TARGETS`.
        dtype: Dtype of floating-point weights; see `cast_weights`.
        max_file_bytes: Most bytes of tensor data in one weights file, where the target has several.
        weights_only: Leave all but the weights out.
        names: Of the first optimizer's parameters in its order, where the source does not say them.
        options: For the source's reader, such as {"tag": ...}.
        progress: Is given the bytes that will be written, and returns what is told of each part.

    Returns:
        What was written.

    Raises:
        ValueError: If the target exists, a format is unknown, an option has no meaning for it, or the source
            is damaged.
        OSError: If the file system fails.
    """
    place = free_place(target, to_format)
    state = read_state(source, from_format, dict(options or {}), weights_only)
    if to_format != NATIVE:
        check_foreign(state.weights, f"a checkpoint of the form {to_format!r}")
    if names is not None and state.optimizers:
        state.optimizers[0] = state.optimizers[0].with_names(names, state.weights)
    if weights_only or to_format == HF:
        state = PortableState(weights=state.weights, aliases=state.aliases)
    if dtype is not None:
        state = cast_weights(state, dtype)
    if unnamed := [optimizer.unnamed for optimizer in state.optimizers if optimizer.unnamed]:
        raise ValueError(unnamed[0])
    total = sum(tensor.spec.nbytes for _, tensor in state.tensors())
    write_state(state, place, to_format, max_file_bytes, progress(total) if progress else None, Path(source))
    return state


def free_place(target: str | os.PathLike[str], to_format: str) -> Path:
    """Place of a new checkpoint.

    Raises:
        ValueError: If there is something, or no such format.
    """
    place = Path(os.path.abspath(target))
    if to_format not in TARGETS:
        raise ValueError(f"cannot write {to_format!r}; known: {', '.join(TARGETS)}")
    if os.path.lexists(place):
        raise ValueError(f"{place} exists; it will not be overwritten: remove it, or give another name")
    return place


def cast_weights(state: PortableState, dtype: torch.dtype) -> PortableState:
    """A state with floating-point weights of another dtype; other weights stay, and quantised ones with their scales.

    Nothing that an optimizer needs is lost: fp32 weights that become narrower are kept as its master weights, and
    master weights become the weights again where these become fp32.
    """
    optimizers = [
        replace(optimizer, kinds={kind: dict(tensors) for kind, tensors in optimizer.kinds.items()})
        for optimizer in state.optimizers
    ]
    weights = dict(state.weights)
    trained = {name: o for o in optimizers for group in o.param_groups for name in group["params"]}
    kept = kept_in_dtype(weights)
    for name, tensor in state.weights.items():
        if not tensor.spec.dtype.is_floating_point or tensor.spec.dtype == dtype or name in kept:
            continue
        weights[name] = _cast(tensor, dtype)
        if name not in trained:
            continue
        masters = trained[name].kinds.setdefault("master", {})
        if dtype == torch.float32:
            weights[name] = masters.pop(name, weights[name])
        elif tensor.spec.dtype == torch.float32:
            masters[name] = tensor
    for optimizer in optimizers:
        if not optimizer.kinds.get("master", True):
            del optimizer.kinds["master"]
        if "master" in optimizer.kinds:
            order = [name for name in weights if name in optimizer.kinds["master"]]
            optimizer.kinds["master"] = {name: optimizer.kinds["master"][name] for name in order}
    return replace(state, weights=weights, optimizers=optimizers)


def _cast(tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    spec = tensor.spec
    return StoredTensor(TensorSpec(spec.name, dtype, spec.shape), lambda: loaded(tensor).to(dtype))


def read_state(
    source: str | os.PathLike[str], from_format: str | None, options: dict[str, Any], weights_only: bool
) -> PortableState:
    if from_format is None:
        entry = foreign_format(source)
    else:
        entry = None if from_format == NATIVE else format_named(from_format)
    if entry is None:
        if tag := options.pop("tag", None):
            source = Path(source) / str(tag)
        if options:
            raise ValueError(f"{source}: {sorted(options)} have no meaning for the format {NATIVE!r}")
        return state_of(open_any(source, source=NATIVE))
    known = inspect.signature(entry.load().read).parameters
    if unknown := [key for key in options if key not in known]:
        raise ValueError(f"{os.fspath(source)}: {unknown} have no meaning for the format {entry.name!r}")
    if weights_only and "weights_only" in known:
        options["weights_only"] = True
    return state_of(open_any(source, source=entry.name, **options))


def write_state(
    state: PortableState, place: Path, to_format: str, max_file_bytes: int, progress: Progress | None, source: Path
) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if to_format == NATIVE:
        write_portable(state, place, max_file_bytes=max_file_bytes, progress=progress)
        return
    if to_format != HF and format_named(to_format).whole:
        _write_foreign(state, place, to_format, progress)
        return
    temporary = beside(place, uuid.uuid4().hex[:12], "tmp")
    try:
        if to_format == HF:
            _write_hf(state, temporary, max_file_bytes, progress, source)
        else:
            _write_foreign(state, temporary, to_format, progress)
        for path in [temporary, *(temporary.rglob("*") if temporary.is_dir() else ())]:
            sync(path)
        os.rename(temporary, place)
        sync(place.parent)
    finally:
        remove(temporary)


def _write_foreign(state: PortableState, place: Path, to_format: str, progress: Progress | None) -> None:
    write, state = format_named(to_format).load().write, state if to_format == LIGHTNING else without_averages(state)
    told = {"progress": progress} if "progress" in inspect.signature(write).parameters else {}
    write(state, place, **told)


def _write_hf(state: PortableState, place: Path, max_file_bytes: int, progress: Progress | None, source: Path) -> None:
    """Our checkpoint of the weights without its manifest, and the model's config if the source has it."""
    from zero_strategy.checkpoint.manifest import MANIFEST_NAME

    write_portable(state, place, max_file_bytes=max_file_bytes, progress=progress)
    (place / MANIFEST_NAME).unlink()
    for pattern in _BESIDE if source.is_dir() else ():
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, place / file.name)
