"""`deepspeed.comm`: `init_distributed`, `log_summary`, and everything else by torch.distributed's names."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zero_strategy.comm.process_group import discover, init_distributed
from zero_strategy.diagnostics.profiles import log_summary

__all__ = ["get_local_rank", "init_distributed", "log_summary"]


def get_local_rank() -> int:
    """This process on its host, as its launcher said; 0 without one."""
    place = discover(os.environ)
    return 0 if place is None else place.local_rank


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(dist, name):
        raise AttributeError(f"neither {__name__!r} nor torch.distributed has {name!r}")
    return getattr(dist, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in dir(dist) if not name.startswith("_"))})
