"""Processes as torchrun starts them, without the seconds that each needs for its imports.

They are forks of the server that has the libraries loaded, with the variables that torchrun would set. The launcher
itself is run by the tests that are about it.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.warm import run_warm_script

LAUNCHERS = ("ACCELERATE_", "PL_", "TORCHELASTIC")


def plain_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what a launcher has left in it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def as_processes_of_torchrun(
    words: list[str], count: int, folder: Path, env: Mapping[str, str], timeout: float = 150.0
) -> list[subprocess.CompletedProcess[str]]:
    """Results of the processes that `torchrun --nproc-per-node COUNT WORDS` would start, by rank.

    Args:
        words: The script, or `-m` and a module, and its arguments.
        count: Processes on this one node.
        folder: The directory they run in.
        env: The launcher's whole environment; with MASTER_PORT in it that one is taken, else a free one.
        timeout: Seconds until a process is killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_PORT": port, **env, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}

    def one(rank: int) -> subprocess.CompletedProcess[str]:
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_warm_script(*words, cwd=folder, env=own, timeout=timeout)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
