"""Reports to Ray Train of checkpoints that all workers write.

A checkpoint is written once, by all workers, to the place in the run's storage path where it stays; Ray registers it
there and copies nothing. Its number of workers may change from one attempt to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os.path import join
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

CHECKPOINT_NAME = "checkpoint.ckpt"
"""The directory of this package in a checkpoint of Ray, named as in Ray's own callback for Lightning."""


def report(metrics: Mapping[str, Any], save: Callable[[str], object] | None = None) -> None:
    """Report metrics, and a checkpoint that `save` writes; all workers call it, the same number of times.

    Args:
        metrics: Numbers; those of rank 0 count.
        save: Called on all workers with the path of a new directory, which is written when it returns:
            `engine.save`, `accelerator.save_state`, `trainer.save_checkpoint`.

    Raises:
        ValueError: If the storage path of the run is not a folder.
    """
    if save is None:
        ray.train.report(dict(metrics))
        return
    checkpoint = _new_checkpoint()
    save(join(checkpoint.path, CHECKPOINT_NAME))
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD  # it is where it belongs
    ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)


def reported_checkpoint() -> str | None:
    """Path of the last checkpoint that was reported, in this attempt or an earlier one; None at the beginning.

    Raises:
        ValueError: If it is not in a folder that workers see.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    _check_folder(checkpoint.filesystem, checkpoint.path)
    return join(checkpoint.path, CHECKPOINT_NAME)


def _new_checkpoint() -> Any:
    """A name in the storage path, the same on all workers."""
    storage = ray.train.get_context().get_storage()
    _check_folder(storage.storage_filesystem, storage.experiment_fs_path)
    # An attempt may come to a step again, and Ray may still hold or remove what an earlier one has reported there.
    name = broadcast_from_rank_zero(storage.make_default_checkpoint_dir_name())
    path = storage.build_checkpoint_path_from_name(name)
    return ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)


def _check_folder(filesystem: Any, path: str) -> None:
    if filesystem.type_name != "local":
        raise ValueError(
            f"checkpoints are written by all workers to a folder that they share, and {path} is on a file system of "
            f'type {filesystem.type_name!r}: set RunConfig(storage_path=...) to a folder such as "/mnt/shared/runs"'
        )
