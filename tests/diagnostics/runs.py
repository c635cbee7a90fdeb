"""Recorded runs made up of numbers, for what reads them."""

from __future__ import annotations

from pathlib import Path

from zero_strategy.diagnostics.run_files import Interval, MemorySample, RunWriter, StepRecord
from zero_strategy.diagnostics.step_clock import Flow
from zero_strategy.survive.history import History, Left

START = 1_700_000_000.0


def write_deaths(directory: Path) -> None:
    """Beginnings of a run of `write_run` with ten steps of 0.5 s: two deaths, a place taken again."""
    history = History()
    history.begin(START, 3, ["000000:a", "000001:a", "000002:a"], Left("", torn=False))
    told = history.copied(1, START + 0.5)
    history.begin(START + 1.0, 1, ["000002:a"], Left("rank 0 <b>is gone</b>", torn=True))
    told += history.copied(2, START + 1.5)
    history.begin(START + 1.75, 2, ["000000:b", "000002:a"], Left("after step 2 1 came and 0 went", torn=False))
    told += history.copied(3, START + 2.0)
    writer = RunWriter(directory, 9)
    writer.beginnings(told)
    writer.close()


def write_run(directory: Path, *, ranks: int = 2, steps: int = 6, pipeline: bool = False, traced: int = 2) -> None:
    """Rank r computes 0.1 (1 + r) s of a step that takes 0.5 s, and waits for all-gathers in the rest but 0.1 s."""
    for rank in range(ranks):
        writer = RunWriter(directory, rank)
        if rank == 0:
            facts = {"model": {"class": "GPT</script>", "parameters": 12_345_678, "trainable": 12_345_678, "units": 3}}
            layout = {"world": ranks, "shard": ranks, "replicate": 1, "pipeline stages": 2 if pipeline else 1}
            config = [["stage", "3", "user: keyword"], ["prefetch", "1", "default"]]
            writer.facts({**facts, "ranks": layout, "device": "CPU", "versions": {"torch": "2"}, "config": config})
        for step in range(1, steps + 1):
            writer.step(_record(rank, step))
            if step <= traced:
                writer.trace(step, _intervals(step, pipeline))
        writer.close()


def _record(rank: int, step: int) -> StepRecord:
    compute = 0.1 * (1 + rank)
    tiers = {"device": {"parameters": 4000 + step, "optimizer state": 8000}, "host": {"staging": 100}}
    memory = MemorySample(tiers, 10**8 + step, 2 * 10**8) if step % 2 else None
    return StepRecord(
        step=step,
        rank=rank,
        time=START + 0.5 * step,
        seconds=0.5,
        parts={"compute": compute, "data_wait": 0.1, "all_gather": 0.4 - compute},
        flows={"all_gather": Flow(4, 1000, 0.001), "control": Flow(1, 8, 0.1)},
        loss=4.0 / step,
        tokens=500,
        samples=5,
        operations=10**9,
        peak=4.0 * 10**9,
        copies=2,
        memory=memory,
    )


def _intervals(step: int, pipeline: bool) -> list[Interval]:
    at = START + 0.5 * (step - 1)
    found = [
        Interval("data_wait", "phase", at, at + 0.1),
        Interval("compute", "phase", at + 0.1, at + 0.5),
        Interval("all_gather", "training", at + 0.1, at + 0.3),
        Interval("disk", "training", at + 0.15, at + 0.2),
        Interval("disk_read", "disk_read", at + 0.12, at + 0.18, "512 bytes"),
        Interval("disk_read", "disk_read", at + 0.14, at + 0.2, "512 bytes"),
    ]
    if pipeline:
        events = enumerate(("F0", "F1", "B0", "B1"))
        found += [Interval(name, "pipeline", at + 0.1 * n, at + 0.1 * n + 0.08, "chunk 0") for n, name in events]
    return found
