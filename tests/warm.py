"""`python -c CODE`, `python SCRIPT`, `python -m MODULE`, and ranks of torchrun, without the seconds of imports.

They run in a fork of the server that has torch and the frameworks of others loaded; this package they load themselves,
if it can be imported. What they start is a process as any other. Not for what happens while a process starts or ends:
code registered with `atexit` does not run. Ranks have the variables that torchrun would set; the launcher itself is run
by the tests that are about it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from tests.launcher import fork_server


def _main(code: str, arguments: tuple[str, ...], env: Mapping[str, str], cwd: Path, out: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *arguments]
    cast(Any, multiprocessing.current_process())._config["daemon"] = False  # it may start processes, as any other
    multiprocessing.set_start_method(None, force=True)
    assert "zero_strategy" not in sys.modules
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


SCRIPT = """
import os, runpy, sys
place = os.getcwd() if sys.argv[1] == "-m" else os.path.dirname(os.path.abspath(sys.argv[1]))
sys.path.insert(0, place)
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_warm_script(
    *words: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, where the first word is a script or `-m`; see `run_warm`."""
    return run_warm(SCRIPT, *words, cwd=cwd, env=env, timeout=timeout)


def run_warm(
    code: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run`, with the output captured as text.

    Args:
        code: Of the module `__main__`.
        arguments: The rest of `sys.argv`.
        cwd: The directory it runs in.
        env: Its whole environment; default: this process's.
        timeout: Seconds until it is killed.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        out = Path(folder)
        values = dict(os.environ if env is None else env)
        process = fork_server().Process(target=_main, args=(code, arguments, values, cwd, out), daemon=True)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        texts = ((out / name).read_text() if (out / name).exists() else "" for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess([code, *arguments], process.exitcode or 0, *texts)


_LAUNCHERS = ("ACCELERATE_", "PL_", "TORCHELASTIC")


def plain_environment(**variables: str) -> dict[str, str]:
    """This process's environment without what a launcher has left in it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def run_warm_ranks(
    *words: str, count: int, cwd: Path, env: Mapping[str, str], timeout: float = 150.0
) -> list[subprocess.CompletedProcess[str]]:
    """`torchrun --nproc-per-node COUNT WORDS`, by rank; see `run_warm_script`.

    Args:
        words: The script, or `-m` and a module, and its arguments.
        count: Processes on this one node.
        cwd: The directory they run in.
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
        return run_warm_script(*words, cwd=cwd, env=own, timeout=timeout)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
