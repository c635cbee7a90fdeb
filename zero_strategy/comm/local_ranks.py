"""Ranks on this host for a command: started, connected, and ended with it.

    results = run_local_ranks("package.module:function", (1, 2), ranks=2)

The call lies in a private temporary directory beside the file through which ranks find each other, and a result comes
through a pipe that its rank inherits. Only the connections of the process group itself listen, on the loopback; what
the ranks exchange over them is unpickled only where a key shows that one of them sent it (`transport`). Ranks may print
what they like; it goes to stderr. Whatever ends this process ends them: they are killed when a call returns or raises
(Ctrl-C included), and each watches its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_strategy.comm.transport import KEY_VARIABLE, new_key
from zero_strategy.runtime.compute_device import gpu_of_local_rank, occupy
from zero_strategy.runtime.torch_private import FileStore

_CALL, _STORE = "call", "store"
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
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
    # Before anything is made: arguments that cannot be pickled leave no folder and no process.
    call = pickle.dumps((function, arguments))
    # The ranks share the cores of this host.
    threads = max(1, torch.get_num_threads() // ranks)
    folder = Path(tempfile.mkdtemp(prefix="zero_strategy-ranks-"))  # which nobody else may look into
    processes: list[subprocess.Popen[bytes]] = []
    results: list[Connection] = []
    environment = _environment()
    try:
        # The call is bytes inside of these: a rank unpickles it when its path is set, for its modules may be found
        # there only.
        (folder / _CALL).write_bytes(pickle.dumps((list(sys.path), threads, call)))
        for rank in range(ranks):
            receiving, sending = Pipe(duplex=False)
            results.append(receiving)
            # This end is closed here once the rank has it, or the pipe would not end with the rank.
            with sending:
                number = sending.fileno()
                numbers = map(str, (os.getpid(), number, rank, ranks))
                command = [sys.executable, "-m", __name__, str(folder), *numbers, backend]
                processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[number])
                )
        return _collect(results, processes, timeout)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for receiving in results:
            receiving.close()
        # Not before all ranks have ended, which find each other through a file there.
        shutil.rmtree(folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    # A rank is started by this module's name, so its interpreter has to find this very package.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    # A launcher's variables are about this process; to a script that reads them, the ranks would all be this one.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env[KEY_VARIABLE] = new_key()
    # Also where the user has chosen another for trainings on several hosts: none of these ranks is on one.
    if interface := _LOOPBACK.get(sys.platform):
        env["GLOO_SOCKET_IFNAME"] = env["NCCL_SOCKET_IFNAME"] = interface
    return env


def _collect(pipes: Sequence[Connection], processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(results) + len(failures) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank in results or rank in failures:
                continue
            status = process.poll()  # asked first: what it left in the pipe is then complete
            if (answer := _received(pipes[rank])) is not None:
                good, value = pickle.loads(answer)
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
    return [results[rank] for rank in range(len(processes))]


def _received(pipe: Connection) -> bytes | None:
    try:
        return pipe.recv_bytes() if pipe.poll() else None
    except EOFError:  # it has ended
        return None


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


# ------------------------------------------------------------------------------------------------ the rank's side


def _end_with_parent(folder: Path, parent: int) -> None:
    def watch() -> None:
        # When it ends, the kernel gives this process another one; that may have been before this process could ask.
        while os.getppid() == parent:
            time.sleep(0.2)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)  # `sys.exit` would end this thread alone

    threading.Thread(target=watch, daemon=True).start()


def _main(folder: Path, parent: int, number: int, rank: int, ranks: int, backend: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it as well, and decides what ends
    _end_with_parent(folder, parent)
    # A process that the function starts, and that lives on, would keep the pipe open.
    os.set_inheritable(number, False)
    result = Connection(number, readable=False)
    path, threads, call = pickle.loads((folder / _CALL).read_bytes())
    sys.path[:] = path
    torch.set_num_threads(threads)
    try:
        name, arguments = pickle.loads(call)
        if backend == "nccl":
            occupy(gpu_of_local_rank(rank))
        store = FileStore(str(folder / _STORE), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        module, _, attribute = name.partition(":")
        value = getattr(import_module(module), attribute)(*arguments)
        answer = pickle.dumps((True, value))  # in here, as a value that cannot be pickled is this rank's failure
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    result.send_bytes(answer)
    # Until the parent ends it: who closes its connections early takes from others what is still under way.
    threading.Event().wait()


if __name__ == "__main__":
    folder, parent, number, rank, ranks, backend = sys.argv[1:]
    _main(Path(folder), int(parent), int(number), int(rank), int(ranks), backend)
