"""An agent of one host: starts processes, and starts one that has died again in its place; the others go on.

A launcher like torchrun ends all processes when one dies. This one does not, and that is all of it: who is there is the
lighthouse's business, and what to do about it the processes' own.

Processes are forks of the agent, which has imported torch and this package: one that takes a place over is there within
a fraction of a second. The agent computes nothing and has no threads, so that a fork of it is as good as a new process.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from zero_strategy.survive.membership import ADDRESS, LIGHTHOUSE, PLACE
from zero_strategy.survive.run import AGENT, RANKS, RUN, run_folder
from zero_strategy.watchdog.peers import STATE, stat_fields

HEARTBEAT_TIMEOUT = 0.5
"""Seconds without a beat after which the lighthouse holds a process for dead."""
STRAGGLER_TIMEOUT = 10.0
"""Seconds that the lighthouse waits for one that beats and does not ask."""
_TICK = 0.02
_END_SECONDS = 10.0
"""In which processes end that are told to."""
_STOPPED_SECONDS = 10.0
"""After which a process that is stopped (SIGSTOP) is killed: the others have given it up long before."""
_UNTIL_END_OF_INPUT = 'exec 3<&0; "$@" 3<&- & found=$!; { cat <&3 >/dev/null; kill $found; } & wait $found'
"""Shell: run a command until it ends, or until nobody has the other end of the input open any more."""
_PRELOADED = ("torch", "torch._dynamo", "zero_strategy", "zero_strategy.survive")
"""The second is what the first optimizer of a process loads, for a second."""


@dataclass
class Launch:
    """Settings of an agent.

    Attributes:
        script: A file, or with `module` a module's name.
        arguments: For the script.
        module: `script` is a module.
        processes: On this host.
        first: Number of the first place of this host.
        places: Over all hosts.
        lighthouse: Its address; "": one is started here, for this host alone.
        serves: Start the lighthouse at that address.
        address: Under which other hosts reach this one.
        run: Name of the run, equal on all hosts.
        restarts: How often processes of this host may be started again.
        preload: Modules that forks find imported.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    processes: int = 1
    first: int = 0
    places: int = 1
    lighthouse: str = ""
    serves: bool = False
    address: str = "127.0.0.1"
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    restarts: int = 1000
    preload: Sequence[str] = ()


