"""How many processes train together, and which of them this is."""

from __future__ import annotations

import os
import warnings

import torch.distributed as dist


def world_size() -> int:
    """Size of the default process group, 1 without one; a warning if the launcher started more processes than that."""
    if dist.is_initialized():
        return dist.get_world_size()
    if (launched := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        warnings.warn(
            f"WORLD_SIZE is {launched}, but there is no process group, so every process trains alone; call "
            "torch.distributed.init_process_group() first",
            stacklevel=3,
        )
    return 1


def world_rank() -> int:
    """This process in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def has_group() -> bool:
    """Whether there is a default process group."""
    return dist.is_initialized()
