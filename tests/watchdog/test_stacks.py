"""Other threads' stacks, read while those threads run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from tests.launcher import Launcher
from zero_strategy.watchdog.flight_recorder import Foreign, as_text, call_site_of, frame_at, stacks

BUSY = """
import threading, time
from zero_strategy.watchdog.flight_recorder import phases, call_site_of
from zero_strategy.watchdog.flight_recorder import frame_at, stacks

def numbers(depth):
    for number in range(3):
        yield from numbers(depth - 1) if depth else ()
        yield number

def busy(end):
    while time.monotonic() < end:
        sum(numbers(6))

main, seen, over = threading.main_thread().ident, [0], threading.Event()
def watch():
    while not over.is_set():
        assert stacks()[main][-1].function == "<module>"
        phases(stacks()), call_site_of(None)
        for depth in range(8):
            frame = frame_at(main, depth)
            assert frame is None or isinstance(frame.f_locals, dict)
        seen[0] += 1

threads = [threading.Thread(target=watch) for _ in range(2)]
for thread in threads:
    thread.start()
busy(time.monotonic() + 1.0)
over.set()
for thread in threads:
    thread.join()
assert seen[0] > 3, seen
print("alive")
"""


COLLECTED = """
import faulthandler, gc, threading, time
from zero_strategy.watchdog.flight_recorder import frame_at

class Ring:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # other threads run

faulthandler.dump_traceback_later(60, exit=True)
gc.collect()
gc.freeze()
main, over = threading.get_ident(), threading.Event()
def watch():
    objects = 0
    while not over.is_set():
        objects = objects % 40 + 1
        gc.collect(0)
        for _ in range(3):
            Ring()
        gc.set_threshold(objects)  # so that a collection begins at any place in there
        frame_at(main, 1)
        assert gc.isenabled()
        gc.set_threshold(0)

def deep(calls):
    if calls:
        return deep(calls - 1)
    thread = threading.Thread(target=int)  # takes the lock of all threads
    thread.start()
    thread.join()

watching = threading.Thread(target=watch)
watching.start()
end = time.monotonic() + 2.0
while time.monotonic() < end:
    deep(10)
over.set()
watching.join()
gc.disable()
assert frame_at(main, 0) is not None and frame_at(main, 500) is None and not gc.isenabled()
print("alive")
"""


def test_a_running_thread_may_be_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "alive\n" and not done.stderr, (done.returncode, done.stderr)


def test_no_collection_begins_while_all_threads_are_locked() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "alive\n", (done.returncode, done.stderr)


def test_a_waiting_thread() -> None:
    began, end = threading.Event(), threading.Event()

    def waiting(word: str) -> None:
        began.set()
        end.wait(60)

    thread = threading.Thread(target=waiting, args=("here",))
    thread.start()
    assert began.wait(60) and thread.ident is not None
    while (names := [call.function for call in stacks()[thread.ident]])[:2] != ["wait", "wait"]:
        pass
    depth = names.index("waiting")
    frame = frame_at(thread.ident, depth)
    assert frame is not None and frame.f_code.co_name == "waiting" and frame.f_locals["word"] == "here"
    inner = frame_at(thread.ident, 0)
    assert inner is not None and inner.f_code.co_name == "wait" and frame_at(thread.ident, 500) is None
    assert as_text(stacks()[thread.ident]).splitlines()[-1].endswith(", in wait")
    del frame, inner
    end.set()
    thread.join()
    assert frame_at(thread.ident, 0) is None and thread.ident not in stacks()


def follows(frame: object, event: str, arg: object) -> Any:
    """A debugger's: each frame has it from its first line on."""
    return follows


def looked_at(traced: bool) -> tuple[int, bool, bool, bool]:
    """Rank 0 waits twice in a barrier while a thread looks at it, and a debugger may follow it.

    Returns:
        In how many calls it was seen; whether one call was seen as one, the calls as ended; whether a tensor of the
        caller's lives on.
    """
    seen: list[Foreign] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            if (foreign := call_site_of(None).foreign) is not None:
                seen.append(foreign)
            time.sleep(0.01)

    def wait() -> ref[torch.Tensor]:
        held = torch.zeros(4)
        if dist.get_rank() == 1:
            time.sleep(0.5)
        dist.barrier()
        return ref(held)

    looker = threading.Thread(target=look)
    looker.start()
    tracer = sys.gettrace()  # where coverage is measured
    sys.settrace(follows if traced else None)
    try:
        held = [wait(), wait()]
    finally:
        sys.settrace(tracer)
    dist.barrier()
    over.set()
    looker.join()
    changes = sum(before.call != after.call for before, after in pairwise(seen))
    different = {id(foreign.call) for foreign in seen}
    ended = all(foreign.call() is None for foreign in seen if isinstance(foreign.call, ref))
    return len(different), changes + 1 == len(different), ended, any(tensor() is not None for tensor in held)


def test_a_look_tells_calls_apart_and_keeps_nothing_of_them(ranks: Launcher) -> None:
    calls, as_one, ended, lives = ranks(2)(looked_at, False)[0]
    assert calls >= 2 and as_one and ended and not lives


def test_a_look_finds_calls_that_a_debugger_follows(ranks: Launcher) -> None:
    calls, _, _, lives = ranks(2)(looked_at, True)[0]
    assert calls >= 1 and not lives
