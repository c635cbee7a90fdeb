"""What `save_state` keeps beside weights and optimizers: schedulers, samplers, loaders, registered objects.

Accelerate's own functions write them, into a directory of this rank alone, from which they go into the checkpoint as
small files; so the checkpoint is one directory that is there as a whole or not at all. For loading they are put back
into such a directory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader

FOLDER = "accelerate"
"""In the checkpoint."""
_RANDOM = "random_states_"
_PER_RANK = "dl_state_dict"


def capture(accelerator: Any) -> tuple[dict[str, bytes], dict[str, bytes]]:
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
    return {f"{FOLDER}/{path}": content for path, content in found.items()}, own


def restore(accelerator: Any, reader: StateReader, load_kwargs: Mapping[str, Any] | None) -> None:
    """Give schedulers, samplers, loaders and registered objects their state back.

    Raises:
        RuntimeError: If the checkpoint holds another number of registered objects.
    """
    with tempfile.TemporaryDirectory(prefix="accelerate-") as name:
        own = _own_path(accelerator.process_index, "")
        for path in reader.manifest.files:
            if path.startswith(own):
                (Path(name) / path.removeprefix(own)).write_bytes(reader.extra(path))
            elif path.startswith(f"{FOLDER}/") and path.count("/") == 1:
                (Path(name) / path.removeprefix(f"{FOLDER}/")).write_bytes(reader.extra(path))
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


def restore_plain(accelerator: Any, directory: Path, load_kwargs: Mapping[str, Any] | None) -> None:
    """The same from a directory of Accelerate's own `save_state`, with its step and this rank's random state."""
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
    return f"{FOLDER}/rank-{rank:05d}/{path}"
