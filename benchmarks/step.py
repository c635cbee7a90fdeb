"""Time of a training step: our engine against DDP and FSDP2, as ratios within one run.

    python -m benchmarks.step --peers ddp,fsdp2 --stages 0,1,2,3 --model transformer-small --out step.json

Stages 0 to 2 are compared with DDP and stage 3 with FSDP2 (``--pairs zero3:ddp,zero1:fsdp2`` for others).
Both sides of a pair live in the same gloo processes, one per rank, on the CPU in float32, and train on the
same data from the same weights; they take turns as A B B A. A step is everything from forward to
``zero_grad``: its time is that of the slowest rank. Building and warming up are not timed. The losses of both
sides are compared, so that a contender that trains something else does not win.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import OPTIMIZERS, PEERS, Contender, Workload, make
from benchmarks.gpt import SIZES, build
from benchmarks.ratios import TURNS, Ratio, bootstrap, round_ratio
from tests.launcher import RankPool

SUMMARY = "Time of a training step: our engine against DDP and FSDP2, as ratios within one run."
Pair = tuple[str, str]
LOSS_TOLERANCE = 1e-3
"""Relative. Sums in another order move a loss by 1e-6; other training moves it by far more."""


@dataclass(frozen=True)
class Plan:
    workload: Workload
    rounds: int
    block_steps: int
    warmup: int
    threads: int


@dataclass
class PairTimes:
    """What one pair measured."""

    a: str
    b: str
    rounds: list[list[list[float]]] = field(default_factory=list)
    """Seconds by round, block (A B B A) and step."""
    loss_difference: float = 0.0
    """Largest relative difference between the losses of A and B at the same step."""


def measure(pair: Pair, plan: Plan) -> PairTimes:
    """Runs one pair; on every rank. The times are the same on all ranks."""
    torch.set_num_threads(plan.threads)
    contenders = {name: make(name, plan.workload) for name in pair}
    losses: dict[str, list[float]] = {name: [] for name in pair}
    for name in pair:
        _block(contenders[name], plan.workload, plan.warmup, losses[name])
    times = PairTimes(*pair)
    for _ in range(plan.rounds):
        blocks = []
        for turn in TURNS:
            name = pair[0] if turn == "A" else pair[1]
            blocks.append(_block(contenders[name], plan.workload, plan.block_steps, losses[name]))
        times.rounds.append(blocks)
    a, b = (torch.tensor(losses[name]) for name in pair)
    times.loss_difference = float(((a - b).abs() / b).max())
    return times


def _block(contender: Contender, workload: Workload, steps: int, losses: list[float]) -> list[float]:
    """Some steps in a row; the seconds of each on the slowest rank."""
    gc.collect()
    dist.barrier()
    seconds = []
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(contender.step(workload))
        now = time.perf_counter()
        seconds.append(now - start)
        start = now
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def default_pairs(peers: Sequence[str], stages: Sequence[int]) -> list[Pair]:
    """Each stage with the peer that is nearest to it; without stages, the peers with each other."""
    if not stages:
        return [(a, b) for i, a in enumerate(peers) for b in peers[i + 1 :]]
    natural = {stage: "fsdp2" if stage == 3 else "ddp" for stage in stages}
    return [(f"zero{stage}", peer) for stage, peer in natural.items() if peer in peers]


def summarize(times: PairTimes) -> dict[str, Any]:
    ratio: Ratio = bootstrap([round_ratio(blocks) for blocks in times.rounds])
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    for blocks in times.rounds:
        for turn, block in zip(TURNS, blocks, strict=True):
            seconds[turn] += block
    return {
        "a": times.a,
        "b": times.b,
        "ratio": asdict(ratio),
        "seconds_a": statistics.median(seconds["A"]),
        "seconds_b": statistics.median(seconds["B"]),
        "steps_each": len(seconds["A"]),
        "loss_difference": times.loss_difference,
        "same_training": times.loss_difference <= LOSS_TOLERANCE,
        "rounds": times.rounds,
    }


def show(summaries: Sequence[dict[str, Any]]) -> str:
    """The table: a ratio below 1 means that the first contender is faster."""
    lines = [f"{'pair':<16}{'ratio':>8}{'95 % interval':>18}{'step A':>10}{'step B':>10}{'steps':>7}  losses"]
    for entry in summaries:
        ratio = entry["ratio"]
        interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
        same = "equal" if entry["same_training"] else f"DIFFER by {entry['loss_difference']:.2g}"
        lines.append(
            f"{entry['a'] + ' / ' + entry['b']:<16}{ratio['median']:>8.3f}{interval:>18}"
            f"{entry['seconds_a']:>9.3f}s{entry['seconds_b']:>9.3f}s{entry['steps_each']:>7}  {same}"
        )
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _stages(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def _pairs(text: str) -> list[Pair]:
    pairs = []
    for name in _names(text):
        a, colon, b = name.partition(":")
        if not (a and colon and b):
            raise argparse.ArgumentTypeError(f"{name!r} is no pair such as zero3:fsdp2")
        pairs.append((a, b))
    return pairs


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=SUMMARY)
    parser.add_argument("--peers", type=_names, default=list(PEERS), help="of ddp, fsdp2")
    parser.add_argument("--stages", type=_stages, default=[0, 1, 2, 3], help="of 0, 1, 2, 3; may be empty")
    parser.add_argument("--pairs", type=_pairs, help="such as zero3:ddp,zero1:fsdp2; instead of peers and stages")
    parser.add_argument("--model", choices=SIZES, default=Workload.model)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=Workload.batch, help="rows per rank and micro-batch")
    parser.add_argument("--length", type=int, default=Workload.length)
    parser.add_argument("--accumulation", type=int, default=Workload.accumulation)
    parser.add_argument("--clip", type=float, default=Workload.clip_norm, help="0: no clipping")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=Workload.optimizer)
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A")
    parser.add_argument("--block-steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per pair")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    workload = Workload(
        options.model,
        options.batch,
        options.length,
        options.accumulation,
        options.clip or None,
        options.optimizer,
    )
    plan = Plan(workload, options.rounds, options.block_steps, options.warmup, options.threads)
    parameters = sum(p.numel() for p in build(workload.model, workload.length).parameters())
    print(f"{workload.model}, {parameters / 1e6:.1f} M parameters, {options.ranks} ranks, {workload}")
    pool = RankPool(options.ranks)
    summaries = []
    for pair in options.pairs or default_pairs(options.peers, options.stages):
        summaries.append(summarize(pool.run(measure, (pair, plan), timeout=options.timeout)[0]))
    pool.close()
    print(show(summaries))
    if options.out:
        report = {
            "plan": asdict(plan),
            "ranks": options.ranks,
            "parameters": parameters,
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
                "cores": os.cpu_count(),
            },
            "pairs": summaries,
        }
        options.out.write_text(json.dumps(report, indent=1))
    return summaries


if __name__ == "__main__":
    main()
