"""Training runs in processes that may be killed at any moment, and that leave behind what they did.

All processes are forked from one that has loaded torch but never started a thread. A rank writes a line to its journal,
with one system call, for every step and every save; what was written survives the rank.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process would load it
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.models import build, loss_fn, make_batch
from zero_strategy.checkpoint.save_job import PendingSave
from zero_strategy.cli.checkpoint_checks import verify
from zero_strategy.config import load_config
from zero_strategy.convert.convert import checkpoint_in
from zero_strategy.engine import ZeroEngine

ROWS = 4
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Shape:
    """Of a run."""

    world: int
    stage: int
    in_files: bool = False
    """All state in files, in a folder beside that of the checkpoints."""


@dataclass(frozen=True)
class Script:
    """Work of a run.

    Attributes:
        steps: Optimizer steps from the very beginning, however often it is resumed.
        every: Steps between saves; 0 for none.
        keep_last: Complete checkpoints to keep; 0 for all.
        background: Every other save goes on in the background.
    """

    steps: int = 8
    every: int = 2
    keep_last: int = 2
    background: bool = True


# ---------------------------------------------------------------------------------------------------- processes


def fork(action: Callable[[], None], log: Path) -> int:
    """Runs `action` in a child whose output goes to `log`; its exit code tells whether it raised."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        action()
        code = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def serve_store(folder: Path) -> tuple[int, int]:
    """A key-value store in a process of its own, as a launcher's agent has it; returns (pid, port)."""
    ours, theirs = os.pipe()

    def serve() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(theirs, str(store.port).encode())
        while True:
            signal.pause()

    pid = fork(serve, folder / "store.log")
    port = int(os.read(ours, 16))
    os.close(ours)
    os.close(theirs)
    return pid, port


def reap(pids: list[int], seconds: float) -> list[int]:
    """Waits for processes to end; returns those that have not."""
    left, end = list(pids), time.monotonic() + seconds
    while left and time.monotonic() < end:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.001)
    return left


# ------------------------------------------------------------------------------------------------------ journals


class Journal:
    """Lines of JSON, each written with one call."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **entry: Any) -> None:
        os.write(self._descriptor, (json.dumps(entry | {"time": time.monotonic()}) + "\n").encode())


def entries(path: Path, key: str) -> list[dict[str, Any]]:
    """The entries of a journal that have `key`; a line that was cut off is none."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in found if key in entry]


# ------------------------------------------------------------------------------------------------------ training


def train(shape: Shape, script: Script, rank: int, folder: Path, port: int, run: str, journal: Path) -> None:
    """One rank: resumes from what is in `folder`, if anything is, and trains to the end of the script."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = PrefixStore(run, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.world, timeout=timedelta(seconds=30))
    notes = Journal(journal)
    engine, optimizer = _engine(shape, script, folder.with_name("state"))
    first = _resume(engine, folder, notes) if script.every else 0
    pending: PendingSave | None = None
    for step in range(first, script.steps):
        loss = _step(engine, optimizer, shape, rank, step)
        notes.note(step=step + 1, loss=loss.hex(), digest=digest(engine))
        if script.every and (step + 1) % script.every == 0:
            background = script.background and (step + 1) // script.every % 2 == 0
            notes.note(saving=step + 1)
            pending = engine.save(folder / f"step-{step + 1}", user={"step": step + 1}, asynchronous=background)
            if not background:
                notes.note(saved=step + 1, background=False)
    if pending is not None:
        pending.wait()
        notes.note(saved=script.steps, background=True)
    engine.saver.finish()  # this process ends without the interpreter's end, which would wait
    notes.note(done=script.steps)
    dist.barrier()
    dist.destroy_process_group()


def _engine(shape: Shape, script: Script, state: Path) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    model = build("transformer", 3)
    options = {"max_file_bytes": 12_000, "keep_last": script.keep_last}
    offload: dict[str, Any] = {}
    if shape.in_files:
        state.mkdir(exist_ok=True)
        parameters = "nvme" if shape.stage == 3 else "none"
        offload = {"optimizer": "nvme", "parameters": parameters, "nvme_path": [str(state)], "probe_seconds": 0}
    config = load_config(
        stage=shape.stage,
        units={"min_numel": 0},
        barrier_seconds=20.0,
        checkpoint=options,
        offload=offload,
    )
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    engine.attach(optimizer)
    return engine, optimizer


def _step(engine: ZeroEngine, optimizer: torch.optim.Optimizer, shape: Shape, rank: int, step: int) -> float:
    batch = make_batch("transformer", step, ROWS * shape.world)[rank * ROWS : (rank + 1) * ROWS]
    loss = loss_fn(engine.module, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _resume(engine: ZeroEngine, folder: Path, notes: Journal) -> int:
    newest = checkpoint_in(folder) if folder.is_dir() else None  # `latest` comes after the first checkpoint
    if newest is None:
        notes.note(resumed=0)
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = engine.load(folder / newest)
    step = int(reader.manifest.user["step"])
    problems = list(verify(reader.directory).problems)
    warned = [str(warning.message) for warning in caught if "latest" in str(warning.message)]
    notes.note(resumed=step, problems=problems, warned=warned, digest=digest(engine))
    return step


def digest(engine: ZeroEngine) -> str:
    """Of this rank's weights and optimizer state."""
    sum_of_all = xxhash.xxh3_128()
    for bucket in engine.model.buckets:
        sum_of_all.update(_bytes(bucket.shard.read(0, bucket.layout.slice_numel)))
    for sharded in engine.optimizers:
        for parameter in sharded.parameters():
            for key, value in sorted(sharded.state_of(parameter).items()):
                sum_of_all.update(key.encode())
                sum_of_all.update(_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
    return sum_of_all.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


if sys.platform == "win32":
    raise ImportError("these tests need fork and signals")
