"""The flight recorder: the numbered collectives of this rank's groups, and where in the user's code its threads are.

Stacks of threads are read with care. Python code must not walk another thread's frames: between two steps of the walk
that thread may run on, and what the next step follows is no frame any more (CPython 3.11 then crashes). Everything here
happens inside of single calls of C, during which no other thread runs Python. From a stack follow the place in the
user's code, the part of a step, and whether the thread waits in a collective that is not ours.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from zero_strategy.runtime.compute_device import beside_captures
from zero_strategy.watchdog.diagnosis import Begun, DesyncError, Failure, Wait, named, shown

_LONGEST = 250  # fits into the card that ranks exchange (`comm/shared_memory.py`)
"""Bytes of a text that is compared."""
_KEPT = 16
"""Of the last collectives: those under way, and what led to them."""

Subject = str | Sequence[str]
"""What a collective is about: in words, or the parameters' names, which become words if somebody asks."""


class TransportError(RuntimeError):
    """A connection broke, or timed out."""


class Waiting(Protocol):
    """Operation that a thread waits in."""

    def wait(self) -> Wait:
        """The wait in words and numbers."""


class CollectiveLogOwner(Protocol):
    """The watchdog that a track reports to; see `Watchdog`."""

    rank: int
    waiting: dict[int, Waiting]
    ended: int
    failure: Failure | None

    @property
    def rank_labels(self) -> Callable[[int], str]: ...

    def explained(self, error: BaseException | None, watched: CollectiveRecord) -> DesyncError: ...

    def fail(self, failure: Failure) -> Failure: ...

    def check(self) -> None: ...

    def progress(self) -> None: ...


class CollectiveRecord:
    """One collective; a context in which this thread waits for its end.

    Attributes:
        track: Whose it is.
        number: Counted from 1.
        work: What can be asked whether it is over, where waiting does not hold the caller (GPUs); None: it is.
    """

    __slots__ = ("number", "thread", "track", "work")

    thread: int

    def __init__(self, track: CollectiveLog, number: int) -> None:
        self.track, self.number = track, number
        self.work: Any = None

    def __enter__(self) -> CollectiveRecord:
        self.thread = threading.get_ident()
        self.track.watchdog.waiting[self.thread] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watchdog = self.track.watchdog
        watchdog.ended += 1
        if self.work is not None and error is None:
            self.track.waited(self)
        if isinstance(error, TransportError) or (watchdog.failure is not None and not isinstance(error, _PASS)):
            explained = watchdog.explained(error, self)
            watchdog.waiting.pop(self.thread, None)
            raise explained from error
        watchdog.waiting.pop(self.thread, None)

    def wait(self) -> Wait:
        """Operation that is waited in."""
        begun = self.track.begun_at(self.number)
        what = "a collective" if begun is None else named(*begun[:2])
        return Wait(what, self.track.ranks, self.track.key, self.number)

    def text(self) -> str:
        """For `compare`."""
        begun = self.track.begun_at(self.number)
        assert begun is not None
        return f"{self.number} {shown(begun)}".encode()[:_LONGEST].decode(errors="ignore")

    def compare(self, texts: Sequence[str]) -> None:
        """Compare with the other ranks' texts, in the order of their numbers.

        Raises:
            DesyncError: If they differ.
        """
        watchdog, told = self.track.watchdog, dict(zip(self.track.ranks, texts))
        different = [rank for rank, text in told.items() if text != told[watchdog.rank]]
        if different:
            both = sorted((watchdog.rank, different[0]))
            words = ", ".join(f"{watchdog.rank_labels(rank)} begins {told[rank].partition(' ')[2]}" for rank in both)
            watchdog.fail(Failure("different", different[0], f"ranks came to different collectives: {words}", {}))
            watchdog.check()


_PASS = (KeyboardInterrupt, SystemExit)  # a way out that somebody has asked for is not explained by a failure


