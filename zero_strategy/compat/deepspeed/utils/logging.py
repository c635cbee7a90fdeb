"""`deepspeed.utils.logging`: a logger that prints, and lines of some ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch.distributed as dist

from zero_strategy.comm.process_group import world_rank

__all__ = ["log_dist", "logger"]


def _printing(name: str) -> logging.Logger:
    found = logging.getLogger(name)
    if not found.handlers:
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
        found.propagate = False
    return found


logger = _printing("zero_strategy.compat.deepspeed.scripts.log")
"""Prints from INFO on."""


def log_dist(message: object, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks.

    Args:
        message: What.
        ranks: Which; [-1]: all. None or empty: none, unless there is no process group.
        level: Of `logging`.
    """
    chosen = list(ranks or [])
    if not dist.is_initialized() or -1 in chosen[:1] or world_rank() in chosen:
        logger.log(level, "[Rank %d] %s", world_rank(), message, stacklevel=2)
