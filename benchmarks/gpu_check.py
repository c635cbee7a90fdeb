"""All that one GPU can show, in one call with a budget of minutes: what tells most comes first.

    scripts/gpu_check.sh --minutes 25 --out outputs/gpu
    scripts/gpu_check.sh --rehearse --minutes 25          # the same suites on a machine without a GPU

Each suite runs in a process of its own: neighbours that measure nothing side by side, the others by themselves. What a
suite prints grows line by line in a file of its name in the folder of results; `results.json` is written when a suite
ends: its status, seconds and figures, with date and versions. A call goes on where an earlier one stopped: suites that
have passed are left out, and those that failed come after the ones that have not run yet. The exit status is 0 if all
have passed, 1 if some failed, 2 if the time was over before all had run.

In a rehearsal every suite starts with small sizes on the CPU, and the CUDA kernels are run by an emulation; nothing in
it is a measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

FIGURES = "FIGURES"
"""Stands in a command for the file into which a suite writes its figures."""
SCRATCH = "SCRATCH"
"""Stands in a command for a folder of its own."""
OUT = "OUT"
"""Stands in a command for the folder of results."""
PASSED, FAILED, OVER = "passed", "failed", "out of time"
_LEAST_SECONDS = 10.0
_OPS = ("-m", "benchmarks.ops", "--json", FIGURES, "--device")
_LAYER = ("-m", "benchmarks.transformer_layer", "--device")
_STEP = ("-m", "benchmarks.one_device", "--out", FIGURES, "--device")
_LAYER_SUITES = ("--suites", "layer", "options", "stochastic", "compiled", "loss")
_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "-m", "gpu")
_WORKERS = ("-n", "4")
_COLLECTED = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "--with-gpu-cases", "-m", "gpu")
_KERNELS = ("tests/gpu/test_native_ops.py", "tests/gpu/test_layer_ops.py", "tests/gpu/test_transformer_layer.py")
_SANITIZED = """
import os, sys
os.environ["TORCH_CUDA_SANITIZER"] = "1"
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
_SHARED = ("tests/gpu/test_shared_device.py",)
_STREAMS = ("tests/gpu/test_cuda.py", "tests/gpu/test_offload.py", "tests/gpu/test_activations.py")
_MACHINE = """
import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda)
if torch.cuda.is_available():
    print(torch.cuda.get_device_properties(0), "NCCL", torch.cuda.nccl.version())
"""


@dataclass(frozen=True)
class Suite:
    """One process.

    Attributes:
        name: As in the results.
        tells: Its use, in a line.
        gpu: Arguments of python on a GPU; empty: only rehearsed.
        rehearsal: The same on a machine without one.
        seconds: The most that it may take.
        needs: A package without which it is left out.
        beside: It measures neither time nor memory, and may run beside its neighbours.
        environment: Variables of its own.
    """

    name: str
    tells: str
    gpu: tuple[str, ...]
    rehearsal: tuple[str, ...]
    seconds: int
    needs: str = ""
    beside: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


