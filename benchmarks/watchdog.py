"""Costs of the watchdog while nothing is wrong: training steps with `watchdog: default` (or strict) against off.

    python -m benchmarks.watchdog --ranks 2 --model transformer-small --stage 3 --rounds 10

Seconds of the slowest rank for a whole step, on over off, two engines of one run in turns as A B B A; and what a
collective costs by itself: microseconds of its bookkeeping, with nothing to send.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpt import SIZES
from benchmarks.offload import Training
from benchmarks.ratios import TURNS, bootstrap, round_ratio
from tests.launcher import RankPool
from zero_strategy.config import load_config
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine

_STEPS = 3
"""Of a block."""


class Contender(Training):
    """A model and its engine, under the settings of the options and some more."""

    def __init__(self, options: dict[str, Any], **settings: Any) -> None:
        super().__init__(options["model"], options["rows"], options["length"])
        self.engine = ZeroEngine(self.model, load_config(stage=options["stage"], **settings))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        install_diagnostics(self.engine)
        self.engine.attach(self.optimizer)
        for _ in range(2):
            self.step()

    def step(self) -> float:
        """Seconds of a step on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        self.loss(self.model).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def begun(self) -> int:
        """Collectives so far."""
        watchdog = self.engine.mesh.watchdog
        return 0 if watchdog is None else sum(track.count for track in watchdog.tracks)

    def bookkeeping(self, count: int = 20_000) -> float:
        """Seconds that a watchdog takes of each collective."""
        watchdog = self.engine.mesh.watchdog
        assert watchdog is not None
        track = watchdog.track("benchmark", [dist.get_rank()])
        names = [name for name, _ in self.model.named_parameters()]
        start = time.perf_counter()
        for _ in range(count):
            with track.begin("all_gather", names, 1 << 20, torch.float32):
                pass
        return (time.perf_counter() - start) / count


def in_turns(both: dict[str, Contender], rounds: int) -> list[list[list[float]]]:
    """Seconds of steps: of each round, each turn of A B B A, each step."""
    return [[[both[turn].step() for _ in range(_STEPS)] for turn in TURNS] for _ in range(rounds)]


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Both contenders on this rank."""
    torch.set_num_threads(1)
    both = {"A": Contender(options, watchdog=options["watchdog"]), "B": Contender(options, watchdog="off")}
    before = both["A"].begun()
    samples = in_turns(both, options["rounds"])
    collectives = (both["A"].begun() - before) / (2 * _STEPS * options["rounds"])
    seconds = both["A"].bookkeeping()
    step = min(time for blocks in samples for block in blocks for time in block)
    return {
        "ratio": asdict(bootstrap([round_ratio(blocks) for blocks in samples])),
        "collectives of a step": collectives,
        "bookkeeping, us a collective": 1e6 * seconds,
        "bookkeeping, % of a step": 100 * seconds * collectives / step,
        "samples": samples,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watchdog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--guard", choices=("default", "strict"), default="default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pool = RankPool(options.ranks)
    try:
        found = pool.run(measure, ({key: value for key, value in vars(options).items() if key != "out"},), timeout=3600)
    finally:
        pool.close()
    report = found[0]
    for key, value in report.items():
        if isinstance(value, (int, float)):
            print(f"{key:<30}{value:.4g}")
    ratio = report["ratio"]
    print(f"{'time of a step, over off':<30}{ratio['median']:.4f}   {ratio['low']:.4f} - {ratio['high']:.4f}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
