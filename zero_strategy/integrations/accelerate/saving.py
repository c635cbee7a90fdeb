"""`save_state` and `load_state` of a `ZeroAccelerator`: one directory for all that was prepared or registered.

The directory is a checkpoint of this package. Schedulers, samplers, loaders and registered objects are written by
Accelerate's own functions, into a directory of this rank alone, from which they go into the checkpoint as small files;
so the checkpoint is there as a whole or not at all. For loading they are put back into such a directory.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

from zero_strategy.checkpoint.folders import checkpoint_directory
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.writer import unlisted
from zero_strategy.comm.store import together
from zero_strategy.engine import ZeroEngine

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader
    from zero_strategy.checkpoint.save_job import PendingSave

_FOLDER = "accelerate"
"""In the checkpoint: Accelerate's own files."""
_KEY = "accelerate"
"""Of the Accelerator's own entry in a checkpoint's user metadata."""
_RANDOM = "random_states_"
_PER_RANK = "dl_state_dict"


# ---- all that was prepared ----


def save_prepared(accelerator: Any, engines: Sequence[ZeroEngine], output_dir: str | os.PathLike[str] | None) -> Path:
    """Save models with their optimizers, and the rest with the first; all ranks call it.

    Args:
        accelerator: The rest is its.
        engines: Of the models, in their order. Several are saved each in `model_0`, `model_1`...
        output_dir: Where to; None: the next directory of its project.

    Returns:
        The directory.

    Raises:
        ValueError: If there is no model, or the directory holds what is not of the checkpoint it would replace.
    """
    if not engines:
        raise ValueError("save_state saves prepared models, and none is: call accelerator.prepare(model) first")
    directory, stale = _next_directory(accelerator, output_dir)
    hooks: list[Callable[..., None]] = list(accelerator._save_model_state_pre_hook.values())
    places = _places(directory, len(engines))
    _check_replaceable(engines[0], directory, places, bool(hooks))
    # A kill between two models leaves those of two saves, which loading tells by this.
    token = engines[0].mesh.world_group.control.all_gather_objects(uuid.uuid4().hex)[0]
    # Before the saves, during which a loop may go on and move these states.
    shared, own = _capture(accelerator)
    saves = [
        engine.save(
            place,
            user={
                _KEY: {
                    "step": accelerator.step,
                    "models": len(engines),
                    "save": token,
                    "slots": accelerator.slot_training.state(),
                }
            },
            extra_files=shared if engine is engines[0] else {},
            own_files=own if engine is engines[0] else {},
            update_latest=False,  # Accelerate takes whatever lies in its folder for a checkpoint
            asynchronous=accelerator.zero_config.checkpoint.asynchronous and not hooks,
        )
        for engine, place in zip(engines, places, strict=True)
    ]
    if accelerator.is_main_process:
        _after_all(saves, partial(_remove, stale))  # not before there is another, with all its models
    for hook in hooks:  # they may write into the directory, which was replaced as a whole
        # As under FSDP and DeepSpeed, where Accelerate gives hooks no weights either.
        hook(accelerator._models, [], str(directory))
    return directory


