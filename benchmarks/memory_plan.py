"""The plan against what is really taken: bytes of model state, and the most inside a step.

    python -m benchmarks.memory_plan --model transformer-large --world 2 --out memory.json

Per stage and dtype, on every rank: the plan made on the meta device, the ledger of the engine, and the growth of the
process (on a GPU: of what the allocator of torch has given out), after steps and at its peak during one. A batch of one
short row keeps activations small. Processes begin with a small engine, so that code and threads are there already.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpt import SIZES, build, loss_fn
from tests.launcher import RankPool
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.planning.held import resident
from zero_strategy.runtime.terminal import size, table

LENGTH = 8
SMALL = "transformer-tiny"
_MALLOC_MMAP_THRESHOLD = -3
"""Number of the option of glibc's mallopt."""
MMAP_THRESHOLD_BYTES = 65536


@dataclass(frozen=True)
class Case:
    """One training run."""

    model: str
    stage: int
    dtype: str
    device: str


@dataclass(frozen=True)
class Result:
    """Bytes of one rank."""

    planned: int
    ledger: int
    grown: int
    planned_peak: int
    grown_peak: int


class Meter:
    """Bytes that this process has on the device: resident ones on the CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self) -> int:
        """After what is free was given back."""
        gc.collect()
        if self.cuda:
            return torch.cuda.memory_allocated()
        ctypes.CDLL(None).malloc_trim(0)
        return resident()[0]

    def reset_peak(self) -> None:
        """Count the most anew."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """The most since then."""
        return torch.cuda.max_memory_allocated() if self.cuda else resident()[1]


def give_back_freed(nbytes: int) -> None:
    """Let glibc return freed buffers of so many bytes at once.

    Else it keeps them in its heap, and the most that was resident is a matter of its gaps.
    """
    ctypes.CDLL(None).mallopt(_MALLOC_MMAP_THRESHOLD, nbytes)


def train(case: Case, model: torch.nn.Module, meter: Meter) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    """Three steps; the peak is that of the third."""
    engine = ZeroEngine(model, load_config(stage=case.stage), compute_dtype=getattr(torch, case.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long, device=case.device)
    for step in range(3):
        if step == 2:
            meter.reset_peak()
        loss_fn(model(tokens).float(), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, optimizer


def measure(case: Case) -> Result:
    """To be called on every rank."""
    if case.device == "cpu":
        give_back_freed(MMAP_THRESHOLD_BYTES)
    meter = Meter(case.device)
    train(case, build(SMALL, LENGTH).to(case.device), meter)
    empty = meter.now()
    model = build(case.model, LENGTH).to(case.device)
    engine, optimizer = train(case, model, meter)
    peak, now = meter.peak(), meter.now()
    with torch.device("meta"):
        shape = build(case.model, LENGTH)
    plan = load_config(stage=case.stage).plan(
        shape,
        world_size=engine.mesh.world_size,
        compute_dtype=getattr(torch, case.dtype),
        optimizer=optimizer,
        device=case.device,
        snapshots=False,
    )
    planned = plan.ledger(engine.mesh.rank)
    held = planned.held()
    return Result(
        held.tier_bytes("device"),
        engine.ledger().tier_bytes("device"),
        now - empty,
        planned.tier_bytes("device"),
        peak - empty,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="The plan of memory against what is really taken.")
    parser.add_argument("--model", choices=tuple(SIZES), default="transformer-large")
    parser.add_argument("--world", type=int, default=2, help="ranks; on a GPU one (default: %(default)s)")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args(arguments)
    world = 1 if options.device == "cuda" else options.world
    rows, written = [], []
    for stage in map(int, options.stages.split(",")):
        for dtype in options.dtypes.split(","):
            case = Case(options.model, stage, dtype, options.device)
            pool = RankPool(world)
            try:
                results = pool.run(measure, (case,), timeout=300.0)
            finally:
                pool.close()
            for rank, found in enumerate(results):
                rows.append((stage, dtype, rank, *_cells(found)))
                written.append(asdict(case) | {"rank": rank} | asdict(found))
    header = ("stage", "dtype", "rank", "plan", "plan/ledger", "grown/plan", "plan, peak", "grown/plan, peak")
    print(table(rows, header, right=(3, 4, 5, 6, 7)))
    if options.out is not None:
        options.out.write_text(json.dumps(written, indent=1))


def _cells(found: Result) -> tuple[str, ...]:
    return (
        size(found.planned),
        f"{found.planned / found.ledger:.5f}",
        f"{found.grown / found.planned:.4f}",
        size(found.planned_peak),
        f"{found.grown_peak / found.planned_peak:.4f}",
    )


if __name__ == "__main__":
    main()
