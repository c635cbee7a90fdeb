"""The stacks of this process's threads, as they were at one moment.

Python code must not walk another thread's frames: between two steps of the walk that thread may run on, and what the
next step follows is no frame any more (CPython 3.11 then crashes). Everything here happens inside of single calls of C,
during which no other thread runs Python.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from operator import attrgetter, methodcaller
from types import FrameType
from typing import NamedTuple

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_NEVER = object()
_LOOKING = threading.Lock()
"""Who looks switches the collector off for a moment: the next one must not take that for the user's wish."""


class Call(NamedTuple):
    """A function that a thread is in.

    Attributes:
        file: Its path.
        function: Its name.
        line: Where it is; 0: unknown.
    """

    file: str
    function: str
    line: int


def stacks() -> dict[int, list[Call]]:
    """By thread, the innermost call first.

    As far as `faulthandler` goes: the innermost 100 calls of the latest 100 threads. Empty where no file can be opened.
    """
    found: dict[int, list[Call]] = {}
    calls: list[Call] = []
    for line in _dump().splitlines():
        if (thread := _THREAD.match(line)) is not None:
            calls = found.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.fullmatch(line)) is not None:
            calls.append(Call(call[1], call[3], int(call[2]) if call[2].isdigit() else 0))
    return found


def as_text(calls: list[Call]) -> str:
    """As Python prints a stack: the outermost call first."""
    return "".join(f'  File "{call.file}", line {call.line}, in {call.function}\n' for call in reversed(calls))


def frame_at(thread: int, depth: int) -> FrameType | None:
    """The frame of a call of a thread, by its distance from the innermost one; None: it is not there any more."""
    # Without a line of Python between taking the innermost frame and arriving: the iterators call one another.
    frames: Iterator[object] = map(methodcaller("get", thread), iter(sys._current_frames, None))
    if depth:
        frames = map(attrgetter(".".join(["f_back"] * depth)), frames)
    # Frames that are made may start a collection, whose finalizers let other threads run: Python 3.11 then waits for
    # itself for ever, since it holds the lock of all threads meanwhile (CPython's issue 106883).
    with _LOOKING:
        collects = gc.isenabled()
        try:
            _, frame = next(zip(iter(gc.disable, _NEVER), frames, strict=False))
        except AttributeError:  # the thread has ended, or has come out of so many calls
            return None
        finally:
            if collects:
                gc.enable()
    return frame if isinstance(frame, FrameType) else None


def _dump() -> str:
    with contextlib.suppress(OSError):  # no descriptor is left
        linux = hasattr(os, "memfd_create")
        with open(os.memfd_create("stacks"), "w+b") if linux else tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read().decode("utf-8", "replace")
    return ""
