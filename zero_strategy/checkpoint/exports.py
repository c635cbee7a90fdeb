"""Saves by tag (`save_dir/tag`, with `latest`), and weights as a Hugging Face directory.

`save_dir/tag`, with `latest` naming the last one, and the user's own state with them.

Arguments and results are DeepSpeed's `save_checkpoint` and `load_checkpoint` (DeepSpeed API 0.3, chapter 4.1).
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch

from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.disk import remove, sync
from zero_strategy.checkpoint.manifest import INDEX_NAME, LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.ranges import FOLDER_PREFIX
from zero_strategy.checkpoint.storage import RemoteFolder, is_remote, join
from zero_strategy.checkpoint.writer import unlisted
from zero_strategy.comm.store import together
from zero_strategy.quantized.entries import check_foreign

if TYPE_CHECKING:
    from zero_strategy.checkpoint.preemption import CheckpointingEngine
    from zero_strategy.checkpoint.reader import StateReader
    from zero_strategy.checkpoint.save_job import PendingSave


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
        BarrierError: If ranks come with different tags, or do not come.
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
    weights: Callable[[StateReader], None] | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Load the checkpoint `load_dir/tag`; all ranks call it.

    Args:
        engine: Whose state.
        load_dir: The folder of checkpoints, or one checkpoint.
        tag: The checkpoint's name; None for the one that `latest` names.
        strict: Missing and unexpected names are errors.
        optimizers: Load optimizer state, counters and random state.
        schedulers: Load the scheduler's state.
        checkpoint_in: Finds a checkpoint of any kind in a folder; see `convert.convert.checkpoint_in`.
        lr_scheduler: What takes it.
        weights: Loads the weights in place of the engine.

    Returns:
        (path of the checkpoint, client state); (None, {}) with a warning where there is none.

    Raises:
        ValueError: If the checkpoint is damaged, or not one of this model.
    """
    # The save under way may be what `latest` is about to name.
    engine.saver.wait()
    source = os.fspath(load_dir) if tag is None else join(load_dir, str(tag))
    # Ranks that do not come are named here within seconds; the gather would wait for its own time-out.
    engine.mesh.world_group.barrier.wait_for_all("load_checkpoint()")
    everyone = engine.mesh.world_group.control.all_gather_objects(_there(source, tag, checkpoint_in))
    name = next((found for found in everyone if found is not None), None)  # one decision for all ranks
    if name is None:
        warnings.warn(f"{source}: no checkpoint found; nothing was loaded", stacklevel=3)
        return None, {}
    if name:
        warnings.warn(f"{source} has no {LATEST_NAME}; taking {name}, the newest checkpoint there", stacklevel=3)
        source = join(source, name)
    reader = engine.load(source, strict=strict, optimizers=optimizers, weights=weights)
    stored = unpack_client_state(reader)
    if schedulers and lr_scheduler is not None and stored["lr_scheduler"] is not None:
        lr_scheduler.load_state_dict(stored["lr_scheduler"])
    return str(reader.directory), dict(stored["client_state"])


def pack_client_state(client_state: dict[str, Any], lr_scheduler: dict[str, Any] | None) -> bytes:
    """The content of the file.

    Raises:
        TypeError: If it could not be loaded without running code from the file.
    """
    try:
        content, error = _packed({"client_state": client_state, "lr_scheduler": lr_scheduler})
    # What pickle says of local functions and the like.
    except (AttributeError, PicklingError) as refused:
        raise TypeError(f"client_state or the scheduler's state cannot be saved: {refused}") from None
    if error is not None:
        raise TypeError(
            f"{_culprits(client_state, lr_scheduler)}: not plain data or tensors, which could not be loaded safely "
            f"({_global_of(error)}). Save their state_dict() or plain values instead, or allow their classes with "
            "torch.serialization.add_safe_globals([...])"
        )
    return content


def _culprits(client_state: dict[str, Any], lr_scheduler: dict[str, Any] | None) -> str:
    """The entries that do not load by themselves."""
    entries = {f"client_state[{key!r}]": value for key, value in client_state.items()}
    found = [name for name, value in {**entries, "lr_scheduler": lr_scheduler}.items() if _packed(value)[1] is not None]
    return ", ".join(found) or "client_state"


def _packed(value: Any) -> tuple[bytes, UnpicklingError | None]:
    """A value as a file, and why it does not load by itself."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    content = buffer.getvalue()
    try:
        # Tried now: when it is loaded, the run that could save it otherwise is gone.
        torch.load(io.BytesIO(content), weights_only=True)
    except UnpicklingError as error:
        return content, error
    return content, None


def _global_of(error: UnpicklingError) -> str:
    """The class that torch's long message is about."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return found[1] if found else str(error).splitlines()[0]


def unpack_client_state(reader: StateReader) -> dict[str, Any]:
    """Argument of `pack_client_state`, empty where there is none."""
    if not reader.has_manifest or CLIENT_FILE not in reader.manifest.files:
        return {"client_state": {}, "lr_scheduler": None}
    return dict(torch.load(io.BytesIO(reader.extra(CLIENT_FILE)), weights_only=True, map_location="cpu"))


