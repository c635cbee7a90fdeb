"""Weights for others: a directory as Hugging Face's `from_pretrained` reads it, in a dtype of one's choice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.pieces import FOLDER_PREFIX
from zero_strategy.checkpoint.plan import INDEX_NAME
from zero_strategy.checkpoint.remote import is_remote
from zero_strategy.checkpoint.replace import remove, sync
from zero_strategy.checkpoint.save_writer import unlisted
from zero_strategy.distributed.together import together
from zero_strategy.saving import random_state

if TYPE_CHECKING:
    from zero_strategy.saving.checkpointing import CheckpointingEngine

_STAGED = ".weights"
_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


def save_pretrained(
    engine: CheckpointingEngine,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write whole weights, each rank its own slices in place, with the module's config beside them.

    Args:
        engine: Whose weights.
        directory: `model.safetensors`, or several files with an index (`checkpoint.max_file_bytes`).
        dtype: What floating-point weights are converted to; None: as they are.

    Raises:
        TypeError: If `dtype` is not one of floating point.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype={dtype!r}: must be a floating-point torch.dtype, such as torch.bfloat16")
    if is_remote(directory):
        raise ValueError(
            f"{os.fspath(directory)}: weights for Hugging Face are written in place, which a URL does not allow; save "
            "them to a local directory and upload it"
        )
    engine.save(
        directory,
        extra_files=config_files(engine.module, dtype),
        optimizers=False,
        update_latest=False,
        weights_dtype=dtype,
    )


def export_weights(engine: CheckpointingEngine, directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> bool:
    """Write whole weights as `save_pretrained` does, without what is a checkpoint's alone; all ranks call it.

    They are written beside first, each rank its own slices. A model or a checkpoint in the directory goes when they
    are there, other files stay.

    Args:
        engine: Whose weights.
        directory: Gets `model.safetensors`, or several files with an index, and `files`.
        files: Further small files, {name: content}; rank 0's are written.

    Returns:
        Whether it was done: not where ranks do not see one directory, of whose weights each host can have but a part.

    Raises:
        OSError, ValueError: On all ranks if one fails.
    """
    target, staged = Path(directory), Path(directory) / _STAGED
    engine.save(staged, extra_files=files, optimizers=False, update_latest=False).finish()
    control, rank = engine.mesh.team.control, engine.mesh.team.rank
    divided = any(control.gather_objects(any(staged.glob(f"{FOLDER_PREFIX}*"))))

    def move() -> None:
        if divided:
            remove(staged)
        elif rank == 0:
            _move(staged, target)

    together(control, move)
    return not divided


def _move(staged: Path, target: Path) -> None:
    found = unlisted(target) if (target / MANIFEST_NAME).is_file() else None
    (target / MANIFEST_NAME).unlink(missing_ok=True)
    if found is None:
        stale = [*target.glob("model*.safetensors"), target / INDEX_NAME]
    else:  # of the checkpoint there
        stale = [path for path in target.iterdir() if path not in found]
    for path in stale:
        remove(path)
    for path in sorted(staged.iterdir(), key=lambda path: path.name in _CONFIGS.values()):
        if path.name not in (MANIFEST_NAME, random_state.DIRECTORY):
            os.replace(path, target / path.name)
    remove(staged)
    sync(target)


def config_files(module: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """What a Hugging Face model keeps in JSON beside its weights; nothing for other modules.

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
