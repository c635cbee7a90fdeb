"""A bar for what takes long outside of the training loop: on one rank, on a terminal, and only if it does take long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
DELAY_SECONDS = 1.0
"""What is over sooner shows no bar."""


def is_shown(rank: int) -> bool:
    """Whether bars are drawn: by the first rank, if somebody may be looking at its standard error."""
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