def _there(path: str, tag: str | int | None, checkpoint_in: Callable[[str], str | None]) -> str | None:
    """An empty name if the path itself is to be opened, which refuses damage; a name in it; None for neither."""
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


_STAGED = ".weights"
_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


def save_pretrained(
    engine: CheckpointingEngine,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write full weights, each rank its own slices in place, with the module's config beside them.

    Args:
        engine: Whose weights.
        directory: `model.safetensors`, or several files with an index (`checkpoint.max_file_bytes`).
        dtype: What floating-point weights are converted to; None: as they are.

    Raises:
        TypeError: If `dtype` is not one of floating point.
        ValueError: If the directory is a URL, or weights are torchao's, or have 4 bits and are of a pipeline's stage.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype, such as torch.bfloat16")
    if is_remote(directory):
        raise ValueError(
            f"{os.fspath(directory)}: weights for Hugging Face are written in place, which a URL does not allow; save "
            "them to a local directory and upload it"
        )
    names = (name for name, _ in engine.model.names())
    check_foreign(names, "weights for Hugging Face", described=not engine.is_part)
    engine.save(
        directory,
        extra_files=config_files(engine.module, dtype),
        optimizers=False,
        update_latest=False,
        weights_dtype=dtype,
    )


def export_weights(engine: CheckpointingEngine, directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> bool:
    """Write full weights as `save_pretrained` does, without what is a checkpoint's alone; all ranks call it.

    They are written beside first, each rank its own slices. A model or a checkpoint in the directory goes when they
    are there, other files stay.

    Args:
        engine: Whose weights.
        directory: Gets `model.safetensors`, or several files with an index, and `files`.
        files: Further small files, {name: content}; rank 0's are written.

    Returns:
        Whether it was done: not where ranks do not see one directory, of whose weights each host can have but a part.

    Raises:
        OSError, ValueError: On all ranks if one fails, or there is a `manifest.json` that is no checkpoint's.
    """
    target, staged = Path(directory), Path(directory) / _STAGED
    # Before the first byte: what refuses the move shall not leave the weights beside it.
    together(engine.mesh.world_group.control, lambda: _checkpoint_in(target))
    # Until its cleaning is over, too: that looks through the directory into which the files are moved next.
    engine.save(staged, extra_files=files, optimizers=False, update_latest=False).finish()
    control, rank = engine.mesh.world_group.control, engine.mesh.world_group.rank
    # Any rank's view counts: a host sees the pieces of its own ranks only.
    divided = any(control.all_gather_objects(any(staged.glob(f"{FOLDER_PREFIX}*"))))

    def move() -> None:
        if divided:
            remove(staged)
        elif rank == 0:
            _move(staged, target)

    # No rank returns, and reads the directory, before the files are there.
    together(control, move)
    return not divided


def _checkpoint_in(target: Path) -> list[Path] | None:
    """Other people's files beside a checkpoint in a directory; None where there is no checkpoint.

    Raises:
        ValueError: If its `manifest.json` does not tell one from the other.
    """
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        Manifest.read(target)
    except ValueError as error:
        raise ValueError(f"{error}; nothing is written over what is in {target}: export to another directory") from None
    return unlisted(target)


def _move(staged: Path, target: Path) -> None:
    # While the manifest is there, which tells the checkpoint's files from other people's.
    found = _checkpoint_in(target)
    # First: from here on nobody takes the rest for a checkpoint.
    (target / MANIFEST_NAME).unlink(missing_ok=True)
    if found is None:
        stale = [*target.glob("model*.safetensors"), target / INDEX_NAME]
    else:  # of the checkpoint there
        stale = [path for path in target.iterdir() if path not in found]
    for path in stale:
        remove(path)
    # Configs last: they invite loaders, for which the weights must be there.
    for path in sorted(staged.iterdir(), key=lambda path: path.name in _CONFIGS.values()):
        if path.name not in (MANIFEST_NAME, random_state.DIRECTORY):
            os.replace(path, target / path.name)
    remove(staged)
    # Renames last only once the directory is flushed.
    sync(target)


def config_files(module: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """JSON files of a Hugging Face model beside its weights; nothing for other modules.

    Args:
        module: The model.
        dtype: What its weights are saved as; default: as they are.
    """
    found: dict[str, bytes] = {}
    for attribute, name in _CONFIGS.items():
        config: Any = getattr(module, attribute, None)
        if callable(getattr(config, "to_json_string", None)):
            found[name] = str(config.to_json_string()).encode()
    if "config.json" in found:  # what tools that build the model from its config look for
        content = json.loads(found["config.json"])
        if not content.get("architectures"):
            content["architectures"] = [type(module).__name__]
        floating = (p.dtype for p in module.parameters() if p.dtype.is_floating_point)
        stored = dtype or next(floating, None)
        if stored is not None:
            content["dtype"] = str(stored).removeprefix("torch.")
        found["config.json"] = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    return found