SUITES = (
    Suite("machine", "versions and the device", ("-c", _MACHINE), ("-c", _MACHINE), 60, beside=True),
    Suite(
        "build",
        "the CUDA library builds and loads",
        ("-m", "zero_strategy.cli", "build", "--cuda", "--verbose"),
        ("-m", "zero_strategy.cli", "build", "--cuda", "--verbose"),
        420,
    ),
    Suite(
        "emulated", "kernels by an emulation", (), ("-m", "pytest", "-q", "tests/ops/test_cuda_on_host.py"), 600,
        beside=True,
    ),
    Suite(
        "kernels", "kernels against their references",
        (*_TESTS, *_WORKERS, *_KERNELS), (*_COLLECTED, *_KERNELS), 150, beside=True,
    ),
    Suite(
        "tests",
        "the engine, offloading, activations, checkpoints",
        (*_TESTS, *_WORKERS, "tests/gpu", "tests/activation", "tests/planning", "tests/checkpoint",
         *(f"--ignore={path}" for path in (*_KERNELS, *_SHARED))),
        (*_COLLECTED, "tests/gpu", "tests/activation", "tests/planning", "tests/checkpoint"),
        150,
        beside=True,
    ),
    Suite(
        "ranks", "several ranks on the device, over gloo and NCCL", (*_TESTS, *_SHARED), (*_COLLECTED, *_SHARED), 150,
        beside=True,
    ),
    Suite(
        "no library",
        "the engine without the CUDA library",
        (*_TESTS, "tests/gpu/test_cuda.py", "tests/gpu/test_offload.py"),
        (*_COLLECTED, "tests/gpu/test_cuda.py", "tests/gpu/test_offload.py"),
        120,
        beside=True,
        environment={"ZERO_STRATEGY_NATIVE": "0"},
    ),
    Suite(
        "races",
        "streams that do not wait for each other, by torch's sanitizer",
        ("-c", _SANITIZED, *_TESTS[2:], *_STREAMS),
        ("-c", _SANITIZED, *_COLLECTED[2:], *_STREAMS),
        150,
        beside=True,
    ),
    Suite(
        "waits",
        "every wait of the host in a step of each stage, tier and mode; busy time and traces",
        ("-m", "benchmarks.host_waits", "--device", "cuda", "--traces", OUT, "--out", FIGURES),
        ("-m", "benchmarks.host_waits", "--device", "cpu", "--model", "transformer-tiny", "--rows", "2",
         "--length", "16", "--out", FIGURES),
        90,
    ),
    Suite(
        "lora",
        "a Llama of 8B with LoRA in bf16, 4096 tokens: tokens/s and share of the peak",
        ("-m", "benchmarks.llama_lora", "--shape", "8b", "--length", "4096", "--device", "cuda", "--out", FIGURES),
        ("-m", "benchmarks.llama_lora", "--shape", "tiny", "--length", "16", "--device", "cpu", "--out", FIGURES),
        150,
        "peft",
    ),
    Suite(
        "step",
        "a step of 1B parameters, stages 0 to 3 on one rank, against plain torch",
        (
            *_STEP, "cuda", "--model", "transformer-1b", "--rows", "8", "--length", "1024", "--pairs",
            "zero1:plain,zero3:plain,zero1-low:plain-low",
        ),
        (*_STEP, "cpu", "--model", "transformer-tiny", "--rows", "2", "--length", "16", "--rounds", "1",
         "--pairs", "zero1:plain,zero3:plain"),
        120,
    ),
    Suite(
        "ops",
        "ops against torch's and the memory's bandwidth",
        (*_OPS, "cuda", "--rows", "16384", "--columns", "4096", "--numel", "100000000", "--tensors", "100"),
        (*_OPS, "cpu", "--rows", "16", "--columns", "64", "--numel", "10000", "--tensors", "4",
         "--rounds", "1", "--block-seconds", "0.001", "--threads", "1"),
        180,
    ),
    Suite(
        "offload",
        "state in host memory, against none and FSDP2",
        (
            *_STEP, "cuda", "--model", "transformer-1b", "--rows", "16", "--length", "1024", "--rounds", "4", "--pairs",
            "zero2-optimizer:zero2,zero3-offload:zero3,zero3-offload:fsdp2-offload",
        ),
        (*_STEP, "cpu", "--model", "transformer-tiny", "--rows", "2", "--length", "16", "--rounds", "1",
         "--pairs", "zero2-optimizer:zero2,zero3-offload:zero3"),
        240,
    ),
    Suite(
        "memory",
        "bytes at rest and at the peak, against the plan",
        ("-m", "benchmarks.memory_plan", "--device", "cuda", "--world", "1", "--model", "transformer-large",
         "--out", FIGURES),
        ("-m", "benchmarks.memory_plan", "--device", "cpu", "--world", "1", "--model", "transformer-tiny",
         "--stages", "3", "--dtypes", "float32", "--out", FIGURES),
        150,
    ),
    Suite(
        "layers",
        "fused layers, 512 tokens",
        (*_LAYER, "cuda", "--dtype", "bf16", "--hidden", "1024", "--length", "512", "--batch", "16", *_LAYER_SUITES),
        (*_LAYER, "cpu", "--hidden", "64", "--length", "16", "--batch", "1", "--suites", "layer"),
        120,
    ),
    Suite(
        "layers of 2048",
        "fused layers, 2048 tokens",
        (*_LAYER, "cuda", "--dtype", "bf16", "--hidden", "1024", "--length", "2048", "--batch", "4", *_LAYER_SUITES),
        (*_LAYER, "cpu", "--hidden", "64", "--length", "32", "--batch", "1", "--suites", "layer"),
        120,
    ),
    Suite(
        "nvme",
        "optimizer's state and parameters in files, against host memory",
        (*_STEP, "cuda", "--model", "transformer-1b", "--rows", "16", "--length", "1024", "--rounds", "2",
         "--folder", SCRATCH, "--pairs", "zero3-nvme:zero3-offload"),
        (*_STEP, "cpu", "--model", "transformer-tiny", "--rows", "2", "--length", "16", "--rounds", "1",
         "--folder", SCRATCH, "--pairs", "zero3-nvme:zero3-offload"),
        150,
    ),
    Suite(
        "deepspeed",
        "state in host memory, against DeepSpeed's",
        (
            *_STEP, "cuda", "--model", "transformer-1b", "--rows", "16", "--length", "1024", "--rounds", "4",
            "--pairs", "zero3-offload:deepspeed3-offload",
        ),
        ("-c", "import deepspeed"),
        180,
        "deepspeed",
    ),
)  # fmt: skip


