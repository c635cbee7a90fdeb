"""Time of every native op against what torch has for it.

    python -m benchmarks.ops --only layer_norm softmax --json ops.json

The two take turns as A B B A in one process. The ratio is torch's time over ours: above 1 we are faster. Layer ops work
on rows x columns elements, and a backward is what autograd runs for all inputs; the others on a list of tensors. What
torch does in several calls is composed of them, the shortest way (op_cases.py).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.op_cases import CASES, Setting, Step
from benchmarks.ratios import TURNS, bootstrap, round_ratio
from zero_strategy import ops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def seconds_of(step: Step, device: str, steps: int) -> list[float]:
    """Seconds that each of some steps took."""
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(name: str, setting: Setting, rounds: int, block_seconds: float) -> dict[str, Any]:
    contenders = dict(zip("AB", CASES[name](setting), strict=True))
    warm = {turn: min(seconds_of(step, setting.device, 4)[1:]) for turn, step in contenders.items()}
    steps = max(3, min(200, round(block_seconds / max(warm.values()))))
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    ratios = []
    for _ in range(rounds):
        blocks = []
        for turn in TURNS:
            blocks.append(seconds_of(contenders[turn], setting.device, steps))
            seconds[turn] += blocks[-1]
        ratios.append(round_ratio(blocks))
    return {
        "op": name,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "ratio": asdict(bootstrap(ratios)),
        "seconds_torch": statistics.median(seconds["A"]),
        "seconds_ours": statistics.median(seconds["B"]),
    }


def line_of(entry: dict[str, Any]) -> str:
    ratio = entry["ratio"]
    interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
    times = (f"{entry[key] * 1e3:.3f} ms" for key in ("seconds_torch", "seconds_ours"))
    return f"{entry['op']:<32}{entry['dtype']:<10}{ratio['median']:>7.3f}{interval:>18}" + "".join(
        f"{time:>14}" for time in times
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ops", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--numel", type=int, default=10_000_000, help="elements of a list of tensors")
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="of A B B A")
    parser.add_argument("--block-seconds", type=float, default=0.02, help="about how long each turn is")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device")
    torch.set_num_threads(options.threads)
    print(ops.ensure(options.device))
    print(f"{options.rows} x {options.columns}; {options.numel} elements in {options.tensors} tensors")
    print(f"{'op':<32}{'dtype':<10}{'ratio':>7}{'95 % interval':>18}{'torch':>14}{'ours':>14}")
    results = []
    sizes = (options.rows, options.columns, options.numel, options.tensors)
    for name in options.only or CASES:
        for dtype in options.dtypes:
            setting = Setting(options.device, DTYPES[dtype], *sizes)
            results.append(measure(name, setting, options.rounds, options.block_seconds))
            print(line_of(results[-1]), flush=True)
    if options.json:
        device = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
        machine = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
        options.json.write_text(json.dumps({"options": str(options), "machine": machine, "ops": results}, indent=1))
    return results


if __name__ == "__main__":
    main()
