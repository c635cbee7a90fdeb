"""Pools of gloo ranks: processes that stand in for a cluster, started once and reused by many tests.

    test process                         rank processes (forks of one that has the libraries and the package loaded)
    ------------                         ---------------------------------------------------------------------------
    run = ranks(2)
    run(function, *args)  -- pipe -->    init_process_group(gloo) under a name of this run
                                         function(*args)
    [result, result]      <-- pipe --    wait for the other ranks, destroy_process_group

Each run has a process group of its own, so no run sees the subgroups or the half-finished collectives of
another. The store lives in the test process: its port is chosen by the kernel, and it survives the death of
any rank. A failure (an exception, a death, a timeout) raises :class:`RankError` and discards the pool; the
next run starts a fresh one. Ranks end with the test process, also when that is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess, ForkServerContext
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tests.permanent import PermanentObjects

T = TypeVar("T")
MAX_WORLD = 4
PRELOADED = ["torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo"]
"""Loaded once, in the server; the last because the first optimizer of any process loads it."""
PRELOADED_IF_USED = ["lightning.pytorch", "accelerate", "transformers.trainer", "peft", "torchao.float8"]
"""Loaded there too where the test process has loaded them: seconds that each rank would need for itself."""
LOADED_IN_TEMPLATE = ("zero_strategy", "hypothesis", "pytest", "_pytest")
"""Packages of which a rank's template has the modules that the test process has loaded."""
PATIENCE = 180.0
"""Seconds until a run without an answer is given up: several times those of the slowest machine that was met."""
_LOG_TAIL = 20_000


@dataclass(frozen=True)
class Failure:
    """Error of one rank."""

    kind: Literal["raised", "died", "hung"]
    """``hung``: gave no answer before the timeout, or within the grace after another rank had failed."""
    text: str
    """The traceback; or how the process died; or the stacks of a hung process."""
    exception: str = ""
    """Qualified class name of the exception, for ``raised``."""
    log: str = ""
    """The end of what the rank wrote to stdout and stderr in this run."""


class RankError(RuntimeError):
    """A run failed on at least one rank; ``failures`` is in the order in which they became known."""

    def __init__(self, summary: str, failures: dict[int, Failure], results: dict[int, Any]) -> None:
        self.failures = failures
        self.results = results
        parts = [summary]
        for rank, failure in failures.items():
            parts.append(f"--- rank {rank} {failure.kind} ---\n{failure.text.rstrip()}")
            if failure.log.strip() and failure.kind != "hung":
                parts.append(f"--- rank {rank}, output ---\n{failure.log.rstrip()}")
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class _StartRank:
    rank: int
    world: int
    port: int
    log: str

    @property
    def name(self) -> str:
        return f"rank{self.rank}of{self.world}"


@dataclass(frozen=True)
class _Job:
    number: int
    import_path: list[str]
    env: dict[str, str]
    call: bytes
    test: str
    backend: str


@dataclass(frozen=True)
class _Reply:
    ok: bool
    payload: bytes = b""
    exception: str = ""
    text: str = ""


def _dumps(value: object) -> bytes:
    # torch.save, not the pickler of multiprocessing: no file descriptors, no shared memory behind a result.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


# ------------------------------------------------------------------------------------------ the rank's side


