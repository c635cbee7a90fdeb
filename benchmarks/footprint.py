"""Footprint of a contender that trains alone in fresh processes: memory, and the elements that a rank sends per step.

Memory is the growth of the resident set over that of the same processes after they have trained the smallest model:
what stays between steps (freed buffers given back), and the most inside a step. That one depends on glibc, which keeps
freed buffers in a heap with gaps, as it is set by default; told to give them back, it shows what a contender holds at
once. Both are measured. Of ours the ledger has categories.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from benchmarks.collective_counter import elements_of_a_step
from benchmarks.contenders import Contender, Workload, make
from benchmarks.gpt import build
from benchmarks.memory_plan import MMAP_THRESHOLD_BYTES, SMALL, Meter, give_back_freed
from tests.launcher import RankPool

STEPS = 3


@dataclass(frozen=True)
class Footprint:
    """Of the rank with the largest peak; bytes, but for what is sent.

    Attributes:
        held: Growth of the process after a step.
        peak: Growth at its peak inside a step.
        sent: Elements of model state that a rank sends per step.
        state: Of ours, persistent bytes of parameters, gradients and optimizer.
        ledger: Of ours, bytes held by category.
        calls: Collectives per step by kind.
    """

    held: int
    peak: int
    sent: int
    state: int = 0
    ledger: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


def alone(name: str, workload: Workload, default_heap: bool = False) -> Footprint:
    """On every rank."""
    torch.set_num_threads(1)
    if not default_heap:
        give_back_freed(MMAP_THRESHOLD_BYTES)
    meter = Meter("cpu")
    _train_smallest(name, workload)
    empty = meter.now()
    contender = make(name, workload)
    for _ in range(STEPS - 1):
        contender.step(workload)
    meter.reset_peak()
    contender.step(workload)
    peak, held = meter.peak(), meter.now()
    sent, calls = count_sent(contender, workload)
    state = 0 if contender.engine is None else sum(contender.engine.state_bytes().values())
    return Footprint(held - empty, peak - empty, sent, state, _ledger(contender), calls)


def _train_smallest(name: str, workload: Workload) -> None:
    """Code, threads and groups are there afterwards."""
    small = replace(workload, model=SMALL)
    contender = make(name, small)
    for _ in range(2):
        contender.step(small)
    if contender.engine is not None:
        contender.engine.close()
    del contender
    gc.collect()


def count_sent(contender: Contender, workload: Workload) -> tuple[int, dict[str, int]]:
    """Elements that this rank sends in a step, and collectives by kind."""
    if contender.engine is None:
        counter = elements_of_a_step(lambda: contender.step(workload), dist.get_world_size())
        return counter.elements_sent, dict(counter.calls)
    counters = contender.engine.counters
    counters.reset()
    contender.step(workload)
    return counters.elements_sent, dict(counters.calls)


def _ledger(contender: Contender) -> dict[str, int]:
    if contender.engine is None:
        return {}
    return {str(key[0]): found.taken for key, found in contender.engine.ledger().held().sums("category").items()}


def measure(
    name: str, workload: Workload, ranks: int, timeout: float = 1800.0, default_heap: bool = False
) -> Footprint:
    """In processes of its own."""
    pool = RankPool(ranks)
    try:
        found = pool.run(alone, (name, workload, default_heap), timeout=timeout)
    finally:
        pool.close()
    return max(found, key=lambda one: one.peak)


def table_elements(stage: int, parameters: int, world: int, accumulation: int) -> float:
    """Elements that a rank sends in a step by the table of docs/architecture.md."""
    passes = {0: 2, 1: 2, 2: accumulation + 1, 3: 3 * accumulation}[stage]
    return passes * parameters * (world - 1) / world


def table_bytes(stage: int, parameters: int, world: int, workload: Workload) -> float:
    """Persistent bytes of model state per rank, by the same table; gradients in what they are reduced in."""
    low = workload.precision != "fp32"
    weight = workload.dtype.itemsize
    gradient = weight if workload.reduce == "parameter" else 4
    moments = 8 if workload.master or not low else 2 * weight
    state = moments + (4 if low and workload.master else 0)
    shares = [1 / world if stage >= least else 1.0 for least in (3, 2, 1)]
    return parameters * sum(size * share for size, share in zip((weight, gradient, state), shares, strict=True))


def elements_of(workload: Workload) -> int:
    """Parameters of the model."""
    with torch.device("meta"):
        return sum(p.numel() for p in build(workload.model, workload.length).parameters())


def show(name: str, found: Footprint) -> str:
    text = f"{name:<16}held {found.held / 2**20:>8.1f} MiB   peak {found.peak / 2**20:>8.1f} MiB   sent {found.sent:,}"
    parts = ", ".join(f"{key} {nbytes / 2**20:.1f}" for key, nbytes in found.ledger.items())
    return f"{text}\n  of it, MiB: {parts}" if parts else text
