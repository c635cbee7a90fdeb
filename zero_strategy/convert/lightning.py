"""Checkpoints of Lightning: `.ckpt` files and directories of FSDP, in; one `.ckpt` file, out.

A `.ckpt` file is what `strategy="ddp"` and one process save and resume.

    {"state_dict", "optimizer_states": [torch's form], "lr_schedulers", "loops", "callbacks", "hyper_parameters", ...}

What is neither weights nor optimizer state comes from the file that our strategies keep it in. Where the source has
none (it is not of a Trainer), there are weights, optimizer states, a schedule and the number of steps: a fit resumes
these and begins its epochs anew.

`.ckpt` files, and directories of FSDP and ModelParallel.

    run.ckpt            torch.save of {"state_dict", "optimizer_states": [...], "callbacks", "loops", "epoch", ...}
    run.ckpt/           torch.distributed.checkpoint of {"model" or "state_dict", "optimizer_0", ...}
        meta.pt         torch.save of all the rest

Fabric writes such directories, too, under the names of the state that it was given. What is neither weights nor
optimizer state goes where our strategies look for it, so that `fit(ckpt_path=...)` and `Fabric.load` go on from these.
Source of the layouts: lightning/{pytorch,fabric}/strategies/{fsdp,model_parallel}.py, versions 2.1 to 2.6.
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

from zero_strategy.checkpoint.disk import naming
from zero_strategy.checkpoint.manifest import AVERAGE, AVERAGE_BUFFERS_NAME
from zero_strategy.convert import dcp, torch_file
from zero_strategy.convert.optimizer_form import is_optimizer_state, is_state_dict, to_torch, whole_state_dict
from zero_strategy.convert.pickle_globals import Record
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableState, Progress, StoredTensor, without_averages
from zero_strategy.convert.zip_entries import pickle_in
from zero_strategy.runtime.regular_files import is_there, open_regular

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
    with naming(path), open(path, "wb") as file:
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
    averages = {n: t for optimizer in state.optimizers for n, t in optimizer.kinds.get(AVERAGE, {}).items()}
    if averages:
        _place_averages(found, replace(state, weights={**state.weights, **averages}), extra)
    if state.optimizers:
        state = without_averages(state)
        found["optimizer_states"] = [to_torch(optimizer) for optimizer in state.optimizers]
        found.setdefault("lr_schedulers", schedulers)
    return with_grad_scaler(found, state.loss_scaler)


def _place_averages(content: dict[str, Any], averaged: PortableState, extra: Mapping[str, Any]) -> None:
    """Put averages where Lightning's callbacks look for them; those of an engine's own are left out."""
    buffers = averaged.extra_files.get(AVERAGE_BUFFERS_NAME)
    stored = {} if buffers is None else torch.load(io.BytesIO(buffers), weights_only=True)
    if "averaging_state" in content:
        content["current_model_state"] = content["state_dict"]
        content["state_dict"] = {**whole_state_dict(averaged), **stored, **extra}
    for callback in content.get("callbacks", {}).values():
        if isinstance(callback, dict) and callback.get("average_model_state", 0) is None:
            callback["average_model_state"] = {**whole_state_dict(averaged), **extra}


def with_grad_scaler(checkpoint: dict[str, Any], scaler: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The checkpoint with the loss scale where Lightning's own `16-mixed` plugin looks for it, in torch's form.

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
    """A state that tells of every tensor that is loaded."""

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


__all__ = ["FABRIC_FILE", "TRAINER_FILE", "detect", "read", "write"]

FABRIC_FILE = "fabric.pt"
"""Where our Fabric strategy keeps the rest of a state."""

_META = "meta.pt"
_MARK = "pytorch-lightning_version"
_DICTS = dict.fromkeys(
    f"{package}.utilities.data.AttributeDict" for package in ("lightning.fabric", "lightning_fabric")
) | dict.fromkeys(
    f"{package}.utilities.parsing.AttributeDict"
    for package in ("lightning.pytorch", "pytorch_lightning", "lightning.pytorch.core", "pytorch_lightning.core")
)


def detect(path: Path) -> bool:
    """True if it is a checkpoint of Lightning's."""
    if path.is_dir():
        return dcp.detect(path) and is_there(path / _META)
    if not torch_file.detect(path) or _MARK.encode() not in _pickle_of(path):
        return False
    try:
        content = load_restricted(path, allow=_DICTS, verify=False)
    except ValueError:  # hyper-parameters of a class of their own; `read` names it
        return True
    return isinstance(content, dict) and _MARK in content  # and not somewhere inside, as in a converted checkpoint


