"""Where built libraries lie: one file per source text, flags, ABI and compiler, put there whole or not at all.

    <cache>/<key of sources, flags, ABI, machine>/<key of compiler>.so
    <cache>/<key of sources, flags, ABI, machine>/lock
    <cache>/building-<pid>-<random>/       a build under way; renamed file by file, swept when its process is gone

Processes that want the same library at once wait for the one that builds it: a lock of the kernel's (flock), which ends
with its process, so that none is left behind. Where a file system has no such locks, both build and the last one's file
stays. A killed build leaves a directory that nobody looks into. A cache that cannot be written is replaced by a
temporary directory of this process.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_VARIABLE = "ZERO_STRATEGY_CACHE"
_STALE_SECONDS = 24 * 3600


def cache_directory() -> Path:
    """`$ZERO_STRATEGY_CACHE`, else `$XDG_CACHE_HOME/zero_strategy`, else `~/.cache/zero_strategy`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zero_strategy"


def source_key(sources: Iterable[Path], flags: Iterable[str], abi: str) -> str:
    """A key of everything but the compiler that decides what a library does."""
    digest = hashlib.sha256()
    for part in (*flags, abi, platform.machine(), platform.system()):
        digest.update(part.encode() + b"\0")
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def compiler_key(identity: str) -> str:
    """A key of a compiler's name, version and further arguments."""
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def find(source: str, compiler: str | None) -> Path | None:
    """The library that was built from these sources by this compiler, or by any one where there is none here."""
    folder = cache_directory() / source
    if compiler is not None:
        path = folder / f"{compiler}.so"
        return path if path.is_file() else None
    return next(iter(sorted(folder.glob("*.so"))), None)


@contextmanager
def turn(source: str) -> Iterator[None]:
    """Inside, no other process of this machine builds the same sources, if the file system has locks."""
    try:
        folder = cache_directory() / source
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # as on some network file systems: two builds at once cost time only
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def building() -> Iterator[Path]:
    """A fresh directory beside the cache's entries, or elsewhere if the cache cannot be written; removed at the end."""
    cache = cache_directory()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=f"building-{os.getpid()}-", dir=cache))
        _sweep(cache)
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="zero_strategy-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def keep(built: Path, source: str, compiler: str) -> Path | None:
    """Move a built library into the cache.

    Returns:
        Its place there, which may hold an equal one of another process; None if the cache cannot be written.
    """
    target = cache_directory() / source / f"{compiler}.so"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(built, target)  # in one step; readers that have the old file open keep it
    except OSError:
        return None
    return target


def _sweep(cache: Path) -> None:
    """Remove what killed builds left."""
    for path in cache.glob("building-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another process removed it
            continue
