"""Interleaved blocks to a ratio with its uncertainty.

Two contenders A and B take turns as A B B A, a *round*: whatever slows the machine down steadily weighs on
both alike. Each round gives one ratio, and the rounds are what the bootstrap draws from.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TURNS = "ABBA"


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    """Lower end of the bootstrap 95 % interval of the median."""
    high: float


def round_ratio(blocks: Sequence[Sequence[float]]) -> float:
    """Time of A over time of B, from the step times of the four blocks of a round."""
    if len(blocks) != len(TURNS):
        raise ValueError(f"a round has {len(TURNS)} blocks, not {len(blocks)}")
    # The median of a block ignores a step that something else interrupted.
    times = [statistics.median(block) for block in blocks]
    a = sum(time for time, turn in zip(times, TURNS, strict=True) if turn == "A")
    b = sum(time for time, turn in zip(times, TURNS, strict=True) if turn == "B")
    return a / b


def slowest(call: Callable[[], object]) -> float:
    """Seconds of a call on the slowest rank. A collective."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def tell(found: Mapping[str, Any], out: Path | None) -> None:
    """Print what the first rank has found, and write it into a file if there is one."""
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=1))


def bootstrap(ratios: Sequence[float], draws: int = 10_000, seed: int = 0) -> Ratio:
    """Median of the rounds' ratios, with the 2.5 and 97.5 percentiles of its bootstrap distribution."""
    generator = random.Random(seed)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return Ratio(statistics.median(ratios), medians[round(0.025 * (draws - 1))], medians[round(0.975 * (draws - 1))])