def _end_with_parent() -> None:
    """Ends this process when the test process is gone, even while the main thread waits in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _prepare_process(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    # A keyboard interrupt reaches the whole process group; the test process decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The pool kills its ranks itself; a rank that counts as a daemon could start no DataLoader workers.
    cast(Any, multiprocessing.current_process())._config["daemon"] = False
    # Back to the platform's default, as in any process: our own start method is inherited otherwise.
    multiprocessing.set_start_method(None, force=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def _clean_state(env: Mapping[str, str], permanent: PermanentObjects) -> Iterator[None]:
    """Gives a run the same random, dtype, thread, signal and environment state, whatever ran before it."""
    environment = dict(os.environ)
    directory = os.getcwd()
    # Anew for every run: Lightning's Trainer, when it ends, "restores" a signal's handler that it cannot see.
    faulthandler.unregister(signal.SIGUSR2)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    os.environ.update(env)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        _forget_device_meshes()
        torch._dynamo.reset()  # it would keep the run's compiled modules, and so their engines and groups
        torch._dynamo.utils.counters.clear()  # of what was compiled
        gc.collect()
        permanent.restore()


def name_coverage(test: str) -> None:
    """Lines that run from here on are counted for a test, where coverage is measured (`make coverage`)."""
    if "coverage" in sys.modules and (current := sys.modules["coverage"].Coverage.current()) is not None:
        current.switch_context(test)


def _forget_device_meshes() -> None:
    """DTensor's caches hold meshes that equal those of the next run, whose groups have gone with this one's.

    A mesh holds its groups, and each of gloo's has a thread that wakes up a hundred times a second.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug: Any = import_module("torch.distributed.tensor.debug")
    if (clear := getattr(debug, "_clear_sharding_prop_cache", None)) is not None:
        clear()
    for name in [name for name in sys.modules if name.startswith("torch.distributed.tensor.")]:
        values = list(vars(sys.modules[name]).values())
        values += [member for kind in values if isinstance(kind, type) for member in vars(kind).values()]
        for value in values:
            cached = getattr(value, "__func__", value)  # of a static method
            if isinstance(cached, functools._lru_cache_wrapper):
                cached.cache_clear()
        if (clear := getattr(sys.modules[name], "clear_redistribute_planner_cache", None)) is not None:
            clear()


def _wait_for_all(store: Store, world: int, what: str = "finished") -> None:
    """A barrier on the store: one on the group could pair up with a collective that another rank waits in.

    Needed because a rank that closes its sockets early can take from a slower one the data still under way, or a
    connection that is still being made.
    """
    if store.add(what, 1) == world:
        store.set(f"all {what}", "")
    store.wait([f"all {what}"], timedelta(days=1))


def _end_groups() -> list[dist.ProcessGroup]:
    """Ends all groups but does not yet let go of them: each would take two rounds of gloo's thread, 20 ms."""
    if not dist.is_initialized():
        return []
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    return groups


