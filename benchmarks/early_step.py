"""Early steps: training steps with `offload.early_step` on against off, where the optimizer's state is in files.

    python -m benchmarks.early_step --folder DIR --ranks 2 --model transformer-small --rounds 6 --out early.json

    never    clipping takes no effect: every step is as guessed
    always   it does in every step: nothing should be gained, and nothing lost
    fourth   it does in every fourth

Seconds of the slowest rank for a whole step, on over off, contenders in turns as A B B A; figures are medians of rounds
with bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
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
from zero_strategy.engine import ZeroEngine

_FAR, _NEAR = 1e9, 1e-3
"""Bounds of the norm that no gradient, and that every gradient exceeds."""
CLIPPING = {"never": (_FAR,), "always": (_NEAR,), "fourth": (_FAR, _FAR, _FAR, _NEAR)}


class Contender(Training):
    """Stage 3 with state in files."""

    def __init__(self, folder: str, early: str, options: dict[str, Any]) -> None:
        super().__init__(options["model"], options["rows"], options["length"])
        offload = {
            "optimizer": "nvme",
            "parameters": options["parameters"],
            "nvme_path": [folder],
            "early_step": early,
            "probe_seconds": 0,
        }
        self.engine = ZeroEngine(self.model, load_config(stage=3, offload=offload))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)
        self.steps = 0
        for _ in range(2):
            self.seconds(_FAR)

    def seconds(self, *norms: float) -> tuple[float, float]:
        """Of a step on the slowest rank, and of `optimizer.step()` on this one."""
        dist.barrier()
        start = time.perf_counter()
        self.loss(self.model).backward()
        self.engine.clip_grad_norm_(norms[self.steps % len(norms)])
        before = time.perf_counter()
        self.optimizer.step()
        alone = time.perf_counter() - before
        self.optimizer.zero_grad()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self.steps += 1
        return taken.item(), alone


def measure(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """All kinds of clipping."""
    torch.set_num_threads(1)
    both = {"A": Contender(folder, "on", options), "B": Contender(folder, "off", options)}
    report = {}
    for name, norms in CLIPPING.items():
        before = both["A"].engine.early_steps
        found = [[[both[turn].seconds(*norms)] for turn in TURNS] for _ in range(options["rounds"])]
        after = both["A"].engine.early_steps
        samples = [[[each[0] for each in block] for block in blocks] for blocks in found]
        report[name] = {
            "ratio": asdict(bootstrap([round_ratio(blocks) for blocks in samples])),
            "seconds of step(), on": statistics.median(s for b in found for block in (b[0], b[3]) for _, s in block),
            "seconds of step(), off": statistics.median(s for b in found for block in b[1:3] for _, s in block),
            "committed": after.committed - before.committed,
            "redone": after.redone - before.redone,
            "samples": samples,
        }
    return report


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.early_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--parameters", choices=("none", "nvme"), default="nvme", help="where parameters are")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chosen = {key: value for key, value in vars(options).items() if key not in ("folder", "out")}
    place, pool = tempfile.mkdtemp(dir=options.folder), RankPool(options.ranks)
    try:
        found = pool.run(measure, (place, chosen), {}, timeout=3600)[0]
    finally:
        pool.close()
        shutil.rmtree(place, ignore_errors=True)
    for name, values in found.items():
        ratio = values["ratio"]
        print(f"{name:<10}{ratio['median']:.3f}   {ratio['low']:.3f} - {ratio['high']:.3f}")
        for key, value in values.items():
            if isinstance(value, (int, float)):
                print(f"  {key:<26}{value:.4g}")
    report: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor(), "options": chosen}
    report["clipping"] = found
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
