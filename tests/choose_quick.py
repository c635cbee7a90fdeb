"""Chooses the tests of ranks and of processes that `make test` runs, and writes their names to tests/quick.txt.

    make coverage            # runs everything under coverage, with each test as a context; records durations
    python -m tests.choose_quick --seconds 260

First one test of each file; then, as long as the budget lasts, the test that adds most per second: lines
of the package that no unit test and no chosen test runs, and pairs of parameters' values that no chosen case has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coverage import CoverageData

from tests.tiers import DURATIONS_FILE, LEAST_SECONDS, QUICK_FILE

_PAIR = 0.2
"""Worth of a pair of parameters' values, in lines."""
_OVERHEAD = 0.05
"""Seconds of a test beyond the recorded ones."""
_HEADER = "# Tests beyond the unit tests that `make test` runs; written by tests/choose_quick.py, not by hand.\n"


def collected(tier: str) -> list[str]:
    """Node ids of a tier."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--tier", tier]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "::" in line]


def covered(data: CoverageData) -> dict[str, set[tuple[str, int]]]:
    """Lines of the package by test, as (file, line)."""
    found: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for measured in data.measured_files():
        file = measured.rpartition("zero_strategy/")[2]  # processes in other directories have whole paths
        for line, contexts in data.contexts_by_lineno(measured).items():
            for context in contexts:
                found[context].add((file, line))
    return found


def pairs(name: str) -> Iterator[tuple[str, Any, Any]]:
    """The pairs of parameters' values of a case, as its id has them; a lone value is a pair with itself."""
    test, _, values = name.partition("[")
    placed = list(enumerate(values.rstrip("]").split("-"))) if values else []
    yield from ((test, *pair) for pair in itertools.combinations(placed, 2))
    yield from ((test, value, value) for value in placed)


def choose(
    tests: Iterable[str],
    seconds: dict[str, float],
    lines: dict[str, set[tuple[str, int]]],
    budget: float,
    longest: float,
) -> list[str]:
    """The chosen tests, in order.

    Args:
        tests: Those to choose from.
        seconds: By test; a test that has none takes `LEAST_SECONDS`.
        lines: By test, without those that need no choice.
        budget: Seconds that the chosen ones may take.
        longest: A test that takes longer is not chosen.
    """
    cost = {test: seconds.get(test, LEAST_SECONDS / 2) + _OVERHEAD for test in tests}
    files: dict[str, list[str]] = defaultdict(list)
    for test in cost:
        files[test.partition("::")[0]].append(test)
    chosen: dict[str, None] = {}
    done_lines: set[tuple[str, int]] = set()
    done_pairs: set[tuple[str, Any, Any]] = set()

    def worth(test: str) -> float:
        return len(lines.get(test, set()) - done_lines) + _PAIR * len(set(pairs(test)) - done_pairs)

    def take(test: str) -> None:
        chosen[test] = None
        done_lines.update(lines.get(test, set()))
        done_pairs.update(pairs(test))

    quick = {file: [test for test in cases if cost[test] <= longest] for file, cases in files.items()}
    for cases in filter(None, quick.values()):
        take(max(cases, key=lambda test: (worth(test) + 5) / (cost[test] + 0.2)))
    spent = sum(cost[test] for test in chosen)
    print(f"one of each of {len(chosen)} files: {spent:.0f} s; none of {[file for file in quick if not quick[file]]}")
    left = {test: worth(test) / cost[test] for cases in quick.values() for test in cases if test not in chosen}
    while left:  # worth only falls, so the first whose fresh worth is still the highest is the best
        test = max(left, key=left.__getitem__)
        fresh = worth(test) / cost[test]
        if fresh < left[test] and any(fresh < other for name, other in left.items() if name != test):
            left[test] = fresh
            continue
        del left[test]
        if fresh == 0 or spent + cost[test] > budget:
            continue
        take(test)
        spent += cost[test]
    print(f"{len(chosen)} tests: {spent:.0f} s; {len(done_lines)} lines that unit tests do not run")
    return list(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", type=Path, default=Path(".coverage"), help="combined data of `make coverage`")
    parser.add_argument("--seconds", type=float, required=True, help="budget, summed over tests")
    parser.add_argument("--longest", type=float, default=4.0, help="no test that takes longer")
    arguments = parser.parse_args()
    data = CoverageData(basename=str(arguments.coverage))
    data.read()
    lines = covered(data)
    by_unit = set().union(*(lines.get(test, set()) for test in [*collected("unit"), ""]))
    tests = [*collected("ranks"), *collected("system")]
    rest = {test: lines.get(test, set()) - by_unit for test in tests}
    everything = set().union(*lines.values())
    print(f"{len(everything)} lines are run by tests, {len(by_unit)} of them by unit tests")
    seconds = json.loads(DURATIONS_FILE.read_text())
    chosen = choose(tests, seconds, rest, arguments.seconds, arguments.longest)
    QUICK_FILE.write_text(_HEADER + "".join(f"{test}\n" for test in sorted(chosen)))


if __name__ == "__main__":
    main()
