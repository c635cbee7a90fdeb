"""Memory that a run may take on this machine now: GPU memory, host memory within its limits, room on drives."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_strategy.runtime.host_heap import free_in_heap

THREADS = 12
"""Threads that an engine and gloo start in a rank."""
THREADS_ALONE = 4
"""Those of a rank that is the only one."""
_NO_LIMIT = 1 << 60
"""Control groups of version 1 say 'none' by a number of this size."""


@dataclass(frozen=True)
class Machine:
    """Memory that a run may take now. None: not known, or not there.

    Attributes:
        gpus: Number of CUDA devices.
        gpu_free: Free bytes of the device that has least.
        host_free: Bytes of host memory that processes of this control group can still take.
        host_bound: What sets `host_free`: "MemAvailable", or the control group's limit.
        process_free: Bytes that this process may still take by its own limits (RLIMIT_AS, RLIMIT_DATA).
        memlock: Bytes that a process may lock in memory (pinned memory is locked); None: no limit.
        shm_free: Free bytes of /dev/shm.
        disk_free: Free bytes where `disk_path` is, or would be.
        disk_path: The directory for NVMe offload.
    """

    gpus: int = 0
    gpu_free: int | None = None
    host_free: int | None = None
    host_bound: str = ""
    process_free: int | None = None
    memlock: int | None = None
    shm_free: int | None = None
    disk_free: int | None = None
    disk_path: str | None = None

    @classmethod
    def here(
        cls, nvme_path: str | os.PathLike[str] | None = None, root: Path = Path("/"), *, threads: int = THREADS
    ) -> Machine:
        """This machine, as it is now.

        Args:
            nvme_path: Directory for NVMe offload; it need not exist yet.
            root: Where `proc`, `sys` and `dev` are.
            threads: That are still to be started, whose stacks a limit of this process counts.
        """
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        free = [torch.cuda.mem_get_info(device)[0] for device in range(gpus)]
        bounds = [(name, nbytes) for name, nbytes in host_memory(root).items() if name == "MemAvailable"]
        bounds += [(f"limit of the control group ({path})", left) for path, left in _cgroup_rooms(root)]
        bound, host_free = min(bounds, key=lambda found: found[1], default=("", None))
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            gpus=gpus,
            gpu_free=min(free, default=None),
            host_free=host_free,
            host_bound=bound,
            process_free=_process_room(root, threads),
            memlock=None if soft == resource.RLIM_INFINITY else soft,
            shm_free=_free(root / "dev/shm"),
            disk_free=None if nvme_path is None else _free(Path(nvme_path)),
            disk_path=None if nvme_path is None else os.fspath(nvme_path),
        )


_STACK = 8 << 20
"""Bytes of a thread's stack where there is no limit."""


def room_now(device: torch.device, *, in_heap: bool = True) -> int | None:
    """Bytes that a rank whose threads run may still take where it computes; None: not known.

    Args:
        device: Where it computes.
        in_heap: What is free in malloc's heap counts.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    root = Path("/")
    shared = [nbytes for name, nbytes in host_memory(root).items() if name == "MemAvailable"]
    shared += [left for _, left in _cgroup_rooms(root)]
    own = _process_room(root, 0)
    rooms = shared + ([] if own is None else [own])
    return min(rooms) + (free_in_heap() if in_heap else 0) if rooms else None


def _process_room(root: Path, threads: int) -> int | None:
    """Bytes that this process may still take by its own limits; None: it has none.

    Stacks of threads count as soon as these begin, by their whole size.
    """
    rooms = []
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stacks = threads * (_STACK if stack == resource.RLIM_INFINITY else stack)
    for kind, field in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft, _ = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY:
            continue
        with suppress(OSError):
            lines = (root / "proc/self/status").read_text().splitlines()
            used = next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
            rooms.append(max(0, soft - used - stacks))
    return min(rooms, default=None)


def host_memory(root: Path) -> dict[str, int]:
    """Bytes by name, as Linux tells them ("MemTotal", "MemAvailable"); empty on other systems."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def _cgroup_rooms(root: Path) -> Iterator[tuple[str, int]]:
    """(directory, bytes left) of this process's control group and of those above it, where there is a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _up(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _up(
                mount / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _up(mount: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[tuple[str, int]]:
    """Go from a group up to the mount; in a container the path may be one that only the host can see."""
    here = mount / path.lstrip("/")
    while True:
        bound, used = _number(here / limit), _number(here / usage)
        if bound is not None and used is not None and bound < _NO_LIMIT:
            # Pages of files that nobody uses count as used, and are given up when memory is asked for.
            yield str(here), max(0, bound - max(0, used - _stat(here / "memory.stat", cache)))
        if here == mount or mount not in here.parents:
            return
        here = here.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)


def _free(path: Path) -> int | None:
    """Free bytes where `path` is, or the first of its parents that exists."""
    for place in (path, *path.absolute().parents):
        if place.exists():
            return shutil.disk_usage(place).free
    return None
