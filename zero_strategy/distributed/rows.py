"""One value, or one row of numbers, from every rank of the default process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather_row(row: Sequence[float]) -> list[list[float]]:
    """Every rank's row, in rank order; one collective of a fixed size, none where there is no process group.

    Args:
        row: As many numbers on every rank; NaN passes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [list(row)]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    found: list[list[float]] = torch.stack(rows).tolist()
    return found


def gather_everywhere(value: Any) -> list[Any]:
    """Every rank's picklable value, in rank order, over the default process group; this one's alone without one."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
