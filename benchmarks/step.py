"""Time of a training step: our engine against DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed, within one run.

    python -m benchmarks.step --peers ddp,fsdp2 --stages 0,1,2,3 --model transformer-small --out step.json
    python -m benchmarks.step --peers deepspeed --regime communication --precision bf16 --footprint --overhead

Stages 0 to 2 are compared with DDP, stage 1 with ZeroRedundancyOptimizer, stage 3 with FSDP2, and stages 1 to 3 with
DeepSpeed's same stage (``--pairs zero3:ddp,zero1:fsdp2`` for others).
Both sides of a pair live in the same gloo processes, one per rank, on the CPU, and train on the
same data from the same weights; they take turns as A B B A. A step is everything from forward to
``zero_grad``: its time is that of the slowest rank. Building and warming up are not timed. The losses of both
sides are compared, so that a contender that trains something else does not win. ``--footprint`` measures what each
takes in processes of its own (memory, elements sent), ``--overhead`` what our engine adds to a step's parts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import engine_overhead, footprint
from benchmarks.contenders import (
    DTYPES,
    OPTIMIZERS,
    PEERS,
    REDUCE,
    REGIMES,
    Contender,
    Workload,
    make,
    missing,
    note,
)
from benchmarks.gpt import SIZES
from benchmarks.ratios import TURNS, Ratio, bootstrap, round_ratio
from tests.launcher import RankPool

SUMMARY = "Time of a training step: our engine against DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed."
Pair = tuple[str, str]
NATURAL = {"ddp": (0, 1, 2), "zero_redundancy": (1,), "fsdp2": (3,), "deepspeed": (1, 2, 3)}
"""The stages that each peer is nearest to."""
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Relative. Sums in another order move a loss by 1e-6 in fp32; other training moves it by far more."""


@dataclass(frozen=True)
class Plan:
    workload: Workload
    rounds: int
    block_steps: int
    warmup: int
    threads: int


@dataclass
class PairTimes:
    """Measurements of one pair."""

    a: str
    b: str
    rounds: list[list[list[float]]] = field(default_factory=list)
    """Seconds by round, block (A B B A) and step."""
    loss_difference: float = 0.0
    """Largest relative difference between the losses of A and B at the same step."""
    notes: list[str] = field(default_factory=list)
    """In what a side differs from the others."""
    tolerance: float = LOSS_TOLERANCE["fp32"]


def measure(pair: Pair, plan: Plan) -> PairTimes:
    """Runs one pair; on every rank. The times are the same on all ranks."""
    torch.set_num_threads(plan.threads)
    contenders = {name: make(name, plan.workload) for name in pair}
    losses: dict[str, list[float]] = {name: [] for name in pair}
    for name in pair:
        _block(contenders[name], plan.workload, plan.warmup, losses[name])
    workload = plan.workload
    notes = [text for name in pair if (text := note(name, workload))]
    times = PairTimes(*pair, notes=notes, tolerance=LOSS_TOLERANCE[workload.precision])
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
    return [
        (f"zero{stage}", f"{peer}{stage}" if peer == "deepspeed" else peer)
        for stage in stages
        for peer in peers
        if stage in NATURAL[peer]
    ]


def compare(pair: Pair, plan: Plan, ranks: int, timeout: float, pool: RankPool | None = None) -> dict[str, Any]:
    """Summary of one pair by `summarize`, in these ranks or else in ranks of its own."""
    used = pool or RankPool(ranks)
    try:
        return summarize(used.run(measure, (pair, plan), timeout=timeout)[0])
    finally:
        if used is not pool:
            used.close()


def compare_all(pairs: Sequence[Pair], plan: Plan, ranks: int, timeout: float) -> list[dict[str, Any]]:
    """All pairs, in the same ranks but for DeepSpeed's, which keeps process groups."""
    pool = RankPool(ranks)
    try:
        return [
            compare(pair, plan, ranks, timeout, None if any("deepspeed" in name for name in pair) else pool)
            for pair in pairs
        ]
    finally:
        pool.close()


def overhead(stage: int, plan: Plan, ranks: int, timeout: float) -> dict[str, Any]:
    """The same for a stage's engine against its parts."""
    found = {}
    for transport in ("transport", "gloo"):
        pool = RankPool(ranks)
        arguments = (stage, plan.workload, plan.rounds, plan.block_steps, plan.warmup, plan.threads, transport)
        try:
            found[transport] = pool.run(engine_overhead.measure, arguments, timeout=timeout)[0]
        finally:
            pool.close()
    return engine_overhead.summarize(stage, found["transport"], found["gloo"])


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
        "same_training": times.loss_difference <= times.tolerance,
        "notes": times.notes,
        "rounds": times.rounds,
    }