class Results:
    """The file of results; it is whole whenever a suite has ended."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.json"
        self.suites: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        if self.path.exists():
            self.suites = json.loads(self.path.read_text())["suites"]

    def status(self, name: str) -> str:
        """Of the suite's last run; "" if it has none."""
        return str(self.suites.get(name, {}).get("status", ""))

    def add(self, name: str, found: dict[str, Any]) -> None:
        """Note what a suite found, and write all of it down."""
        with self._lock:
            self.suites[name] = found
            text = json.dumps({"machine": platform.node(), "suites": self.suites}, indent=1)
            beside = self.path.with_suffix(".tmp")
            beside.write_text(text + "\n")
            beside.replace(self.path)


def left_to_run(suites: Sequence[Suite], status: Callable[[str], str]) -> list[Suite]:
    """Those that have not passed, the ones that have never run first."""
    waiting = [suite for suite in suites if status(suite.name) != PASSED]
    return sorted(waiting, key=lambda suite: bool(status(suite.name)))  # stable: what tells most stays first


def words_of(suite: Suite, rehearse: bool, figures: Path, scratch: Path, out: Path) -> list[str]:
    """The command of a suite, for this machine."""
    places = {FIGURES: str(figures), SCRATCH: str(scratch), OUT: str(out)}
    words = suite.rehearsal if rehearse else suite.gpu
    return [sys.executable, *(places.get(word, word) for word in words)]


def run(suite: Suite, rehearse: bool, seconds: float, out: Path) -> dict[str, Any]:
    """Run one suite, for at most so many seconds; what it prints goes into a file of its name as it comes.

    Returns:
        status, seconds, date, versions, the command and its figures, as in `results.json`.
    """
    log_path = out / f"{suite.name.replace(' ', '-')}.txt"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, open(log_path, "a") as log:
        figures, scratch = Path(folder, "figures.json"), Path(folder, "scratch")
        scratch.mkdir()
        words = words_of(suite, rehearse, figures, scratch, out)
        log.write(f"\n==== {suite.name}: {suite.tells}\n$ {' '.join(words)}\n")
        log.flush()
        # One place for the native libraries: tests would build them once more for their checkout.
        cache = os.environ.get("ZERO_STRATEGY_CACHE", str(out.absolute() / "ops"))
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "ZERO_STRATEGY_CACHE": cache, **suite.environment}
        begin = time.monotonic()
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code = process.wait(seconds)
            status = PASSED if code == 0 else FAILED
        except subprocess.TimeoutExpired:
            status, code = OVER, -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.write(f"\n==== {suite.name}: {status}, exit status {code}\n")
        log.flush()
        found: Any = None
        if figures.exists():
            with contextlib.suppress(ValueError):
                found = json.loads(figures.read_text())
    return {
        "status": status,
        "exit status": code,
        "seconds": round(time.monotonic() - begin, 1),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": "none, rehearsed" if rehearse else torch.cuda.get_device_name(0),
        "command": words,
        "figures": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is left, as far as the time goes; the exit status."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__, formatter_class=raw)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all suites (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="for results (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, small")
    parser.add_argument("--only", nargs="+", metavar="SUITE", help="these, although they may have passed")
    parser.add_argument("--list", action="store_true", help="name the suites in their order, and end")
    options = parser.parse_args(arguments)
    known = {suite.name: suite for suite in SUITES}
    if wrong := [name for name in options.only or () if name not in known]:
        parser.error(f"no suite is called {wrong[0]!r}; there are {', '.join(known)}")
    if options.list:
        for suite in SUITES:
            print(f"{suite.name:<16}{suite.seconds:>5} s at most   {suite.tells}")
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --rehearse runs the suites without one")
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out)
    there = [suite for suite in SUITES if (suite.rehearsal if options.rehearse else suite.gpu)]
    chosen = [known[name] for name in options.only] if options.only else left_to_run(there, results.status)
    waiting: list[Suite] = []

    def one(suite: Suite) -> None:
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            waiting.append(suite)
            return
        if suite.needs and importlib.util.find_spec(suite.needs) is None:
            print(f"{suite.name:<16}left out: {suite.needs} is not installed", flush=True)
            return
        found = run(suite, options.rehearse, min(left, suite.seconds), options.out)
        results.add(suite.name, found)
        print(f"{suite.name:<16}{found['status']:<12}{found['seconds']:>7.1f} s", flush=True)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for beside, group in groupby(chosen, lambda suite: suite.beside and not options.rehearse):
            if beside:
                list(threads.map(one, group))
            else:
                for suite in group:
                    one(suite)
    if waiting:
        print(f"no time was left for {', '.join(suite.name for suite in waiting)}: the same call goes on with them")
        return 2
    return int(any(results.status(suite.name) != PASSED for suite in chosen if results.status(suite.name)))


if __name__ == "__main__":
    sys.exit(main())