class CollectiveLog:
    """Collectives of one group of ranks.

    Args:
        watchdog: Whose it is.
        key: Names it; equal on all of its ranks.
        ranks: World ranks that take part.
        compared: The others' of the same number are the same.

    Attributes:
        count: Collectives begun.
    """

    def __init__(self, watchdog: CollectiveLogOwner, key: str, ranks: Sequence[int], compared: bool = True) -> None:
        self.watchdog, self.key, self.ranks, self.compared = watchdog, key, tuple(ranks), compared
        self.count = 0
        self._recent: deque[tuple[int, str, Subject, int, Any]] = deque(maxlen=_KEPT)
        self._works: deque[CollectiveRecord] = deque(maxlen=_KEPT)
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None

    def begin(self, kind: str, of: Subject = "", nbytes: int = 0, dtype: Any = None) -> CollectiveRecord:
        """This rank begins a collective.

        Args:
            kind: Of it.
            of: What it is about.
            nbytes: Of the tensor; the same on all ranks.
            dtype: Likewise.

        Raises:
            DesyncError: If the ranks cannot go on together.
        """
        # Before it is counted: after a failure nothing begins.
        self.watchdog.check()
        self.count += 1
        self._recent.append((self.count, kind, of, nbytes, dtype))
        return CollectiveRecord(self, self.count)

    def withdraw(self) -> None:
        """The last one did not come about, and will be begun again."""
        self.count -= 1
        self._recent.pop()
        self.watchdog.progress()

    def under_way(self, watched: CollectiveRecord, work: Any, device: torch.device) -> None:
        """A collective that goes on without holding its caller.

        Args:
            watched: The collective.
            work: What torch gave for it; it holds the tensors.
            device: Of them.
        """
        watched.work, self._device = work, device
        self._works.append(watched)

    def waited(self, watched: CollectiveRecord) -> None:
        """The caller has waited for one of these: its tensors are not held for longer, whenever the device is done."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing() or watched.work.is_completed():
            watched.work = None  # a stream beside a capture must not wait for what is captured
            return
        # On a stream on which nothing else is, an event comes when the collective is over, whatever is computed. One
        # for each group, since a stream is in order. torch hands the streams of a priority out in turns, 32 of them:
        # copies and NCCL take those of the default one.
        self._stream = self._stream or torch.cuda.Stream(self._device, priority=-1)
        with torch.cuda.stream(self._stream):
            watched.work.wait()
            watched.work = _DeviceEnd(self._stream.record_event())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the host waits for a device, and so for the collectives that it has under way.

        It is no entry of what threads wait in: the oldest of those collectives, of whichever group, says whom.

        Raises:
            DesyncError: If the ranks cannot go on: then connections were broken, and what was read is no result.
        """
        try:
            yield
        except RuntimeError as error:
            if self.watchdog.failure is not None:
                raise self.watchdog.explained(error, CollectiveRecord(self, self.count)) from error
            raise
        self.watchdog.check()

    def oldest_under_way(self) -> CollectiveRecord | None:
        """The first such one that is not over."""
        # To ask an event would break a CUDA graph that another thread captures.
        with beside_captures() if self._device.type == "cuda" else contextlib.nullcontext():
            for watched in list(self._works):  # a copy: this is the watch's thread, and others go on
                work = watched.work
                if work is not None and not work.is_completed():
                    return watched
        return None

    def recent(self) -> dict[int, Begun]:
        """The last collectives, by number."""
        return {number: _begun(*one) for number, *one in list(self._recent)}

    def begun_at(self, number: int) -> Begun | None:
        """One of them."""
        return self.recent().get(number)


