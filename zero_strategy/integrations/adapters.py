"""PEFT adapters on a sharded model: what PEFT writes of one, without a rank that holds the frozen weights.

PEFT picks an adapter's tensors out of a whole state dict by their names. It is shown one without memory first, which
tells the few that it wants; those alone are gathered.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.engine import ZeroEngine


def is_adapted(module: nn.Module) -> bool:
    """True if a module is PEFT's, of which only adapters are saved."""
    peft = sys.modules.get("peft")  # nobody has such a module without it
    return peft is not None and isinstance(module, peft.PeftModel)


def adapter_files(engine: ZeroEngine) -> dict[str, bytes]:
    """Files of PEFT's `save_pretrained`, {relative path: content}, on rank 0; nothing on others. All ranks call it.

    Only what it writes is gathered, into the host memory of every rank.
    """
    model: Any = engine.module
    entries = state_dict_entries(model, tied=True)
    hollow = {name: torch.empty_like(tensor, device="meta") for name, tensor in entries}
    state = {**hollow, **engine.full_state_dict(_written(model, hollow))}
    with tempfile.TemporaryDirectory() as folder:
        # PEFT asks modules for their state dicts on the way, which is a collective.
        model.save_pretrained(folder, state_dict=state, is_main_process=engine.mesh.rank == 0)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _written(model: Any, hollow: dict[str, Tensor]) -> set[str]:
    """The names of what PEFT writes; all of them where it computes with a tensor instead of taking it."""
    from peft import get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in hollow.items()}
    found: set[str] = set()
    for adapter in model.peft_config:
        for tensor in get_peft_model_state_dict(model, state_dict=dict(hollow), adapter_name=adapter).values():
            if id(tensor) not in names:
                return set(hollow)
            found.add(names[id(tensor)])
    return found
