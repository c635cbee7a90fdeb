"""One `.ckpt` file of Lightning from any training state: what `strategy="ddp"` and one process save, and resume.

    {"state_dict", "optimizer_states": [torch's form], "lr_schedulers", "loops", "callbacks", "hyper_parameters", ...}

What is neither weights nor optimizer state comes from the file that our strategies keep it in. Where the source has
none (it is not of a Trainer), there are weights, optimizer states, a schedule and the number of steps: a fit resumes
these and begins its epochs anew.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from zero_strategy.checkpoint.interop.optimizer_form import to_torch
from zero_strategy.checkpoint.interop.state_dicts import whole_state_dict
from zero_strategy.checkpoint.portable import PortableState, Progress, StoredTensor

TRAINER_FILE = "lightning.pt"
"""Where our strategies keep the rest of a checkpoint dict."""
EXTRA_KEY = "zero_strategy.extra_state"
"""In it: entries of the module's state dict that are no tensors."""
VERSION = "2.6.0"
"""Of a file that Lightning has nothing to migrate in."""
_OURS, _THEIRS = "ZeroPrecision", "MixedPrecision"
"""Under which a precision plugin's state lies: the class's name."""


def write(state: PortableState, path: Path, *, progress: Progress | None = None) -> None:
    """Write the file. All of the state is in memory meanwhile, as `torch.save` needs it.

    Raises:
        ValueError: If the source's hyper-parameters or callback states are not plain data; names them.
        OSError: If the file system fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        torch.save(to_content(state if progress is None else _told(state, progress)), file)
        file.flush()
        os.fsync(file.fileno())


def to_content(state: PortableState) -> dict[str, Any]:
    """The Trainer's checkpoint dict.

    Raises:
        ValueError: See `write`.
    """
    rest = _rest(state)
    extra = rest.pop(EXTRA_KEY, {})
    schedulers = [] if state.lr_scheduler is None else [state.lr_scheduler]
    found = {
        "epoch": 0,
        "global_step": state.counters.get("global_steps", 0),
        "pytorch-lightning_version": VERSION,
        **rest,
        "state_dict": {**whole_state_dict(state), **extra},
    }
    if state.optimizers:
        found["optimizer_states"] = [to_torch(optimizer) for optimizer in state.optimizers]
        found.setdefault("lr_schedulers", schedulers)
    return with_grad_scaler(found, state.loss_scaler)


def with_grad_scaler(checkpoint: dict[str, Any], scaler: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The same with the loss scale where Lightning's own `16-mixed` plugin looks for it, in torch's form.

    Args:
        checkpoint: The Trainer's checkpoint dict.
        scaler: The state of a `LossScaler`; default: that of our precision plugin in the dict, if any.
    """
    ours = checkpoint.get(_OURS) or scaler
    if not ours or _THEIRS in checkpoint:
        return checkpoint
    fixed = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}  # torch's, and our defaults
    tracker = ours.get("good_steps", ours.get("_growth_tracker", 0))
    return {**checkpoint, _THEIRS: {**fixed, "scale": float(ours["scale"]), "_growth_tracker": int(tracker)}}


def _rest(state: PortableState) -> dict[str, Any]:
    if TRAINER_FILE not in state.extra_files:
        return {}
    try:
        found = torch.load(io.BytesIO(state.extra_files[TRAINER_FILE]), map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ValueError(
            f"{TRAINER_FILE} of the source holds objects (hyper-parameters or callback states) that are not plain "
            f"data: {error}. If you trust it, write the file in Python: "
            "torch.save(torch.load(zero_strategy.open_checkpoint(IN, weights_only=False, optimizers=True), "
            "weights_only=False), OUT)"
        ) from None
    return dict(found)


def _told(state: PortableState, progress: Progress) -> PortableState:
    """The same, telling of every tensor that is loaded."""

    def telling(tensor: StoredTensor) -> StoredTensor:
        def load() -> torch.Tensor:
            value = tensor.load()
            progress(tensor.spec.nbytes)
            return value

        return StoredTensor(tensor.spec, load)

    return replace(
        state,
        weights={name: telling(tensor) for name, tensor in state.weights.items()},
        optimizers=[
            replace(
                optimizer,
                kinds={k: {n: telling(t) for n, t in tensors.items()} for k, tensors in optimizer.kinds.items()},
            )
            for optimizer in state.optimizers
        ],
    )
