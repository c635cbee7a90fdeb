"""The three file queues do the same: any sizes, short calls, errors by name, refusals, and nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import random
import resource
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.offload.files import aligned, every_backend, need, nothing_left, opened, random_bytes
from zero_strategy.offload.file_io import Extent, FileQueue, Kind, OpenFile
from zero_strategy.offload.file_queues import BACKENDS, IO_VARIABLE, Backend, NativeQueue, open_queue

ROOT = Path(__file__).resolve().parents[2]


def queue_of(backend: Backend, depth: int = 4, block_bytes: int = 8192, stall_seconds: float = 20.0) -> FileQueue:
    need(backend)
    return open_queue(backend, depth=depth, block_bytes=block_bytes, stall_seconds=stall_seconds)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())


@every_backend
@pytest.mark.parametrize("seed", range(4))
def test_ranges_of_any_size_in_any_order(tmp_path: Path, backend: Backend, seed: int) -> None:
    draw, size = random.Random(seed), 300_001
    cuts = sorted({0, size, *(draw.randrange(size) for _ in range(20))})
    ranges = list(pairwise(cuts))
    draw.shuffle(ranges)
    content = random_bytes(size, seed)
    with opened(tmp_path / "a") as file, queue_of(backend, depth=1 + 3 * seed) as queue:
        writes = [queue.submit("write", [Extent(file, content[a:b], a)]) for a, b in ranges]
        for request in writes:
            request.wait()
            assert request.done() and not request.failed
        assert (tmp_path / "a").read_bytes() == as_bytes(content)
        found = torch.zeros(size, dtype=torch.uint8)
        queue.submit("read", [Extent(file, found[a:b], a) for a, b in ranges]).wait()  # in one request
        assert torch.equal(found, content)


@every_backend
def test_nothing_is_a_request_too(tmp_path: Path, backend: Backend) -> None:
    with opened(tmp_path / "a") as file, queue_of(backend) as queue:
        queue.submit("write", []).wait()
        queue.submit("read", [Extent(file, aligned(1)[:0], 5)]).wait()
        nothing, one = aligned(1)[:0], random_bytes(1)
        extents = [Extent(file, nothing, 0), Extent(file, one, 2), Extent(file, nothing, 9)]
        queue.submit("write", extents).wait()
    assert (tmp_path / "a").read_bytes() == b"\0\0" + as_bytes(one)


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
@pytest.mark.parametrize("most", [1, 4096 + 512, 5000, 8191])
@pytest.mark.parametrize("direct", [False, True])
def test_short_calls_go_on(tmp_path: Path, backend: Backend, most: int, direct: bool) -> None:
    if direct and most % 512:
        pytest.skip("such a call is refused with O_DIRECT")
    queue, size = queue_of(backend, block_bytes=16384), 5 * 16384 if direct else (4001 if most == 1 else 70_001)
    assert isinstance(queue, NativeQueue)
    content, found = aligned(size).copy_(random_bytes(size)), aligned(size)
    (tmp_path / "a").write_bytes(bytes(size))
    flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
    with opened(tmp_path / "a", flags, alignment=4096 if direct else 1) as file, queue:
        queue.shorten(most)
        before = queue.calls()
        queue.submit("write", [Extent(file, content, 0)]).wait()
        queue.submit("read", [Extent(file, found, 0)]).wait()
        assert queue.calls() - before >= 2 * size // most
    assert torch.equal(found, content) and (tmp_path / "a").read_bytes() == as_bytes(content)


def test_short_calls_go_on_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, memory, at: preadv(fd, [memory[0][:1000]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, memory, at: pwritev(fd, [memory[0][:999]], at))
    content, found = random_bytes(50_001), aligned(50_001)
    with opened(tmp_path / "a") as file, queue_of("python") as queue:
        queue.submit("write", [Extent(file, content, 0)]).wait()
        queue.submit("read", [Extent(file, found, 0)]).wait()
    assert torch.equal(found, content)


@every_backend
def test_short_reads_of_the_kernels_own(backend: Backend) -> None:
    # A file that the kernel makes up comes page by page, however much is asked for.
    path = Path("/proc/kallsyms")
    content = path.read_bytes() if path.exists() else b""
    if len(content) < 100_000:
        pytest.skip("no long file in /proc")
    found = aligned(len(content))
    with opened(path, os.O_RDONLY) as file, queue_of(backend, depth=1, block_bytes=1 << 20) as queue:
        queue.submit("read", [Extent(file, found, 0)]).wait()
        assert queue.calls() > len(content) >> 20
    assert as_bytes(found) == content


# ---------------------------------------------------------------------------------------------------------- errors


@every_backend
def test_a_full_device(backend: Backend) -> None:
    with opened(Path("/dev/full"), os.O_RDWR) as file, queue_of(backend) as queue:
        request = queue.submit("write", [Extent(file, random_bytes(20_000), 40_960)])
        with pytest.raises(OSError, match=r"write of \d+ bytes at byte offset \d+: No space left") as caught:
            request.wait()
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"
        with pytest.raises(OSError, match="No space left"):
            request.wait()  # as often as one asks
        assert request.done() and request.failed


@every_backend
@pytest.mark.parametrize("kind", ["read", "write"])
def test_an_error_of_the_drive(tmp_path: Path, backend: Backend, kind: Kind) -> None:
    # /proc/self/mem stands for a drive with a bad place: where a mapped file has been cut off, the kernel says EIO.
    page = mmap.PAGESIZE
    with opened(tmp_path / "mapped") as mapped:
        os.truncate(mapped.fd, 2 * page)
        area = mmap.mmap(mapped.fd, 2 * page)
        os.truncate(mapped.fd, page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    with opened(Path("/proc/self/mem"), os.O_RDWR) as file, queue_of(backend, depth=1) as queue:
        request = queue.submit(kind, [Extent(file, random_bytes(2 * page), start)])
        bad = start + page  # the first call comes back short, the second one fails
        with pytest.raises(OSError, match=f"{kind} of {page} bytes at byte offset {bad}: Input/output error"):
            request.wait()
        queue.submit("read", [Extent(file, aligned(page), start)]).wait()  # the queue is as good as before


@every_backend
@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_ends_too_early(tmp_path: Path, backend: Backend, direct: bool) -> None:
    (tmp_path / "a").write_bytes(bytes(10_000))
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    with opened(tmp_path / "a", flags, 512 if direct else 1) as file, queue_of(backend) as queue:
        request = queue.submit("read", [Extent(file, aligned(20_480), 0)])
        with pytest.raises(OSError, match="the file ends before that") as caught:
            request.wait()
        assert caught.value.filename == str(tmp_path / "a")


@every_backend
def test_after_an_error_the_rest_is_not_begun(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "a").touch()
    with opened(tmp_path / "a", os.O_RDONLY) as file, queue_of(backend, depth=1) as queue:
        before = queue.calls()
        with pytest.raises(OSError, match="Bad file descriptor"):
            queue.submit("write", [Extent(file, random_bytes(1 << 20), 0)]).wait()
        assert queue.calls() - before == 1


@every_backend
def test_draining_tells_of_errors_nobody_asked_for(tmp_path: Path, backend: Backend) -> None:
    with nothing_left():
        with opened(Path("/dev/full"), os.O_RDWR) as full, opened(tmp_path / "a") as good:
            queue = queue_of(backend)
            queue.submit("write", [Extent(full, random_bytes(10), 0)])
            for number in range(100):
                queue.submit("write", [Extent(good, random_bytes(10), 10 * number)])
            with pytest.raises(OSError, match="No space left"):
                queue.close()
            queue.close()
    assert (tmp_path / "a").stat().st_size == 1000


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="depth must be 1 to 1024 blocks, got 0"):
        open_queue("python", depth=0)
    with pytest.raises(ValueError, match="block_bytes must be a multiple of 4096 up to 1 GiB, got 5000"):
        open_queue("python", block_bytes=5000)
    with pytest.raises(ValueError, match="stall_seconds must be positive"):
        open_queue("python", stall_seconds=0)
    for backend in BACKENDS:  # longer than any of them can wait
        with pytest.raises(ValueError, match="stall_seconds must be positive and finite, got inf"):
            open_queue(backend, stall_seconds=math.inf)
    with opened(tmp_path / "a") as file, open_queue("python") as queue:
        with pytest.raises(ValueError, match=r"flat contiguous bytes in host memory, got \(3,\) of torch.float32"):
            queue.submit("write", [Extent(file, torch.zeros(3), 0)])
        with pytest.raises(ValueError, match="byte offset -1 is negative"):
            queue.submit("write", [Extent(file, aligned(1), -1)])


# ------------------------------------------------------------------------------------------------ ends and silence


@every_backend
def test_closed_queues_leave_nothing(tmp_path: Path, backend: Backend) -> None:
    need(backend)
    with opened(tmp_path / "a") as file, nothing_left():
        queue = queue_of(backend, depth=3)
        queue.submit("write", [Extent(file, random_bytes(100_000), 0)])  # closing waits for it
        queue.close()
        assert (tmp_path / "a").read_bytes() == as_bytes(random_bytes(100_000))
        with pytest.raises(ValueError, match="the file queue is closed"):
            queue.submit("read", [])
        dropped = queue_of(backend)
        dropped.submit("write", [Extent(file, random_bytes(1000), 0)]).wait()
        del dropped
        cancelled = queue_of(backend, depth=1, block_bytes=4096)
        content = random_bytes(1 << 20)
        requests = [cancelled.submit("write", [Extent(file, content, 0)]) for _ in range(100)]
        cancelled.close(cancel=True)
        with pytest.raises(OSError, match="the queue was closed before"):
            requests[-1].wait()


@every_backend
def test_threads_may_share_a_queue(tmp_path: Path, backend: Backend) -> None:
    content, errors = random_bytes(400_000), []

    def work(part: int) -> None:
        try:
            for begin in range(part * 100_000, (part + 1) * 100_000, 9_999):
                end = min(begin + 9_999, (part + 1) * 100_000)
                queue.submit("write", [Extent(file, content[begin:end], begin)]).wait()
        except BaseException as error:
            errors.append(error)

    with opened(tmp_path / "a") as file, queue_of(backend) as queue:
        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors and (tmp_path / "a").read_bytes() == as_bytes(content)


def test_a_silent_drive_is_an_error() -> None:
    reader, writer = os.pipe()  # io_uring reads from a pipe, too: nothing comes until somebody writes
    queue = queue_of("io_uring", stall_seconds=0.3)
    memory = aligned(3)
    request = queue.submit("read", [Extent(OpenFile(reader, "a pipe"), memory, 0)])
    with pytest.raises(TimeoutError, match=r"read of 3 bytes .* the drive has answered nothing for 0\.3 s"):
        request.wait()
    os.write(writer, b"abc")
    request.wait()
    assert as_bytes(memory) == b"abc"
    queue.close()
    os.close(reader)
    os.close(writer)


def test_closing_does_not_wait_for_a_silent_drive() -> None:
    with nothing_left():
        reader, writer = os.pipe()
        queue = queue_of("io_uring", stall_seconds=0.2)
        queue.submit("read", [Extent(OpenFile(reader, "a pipe"), aligned(3), 0)])
        with pytest.raises(TimeoutError):
            queue.close()
        os.write(writer, b"abc")  # what was kept for the drive now goes
        os.close(writer)
        os.close(reader)


@every_backend
def test_a_forked_child_is_told(tmp_path: Path, backend: Backend) -> None:
    with opened(tmp_path / "a") as file, queue_of(backend) as queue:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                queue.submit("write", [Extent(file, random_bytes(1), 0)])
            except RuntimeError as error:
                code = 0 if "forked from it" in str(error) else 2
            queue.close()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        queue.submit("write", [Extent(file, random_bytes(9), 0)]).wait()


# -------------------------------------------------------------------------------------------------------- refusals

REPORT = """
import sys
from zero_strategy.offload.file_queues import open_queue
queue = open_queue()
print(queue.backend, "|", queue.reason)
queue.close()
"""
FILTER = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
# A program of the kernel's packet filter: load the number of the system call; of io_uring_setup return {errno}.
lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | {errno}), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != IO_VARIABLE}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("code", ["EPERM", "ENOSYS"])
def test_where_io_uring_is_forbidden_threads_do_it(code: str) -> None:
    need("threads")
    number = getattr(errno, code)
    done = run(FILTER.format(errno=number) + REPORT + "open_queue('io_uring')")
    assert done.stdout == f"threads | io_uring is refused: {os.strerror(number)}\n", done.stderr
    assert done.returncode == 1 and f"io_uring is refused: {os.strerror(number)}" in done.stderr


@every_backend
def test_the_switch(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    need(backend)
    monkeypatch.setenv(IO_VARIABLE, backend)
    with open_queue() as queue, open_queue("python") as other:
        assert (queue.backend, queue.reason) == (backend, "")
        assert other.backend == "python"  # an argument goes before the environment


def test_a_switch_to_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IO_VARIABLE, "libaio")
    known = "io_uring, threads, python"
    with pytest.raises(ValueError, match=f"ZERO_STRATEGY_IO='libaio' is no kind of file I/O; there are {known}"):
        open_queue()


def test_without_a_compiler_python_does_it(tmp_path: Path) -> None:
    done = run(REPORT, ZERO_STRATEGY_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert done.stdout.startswith("python | no C++ compiler")
    assert done.stderr.count("\n") == 1 and "threads of Python run instead" in done.stderr


def test_memory_is_registered_where_that_is_allowed(tmp_path: Path) -> None:
    memory = aligned(1 << 20).copy_(random_bytes(1 << 20))
    with opened(tmp_path / "a", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 512) as file, queue_of("io_uring") as queue:
        queue.register(memory)  # whether it may is the machine's; that it works is ours
        queue.submit("write", [Extent(file, memory, 0)]).wait()
        found = aligned(1 << 20)
        queue.submit("read", [Extent(file, found, 0)]).wait()
        assert torch.equal(found, memory)
        memory.zero_()
        queue.submit("read", [Extent(file, memory, 0)]).wait()
        assert torch.equal(found, memory)


def test_memory_that_may_not_be_registered_is_used_all_the_same(tmp_path: Path) -> None:
    need("io_uring")
    if os.getuid() != 0:
        pytest.skip("only root can give its rights up")
    content = random_bytes(1 << 20)
    with opened(tmp_path / "a") as file:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
                os.setresuid(65534, 65534, 65534)
                with open_queue("io_uring") as queue:
                    code = 2 if queue.register(content) else 0
                    queue.submit("write", [Extent(file, content, 0)]).wait()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "a").read_bytes() == as_bytes(content)