class _DeviceEnd:
    """The end of a collective on a device, without what it was about."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        """True if it is over."""
        return bool(self._event.query())


def _begun(kind: str, of: Subject, nbytes: int, dtype: Any) -> Begun:
    return kind, of if isinstance(of, str) else subject(of), nbytes, "" if dtype is None else str(dtype)[6:]


def subject(names: Sequence[str]) -> str:
    """Common name of parameters: the name of their module, else that of the first."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".")[:-1] for name in names]
    common = 0
    while all(len(each) > common and each[common] == parts[0][common] for each in parts):
        common += 1
    return ".".join(parts[0][:common]) or f"{names[0]} and {len(names) - 1} more"


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
    """Stacks by thread, the innermost call first.

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
    """The stack as Python prints it: the outermost call first."""
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
            faulthandler.dump_traceback(file)  # it writes to descriptors only
            file.seek(0)
            return file.read().decode("utf-8", "replace")
    return ""


_BELOW = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")
_FORWARD, _BACKWARD, _STEP = "forward", "backward", "step"
_MARKS = {
    ("nn/modules/module.py", "_call_impl"): _FORWARD,
    ("autograd/graph.py", "_engine_run_backward"): _BACKWARD,
    ("autograd/__init__.py", "backward"): _BACKWARD,
    ("optim/optimizer.py", "wrapper"): _STEP,
}
"""Functions of torch on the stack, and the part of a step that is then going on."""
_COLLECTIVES = (
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "monitored_barrier", "new_group",
    "recv", "reduce", "scatter", "send",
)  # fmt: skip


_MESSAGES = {
    "send": "group_dst", "send_object_list": "group_dst", "recv": "group_src", "recv_object_list": "group_src",
}  # fmt: skip
_TO_ONE = {"gather": "group_dst", "gather_object": "group_dst", "reduce": "group_dst"}
_FROM_ONE = {
    "broadcast": "group_src", "broadcast_object_list": "group_src", "scatter": "group_src",
    "scatter_object_list": "group_src",
}  # fmt: skip
"""What not all ranks leave together, and the argument that names the one rank."""


class _Mark:
    """Lives as long as the call of a function on whose frame it is, where debuggers have theirs (`f_trace`).

    The frame itself would tell calls apart, too, but it keeps what its callers hold: whole buckets, for one.
    """

    __slots__ = ("__weakref__",)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Nothing; called if the thread is traced from now on."""


def _mark_of(frame: FrameType) -> weakref.ref[_Mark] | int:
    """The mark of a call, which gets one where it has none.

    Where a debugger or a measurement of coverage has its own there: the frame's address, which later calls may have.
    """
    if frame.f_trace is None:
        frame.f_trace = _Mark()
    mark = frame.f_trace
    return weakref.ref(mark) if isinstance(mark, _Mark) else id(frame)


class Foreign(NamedTuple):
    """A collective of torch.distributed that a thread is in.

    Attributes:
        name: Of the function.
        ranks: World ranks that take part.
        call: Tells this call from all others; nothing is kept alive by it.
        awaited: Those of them that cannot have left it, whatever it is that keeps this rank.
        message: It is between two ranks.
    """

    name: str
    ranks: tuple[int, ...]
    call: weakref.ref[_Mark] | int
    awaited: tuple[int, ...]
    message: bool = False


class CallSite(NamedTuple):
    """Position of a thread.

    Attributes:
        phase: "forward", "backward", "step", or "".
        place: The innermost line of the user's own code: "train.py:88".
        foreign: The collective that it is in, if it is in one of torch's.
    """

    phase: str
    place: str
    foreign: Foreign | None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.phase, self.place)))


Stacks = dict[int, list[Call]]


def call_site_of(thread: int | None, found: Stacks | None = None) -> CallSite:
    """Position of a thread, by its identifier; None: the main thread. What it cannot say, the main thread may.

    Args:
        thread: Which.
        found: All stacks; None: as they are now.
    """
    found, main = stacks() if found is None else found, threading.main_thread().ident or 0
    thread = main if thread is None else thread
    own = found.get(thread, [])
    site = _read(own)._replace(foreign=_foreign(thread, own))
    if not site.place and thread != main:  # a thread of autograd's
        elsewhere = _read(found.get(main, []))
        return site._replace(phase=site.phase or elsewhere.phase, place=elsewhere.place)
    return site


