"""Other threads' stacks, read while those threads run."""

from __future__ import annotations

import subprocess
import sys
import threading

from zero_strategy.distributed.stacks import as_text, frame_at, stacks

BUSY = """
import threading, time
from zero_strategy.distributed.sites import phases, site_of
from zero_strategy.distributed.stacks import frame_at, stacks

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
        phases(stacks()), site_of(None)
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


def test_a_running_thread_may_be_looked_at() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "alive\n" and not done.stderr, (done.returncode, done.stderr)


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
