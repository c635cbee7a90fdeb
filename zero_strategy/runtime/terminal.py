"""Terminal output of commands and long work: tables, sizes, progress bars, lines that a script asked for.

Python drops what is logged at INFO until a handler is there, so a plain script would see nothing of what it asked for.
Where logging is configured, by anyone and in any way, it alone decides, and no line comes twice.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from zero_strategy.runtime.shown import shown, shown_lines

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Columns of text; those of the numbers in `right` are aligned to the right. Cells may hold foreign names."""
    lines = [[shown(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
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


def complain(message: object) -> None:
    """Print an error, or a warning, of a command on stderr; it may name things of others."""
    print(shown_lines(message), file=sys.stderr)


T = TypeVar("T")
DELAY_SECONDS = 1.0
"""What is over sooner shows no bar."""


def is_shown(rank: int) -> bool:
    """True if bars are drawn: by the first rank, if somebody may be looking at its standard error."""
    return rank == 0 and sys.stderr.isatty()


@contextmanager
def progress(what: str, total: int, rank: int) -> Iterator[Callable[[int], object] | None]:
    """Around something long.

    Args:
        what: Before the bar, such as "saving".
        total: Bytes of all of it.
        rank: Of this process.

    Yields:
        Is told of bytes that are done, in any thread; None where no bar is drawn.
    """
    if not is_shown(rank):
        yield None
        return
    from tqdm import tqdm

    settings: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "delay": DELAY_SECONDS}
    with tqdm(total=total, desc=what, **settings) as bar:
        yield bar.update


def each(what: str, items: Sequence[T], rank: int) -> Iterator[T]:
    """The items, with a bar of how many of them there have been."""
    if not is_shown(rank):
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, desc=what, delay=DELAY_SECONDS)


_PACKAGE = __name__.partition(".")[0]


def report(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a line at INFO; with no logging configured for the logger, print it to stderr.

    Args:
        logger: Of the module that has something to say.
        message: With places for values, as `logging` has them.
        values: For the message.
    """
    if _configured(logger):
        logger.info(message, *values)
    elif logger.manager.disable < logging.INFO:
        print(f"{_PACKAGE}: {message % values if values else message}", file=sys.stderr, flush=True)


def _configured(logger: logging.Logger) -> bool:
    """True if somebody has given the logger, or one that it hands lines to, a handler; or a package's one a level."""
    current: logging.Logger | None = logger
    while current is not None and current.parent is not None:  # the root's level is never unset
        if current.level != logging.NOTSET:
            return True
        current = current.parent
    return logger.hasHandlers()
