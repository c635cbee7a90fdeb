"""Start-up: what importing costs beyond torch, and what construction and the first step take.

    python -m benchmarks.startup --peers deepspeed,lightning,fsdp2 --rounds 8 --out startup.json

Imports are timed in fresh interpreters that have imported torch; construction and the first step in fresh ranks that
have imported everything. Peer and ours take turns as A B B A; the ratio is the peer's time over ours.

    import          `import zero_strategy` against `import deepspeed`, `import lightning`
    import engine   the same until the engine's class is there
    construction    from a module to an engine, stage 3: against FSDP2, and DeepSpeed stage 3
    first step      the step after it
    both            the two together
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import REGIMES, Workload, make
from benchmarks.ratios import TURNS, bootstrap, round_ratio, slowest
from benchmarks.suite import Options, Row, Suite, row_of, rows_of
from tests.launcher import RankPool

IMPORTS = {"deepspeed": "import deepspeed", "lightning": "import lightning"}
OURS = {"import": "import zero_strategy", "import engine": "from zero_strategy import ZeroEngine"}
_ACCELERATOR = {"DS_ACCELERATOR": "cpu"}
_MARK = "seconds of import:"
_MODULES = {"zero3": "zero_strategy.engine", "fsdp2": "torch.distributed.fsdp", "deepspeed3": "deepspeed"}


def import_seconds(statement: str) -> float:
    """In a fresh interpreter, after `import torch`."""
    code = (
        f"import time, torch\nstart = time.perf_counter()\n{statement}\n"
        f"print('\\n{_MARK}', time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, **_ACCELERATOR}
    )
    return float(done.stdout.rpartition(_MARK)[2])


def first_steps(name: str, workload: Workload) -> tuple[float, float]:
    """Seconds of construction and of the first step, on the slowest rank."""
    torch.set_num_threads(1)
    os.environ.update(_ACCELERATOR)
    importlib.import_module(_MODULES[name])
    gc.collect()
    held: list[Any] = []
    construction = slowest(lambda: held.append(make(name, workload)))
    return construction, slowest(lambda: held[0].step(workload))


def in_fresh_ranks(name: str, workload: Workload, ranks: int) -> tuple[float, float]:
    pool = RankPool(ranks)
    try:
        return pool.run(first_steps, (name, workload), timeout=600.0)[0]
    finally:
        pool.close()


def compared(what: str, peer: str, rounds: Sequence[Sequence[float]]) -> Row:
    """From the turns' seconds, A being the peer."""
    theirs, ours = ([seconds for turns in rounds for seconds in (turns[i], turns[j])] for i, j in ((0, 3), (1, 2)))
    ratio = bootstrap([round_ratio([[seconds] for seconds in turns]) for turns in rounds])
    details = {"rounds": [list(turns) for turns in rounds]}
    return row_of(
        "startup", what, peer, ratio, statistics.median(ours), statistics.median(theirs), "s", details=details
    )


def startup(options: Options) -> list[Row]:
    """All that is asked for and installed."""
    imports = [(peer, what) for peer in IMPORTS if options.wants(peer) for what in OURS]
    peers = [name for name in ("fsdp2", "deepspeed3") if options.wants(name.rstrip("3"))]
    rows = rows_of("startup", options, imports, " against ".join, partial(_imports, options))
    return rows + rows_of("startup", options, peers, lambda name: f"first step of {name}", partial(_first, options))


def _imports(options: Options, case: tuple[str, str]) -> list[Row]:
    peer, what = case
    for statement in (IMPORTS[peer], OURS[what]):
        import_seconds(statement)  # files are in the page cache and compiled afterwards
    rounds = [
        [import_seconds(IMPORTS[peer] if turn == "A" else OURS[what]) for turn in TURNS] for _ in range(options.rounds)
    ]
    return [compared(f"{what}, beyond torch", peer, rounds)]


def _first(options: Options, name: str) -> list[Row]:
    workload = Workload(**({"model": "transformer-tiny", "length": 16} if options.quick else REGIMES["communication"]))
    ranks = options.ranks[0]
    for contender in (name, "zero3"):
        in_fresh_ranks(contender, workload, ranks)
    found = [
        [in_fresh_ranks(name if turn == "A" else "zero3", workload, ranks) for turn in TURNS]
        for _ in range(options.rounds)
    ]
    parts: dict[str, Callable[[tuple[float, float]], float]] = {
        "construction": lambda times: times[0],
        "first step": lambda times: times[1],
        "construction and first step": sum,
    }
    return [
        compared(f"{what}, zero3", name, [[part(times) for times in turns] for turns in found])
        for what, part in parts.items()
    ]


SUITE = Suite("startup", "imports beyond torch, construction and the first step", startup)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="deepspeed,lightning,fsdp2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="of A B B A")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    rows = startup(Options(peers=tuple(chosen.peers.split(",")), rounds=chosen.rounds, ranks=(chosen.ranks,)))
    for row in rows:
        print(
            f"{row.what:<36}{row.peer:<12}{row.ratio:>8.3f}   {row.low:.3f} - {row.high:.3f}   "
            f"{row.theirs:.3f} s / {row.ours:.3f} s"
        )
    if chosen.out is not None:
        chosen.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return rows


if __name__ == "__main__":
    main()
