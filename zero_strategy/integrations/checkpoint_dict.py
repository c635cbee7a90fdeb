"""The framework's checkpoint dict beside the engine's files, and back.

A checkpoint directory holds weights and optimizer state as safetensors, written by the engine. All else that Lightning
(or Fabric) puts into its checkpoint dict goes into one small file of its own there, written by `torch.save`.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from zero_strategy.checkpoint import StateReader
from zero_strategy.checkpoint.disk import beside, remove, replace_directory, sync
from zero_strategy.checkpoint.storage import is_remote, is_remote_checkpoint
from zero_strategy.checkpoint.writer import check_replaceable
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.extra_state import EXTRA_KEY, extra_state, load_extra_state
from zero_strategy.integrations.on_demand import StateOnDemand, whole

LIGHTNING_FILE = "lightning.pt"
"""The rest of the Trainer's checkpoint dict."""

FABRIC_FILE = "fabric.pt"
"""The rest of the state dict given to `Fabric.save`."""


@dataclass(frozen=True)
class StoredWeights:
    """Place of the weights of a checkpoint dict.

    Attributes:
        reader: The directory.
        extra: What the module's state dict holds besides tensors.
    """

    reader: StateReader
    extra: Mapping[str, Any]

    def whole(self) -> dict[str, Any]:
        """The whole state dict, every tensor under every name it has, tied names sharing one."""
        weights = {name: self.reader.full(name) for name in self.reader.weights}
        aliases = {alias: weights[first] for alias, first in self.reader.aliases.items()}
        return {**weights, **aliases, **self.extra}

    def load_into(self, engine: ZeroEngine, strict: bool) -> None:
        """Read each rank's part into live shards."""
        engine.load_weights(self.reader, strict=strict)
        load_extra_state(engine.module, self.extra)


_ENGINE = "zero_strategy"
"""The engine's own entry in the manifest's user metadata."""


def is_directory_checkpoint(path: str | os.PathLike[str]) -> bool:
    """True if `path` is for `CheckpointReader`: a directory, or one safetensors file."""
    if is_remote(path):
        return is_remote_checkpoint(os.fspath(path))
    found = Path(path)
    return found.is_dir() or found.suffix == ".safetensors"


def pack(rest: Mapping[str, Any], module: nn.Module) -> bytes:
    """The rest of a checkpoint dict, and what only the module itself knows how to save, as a file's content."""
    buffer, extra = io.BytesIO(), extra_state(module)
    torch.save({**whole(dict(rest)), **({EXTRA_KEY: extra} if extra else {})}, buffer)
    return buffer.getvalue()


def write_file(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a whole checkpoint dict as one file, in the place of a file or of a checkpoint directory.

    Raises:
        ValueError: If the path is a directory and no checkpoint.
        OSError: If the file system fails; what was there stays.
    """
    target, token = Path(os.path.abspath(path)), uuid.uuid4().hex[:12]
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(target, token, "tmp")
    try:
        torch.save(dict(checkpoint), temporary)
        sync(temporary)
        replace_directory(temporary, target, beside(target, token, "old"))
    finally:
        remove(temporary)


def unpack(content: bytes, source: str, weights_only: bool | None) -> dict[str, Any]:
    """The rest of a checkpoint dict.

    Args:
        content: What `pack` gave.
        source: Its file, for errors.
        weights_only: False allows arbitrary pickled objects; None means True, as in torch.

    Raises:
        UnpicklingError: If it holds such objects and they are not allowed; names them and the ways out.
    """
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=weights_only is not False)
    except UnpicklingError as error:
        raise UnpicklingError(
            f"{source} holds objects (hyper-parameters or callback state) that are not plain data: {error}. If you "
            "trust it, allow their classes with torch.serialization.add_safe_globals([...]), or allow everything with "
            "ZeroStrategy(load_weights_only=False)."
        ) from None
    return dict(found)


def read_checkpoint(
    path: str | os.PathLike[str], weights_only: bool | None, *, verify: bool = True
) -> dict[str, Any]:
    """The Trainer's checkpoint dict from a directory; weights and optimizer state come when they are looked into.

    `verify`: compare checksums.

    Raises:
        ValueError: If the directory is no complete checkpoint; names what is wrong.
    """
    reader = open_any(path, verify=verify)
    rest: dict[str, Any] = {}
    if reader.has_manifest and LIGHTNING_FILE in reader.manifest.files:
        rest = unpack(reader.extra(LIGHTNING_FILE), f"{reader.directory}/{LIGHTNING_FILE}", weights_only)
    rest.setdefault("pytorch-lightning_version", "2.6.0")  # plain weights: nothing to migrate
    rest["state_dict"] = weights_on_demand(reader, rest)
    if reader.has_manifest and reader.manifest.optimizers:
        rest["optimizer_states"] = [
            StateOnDemand(lambda name=name: whole_optimizer_state(reader, name), nested=True, source=reader)  # type: ignore[misc]
            for name in sorted(reader.manifest.optimizers, key=int)
        ]
    return rest


def weights_on_demand(reader: StateReader, rest: dict[str, Any]) -> StateOnDemand:
    """The state dict of a checkpoint; its extra state moves there from `rest`."""
    stored = StoredWeights(reader, rest.pop(EXTRA_KEY, {}))
    return StateOnDemand(stored.whole, source=stored)


def whole_optimizer_state(reader: StateReader, optimizer: str) -> dict[str, Any]:
    """An optimizer's whole state in the form of torch's `Optimizer.state_dict()`, master weights left out."""
    record, states = reader.manifest.optimizers[optimizer], reader.states(optimizer)
    dtypes = dict(reader.manifest.user.get(_ENGINE, {}).get("scalar_dtypes", {})[int(optimizer)])
    numbers: dict[str, int] = {}
    groups = []
    for stored in record.param_groups:
        for name in stored["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**stored, "params": [numbers[name] for name in stored["params"]]})
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        values: dict[str, Any] = {
            key: torch.tensor(value, dtype=getattr(torch, dtypes[key])) if key in dtypes else value
            for key, value in record.scalars.get(name, {}).items()
        }
        for kind, specs in states.items():
            if kind != "master" and name in specs:
                values[kind] = reader.full(name, (optimizer, kind))
        if values:
            state[number] = values
    return {"state": state, "param_groups": groups}


def describe(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Summary of the rest for a reader of the manifest."""
    known = ("epoch", "global_step", "pytorch-lightning_version")
    return {"lightning": {key: rest[key] for key in known if isinstance(rest.get(key), (int, str))}}


def check_options(path: str, storage_options: Any) -> None:
    """Raise if a checkpoint cannot be written as asked.

    Raises:
        ValueError: For options that only a `CheckpointIO` has a use for.
    """
    if storage_options is not None:
        raise ValueError(
            f"{path}: storage_options={storage_options!r}: a checkpoint directory is written by all ranks themselves "
            "and has no use for them. For a URL give options to fsspec (its configuration or environment variables), "
            "or pass plugins=[a CheckpointIO] to save one whole file through it."
        )