class _Forked(BaseException):
    """This process is one of those that were started: it leaves what the agent does."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class Agent:
    """Processes of one host.

    Args:
        launch: The settings.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._places: dict[int, int] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._started, self._status, self._told = 0, 0, 0
        self._pid = os.getpid()
        self._stopped: dict[int, float] = {}
        # Forks have the end that is written to as well: the lighthouse ends with the last of them, or of this one.
        self._lives, self._open = os.pipe()

    def run(self) -> int:
        """Run until all processes have ended; returns the exit status.

        Raises:
            ImportError: If torchft is not installed.
        """
        launch = self._launch
        if not launch.lighthouse or launch.serves:
            self._serve()
        for name in (*_PRELOADED, *launch.preload):
            importlib.import_module(name)
        # Forks need not look through the libraries' objects when they look for what nobody holds any more.
        gc.collect()
        gc.freeze()
        before = {each: signal.signal(each, self._tell) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            for place in range(launch.first, launch.first + launch.processes):
                self._start(place)
            while self._places:
                self._wait()
        except _Forked as forked:
            for each, handler in before.items():
                signal.signal(each, handler)
            return _run_script(launch, forked.place)
        finally:
            if os.getpid() == self._pid:
                self._end()
        return self._status

    # ---- processes ----

    def _start(self, place: int) -> None:
        self._started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            raise _Forked(place)
        self._places[pid] = place

    def _wait(self) -> None:
        """Wait for one process to end, and start it again if that was a death."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            self._kill_stopped()
            time.sleep(_TICK)
            return
        if self._lighthouse is not None and pid == self._lighthouse.pid:
            # It knows nothing that the next beat would not tell it anew.
            self._serve()
            return
        place, code = self._places.pop(pid, None), os.waitstatus_to_exitcode(status)
        if place is None or code == 0:
            return
        if code < 0 and not self._told and not self._status and self._started < self._most:
            print(f"zero-strategy run: place {place} has died of {_signal(-code)}, and starts again", file=sys.stderr)
            self._start(place)
            return
        # An error of the script's: it would come again, and the others have raised or will raise it, too.
        if not self._status and not self._told:
            why = f"has ended with exit code {code}" if code > 0 else f"has died of {_signal(-code)} once too often"
            print(f"zero-strategy run: place {place} {why}; the others are ended", file=sys.stderr)
            self._send(signal.SIGTERM)
        self._status = self._status or (code if code > 0 else 128 - code)

    def _kill_stopped(self) -> None:
        """Kill processes that were stopped long ago, so that their places are taken again."""
        now = time.monotonic()
        for pid in self._places:
            fields = stat_fields(pid)
            if fields is None or fields[STATE] != "T":
                self._stopped.pop(pid, None)
            elif now - self._stopped.setdefault(pid, now) > _STOPPED_SECONDS:
                os.kill(pid, signal.SIGKILL)

    @property
    def _most(self) -> int:
        return self._launch.processes + self._launch.restarts

    def _tell(self, number: int, frame: FrameType | None) -> None:
        """Hand a signal on: what the script does on it is its business."""
        self._told += 1
        self._status = self._status or 128 + number
        self._send(signal.SIGKILL if self._told > 2 else number)

    def _send(self, number: int) -> None:
        for pid in self._places:
            with suppress(ProcessLookupError):  # it has ended, and is about to be waited for
                os.kill(pid, number)

    # ---- the lighthouse, and the end ----

    def _serve(self) -> None:
        launch = self._launch
        if not launch.lighthouse:
            launch.lighthouse = f"http://127.0.0.1:{_free_port()}"
        host, _, port = launch.lighthouse.rpartition("//")[2].rpartition(":")
        command = [
            lighthouse_command(), "--bind", f"{'127.0.0.1' if host == '127.0.0.1' else '0.0.0.0'}:{port}",
            "--min_replicas", "1", "--join_timeout_ms", str(int(STRAGGLER_TIMEOUT * 1000)),
            "--quorum_tick_ms", str(int(_TICK * 1000)), "--heartbeat_timeout_ms", str(int(HEARTBEAT_TIMEOUT * 1000)),
        ]  # fmt: skip
        # In a session of its own: it goes on where the agent is killed, and the processes with it.
        self._lighthouse = subprocess.Popen(
            ["sh", "-c", _UNTIL_END_OF_INPUT, "sh", *command], stdin=self._lives, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "RUST_LOG": "error"},
        )  # fmt: skip

    def _end(self) -> None:
        end = time.monotonic() + _END_SECONDS
        while self._places:
            if time.monotonic() > end:
                self._send(signal.SIGKILL)
            pid, _ = os.waitpid(-1, os.WNOHANG)
            self._places.pop(pid, None)
            time.sleep(_TICK)
        os.close(self._open)  # the last one
        if self._lighthouse is not None:
            self._lighthouse.wait()
        shutil.rmtree(run_folder(self._launch.run), ignore_errors=True)


def lighthouse_command() -> str:
    """The file of torchft's lighthouse.

    Raises:
        ImportError: If torchft is not installed.
    """
    beside = Path(sys.executable).with_name("torchft_lighthouse")
    found = str(beside) if beside.is_file() else shutil.which("torchft_lighthouse")
    if found is None:
        raise ImportError("`zero-strategy run` starts torchft's lighthouse: pip install 'zero-strategy[survive]'")
    return found


def _run_script(launch: Launch, place: int) -> int:
    """Be one of the processes; returns the exit status."""
    os.environ.update(environment(launch, place))
    sys.argv = [launch.script, *launch.arguments]
    sys.path[0] = os.getcwd() if launch.module else str(Path(launch.script).resolve().parent)
    try:
        if launch.module:
            runpy.run_module(launch.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(launch.script, run_name="__main__")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def environment(launch: Launch, place: int) -> Mapping[str, str]:
    """Variables of one process."""
    found = {
        PLACE: str(place), RANKS: str(launch.places), RUN: launch.run, LIGHTHOUSE: launch.lighthouse,
        ADDRESS: launch.address, AGENT: str(os.getppid()),
    }  # fmt: skip
    # Else torch prints its C++ frames for each connection that a death has broken.
    found["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launch.processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = "1"  # as torchrun does: each process would take all cores
    return found


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port: int = any_socket.getsockname()[1]
        return port
