"""What the actions share: tables, sizes, progress bars, arguments."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parser_for(actions: Any, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser with examples at the end of its help, --json and --quiet."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Columns of text; those of the numbers in `right` are aligned to the right."""
    lines = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in lines
    ]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def size(nbytes: int) -> str:
    """Bytes for people: 1536 -> "1.5 KB"; the units are powers of 1000."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MiB", "1e9", ...; for argparse."""
    found = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    if found is None or found[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or a number with KB, MB, GB, MiB, GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@contextlib.contextmanager
def progress_bar(options: argparse.Namespace, what: str) -> Iterator[Callable[[int], Callable[[int], object]]]:
    """Gives a function from the total number of bytes to what is told of each part of them."""
    from tqdm import tqdm

    hidden = options.quiet or options.json or not sys.stderr.isatty()
    with contextlib.ExitStack() as stack:

        def start(total: int) -> Callable[[int], object]:
            bar: Any = stack.enter_context(
                tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc=what, disable=hidden)
            )
            return lambda count: bar.update(count)

        yield start
