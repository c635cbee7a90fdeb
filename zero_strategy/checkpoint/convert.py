"""From any checkpoint to any other: read by one module, written by another, tensor by tensor."""

from __future__ import annotations

import inspect
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.interop import FORMATS, format_named
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.open_any import NATIVE, foreign_format, open_any, state_of
from zero_strategy.checkpoint.plan import DEFAULT_MAX_FILE_BYTES
from zero_strategy.checkpoint.portable import (
    PortableState,
    Progress,
    StoredTensor,
    loaded,
    write_portable,
)
from zero_strategy.checkpoint.replace import beside, remove, sync

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
    place = Path(os.path.abspath(target))
    if to_format not in TARGETS:
        raise ValueError(f"cannot write {to_format!r}; known: {', '.join(TARGETS)}")
    if os.path.lexists(place):
        raise ValueError(f"{place} exists; it will not be overwritten: remove it, or give another name")
    state = _read(source, from_format, dict(options or {}), weights_only)
    if names is not None and state.optimizers:
        state.optimizers[0] = state.optimizers[0].with_names(names, state.weights)
    if weights_only or to_format == HF:
        state = PortableState(weights=state.weights, aliases=state.aliases)
    if dtype is not None:
        state = cast_weights(state, dtype)
    if unnamed := [optimizer.unnamed for optimizer in state.optimizers if optimizer.unnamed]:
        raise ValueError(unnamed[0])
    total = sum(tensor.spec.nbytes for _, tensor in state.tensors())
    _write(state, place, to_format, max_file_bytes, progress(total) if progress else None, Path(source))
    return state


def cast_weights(state: PortableState, dtype: torch.dtype) -> PortableState:
    """The same state with floating-point weights of another dtype; other weights stay.

    Nothing that an optimizer needs is lost: fp32 weights that become narrower are kept as its master weights, and
    master weights become the weights again where these become fp32.
    """
    optimizers = [
        replace(optimizer, kinds={kind: dict(tensors) for kind, tensors in optimizer.kinds.items()})
        for optimizer in state.optimizers
    ]
    weights = dict(state.weights)
    trained = {name: o for o in optimizers for group in o.param_groups for name in group["params"]}
    for name, tensor in state.weights.items():
        if not tensor.spec.dtype.is_floating_point or tensor.spec.dtype == dtype:
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


def _read(
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


def _write(
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
    write = format_named(to_format).load().write
    told = {"progress": progress} if "progress" in inspect.signature(write).parameters else {}
    write(state, place, **told)


def _write_hf(
    state: PortableState, place: Path, max_file_bytes: int, progress: Progress | None, source: Path
) -> None:
    """Our checkpoint of the weights without its manifest, and the model's config if the source has it."""
    from zero_strategy.checkpoint.manifest import MANIFEST_NAME

    write_portable(state, place, max_file_bytes=max_file_bytes, progress=progress)
    (place / MANIFEST_NAME).unlink()
    for pattern in _BESIDE if source.is_dir() else ():
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, place / file.name)
