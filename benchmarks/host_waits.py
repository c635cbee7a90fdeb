"""Every wait of the host for a GPU in a training step, with the line that waits; and where the device's time goes.

    python -m benchmarks.host_waits --device cuda --out waits.json --traces traces

One rank. Each mode trains two steps, then one under `torch.cuda.set_sync_debug_mode("warn")`, whose warnings are told
by the innermost line of this package, in its part of the step; then three for the time. After all of them each trains
once more, one step under torch's profiler, for the device's busy time, its launches and a trace: a process that has
profiled once launches everything more slowly. On the CPU, which has no such waits, the modes only run.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, and not listed

import zero_strategy
from benchmarks.gpt import SIZES, build, loss_fn
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

_HOST: dict[str, Any] = {"optimizer": "cpu", "parameters": "cpu"}
MODES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, full recomputation": {"stage": 3, "activation_checkpointing": "full"},
    "stage 2, optimizer on the host": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "stage 3, offloaded": {"stage": 3, "offload": _HOST},
    "stage 3, gradients too": {"stage": 3, "offload": _HOST | {"gradients": "cpu"}},
    "stage 3, activations": {"stage": 3, "offload": {"activations": "cpu"}},
}
_PACKAGE = str(Path(zero_strategy.__file__).parent)


class Waits:
    """Waits by part of the step and by line.

    Attributes:
        found: (part, line) to the number of waits.
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.part = ""

    @contextmanager
    def watched(self, device: torch.device) -> Iterator[None]:
        """Inside, every wait counts."""
        if device.type != "cuda":
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
        at = "outside of the package"
        if frames:
            last = frames[-1]
            at = f"{Path(last.filename).relative_to(_PACKAGE)}:{last.lineno} {last.name}: {last.line}"
        self.found[self.part, at] += 1


def step_of(engine: Any, model: Any, optimizer: Any, rows: torch.Tensor, waits: Waits) -> None:
    """One step, each part under its name."""
    waits.part = "forward"
    loss = loss_fn(model(rows[:, :-1]).float(), rows[:, 1:])
    waits.part = "backward"
    loss.backward()
    waits.part = "clip"
    engine.clip_grad_norm_(1.0)
    waits.part = "step"
    optimizer.step()
    waits.part = "zero_grad"
    optimizer.zero_grad()


@contextmanager
def training(
    name: str, options: argparse.Namespace, device: torch.device, waits: Waits
) -> Iterator[Callable[[], None]]:
    """A step of one mode, after two."""
    with device:
        model = build(options.model, options.length)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    engine = ZeroEngine(model, load_config(MODES[name]), compute_dtype=dtype, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine.attach(optimizer)
    rows = torch.randint(SIZES[options.model].vocabulary, (options.rows, options.length + 1)).to(device)
    step = partial(step_of, engine, model, optimizer, rows, waits)
    for _ in range(2):
        step()
    try:
        yield step
    finally:
        engine.close()


def measured(step: Callable[[], None], waits: Waits, device: torch.device) -> dict[str, Any]:
    """Waits, seconds and bytes of one mode."""
    with waits.watched(device):
        step()
    row: dict[str, Any] = {"waits": [[*key, count] for key, count in waits.found.most_common()]}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(3):
            step()
        queued = time.perf_counter() - start
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        row |= {
            "seconds": (time.perf_counter() - start) / 3,
            "seconds queued": queued / 3,
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "retries": stats["num_alloc_retries"],
        }
    return row


def profiled(step: Callable[[], None], name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Busy time and launches of one step under torch's profiler; its trace is kept, packed."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in found.events() if event.device_type.name == "CUDA" and "#" not in event.name]
    if options.traces is not None:
        options.traces.mkdir(parents=True, exist_ok=True)
        path = options.traces / (name.replace(" ", "_").replace(",", "") + ".json")
        found.export_chrome_trace(str(path))
        with gzip.open(f"{path}.gz", "wb") as packed:
            packed.write(path.read_bytes())
        path.unlink()
    by_name: Counter[str] = Counter()
    for event in on_device:
        by_name[event.name[:80]] += event.device_time
    return {
        "device seconds": sum(event.device_time for event in on_device) / 1e6,
        "kernels": len(on_device),
        "most": [[kernel, round(time_ / 1e3, 3)] for kernel, time_ in by_name.most_common(12)],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, write JSON."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_waits", description=__doc__, formatter_class=raw)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=SIZES, default="transformer-98m")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--modes", default="; ".join(MODES), help="separated by semicolons (default: all)")
    parser.add_argument("--traces", type=Path, help="folder for traces")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    found: dict[str, Any] = {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1
    )
    try:
        modes = [each.strip() for each in options.modes.split(";")]
        for name in modes:
            waits = Waits()
            try:
                with training(name, options, device, waits) as step:
                    found[name] = measured(step, waits, device)
                del step  # it holds the model
            except Exception as error:  # the next mode tells more than the end of all
                traceback.print_exc()
                found[name] = {"failed": f"{type(error).__name__}: {error}", "waits": []}
            gc.collect()
            row = {key: value for key, value in found[name].items() if key != "waits"}
            print(f"{name}: {len(found[name]['waits'])} lines wait; {json.dumps(row)}", flush=True)
            for part, at, count in found[name]["waits"]:
                print(f"    {count:>4} x {part}: {at}", flush=True)
        for name in modes if device.type == "cuda" else ():
            if "failed" not in found[name]:
                with training(name, options, device, Waits()) as step:
                    found[name] |= profiled(step, name, options)
                del step
                print(f"{name}: {found[name]['kernels']} kernels, {found[name]['device seconds']:.4f} s", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"torch": torch.__version__, "modes": found}, indent=1))
    finally:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    failed = [name for name, row in main().items() if "failed" in row]
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
