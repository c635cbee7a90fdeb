"""Attempts of an attack, and what counts as holding: the same result as without it, or a named error, soon."""

from __future__ import annotations

import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS = 30.0
"""After which an attempt counts as a hang, on a machine with other work."""


@dataclass(frozen=True)
class Attempt:
    """One try.

    Attributes:
        name: Of what was tried.
        wrong: Words for what does not hold; "" where it holds.
    """

    name: str
    wrong: str


@dataclass(frozen=True)
class Row:
    """A kind of attack.

    Attributes:
        name: In the table.
        run: From an empty folder, a source of random numbers and a number of rounds to attempts.
        rounds: Of a run before a release; a test makes one.
        is_test: It is short enough for a test.
    """

    name: str
    run: Callable[[Path, random.Random, int], Iterator[Attempt]]
    rounds: int = 1
    is_test: bool = True


class Hang(BaseException):
    """Raised where an attempt has not ended in time; nothing that is attacked catches it."""


@dataclass(frozen=True)
class Outcome:
    """End of an attempt: a value or an error."""

    value: Any = None
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.value!r}"[:200] if self.error is None else f"{type(self.error).__name__}: {self.error}"[:300]


def outcome(function: Callable[[], Any], seconds: float = SECONDS) -> Outcome:
    """Runs a function under a bound on its time; in the main thread."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang(f"has not ended after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("attempts run in the main thread, which gets signals")
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Outcome(value=function())
    except BaseException as error:
        return Outcome(error=error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused(
    name: str,
    found: Outcome,
    *,
    names: str = "",
    errors: tuple[type[BaseException], ...] = (ValueError,),
) -> Attempt:
    """Holds if it ended in such an error, whose text has `names` in it and nothing that a terminal acts on."""
    if found.error is None:
        return Attempt(name, f"was taken: {found}")
    if not isinstance(found.error, errors):
        return Attempt(name, f"ended in {found}")
    text = str(found.error)
    if names not in text:
        return Attempt(name, f"does not name {names}: {found}")
    if "\x1b" in text:
        return Attempt(name, f"has an escape sequence in its text: {text!r}")
    return Attempt(name, "")


def harmless(
    name: str, found: Outcome, expected: object, *, errors: tuple[type[BaseException], ...] = (ValueError,)
) -> Attempt:
    """Holds if the value is that without the attack, or it ended in such an error."""
    if found.error is not None:
        return Attempt(name, "" if isinstance(found.error, errors) else f"ended in {found}")
    return Attempt(name, "" if found.value == expected else f"gave another value: {found}")
