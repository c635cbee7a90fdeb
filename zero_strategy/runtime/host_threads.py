"""Threads for work on the host: each rank's share of the cores, where a launcher has left it one thread.

torchrun, and `accelerate launch` through it, set OMP_NUM_THREADS=1 for the processes of a host with several, unless the
user has set it: right for ranks whose work is on a device, and wrong for an optimizer step on the host. Its workers
cannot tell from their own environment who set it. The environment with which the launcher itself began can, and the
system shows it to its children. Where it does not (not Linux, a script in between), the number stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

_VARIABLE = "OMP_NUM_THREADS"


@contextmanager
def share_of_cores() -> Iterator[None]:
    """Inside, torch computes on this thread's behalf with this rank's share of the cores; as before, afterwards."""
    before = torch.get_num_threads()
    wanted = _threads(before, os.environ)
    if wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _threads(present: int, environment: Mapping[str, str]) -> int:
    ranks = environment.get("LOCAL_WORLD_SIZE", "")
    if present != 1 or environment.get(_VARIABLE) != "1" or not ranks.isdecimal() or int(ranks) < 2:
        return present
    if "TORCHELASTIC_RUN_ID" not in environment or _launcher_was_told(os.getppid()):
        return present
    return max(1, len(os.sched_getaffinity(0)) // int(ranks))


def _launcher_was_told(launcher: int) -> bool:
    """True if the user has set the number of threads, or that cannot be known."""
    try:
        began_with = Path(f"/proc/{launcher}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return not any(began_with) or any(entry.startswith(f"{_VARIABLE}=".encode()) for entry in began_with)
