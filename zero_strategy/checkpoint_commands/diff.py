"""`zero-strategy checkpoint diff`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zero_strategy.runtime.terminal import parser_for, progress_bar, table

if TYPE_CHECKING:
    from zero_strategy.checkpoint.compare import Difference


def add(actions: Any) -> None:
    """Adds the action."""
    parser = parser_for(
        actions,
        "diff",
        "what differs between two checkpoints",
        "Compares names, shapes, dtypes and every element of two checkpoints of any format, and their step counts,\n"
        "hyper-parameters and counters. Exit status: 0 equal, 1 different, 2 error.",
        "  zero-strategy checkpoint diff runs/step100 runs/step200\n"
        "  zero-strategy checkpoint diff exported.pt runs/step200 --weights-only",
    )
    parser.add_argument("a", help="a checkpoint of any format")
    parser.add_argument("b", help="another one")
    parser.add_argument("--weights-only", action="store_true", help="leave optimizers and counters out")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums meanwhile")


def run(options: argparse.Namespace) -> int:
    """Runs the action; returns the exit status."""
    from zero_strategy.checkpoint.compare import bytes_to_compare, compare
    from zero_strategy.checkpoint.open_any import open_any

    a, b = (open_any(path, verify=not options.no_verify) for path in (options.a, options.b))
    with progress_bar(options, "diff") as progress:
        total = bytes_to_compare(a, b, weights_only=options.weights_only)
        found = compare(a, b, weights_only=options.weights_only, progress=progress(total))
    if options.json:
        entries = [{k: _finite(v) for k, v in asdict(entry).items()} for entry in found.differences]
        print(json.dumps({"tensors": found.tensors, "equal": found.equal, "differences": entries}, indent=1))
        return int(bool(found.differences))
    if found.differences:
        header = ("where", "name", "what", "A", "B", "elements", "max abs", "max rel")
        print(table([_row(entry) for entry in found.differences], header, right=(5, 6, 7)))
    print(f"{found.equal} of {found.tensors} tensors in both are equal; {len(found.differences)} difference(s)")
    return int(bool(found.differences))


def _row(entry: Difference) -> tuple[str, ...]:
    if not entry.numel:
        return (entry.where, entry.name, entry.what, entry.a, entry.b, "", "", "")
    numbers = (f"{entry.elements}/{entry.numel}", f"{entry.max_abs:.3g}", f"{entry.max_rel:.3g}")
    return (entry.where, entry.name, entry.what, entry.a, entry.b, *numbers)


def _finite(value: Any) -> Any:
    return str(value) if value in (float("inf"), float("-inf")) else value