def _let_go(groups: list[dist.ProcessGroup]) -> None:
    """Of all of them at once; nobody else holds any."""
    threads = [threading.Thread(target=groups.pop) for _ in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _execute(
    job: _Job, rank: int, world: int, store: Store, permanent: PermanentObjects, ended: list[dist.ProcessGroup]
) -> _Reply:
    """Runs a job. The groups that were there at its end are added to `ended`."""
    sys.path[:] = job.import_path
    try:
        with _clean_state(job.env, permanent):
            known = len(sys.modules)
            name_coverage(job.test)
            function, args, kwargs = _loads(job.call)
            if len(sys.modules) > known:
                permanent.add_all()
            run_store = PrefixStore(f"run{job.number}", store)
            if "cuda" in job.backend:
                torch.cuda.set_device(rank % torch.cuda.device_count())
            dist.init_process_group(job.backend, store=run_store, rank=rank, world_size=world)
            _wait_for_all(run_store, world, "connected")
            payload = _dumps(function(*args, **kwargs))
            _wait_for_all(run_store, world)
            ended += _end_groups()
        return _Reply(ok=True, payload=payload)
    except BaseException as error:  # whatever it is, the test process must hear of it
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return _Reply(ok=False, exception=name, text=traceback.format_exc())


def _serve(
    rank: int, world: int, port: int, connection: Connection, log_path: str, permanent: PermanentObjects
) -> None:
    _prepare_process(log_path)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        ended: list[dist.ProcessGroup] = []
        reply = _execute(job, rank, world, store, permanent, ended)
        connection.send_bytes(pickle.dumps(reply))
        _let_go(ended)
        if not reply.ok:
            # The group is left as it is: closing it would add errors on other ranks that explain nothing.
            connection.poll(None)
            return


# ------------------------------------------------------------------------------------------ the template's side


def _serve_template(orders: Connection, modules: list[str]) -> None:
    """Starts a rank for each `_StartRank`, and answers each pid with that process's exit code, None while it runs."""
    cast(Any, multiprocessing.current_process())._config["daemon"] = False  # a daemon could start no processes
    for name in modules:
        import_module(name)
    permanent = PermanentObjects()  # else the collection after each run looks at all of torch: 0.2 s, 1 s after a fork
    context = multiprocessing.get_context("fork")
    started: dict[int, ForkProcess] = {}
    while True:
        try:
            order: _StartRank | tuple[int, float] = orders.recv()
        except EOFError:  # the test process is gone; the ranks end when this one does
            return
        if isinstance(order, _StartRank):
            with Connection(reduction.recv_handle(orders)) as pipe:  # closed here, so that no later rank keeps it open
                arguments = (order.rank, order.world, order.port, pipe, order.log, permanent)
                process = context.Process(target=_serve, args=arguments, name=order.name, daemon=True)
                process.start()
            assert process.pid is not None
            started[process.pid] = process
            orders.send(process.pid)
        else:
            pid, seconds = order
            started[pid].join(seconds)
            orders.send(started[pid].exitcode)


# ---------------------------------------------------------------------------------- the test process's side


def fork_server() -> ForkServerContext:
    """Starts processes that have the heavy libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(name for name in PRELOADED_IF_USED if name in sys.modules)])
    return context


class _Template:
    """The process of which all ranks of this test process are forks: they load their tests' modules and no others."""

    def __init__(self) -> None:
        context = fork_server()
        self._orders, theirs = context.Pipe()
        modules = [
            name
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in LOADED_IN_TEMPLATE and getattr(module, "__spec__", None) is not None
        ]
        self._process = context.Process(target=_serve_template, args=(theirs, modules), name="template", daemon=True)
        self._process.start()
        theirs.close()

    def start(self, order: _StartRank) -> tuple[int, Connection]:
        """Pid of a new rank and the pipe to it."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._orders.send(order)
            reduction.send_handle(self._orders, theirs.fileno(), self._process.pid)
            return self._orders.recv(), ours

    def exit_code(self, pid: int, seconds: float) -> int | None:
        """Exit code of a rank that ends within some seconds; negative for a signal."""
        self._orders.send((pid, seconds))
        return cast("int | None", self._orders.recv())


@functools.cache
def _template() -> _Template:
    return _Template()


class RankPool:
    """``world`` rank processes. After a failed run it is closed and cannot be used again."""

    def __init__(self, world: int) -> None:
        if not 1 <= world <= MAX_WORLD:
            raise ValueError(f"a pool has 1 to {MAX_WORLD} ranks, not {world}")
        self.world = world
        self.closed = False
        self._runs = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[Connection] = []
        self.pids: list[int] = []
        for rank in range(world):
            pid, connection = _template().start(_StartRank(rank, world, self._store.port, str(self._log(rank))))
            self._connections.append(connection)
            self.pids.append(pid)

    def run(
        self,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float = PATIENCE,
        grace: float = 1.0,
        env: Mapping[str, str] | None = None,
        backend: str = "gloo",
    ) -> list[T]:
        """The results of ``function`` on every rank, in rank order; or raises :class:`RankError`."""
        __tracebackhide__ = True
        if "<" in getattr(function, "__qualname__", ""):
            raise TypeError(f"{function.__qualname__} is not at module level: ranks import it by name")
        call = _dumps((function, args, dict(kwargs or {})))
        self._runs += 1
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        job = pickle.dumps(_Job(self._runs, list(sys.path), dict(env or {}), call, test, backend))
        offsets = [self._log_size(rank) for rank in range(self.world)]
        for connection in self._connections:
            # A rank that died between two runs has closed its pipe; waiting for its answer reports that.
            with contextlib.suppress(OSError):
                connection.send_bytes(job)
        try:
            results, failures = self._collect(timeout, grace, offsets)
        except BaseException:
            self.close(patience=0.0)
            raise
        if failures or len(results) < self.world:
            summary = _summary(failures, timeout)
            self._add_hung(results, failures, offsets)
            self.close(patience=0.0)
            raise RankError(f"{function.__module__}.{function.__qualname__}: {summary}", failures, results)
        return [results[rank] for rank in range(self.world)]

    def _collect(self, timeout: float, grace: float, offsets: list[int]) -> tuple[dict[int, Any], dict[int, Failure]]:
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        deadline = time.monotonic() + timeout
        while waiting := [r for r in range(self.world) if r not in results and r not in failures]:
            left = deadline - time.monotonic()
            by_pipe = {self._connections[rank]: rank for rank in waiting}
            ready = multiprocessing.connection.wait(list(by_pipe), left) if left > 0 else []
            if not ready:
                break
            for pipe in ready:
                rank = by_pipe[cast(Connection, pipe)]
                try:
                    reply: _Reply = pickle.loads(cast(Connection, pipe).recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = self._death(rank, offsets[rank])
                else:
                    if reply.ok:
                        results[rank] = _loads(reply.payload)
                    else:
                        failures[rank] = Failure(
                            "raised", reply.text, reply.exception, self._log_tail(rank, offsets[rank])
                        )
                if rank in failures:
                    deadline = min(deadline, time.monotonic() + grace)
        return results, failures

    def _death(self, rank: int, offset: int) -> Failure:
        code = _template().exit_code(self.pids[rank], 1.0) or 0
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return Failure("died", f"the process ended {how}", log=self._log_tail(rank, offset))

    def _add_hung(self, results: dict[int, Any], failures: dict[int, Failure], offsets: list[int]) -> None:
        """Adds the ranks without an answer, with their stacks, which a signal makes them write to the log."""
        hung = [r for r in range(self.world) if r not in results and r not in failures]
        sizes = {rank: self._log_size(rank) for rank in hung}
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR2)
        end = time.monotonic() + 15.0
        while time.monotonic() < end and any(self._log_size(rank) == size for rank, size in sizes.items()):
            time.sleep(0.02)
        if hung:
            time.sleep(0.5)
        for rank in hung:
            tail = self._log_tail(rank, offsets[rank])
            failures[rank] = Failure("hung", tail, log=tail)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _log_size(self, rank: int) -> int:
        log = self._log(rank)
        return log.stat().st_size if log.exists() else 0

    def _log_tail(self, rank: int, offset: int) -> str:
        log = self._log(rank)
        return log.read_bytes()[offset:][-_LOG_TAIL:].decode(errors="replace") if log.exists() else ""

    def close(self, patience: float = 2.0) -> None:
        """Ends the processes: idle ones end as their pipe closes, the others after ``patience`` seconds."""
        if self.closed:
            return
        self.closed = True
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + patience
        for pid in self.pids:
            if _template().exit_code(pid, max(0.0, end - time.monotonic())) is None:
                os.kill(pid, signal.SIGKILL)
                _template().exit_code(pid, 60.0)
        self._folder.cleanup()


def _summary(failures: dict[int, Failure], timeout: float) -> str:
    if not failures:
        return f"no answer from every rank within {timeout:g} s"
    rank, first = next(iter(failures.items()))
    last_line = first.text.strip().splitlines()[-1] if first.text.strip() else ""
    return f"rank {rank} {first.kind} first: {last_line}"


@dataclass(frozen=True)
class Runner:
    """Runs functions on ``world`` ranks; what a test gets from the fixture ``ranks``."""

    launcher: Launcher
    world: int
    timeout: float
    grace: float
    env: Mapping[str, str] | None

    def __call__(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        __tracebackhide__ = True
        pool = self.launcher.pool(self.world)
        more: dict[str, Any] = {"timeout": self.timeout, "grace": self.grace, "env": self.env}
        return pool.run(function, args, kwargs, **more, backend=self.launcher.backend)


class Launcher:
    """The pools of one test process, by world size. A pool that failed is replaced at its next use.

    Args:
        backend: Of the ranks' default process group; with "cuda" in it each rank has a device, or a share of one.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self._pools: dict[int, RankPool] = {}

    def __call__(
        self, world: int, *, timeout: float = PATIENCE, grace: float = 1.0, env: Mapping[str, str] | None = None
    ) -> Runner:
        """A runner on ``world`` ranks.

        Args:
            world: number of ranks, 1 to 4.
            timeout: seconds until a run without an answer from every rank is given up.
            grace: seconds that the other ranks have to answer after one has failed.
            env: environment variables that the ranks see during a run.
        """
        return Runner(self, world, timeout, grace, env)

    def pool(self, world: int) -> RankPool:
        pool = self._pools.get(world)
        if pool is None or pool.closed:
            pool = self._pools[world] = RankPool(world)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
