"""Pipelines with layers that sleep: idle time against the simulator, and time per batch against torch's pipelining.

    python -m benchmarks.pipeline --suites idle,torch --ranks 2,4 --rounds 6 --out pipeline.json

A layer sleeps in its forward, in the input half and in the weight half of its backward, so that more ranks than
cores compute at once. ``idle``: the fraction of each rank's window, from the beginning of its first computation to
the end of its last one, in which it carries out none, against the simulator's fraction for the same times; and the
stricter one in which no layer sleeps, so that what computations cost besides counts as idle, too. ``torch``: the same
schedule by torch.distributed.pipelining and by us, in the same processes, with gloo, taking turns as A B B A; a
batch's time is from a barrier until the slowest rank has returned. The ratio is torch's time over ours: above 1 we are
faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ratios import TURNS, bootstrap, round_ratio
from tests.launcher import RankPool
from zero_strategy.pipeline import Placement, TableSchedule, build_table, lower
from zero_strategy.pipeline.executor import Executor
from zero_strategy.pipeline.simulator import Times, simulate

SUMMARY = "Pipelines with layers that sleep: idle time, and time per batch against torch.distributed.pipelining."
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "interleaved_zb": 2, "zbv": 2}
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True)
class Plan:
    micro_batches: int
    milliseconds: float
    """Of a rank's forward of one micro-batch, and of each half of its backward, all chunks together."""
    width: int
    rows: int
    rounds: int
    batches: int


class _Slept:
    """Seconds that this process has slept in layers."""

    seconds = 0.0


def _sleep(seconds: float) -> None:
    started = time.perf_counter()
    time.sleep(seconds)
    _Slept.seconds += time.perf_counter() - started


class _SleepOnTheWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        _sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(ctx.seconds)
        return gradient, None, None


class _SleepAtTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """Multiplies by a weight; the two halves of its backward sleep apart from each other."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        product = x * _SleepAtTheWeight.apply(self.weight, self.seconds)
        out: Tensor = _SleepOnTheWay.apply(product, self.seconds, self.seconds)
        return out


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


class Ours:
    """Our executor on one rank."""

    def __init__(self, schedule: str, plan: Plan) -> None:
        chunks = CHUNKS[schedule]
        table = build_table(schedule, dist.get_world_size(), plan.micro_batches, chunks)
        self.schedules: tuple[TableSchedule, ...] = lower(table)
        stages = [SleepingLayer(plan.width, plan.milliseconds / 1e3 / chunks) for _ in range(chunks)]
        self.executor = Executor(stages, table.placement, loss_fn=loss_fn, name=schedule)
        self.plan = plan

    def batch(self) -> float | None:
        x = torch.ones(self.plan.rows, self.plan.width)
        pairs = [(x, x)] * self.plan.micro_batches
        loss = self.executor.run(self.schedules[dist.get_rank()], iter(pairs)).loss
        return None if loss is None else float(loss)


class Theirs:
    """torch.distributed.pipelining's schedule of the same name."""

    def __init__(self, schedule: str, plan: Plan) -> None:
        from torch.distributed import pipelining

        chunks, ranks, rank = CHUNKS[schedule], dist.get_world_size(), dist.get_rank()
        self.placement = Placement(ranks, chunks, "v" if schedule == "zbv" else "loop")
        numbers = [self.placement.stage_of(rank, chunk) for chunk in range(chunks)]
        stages = [
            pipelining.PipelineStage(
                SleepingLayer(plan.width, plan.milliseconds / 1e3 / chunks), number, ranks * chunks, torch.device("cpu")
            )
            for number in numbers
        ]
        make: Any = getattr(pipelining, PEERS[schedule])
        self.schedule = make(stages if chunks > 1 else stages[0], plan.micro_batches, loss_fn=loss_fn)
        self.first, self.last = 0 in numbers, ranks * chunks - 1 in numbers
        self.plan = plan

    def batch(self) -> float | None:
        x = torch.ones(self.plan.rows * self.plan.micro_batches, self.plan.width)
        losses: list[Tensor] = []
        given = (x,) if self.first else ()
        if self.last:
            self.schedule.step(*given, target=x, losses=losses)
        else:
            self.schedule.step(*given)
        return sum(float(loss) for loss in losses) / len(losses) if losses else None


def compare(schedule: str, plan: Plan) -> tuple[list[list[list[float]]], list[float | None]]:
    """Seconds by round, block (A B B A: A is torch) and batch; and the losses of both on this rank."""
    torch.set_num_threads(1)
    contenders: dict[str, Ours | Theirs] = {"A": Theirs(schedule, plan), "B": Ours(schedule, plan)}
    losses = [contender.batch() for contender in contenders.values()]
    for contender in contenders.values():
        _block(contender.batch, 1)
    return [[_block(contenders[turn].batch, plan.batches) for turn in TURNS] for _ in range(plan.rounds)], losses


