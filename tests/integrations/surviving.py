"""Processes of a run that survives deaths: as many as are asked for, and a lighthouse, on this host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.warm import plain_environment, run_warm_script

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def lighthouse(folder: Path) -> Iterator[str]:
    """Torchft's, whose address is given."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [Path(sys.executable).with_name("torchft_lighthouse"), "--bind", address, "--min_replicas", "1"]
    # The processes of a test begin at once, but a loaded machine is slow.
    times = ["--join_timeout_ms", "20000", "--quorum_tick_ms", "20", "--heartbeat_timeout_ms", "1000"]
    with (
        (folder / "lighthouse.log").open("w") as log,
        subprocess.Popen([*command, *times], stdout=log, stderr=log) as it,
    ):
        try:
            yield f"http://{address}"
        finally:
            it.kill()


def die() -> None:
    """End this process as a host's failure does."""
    os.kill(os.getpid(), signal.SIGKILL)


LIFE = "LIFE_OF_PLACE"
"""Variable: 1 for the first process of a place."""


def run_surviving(
    module: str, *arguments: str, count: int, folder: Path, lives: int = 1
) -> list[subprocess.CompletedProcess[str]]:
    """`python -m MODULE ARGUMENTS` in each process, by place.

    Args:
        module: Of the script.
        arguments: Its arguments.
        count: Number of processes.
        folder: Of the memory of the run.
        lives: How often a place is taken, by another process when one was killed.
    """
    with lighthouse(folder) as address:
        shared = {"TORCHFT_LIGHTHOUSE": address, "ZERO_STRATEGY_RANKS": str(count), "ZERO_STRATEGY_RUN": "test"}
        shared |= {"ZERO_STRATEGY_MEMORY": str(folder), "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}

        def one(place: int) -> subprocess.CompletedProcess[str]:
            env = plain_environment(**shared, ZERO_STRATEGY_PLACE=str(place))
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                env.pop(name, None)
            for life in range(1, 1 + lives):
                words = ("-m", module, *arguments)
                done = run_warm_script(*words, cwd=ROOT, env={**env, LIFE: str(life)}, timeout=60)
                if done.returncode != -signal.SIGKILL:
                    break
            return done

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))
