"""Ranks on this host for a command: processes that form a process group, run one function, and go away.

    results = run_local_ranks("package.module:function", (1, 2), ranks=2)

Calls and results pass through a store that lives in this process, so ranks may print what they like; what they print
goes to stderr. Whatever ends this process ends them: they are killed when a call returns or raises (Ctrl-C included),
and each watches its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_POLL = 0.05
_GRACE = 2.0
"""Seconds in which other ranks may tell of a failure that is the cause of the first one heard of."""


class LocalRankError(RuntimeError):
    """A rank raised, died or did not end in time.

    Attributes:
        failures: By rank, what happened: a traceback, or how it ended.
    """

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {text.rstrip()}" for rank, text in sorted(failures.items())))


def run_local_ranks(
    function: str, arguments: tuple[Any, ...], ranks: int, *, timeout: float = 600.0, backend: str = "gloo"
) -> list[Any]:
    """Call a function on several ranks of this host; returns what it returned, in rank order.

    Args:
        function: Where it is, as "module:name".
        arguments: For it; they are pickled.
        ranks: How many.
        timeout: Seconds until they are given up.
        backend: Of the default process group: "gloo", or "nccl" with a GPU for each.

    Raises:
        LocalRankError: If a rank raised, died or did not end in time.
    """
    # The address of this host, not its name: a name may lead to an interface that is down.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((function, arguments))
    threads = max(1, torch.get_num_threads() // ranks)
    _set(store, "call", pickle.dumps((list(sys.path), threads, call)))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command = [sys.executable, "-m", __name__, str(store.port), str(rank), str(ranks), backend]
            processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=_environment()))
        return _collect(store, processes, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _set(store: TCPStore, key: str, value: bytes) -> None:
    cast(Any, store).set(key, value)  # the stub knows text only


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if sys.platform.startswith("linux"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _collect(store: TCPStore, processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank in results or rank in failures:
                continue
            status = process.poll()  # asked first: what it left in the store is then complete
            if store.check([f"result{rank}"]):
                good, value = pickle.loads(store.get(f"result{rank}"))
                (results if good else failures)[rank] = value
            elif status is not None:
                failures[rank] = f"ended with {_how(status)}, without a word"
        if failures:
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(_POLL)
    if failures:
        raise LocalRankError(failures)
    if missing := [rank for rank in range(len(processes)) if rank not in results]:
        raise LocalRankError({rank: f"was not done within {timeout:g} seconds" for rank in missing})
    _set(store, "finished", b"")
    return [results[rank] for rank in range(len(processes))]


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


# ------------------------------------------------------------------------------------------------ the rank's side


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _main(port: int, rank: int, ranks: int, backend: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it as well, and decides what ends
    _end_with_parent()
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    path, threads, call = pickle.loads(store.get("call"))
    sys.path[:] = path
    torch.set_num_threads(threads)
    try:
        name, arguments = pickle.loads(call)
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=ranks)
        module, _, attribute = name.partition(":")
        value = getattr(import_module(module), attribute)(*arguments)
        answer = pickle.dumps((True, value))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    _set(store, f"result{rank}", answer)
    # Not before all are done: who closes its connections early takes from others what is still under way.
    with contextlib.suppress(Exception):
        store.wait(["finished"], timedelta(days=1))
    os._exit(0)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
