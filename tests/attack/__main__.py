"""Attacks what others can write, send or take away, and prints a table: row, tries, held.

python -m tests.attack --seed 0
python -m tests.attack --only "pickles, zips" --rounds 5
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.attack.rows import Row
from tests.attack.table import ROWS
from zero_strategy.runtime.terminal import complain, table

_SHOWN = 5


def attempt(row: Row, rounds: int, seed: int) -> tuple[int, int, float]:
    """Tries, those that hold, and seconds of a row; what does not hold is printed."""
    folder, began, tries, held = Path(tempfile.mkdtemp(prefix="attack-")), time.monotonic(), 0, 0
    try:
        for each in row.run(folder, random.Random(seed), rounds):
            tries, held = tries + 1, held + (not each.wrong)
            if each.wrong and tries - held <= _SHOWN:
                complain(f"{row.name}: {each.name}: {each.wrong}")
    except Exception:
        tries += 1
        complain(f"{row.name}: the attack itself failed: {traceback.format_exc()}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tries, held, time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the rows; returns 1 if anything does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="rows that have this in their name")
    parser.add_argument("--rounds", type=int, help="of each row; default: the row's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20, help="rounds of the torture; 0 for none")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines: list[tuple[object, ...]] = []
    whole = True
    for row in ROWS:
        if options.only is None or options.only in row.name:
            tries, held, seconds = attempt(row, options.rounds or row.rounds, options.seed)
            lines.append((row.name, tries, held, f"{seconds:.1f}"))
            whole = whole and tries == held
            print(f"{row.name}: {held} of {tries}, {seconds:.1f} s", flush=True)
    if options.kills and options.only is None:
        command = [sys.executable, "-m", "tests.torture", "--rounds", str(options.kills), "--seed", str(options.seed)]
        failed = subprocess.run(command, check=False).returncode
        lines.append(("kills in and between saves", options.kills, "all" if not failed else "see above", ""))
        whole = whole and not failed
    print()
    print(table(lines, ("row", "tries", "held", "seconds"), right=(1, 2, 3)))
    return int(not whole)


if __name__ == "__main__":
    sys.exit(main())
