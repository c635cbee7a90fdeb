"""Making process groups out of lists of ranks."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zero_strategy.runtime.torch_private import backend_of

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup


def own_group(
    lists: Iterable[Sequence[int]], *, timeout: timedelta | None = None, backend: str | None = None
) -> ProcessGroup | None:
    """Make a group of each list of ranks. A collective over the default process group: all pass the same lists.

    Args:
        lists: Ranks of each group; a rank is in one of them at most.
        timeout: Of their collectives; None: the backend's.
        backend: "gloo", "nccl"; None: the default group's.

    Returns:
        The group that this rank is in, or None.
    """
    mine = None
    for ranks in lists:  # every rank takes part in making every group
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def end_group(group: ProcessGroup) -> None:
    """End a group that `own_group` made. Its ranks do so in the same order, when nothing is under way in it."""
    with suppress(ValueError):  # all groups were ended before, with the default one
        dist.destroy_process_group(group)


def end_with(owner: object, group: ProcessGroup) -> weakref.finalize[..., Any]:
    """End a group that `own_group` made when its owner is garbage: it is torch that holds it until then.

    Nothing may be under way in it that the owner does not take part in. Not where it is on GPUs: NCCL ends a
    communicator with all of its ranks, in one order, and garbage has none.
    """
    finalizer = weakref.finalize(owner, _end_dropped, group, os.getpid())
    finalizer.atexit = False
    return finalizer


def _end_dropped(group: ProcessGroup, pid: int) -> None:
    if os.getpid() != pid or sys.is_finalizing():
        return
    with suppress(Exception):  # collected anywhere: whoever runs there has not asked for it
        if not _on_gpus(group):
            end_group(group)


def _on_gpus(group: ProcessGroup) -> bool:
    """Whether anything but gloo connects its GPUs."""
    try:
        return not isinstance(backend_of(group, "cuda"), dist.ProcessGroupGloo)
    except RuntimeError:  # nothing does
        return False


def has_process_group() -> bool:
    """Whether the default process group was started."""
    return dist.is_initialized()


def group_size(group: ProcessGroup) -> int:
    """Number of its ranks."""
    return dist.get_world_size(group)


def from_first_rank(value: T) -> T:
    """Rank 0's picklable `value`, on all ranks; the value itself without a process group. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values: list[T | None] = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    found = values[0]
    assert found is not None
    return found
