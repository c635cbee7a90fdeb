"""State directories of Accelerate (`accelerator.save_state`), of plain, DDP and FSDP trainings.

    pytorch_model_fsdp_0/, optimizer_0/      sharded: torch.distributed.checkpoint of {"model"}, {"optimizer"}
    pytorch_model_fsdp.bin, optimizer.bin    full: torch.save of a state dict; optimizer state under names
    model.safetensors or pytorch_model.bin, optimizer.bin     plain and DDP; parameters by number
    optimizer_1 ..., scheduler.bin, scheduler_1.bin, scaler.pt, custom_checkpoint_0.pkl, ...

Random states and samplers are left out: they are the other library's objects.
Source of the layout: accelerate/checkpointing.py and accelerate/utils/fsdp_utils.py, versions 1.0 to 1.15.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.reader import CheckpointReader
from zero_strategy.convert import dcp, torch_file
from zero_strategy.convert.optimizer_form import add_weights, from_torch
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableState, portable_of
from zero_strategy.runtime.regular_files import is_there

_SHARDED, _FULL = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
_PLAIN = ("model.safetensors", "pytorch_model.bin")
_RANDOM = "random_states_0.pkl"


def detect(path: Path) -> bool:
    """True if it is a state directory of Accelerate."""
    if not path.is_dir():
        return False
    if dcp.detect(path / _SHARDED) or is_there(path / _FULL) or any(path.glob(f"{_SHARDED}_rank*.bin")):
        return True
    beside = (_RANDOM, "optimizer.bin", "scheduler.bin")
    return any(is_there(path / name) for name in _PLAIN) and any(is_there(path / name) for name in beside)


def read(path: Path, *, prefix: str | None = None, weights_only: bool = False) -> PortableState:
    """Reads a directory; its tensors stay on disk until they are asked for.

    Args:
        path: The directory.
        prefix: What to take off the beginnings of names; None: what DDP adds.
        weights_only: Leave optimizers out.

    Raises:
        ValueError: If it is damaged, holds several models, or files of one rank each.
    """
    if any(path.glob("pytorch_model_fsdp*_rank*.bin")):
        raise ValueError(
            f"{path}: files of one rank each (LOCAL_STATE_DICT or use_dcp=False) say nothing about full parameters; "
            "save with SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    for name in ("pytorch_model_fsdp_1", "pytorch_model_fsdp_1.bin", "model_1.safetensors", "pytorch_model_1.bin"):
        if (path / name).exists():
            raise ValueError(f"{path}: holds several models ({name}); only one can be read")
    state, rename = _weights(path, prefix)
    ordered = any((path / name).exists() for name in (_SHARDED, _FULL, _PLAIN[1]))  # safetensors sorts by name
    specs = {name: tensor.spec for name, tensor in state.weights.items()}
    for source, content in [] if weights_only else _optimizers(path):
        state.optimizers.append(from_torch(content, specs, str(source), rename, ordered=ordered))
    _read_rest(path, state)
    return state


def _weights(path: Path, prefix: str | None) -> tuple[PortableState, Any]:
    state = PortableState()
    if dcp.detect(path / _SHARDED):
        return state, add_weights(state, dcp.content_of(path / _SHARDED)["model"], prefix)
    for name in (_FULL, _PLAIN[1]):
        if is_there(path / name):
            return state, add_weights(state, load_restricted(path / name), prefix)
    stored = portable_of(CheckpointReader(path / _PLAIN[0])).weights
    return state, add_weights(state, stored, prefix)


def _optimizers(path: Path) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    while True:
        number = len(found)
        sharded, full = path / f"optimizer_{number}", path / f"optimizer_{number}.bin"
        if number == 0 and not dcp.detect(sharded):
            full = path / "optimizer.bin"
        if dcp.detect(sharded):
            found.append((sharded, dcp.content_of(sharded)["optimizer"]))
        elif is_there(full):
            found.append((full, _checked(load_restricted(full), full)))
        elif sharded.is_dir():
            raise ValueError(f"{sharded}: has no {dcp.METADATA}, without which its optimizer state cannot be read")
        elif later := [file for file in sorted(path.glob("optimizer_*")) if _number(file) > number]:
            raise ValueError(f"{later[0]}: is there, and the state of optimizer {number} before it is not")
        else:
            return found


def _number(file: Path) -> int:
    """The optimizer that a file belongs to; -1 if it is another file."""
    found = re.fullmatch(r"optimizer_(\d+)(\.bin)?", file.name)
    return int(found[1]) if found else -1


def _checked(content: Any, source: Path) -> Any:
    states = torch_file.optimizer_states(content)
    if len(states) != 1:
        raise ValueError(f"{source}: holds no optimizer state")
    return states[0]


def _read_rest(path: Path, state: PortableState) -> None:
    if is_there(path / "scheduler.bin"):
        state.lr_scheduler = load_restricted(path / "scheduler.bin")
    if is_there(path / "scaler.pt"):
        state.loss_scaler = load_restricted(path / "scaler.pt")
    for file in sorted(path.glob("*")):
        if re.fullmatch(r"custom_checkpoint_\d+\.pkl|scheduler_\d+\.bin", file.name):
            state.client_state[file.stem] = load_restricted(file)