def read(path: Path, *, weights_only: bool = False) -> PortableState:
    """Reads a checkpoint; its tensors stay on disk until they are asked for.

    Args:
        path: The file or directory.
        weights_only: Leave optimizers out.

    Raises:
        ValueError: If it is damaged, or holds hyper-parameters or callback states that are not plain data; names them.
    """
    if path.is_dir():
        tensors = dcp.content_of(path)
        rest = _plain(load_restricted(path / _META, allow=_DICTS), str(path / _META))
    else:
        rest = _plain(load_restricted(path, allow=_DICTS), str(path))
        tensors = {key: rest.pop(key) for key in ("state_dict", "optimizer_states") if key in rest}
    state = torch_file.from_content(_known(tensors), str(path), prefix="", weights_only=weights_only)
    state.client_state = {}
    if _MARK in rest:
        _keep_trainers(state, rest)
    else:
        _keep_fabrics(state, rest, tensors)
    return state


def _known(tensors: dict[str, Any]) -> dict[str, Any]:
    """Weights and optimizer states under the names that `from_content` looks for; Fabric's users choose theirs."""
    models = [key for key, value in tensors.items() if is_state_dict(value)]
    lists = [torch_file.optimizer_states(tensors.get(key)) for key in ("optimizers", "optimizer_states")]
    states = [*lists[0], *lists[1], *(value for value in tensors.values() if is_optimizer_state(value))]
    known = {"model": tensors[models[0]]} if len(models) == 1 else dict(tensors)
    return {**known, "optimizers": states} if states else known


def _keep_trainers(state: PortableState, rest: dict[str, Any]) -> None:
    step, epoch = rest.get("global_step"), rest.get("epoch")
    state.counters = {"global_steps": step} if type(step) is int else {}
    state.user["lightning"] = {
        key: value
        for key, value in {"epoch": epoch, "global_step": step, _MARK: rest[_MARK]}.items()
        if isinstance(value, (int, str))
    }
    schedulers = rest.get("lr_schedulers")
    if isinstance(schedulers, list) and len(schedulers) == 1 and isinstance(schedulers[0], dict):
        state.lr_scheduler = schedulers[0]
    state.extra_files[TRAINER_FILE] = _packed(rest)


def _keep_fabrics(state: PortableState, rest: dict[str, Any], tensors: dict[str, Any]) -> None:
    model = next(key for key, value in tensors.items() if is_state_dict(value))
    optimizers = [key for key, value in tensors.items() if is_optimizer_state(value)]
    if len(optimizers) == len(state.optimizers):
        state.user["fabric"] = {"module": model, "optimizers": optimizers}
        state.extra_files[FABRIC_FILE] = _packed(rest)
    else:
        state.client_state = rest


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _plain(value: Any, source: str) -> Any:
    """Lightning's dict with attributes as a dict.

    Raises:
        ValueError: For any other record.
    """
    if isinstance(value, Record):
        if value.full_name in _DICTS:
            return {key: _plain(item, source) for key, item in value.entries.items()}
        raise ValueError(f"{source}: holds a {value.full_name}, which is not plain data")
    if type(value) is dict:
        return {key: _plain(item, source) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, source) for item in value)
    return value


def _pickle_of(path: Path) -> bytes:
    """The pickle in a file of torch.save; of the older format the beginning, which holds it."""
    with open(open_regular(path), "rb") as file:
        return pickle_in(file, str(path), 1 << 20)
