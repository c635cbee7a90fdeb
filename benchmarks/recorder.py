"""Costs of recording: training steps with `diagnostics.run_dir` against steps without.

    python -m benchmarks.recorder --ranks 2 --model transformer-small --stage 3 --rounds 10

Seconds of the slowest rank for a whole step, recorded over not recorded, two engines of one run in turns as A B B A;
and of each recorded step the seconds that the recorder itself says it took (`diagnostics` of its budget).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpt import SIZES
from benchmarks.ratios import bootstrap, round_ratio
from benchmarks.watchdog import Contender, in_turns
from tests.launcher import RankPool
from zero_strategy.diagnostics.run_files import read_run


def measure(options: dict[str, Any], run_dir: str) -> dict[str, Any]:
    """Both contenders on this rank."""
    torch.set_num_threads(1)
    diagnostics = {"run_dir": run_dir, "every_n_steps": options["every"]}
    both = {"A": Contender(options, diagnostics=diagnostics), "B": Contender(options)}
    samples = in_turns(both, options["rounds"])
    for contender in both.values():
        contender.engine.close()
    return {"ratio": asdict(bootstrap([round_ratio(blocks) for blocks in samples])), "samples": samples}


def of_the_record(run_dir: str) -> dict[str, float]:
    """Records of rank 0."""
    recorded = read_run(run_dir).steps[0]
    return {
        "recorded steps": len(recorded),
        "seconds of a recorded step": median(step.seconds for step in recorded),
        "of them the recorder's own": median(step.parts.get("diagnostics", 0.0) for step in recorded),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=SIZES, default="transformer-small")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="record every so many steps")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    pool = RankPool(options.ranks)
    with tempfile.TemporaryDirectory() as run_dir:
        given = {key: value for key, value in vars(options).items() if key != "out"}
        try:
            found = pool.run(measure, (given, run_dir), timeout=3600)
        finally:
            pool.close()
        report = {**found[0], **of_the_record(run_dir)}
    for key, value in report.items():
        if isinstance(value, (int, float)):
            print(f"{key:<34}{value:.4g}")
    ratio = report["ratio"]
    print(f"{'time of a step, over not recorded':<34}{ratio['median']:.4f}   {ratio['low']:.4f} - {ratio['high']:.4f}")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
