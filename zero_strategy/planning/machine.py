"""The memory of a machine: devices, host within its limits, room on drives.

GPU memory, host memory within its limits, room on drives.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

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
        memlock: Bytes that a process may lock in memory (pinned memory is locked); None: no limit.
        shm_free: Free bytes of /dev/shm.
        disk_free: Free bytes where `disk_path` is, or would be.
        disk_path: The directory for NVMe offload.
    """

    gpus: int = 0
    gpu_free: int | None = None
    host_free: int | None = None
    host_bound: str = ""
    memlock: int | None = None
    shm_free: int | None = None
    disk_free: int | None = None
    disk_path: str | None = None

    @classmethod
    def here(cls, nvme_path: str | os.PathLike[str] | None = None, root: Path = Path("/")) -> Machine:
        """This machine, as it is now.

        Args:
            nvme_path: Directory for NVMe offload; it need not exist yet.
            root: Where `proc`, `sys` and `dev` are.
        """
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        free = [torch.cuda.mem_get_info(device)[0] for device in range(gpus)]
        bounds = [("MemAvailable", available)] if (available := _available(root)) is not None else []
        bounds += [(f"limit of the control group ({path})", left) for path, left in _cgroup_rooms(root)]
        bound, host_free = min(bounds, key=lambda found: found[1], default=("", None))
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            gpus=gpus,
            gpu_free=min(free, default=None),
            host_free=host_free,
            host_bound=bound,
            memlock=None if soft == resource.RLIM_INFINITY else soft,
            shm_free=_free(root / "dev/shm"),
            disk_free=None if nvme_path is None else _free(Path(nvme_path)),
            disk_path=None if nvme_path is None else os.fspath(nvme_path),
        )


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
    """From a group up to the mount; in a container the path may be one that only the host can see."""
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
