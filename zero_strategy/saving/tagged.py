"""Checkpoints by tag: `save_dir/tag`, with `latest` naming the last one, and the user's own state with them.

Arguments and results are DeepSpeed's `save_checkpoint` and `load_checkpoint` (DeepSpeed API 0.3, chapter 4.1).
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch

from zero_strategy.checkpoint import LATEST_NAME
from zero_strategy.checkpoint.remote import RemoteFolder, is_remote, join

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader
    from zero_strategy.saving.checkpointing import CheckpointingEngine
    from zero_strategy.saving.job import PendingSave

CLIENT_FILE = "client_state.pt"
"""torch.save({"client_state": dict, "lr_scheduler": dict or None})"""


def save_checkpoint(
    engine: CheckpointingEngine,
    save_dir: str | os.PathLike[str],
    tag: str | int | None,
    client_state: Mapping[str, Any],
    save_latest: bool,
    *,
    lr_scheduler: Any = None,
    asynchronous: bool = False,
    frozen: Literal["store", "reference"] | None = None,
) -> PendingSave:
    """Write the checkpoint `save_dir/tag`; all ranks call it.

    Args:
        engine: Whose state.
        save_dir: The folder of checkpoints; it is made if need be.
        tag: The checkpoint's name, equal on all ranks; None for `global_step{n}`, n steps having been taken.
        client_state: The user's own state, of tensors and plain data; rank 0's is saved.
        save_latest: Let `latest` in the folder name this checkpoint.
        lr_scheduler: Its `state_dict()` is saved too.
        asynchronous: See `ZeroEngine.save`.
        frozen: See `ZeroEngine.save`.

    Raises:
        ValueError: If the tag is no name of a folder.
        TypeError: If the client state holds what cannot be loaded safely; names it.
        RendezvousError: If ranks come with different tags, or do not come.
    """
    name = f"global_step{engine.steps.taken}" if tag is None else str(tag)
    _check_tag(name)
    content = pack_client_state(dict(client_state), None if lr_scheduler is None else lr_scheduler.state_dict())
    return engine.save(
        join(save_dir, name),
        extra_files={CLIENT_FILE: content},
        update_latest=save_latest,
        asynchronous=asynchronous,
        frozen=frozen,
    )


def load_checkpoint(
    engine: CheckpointingEngine,
    load_dir: str | os.PathLike[str],
    tag: str | int | None,
    strict: bool,
    optimizers: bool,
    schedulers: bool,
    *,
    checkpoint_in: Callable[[str], str | None],
    lr_scheduler: Any = None,
) -> tuple[str | None, dict[str, Any]]:
    """Load the checkpoint `load_dir/tag`; all ranks call it.

    Args:
        engine: Whose state.
        load_dir: The folder of checkpoints, or one checkpoint.
        tag: The checkpoint's name; None for the one that `latest` names.
        strict: Missing and unexpected names are errors.
        optimizers: Load optimizer state, counters and random state.
        schedulers: Load the scheduler's state.
        checkpoint_in: Finds a checkpoint of any kind in a folder; see `open_any.checkpoint_in`.
        lr_scheduler: What takes it.

    Returns:
        (path of the checkpoint, client state); (None, {}) with a warning where there is none.

    Raises:
        ValueError: If the checkpoint is damaged, or not one of this model.
    """
    engine.saver.wait()
    source = os.fspath(load_dir) if tag is None else join(load_dir, str(tag))
    engine.mesh.team.rendezvous.meet("load_checkpoint()")
    everyone = engine.mesh.team.control.gather_objects(_there(source, tag, checkpoint_in))
    name = next((found for found in everyone if found is not None), None)  # one decision for all ranks
    if name is None:
        warnings.warn(f"{source}: no checkpoint found; nothing was loaded", stacklevel=3)
        return None, {}
    if name:
        warnings.warn(f"{source} has no {LATEST_NAME}; taking {name}, the newest checkpoint there", stacklevel=3)
        source = join(source, name)
    reader = engine.load(source, strict=strict, optimizers=optimizers)
    stored = unpack_client_state(reader)
    if schedulers and lr_scheduler is not None and stored["lr_scheduler"] is not None:
        lr_scheduler.load_state_dict(stored["lr_scheduler"])
    return str(reader.directory), dict(stored["client_state"])


def pack_client_state(client_state: dict[str, Any], lr_scheduler: dict[str, Any] | None) -> bytes:
    """The content of the file.

    Raises:
        TypeError: If it could not be loaded without running code from the file.
    """
    buffer = io.BytesIO()
    try:
        torch.save({"client_state": client_state, "lr_scheduler": lr_scheduler}, buffer)
    except (AttributeError, PicklingError) as error:
        raise TypeError(f"client_state or the scheduler's state cannot be saved: {error}") from None
    content = buffer.getvalue()
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except UnpicklingError as error:
        raise TypeError(
            f"{_culprits(client_state, lr_scheduler)}: not plain data or tensors, which could not be loaded safely "
            f"({_global_of(error)}). Save their state_dict() or plain values instead, or allow their classes with "
            "torch.serialization.add_safe_globals([...])"
        ) from None
    return content


def _culprits(client_state: dict[str, Any], lr_scheduler: dict[str, Any] | None) -> str:
    """The entries that do not load by themselves."""
    entries = {f"client_state[{key!r}]": value for key, value in client_state.items()}
    found = [name for name, value in {**entries, "lr_scheduler": lr_scheduler}.items() if not _loads(value)]
    return ", ".join(found) or "client_state"


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except UnpicklingError:
        return False
    return True


def _global_of(error: UnpicklingError) -> str:
    """The class that torch's long message is about."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else str(error).splitlines()[0]


def unpack_client_state(reader: StateReader) -> dict[str, Any]:
    """What `pack_client_state` was given, empty where there is none."""
    if not reader.has_manifest or CLIENT_FILE not in reader.manifest.files:
        return {"client_state": {}, "lr_scheduler": None}
    return dict(torch.load(io.BytesIO(reader.extra(CLIENT_FILE)), weights_only=True, map_location="cpu"))


def _there(path: str, tag: str | int | None, checkpoint_in: Callable[[str], str | None]) -> str | None:
    """"" if the path is to be opened, which refuses what is damaged; a name in it to open instead; None for neither."""
    if tag is None:
        return checkpoint_in(path)
    if is_remote(path):
        return "" if RemoteFolder(path).names() else None
    return "" if Path(path).exists() else None


def _check_tag(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or "\0" in name or name == LATEST_NAME:
        raise ValueError(
            f"tag {name!r} cannot name a checkpoint: give a folder's name without '/' or a dot in front, not 'latest'"
        )
