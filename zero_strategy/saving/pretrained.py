"""Weights for others: a directory as Hugging Face's `from_pretrained` reads it, in a dtype of one's choice."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.checkpoint.remote import is_remote

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine

_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


def save_pretrained(
    engine: ZeroEngine,
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