def load_prepared(
    accelerator: Any,
    engines: Sequence[ZeroEngine],
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> None:
    """Load what `save_prepared` saved, or what Accelerate's own `save_state` did; all ranks call it.

    Args:
        accelerator: As for saving.
        engines: As for saving.
        input_dir: Where from; None: the last directory of its project.
        load_kwargs: See Accelerate's `load_state`.
        options: Of `ZeroEngine.load`.

    Raises:
        ValueError: If there is no checkpoint, or it does not fit what is prepared; names what differs.
    """
    directory = _saved_directory(accelerator, input_dir)
    # A copy of the list, as hooks take out the models that they load.
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(list(accelerator._models), str(directory))
    places = _places(directory, len(engines))
    entries = together(engines[0].mesh.world_group.control, lambda: [_entry(place) for place in places])
    saves = {(ours.get("save"), ours.get("models", len(engines))) for ours in entries}
    # Before the first is loaded: a refusal leaves all models as they are.
    if len(saves) > 1 or any(models != len(engines) for _, models in saves):
        raise ValueError(
            f"{directory} holds models of several saves, or {max(models for _, models in saves)} models where "
            f"{len(engines)} are prepared: a save was interrupted between two models, or others were prepared; take an "
            "earlier one"
        )
    for engine, place, ours in zip(engines, places, entries, strict=True):
        reader = engine.load(place, **options)
        if engine is engines[0] and ours:
            _restore(accelerator, reader, load_kwargs)
            accelerator.step = accelerator.slot_training.load(ours.get("slots", {}), ours["step"])
            engine.load_random_state(reader)  # once more: restoring may have drawn
        elif engine is engines[0]:
            _restore_plain(accelerator, directory, load_kwargs)


# ---- directories ----


def _next_directory(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> tuple[Path, list[Path]]:
    """The directory to save to, and the checkpoints that are too many then; all ranks call it.

    Raises:
        ValueError: If none is given or named, or the next one in the order of names exists.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError("save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        return Path(output_dir).expanduser(), []
    accelerator.wait_for_saves()  # one that is on its way counts
    folder = Path(accelerator.project_dir) / "checkpoints"
    directory = folder / f"checkpoint_{accelerator.save_iteration}"
    if directory.exists():
        raise ValueError(
            f"{directory} exists already; set accelerator.project_configuration.iteration to where to go on"
        )
    accelerator.wait_for_everyone()  # all have looked
    found = _numbered(folder)
    many = 0 if project.total_limit is None else max(0, len(found) + 1 - project.total_limit)
    return directory, found[:many]


def _saved_directory(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    """The directory to load from; the last one where none is given.

    Raises:
        ValueError: If there is none.
    """
    if input_dir is not None:
        directory = Path(input_dir).expanduser()
        if not directory.is_dir():
            raise ValueError(f"{directory}: there is no such checkpoint directory")
        return directory
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    folder = Path(accelerator.project_dir) / "checkpoints"
    found = _numbered(folder)
    if not found:
        raise ValueError(f"{folder}: there is no checkpoint")
    return found[-1]


def _places(directory: Path, models: int) -> list[Path]:
    return [directory] if models == 1 else [directory / f"model_{number}" for number in range(models)]


def _entry(place: Path) -> dict[str, Any]:
    """The Accelerator's own entry in a checkpoint's user metadata; {}: somebody else has saved it."""
    found = checkpoint_directory(place)
    if not (found / MANIFEST_NAME).is_file():
        return {}
    entry: dict[str, Any] = Manifest.load(found).user.get(_KEY, {})
    return entry


def _check_replaceable(engine: ZeroEngine, directory: Path, places: Sequence[Path], hooks: bool) -> None:
    """A save replaces its directory as a whole, with all that somebody else has put there."""
    foreign = [str(path) for place in places for path in unlisted(place)]
    if hooks:  # which write there
        foreign = [path for path in foreign if (Path(path) / MANIFEST_NAME).is_file()]
    found = engine.mesh.world_group.control.all_gather_objects(foreign)
    if any(found):
        raise ValueError(
            f"{directory} holds {sorted({path for paths in found for path in paths})[:5]}, which are not of the "
            "checkpoint there and would be removed with it; save to another directory"
        )


def _after_all(saves: Sequence[PendingSave], action: Callable[[], object]) -> None:
    """Do something once all of these checkpoints are there, and not if one of them cannot be."""
    if not saves:
        action()
    else:  # one after the other, whichever ends last
        saves[0].then(partial(_after_all, saves[1:], action))


def _remove(directories: Sequence[Path]) -> None:
    """A checkpoint too many is no reason to fail, and none to be silent."""
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            warnings.warn(f"{directory}: an old checkpoint could not be removed: {error}", stacklevel=2)


def _numbered(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


# ---- schedulers, samplers, loaders, registered objects ----


def _capture(accelerator: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Small files: those that are the same everywhere, and those of this rank alone."""
    rank = accelerator.process_index
    with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
        save_accelerator_state(
            name,
            [],
            [],
            accelerator._schedulers,
            accelerator._dataloaders,
            rank,
            accelerator.step,
            save_on_each_node=True,
        )
        for index, custom in enumerate(accelerator._custom_objects):
            save_custom_state(custom, name, index, save_on_each_node=True)
        found = {path.name: path.read_bytes() for path in Path(name).iterdir() if path.is_file()}
    found = {path: content for path, content in found.items() if not path.startswith(_RANDOM)}  # the engine's own
    own = {_own_path(rank, path): found.pop(path) for path in list(found) if path.startswith(_PER_RANK)}
    return {f"{_FOLDER}/{path}": content for path, content in found.items()}, own


def _restore(accelerator: Any, reader: StateReader, load_kwargs: Mapping[str, Any] | None) -> None:
    """Give schedulers, samplers, loaders and registered objects their state back.

    Raises:
        RuntimeError: If the checkpoint holds another number of registered objects.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
        own = _own_path(accelerator.process_index, "")
        for path in reader.manifest.files:
            if path.startswith(own):
                (Path(name) / path.removeprefix(own)).write_bytes(reader.extra(path))
            # Files of other ranks lie a folder deeper.
            elif path.startswith(f"{_FOLDER}/") and path.count("/") == 1:
                (Path(name) / path.removeprefix(f"{_FOLDER}/")).write_bytes(reader.extra(path))
        customs = sorted(Path(name).glob("custom_checkpoint_*.pkl"))
        if len(customs) != len(accelerator._custom_objects):
            raise RuntimeError(
                f"{reader.directory} holds {len(customs)} registered objects, {len(accelerator._custom_objects)} are "
                "registered: call accelerator.register_for_checkpointing for the same objects in the same order"
            )
        load_accelerator_state(
            name,
            [],
            [],
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            load_kwargs=dict(load_kwargs or {}),
        )
        for index, custom in enumerate(accelerator._custom_objects):
            load_custom_state(custom, name, index)


def _restore_plain(accelerator: Any, directory: Path, load_kwargs: Mapping[str, Any] | None) -> None:
    """Restore from a directory of Accelerate's own `save_state`, with its step and this rank's random state."""
    # Accelerate writes none where no schedule was prepared.
    schedulers = accelerator._schedulers if (directory / "scheduler.bin").is_file() else []
    attributes = load_accelerator_state(
        directory,
        [],
        [],
        schedulers,
        accelerator._dataloaders,
        accelerator.process_index,
        load_kwargs=dict(load_kwargs or {}),
    )
    accelerator.step = attributes.get("step", accelerator.step)
    for index, custom in enumerate(accelerator._custom_objects):
        if (directory / f"custom_checkpoint_{index}.pkl").is_file():
            load_custom_state(custom, str(directory), index)


def _own_path(rank: int, path: str) -> str:
    return f"{_FOLDER}/rank-{rank:05d}/{path}"