def show(summaries: Sequence[dict[str, Any]]) -> str:
    """The table: a ratio below 1 means that the first contender is faster."""
    lines = [f"{'pair':<24}{'ratio':>8}{'95 % interval':>18}{'step A':>10}{'step B':>10}{'steps':>7}  losses"]
    for entry in summaries:
        ratio = entry["ratio"]
        interval = f"{ratio['low']:.3f} - {ratio['high']:.3f}"
        same = "equal" if entry["same_training"] else f"DIFFER by {entry['loss_difference']:.2g}"
        lines.append(
            f"{entry['a'] + ' / ' + entry['b']:<24}{ratio['median']:>8.3f}{interval:>18}"
            f"{entry['seconds_a']:>9.3f}s{entry['seconds_b']:>9.3f}s{entry['steps_each']:>7}  {same}"
        )
    lines += dict.fromkeys(f"  {text}" for entry in summaries for text in entry["notes"])
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _peers(text: str) -> list[str]:
    names = _names(text)
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is no peer; there are {', '.join(PEERS)}")
    return names


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
    parser.add_argument("--peers", type=_peers, default=["ddp", "fsdp2"], help=f"of {', '.join(PEERS)}")
    parser.add_argument("--stages", type=_stages, default=[0, 1, 2, 3], help="of 0, 1, 2, 3; may be empty")
    parser.add_argument("--pairs", type=_pairs, help="such as zero3:ddp,zero1:fsdp2; instead of peers and stages")
    parser.add_argument("--regime", choices=REGIMES, help="model, batch and length by what bounds a step")
    parser.add_argument("--model", choices=SIZES, help=f"default: the regime's, else {Workload.model}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, help=f"rows per rank and micro-batch; default as above, {Workload.batch}")
    parser.add_argument("--length", type=int, help=f"tokens of a row; default as above, {Workload.length}")
    parser.add_argument("--accumulation", type=int, default=Workload.accumulation)
    parser.add_argument("--clip", type=float, default=Workload.clip_norm, help="0: no clipping")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=Workload.optimizer)
    parser.add_argument("--precision", choices=DTYPES, default=Workload.precision)
    parser.add_argument("--reduce", choices=REDUCE, default=Workload.reduce, help="what gradients are summed in")
    parser.add_argument("--no-master", action="store_true", help="ours has no master weights either, as DDP")
    parser.add_argument("--footprint", action="store_true", help="memory and elements sent, each by itself")
    parser.add_argument("--overhead", action="store_true", help="of our engine, against the parts of a step")
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A")
    parser.add_argument("--block-steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds per pair")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    """Options as asked for: the regime's values, and what is given by itself."""
    chosen = dict(REGIMES.get(options.regime, {}))
    chosen |= {key: value for key in ("model", "batch", "length") if (value := getattr(options, key)) is not None}
    return Workload(
        **chosen,
        accumulation=options.accumulation,
        clip_norm=options.clip or None,
        optimizer=options.optimizer,
        precision=options.precision,
        reduce=options.reduce,
        master=not options.no_master,
    )


def present(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs whose contenders are installed; the others are named on standard error."""
    found = []
    for pair in pairs:
        lacking = [text for name in pair if (text := missing(name))]
        if lacking:
            print(f"skipped {' / '.join(pair)}: {lacking[0]}", file=sys.stderr)
        else:
            found.append(pair)
    return found


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    workload = workload_of(options)
    plan = Plan(workload, options.rounds, options.block_steps, options.warmup, options.threads)
    parameters = footprint.elements_of(workload)
    print(f"{workload.model}, {parameters / 1e6:.1f} M parameters, {options.ranks} ranks, {workload}")
    pairs = present(options.pairs or default_pairs(options.peers, options.stages))
    names = dict.fromkeys(name for pair in pairs for name in pair)
    summaries = compare_all(pairs, plan, options.ranks, options.timeout)
    print(show(summaries))
    report: dict[str, Any] = {"plan": asdict(plan), "ranks": options.ranks, "parameters": parameters}
    report |= {"environment": _environment(), "pairs": summaries}
    if options.footprint:
        report["footprints"] = {}
        for name in names:
            found = footprint.measure(name, workload, options.ranks, options.timeout)
            report["footprints"][name] = asdict(found)
            print(footprint.show(name, found))
    if options.overhead:
        report["overhead"] = []
        for name in (name for name in names if name in {"zero0", "zero1", "zero2", "zero3"}):
            report["overhead"].append(overhead(int(name[-1]), plan, options.ranks, options.timeout))
            print(engine_overhead.show(report["overhead"][-1]))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return summaries


def _environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