def _block(batch: Callable[[], Any], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        gc.collect()
        dist.barrier()
        started = time.perf_counter()
        batch()
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def idle(schedule: str, plan: Plan) -> list[dict[str, float]]:
    """Of each batch, this rank's window, how long it slept in it, and how long it computed by its events: seconds."""
    torch.set_num_threads(1)
    ours = Ours(schedule, plan)
    ours.batch()
    ours.executor.record = True
    rank, found = dist.get_rank(), []
    for _ in range(plan.rounds * plan.batches):
        gc.collect()
        dist.barrier()
        _Slept.seconds = 0.0
        x = torch.ones(plan.rows, plan.width)
        run = ours.executor.run(ours.schedules[rank], iter([(x, x)] * plan.micro_batches))
        events = [event for event in run.events if event.computes]
        window = events[-1].end - events[0].start
        busy = sum(event.end - event.start for event in events)
        found.append({"window": window, "slept": _Slept.seconds, "busy": busy})
    return found


def summarize_idle(schedule: str, plan: Plan, results: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Idle fractions by rank: the simulator's, and the measured median."""
    stages = len(results) * CHUNKS[schedule]
    # The first stage has no input half: everything is in its weight half.
    times = Times(forward=1.0, backward=[0.0] + [1.0] * (stages - 1), weight=[2.0] + [1.0] * (stages - 1))
    usage = simulate(lower(build_table(schedule, len(results), plan.micro_batches, CHUNKS[schedule])), times).usage
    ranks = []
    for own, result in zip(usage, results, strict=True):
        slept = statistics.median(1 - one["slept"] / one["window"] for one in result)
        busy = statistics.median(1 - one["busy"] / one["window"] for one in result)
        bound = 1.10 * own.idle_in_window + 0.01
        ranks.append({"simulated": own.idle_in_window, "measured": busy, "not_sleeping": slept, "bound": bound})
    return {"schedule": schedule, "ranks": ranks}


def summarize_torch(schedule: str, ranks: int, results: Sequence[Any]) -> dict[str, Any]:
    rounds = results[0][0]
    ratio = bootstrap([round_ratio(blocks) for blocks in rounds])
    losses = [loss for _, pair in results for loss in pair if loss is not None]
    seconds: dict[str, list[float]] = {"A": [], "B": []}
    for blocks in rounds:
        for turn, block in zip(TURNS, blocks, strict=True):
            seconds[turn] += block
    return {
        "schedule": schedule,
        "ranks": ranks,
        "ratio": asdict(ratio),
        "seconds_torch": statistics.median(seconds["A"]),
        "seconds_ours": statistics.median(seconds["B"]),
        "losses_differ_by": max(losses) - min(losses),
        "rounds": rounds,
    }


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=SUMMARY)
    parser.add_argument("--suites", type=_names, default=["idle", "torch"], help="of idle, torch")
    parser.add_argument("--schedules", type=_names, default=list(CHUNKS), help=f"of {', '.join(CHUNKS)}")
    parser.add_argument("--ranks", type=_names, default=["2", "4"])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of a rank's forward and half backwards")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6, help="of A B B A")
    parser.add_argument("--batches", type=int, default=1, help="in a block")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per schedule")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    plan = Plan(
        options.micro_batches, options.milliseconds, options.width, options.rows, options.rounds, options.batches
    )
    report: dict[str, Any] = {"plan": asdict(plan), "idle": [], "torch": []}
    for ranks in map(int, options.ranks):
        pool = RankPool(ranks)
        for schedule in options.schedules:
            if "idle" in options.suites:
                found = summarize_idle(schedule, plan, pool.run(idle, (schedule, plan), timeout=options.timeout))
                report["idle"].append(found)
                cells = "  ".join(
                    f"{one['measured']:.3f}({one['not_sleeping']:.3f})/{one['simulated']:.3f}" for one in found["ranks"]
                )
                kept = all(one["measured"] <= one["bound"] for one in found["ranks"])
                verdict = "ok" if kept else "ABOVE"
                print(f"{ranks} ranks {schedule:<18} idle, measured(strict)/simulated: {cells}  {verdict}")
            if "torch" in options.suites and schedule in PEERS:
                results = pool.run(compare, (schedule, plan), timeout=options.timeout)
                one = summarize_torch(schedule, ranks, results)
                report["torch"].append(one)
                ratio = one["ratio"]
                print(
                    f"{ranks} ranks {schedule:<18} torch / ours {ratio['median']:.3f} "
                    f"[{ratio['low']:.3f} - {ratio['high']:.3f}]  {one['seconds_torch']:.4f} s / "
                    f"{one['seconds_ours']:.4f} s  losses differ by {one['losses_differ_by']:.2g}"
                )
        pool.close()
    report["environment"] = {
        "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
        "cores": os.cpu_count(),
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
