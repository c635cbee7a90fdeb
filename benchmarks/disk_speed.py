"""Speed at which a disk takes a long sequential write: by `fio`, or else by threads that write past the page cache."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pattern:
    """Of writes: bytes of each, and how many are under way at once."""

    block: int
    depth: int


PATTERNS = [Pattern(block << 20, depth) for block in (1, 4, 16) for depth in (1, 4, 16)]


def tool() -> str:
    """Program that measures."""
    return "fio" if shutil.which("fio") else "threads with O_DIRECT (fio is not installed)"


def write_speed(folder: Path, nbytes: int, pattern: Pattern) -> float:
    """Bytes per second of one sequential write of a new file, flushed at the end."""
    return _by_fio(folder, nbytes, pattern) if shutil.which("fio") else _by_threads(folder, nbytes, pattern)


def best_pattern(folder: Path, nbytes: int) -> Pattern:
    """The pattern with the fastest of two writes each."""
    return max(PATTERNS, key=lambda pattern: max(write_speed(folder, nbytes, pattern) for _ in range(2)))


def _by_fio(folder: Path, nbytes: int, pattern: Pattern) -> float:
    options = {
        "name": "speed",
        "directory": str(folder),
        "rw": "write",
        "direct": 1,
        "ioengine": "libaio",
        "bs": pattern.block,
        "iodepth": pattern.depth,
        "size": max(nbytes // pattern.block, 1) * pattern.block,
        "end_fsync": 1,
        "unlink": 1,
        "output-format": "json",
    }
    command = ["fio", *(f"--{key}={value}" for key, value in options.items())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    return float(result["io_bytes"] / max(result["runtime"], 1) * 1e3)


def _by_threads(folder: Path, nbytes: int, pattern: Pattern) -> float:
    path = folder / "speed"
    blocks = max(nbytes // pattern.block, 1)
    page = mmap.mmap(-1, pattern.block)  # O_DIRECT wants memory on page boundaries
    page.write(os.urandom(pattern.block))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0), 0o600)

    def write(first: int) -> None:
        for number in range(first, blocks, pattern.depth):
            os.pwrite(fd, page, number * pattern.block)

    try:
        start = time.perf_counter()
        os.posix_fallocate(fd, 0, blocks * pattern.block)
        threads = [threading.Thread(target=write, args=(first,)) for first in range(pattern.depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(fd)
        return blocks * pattern.block / (time.perf_counter() - start)
    finally:
        os.close(fd)
        path.unlink()
