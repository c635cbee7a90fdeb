"""Checkpoints of Lightning's own strategies: `.ckpt` files, and directories of FSDP and ModelParallel.

    run.ckpt            torch.save of {"state_dict", "optimizer_states": [...], "callbacks", "loops", "epoch", ...}
    run.ckpt/           torch.distributed.checkpoint of {"model" or "state_dict", "optimizer_0", ...}
        meta.pt         torch.save of all the rest

Fabric writes such directories, too, under the names of the state that it was given. What is neither weights nor
optimizer state goes where our strategies look for it, so that `fit(ckpt_path=...)` and `Fabric.load` go on from these.
Source of the layouts: lightning/{pytorch,fabric}/strategies/{fsdp,model_parallel}.py, versions 2.1 to 2.6.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from zero_strategy.checkpoint.interop import dcp, torch_file
from zero_strategy.checkpoint.interop.lightning_write import TRAINER_FILE, write
from zero_strategy.checkpoint.interop.optimizer_form import is_optimizer_state
from zero_strategy.checkpoint.interop.pickles import Record, load_restricted
from zero_strategy.checkpoint.interop.state_dicts import is_state_dict
from zero_strategy.checkpoint.portable import PortableState
from zero_strategy.runtime.regular_files import is_there, open_regular

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
    """Whether it is a checkpoint of Lightning's."""
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
        return _pickle_in(file)


def _pickle_in(file: IO[bytes]) -> bytes:
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return file.read(1 << 20)
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        return archive.read(name) if name else b""