def phases(found: Stacks) -> set[str]:
    """The parts of a step in which any thread is: training need not be in the main one."""
    return {_phase(call.file, call.function) for calls in found.values() for call in calls}


def call_site_of_error(error: BaseException) -> CallSite:
    """Place at which an exception was raised, which this thread has caught."""
    calls, trace = list[Call](), error.__traceback__
    outer = None if trace is None else trace.tb_frame.f_back
    while trace is not None:
        calls.insert(0, _call(trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    while outer is not None:
        calls.append(_call(outer, outer.f_lineno))
        outer = outer.f_back
    return _read(calls)


def _call(frame: FrameType, line: int) -> Call:
    return Call(frame.f_code.co_filename, frame.f_code.co_name, line)


def _read(calls: Sequence[Call]) -> CallSite:
    phases = [_phase(call.file, call.function) for call in calls]
    # A forward inside of a backward is a recomputation, and part of that.
    phase = _BACKWARD if _BACKWARD in phases else next(filter(None, phases), "")
    users = next((call for call in calls if not _is_library(call.file)), None)
    return CallSite(phase, "" if users is None else f"{Path(users.file).name}:{users.line}", None)


def _foreign(thread: int, calls: Sequence[Call]) -> Foreign | None:
    """The outermost of nested calls, for objects are gathered by tensors."""
    c10d = dist.distributed_c10d.__file__
    known = [
        number
        for number, call in enumerate(calls)
        if call.file == c10d and not call.function.startswith("_") and call.function.startswith(_COLLECTIVES)
    ]
    if not known or not dist.is_initialized():
        return None
    depth = known[-1]
    name, found = calls[depth].function, frame_at(thread, depth)
    if found is None or (found.f_code.co_filename, found.f_code.co_name) != (c10d, name):
        return None  # it has ended meanwhile
    call = _mark_of(found)
    arguments = found.f_locals
    try:
        ranks = tuple(dist.get_process_group_ranks(arguments.get("group")))
    except Exception:  # not a group of this rank's, or one that is gone
        ranks = tuple(range(dist.get_world_size()))
    argument = {**_MESSAGES, **_TO_ONE, **_FROM_ONE}.get(name)
    if argument is None:
        return Foreign(name, ranks, call, ranks)
    number = arguments.get(argument)
    one = ranks[number] if isinstance(number, int) and 0 <= number < len(ranks) else None
    return Foreign(name, ranks, call, _awaited(name, ranks, one, dist.get_rank()), name in _MESSAGES)


def _awaited(name: str, ranks: tuple[int, ...], one: int | None, own: int) -> tuple[int, ...]:
    """Whom a rank waits for that is in a collective of all with one, or in a message."""
    if name in _MESSAGES:
        return () if one is None else (one,)
    if len(ranks) == 2 or one is None:
        return ranks if len(ranks) == 2 else ()
    if one == own or name.startswith("broadcast"):  # others have done their part, perhaps; a broadcast is passed on
        return ()
    return (one,)


@cache
def _phase(file: str, function: str) -> str:
    if not file.startswith(_torch_folder()):
        return ""
    return _MARKS.get((file.removeprefix(_torch_folder()).replace("\\", "/"), function), "")


@cache
def _is_library(file: str) -> bool:
    """True if it is ours, Python's, or of a framework that calls the user's code."""
    standard = sysconfig.get_paths()["stdlib"]
    if file.startswith(("<", _torch_folder())) or (file.startswith(standard) and "site-packages" not in file):
        return True
    ours = f"{Path(__file__).resolve().parent.parent}/"
    parts = file.rpartition("site-packages/")[2].split("/")
    return file.startswith(ours) or ("site-packages/" in file and parts[0] in _BELOW)


@cache
def _torch_folder() -> str:
    return f"{Path(torch.__file__).parent}/"
