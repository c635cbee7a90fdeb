"""Where built libraries lie: one file per source text, flags, ABI and compiler, put there whole or not at all.

    <cache>/<key of sources, flags, ABI, machine>/<key of compiler>.so
    <cache>/<key of sources, flags, ABI, machine>/lock
    <cache>/building-<pid>-<random>/       a build under way; renamed file by file, swept when its process is gone

Processes that want the same library at once wait for the one that builds it: a lock of the kernel's (flock), which ends
with its process, so that none is left behind. Where a file system has no such locks, both build and the last one's file
stays. A killed build leaves a directory that nobody looks into. A cache that cannot be written is replaced by a
temporary directory of this process.

A library is code, so nothing is loaded from, or built in, a cache that another user owns or may write.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CACHE_VARIABLE = "ZERO_STRATEGY_CACHE"
_STALE_SECONDS = 24 * 3600
_FOLDER_MODE = 0o755
"""Less the umask: others may read what is built, such as the users of an image, and never write."""


class UntrustedCacheError(PermissionError):
    """Another user owns, or may write, a library or a directory of the cache."""


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
    """The library that was built from these sources by this compiler, or by any one where there is none here.

    Raises:
        UntrustedCacheError: If another user owns or may write it, or a directory of the cache above it.
    """
    folder = cache_directory() / source
    check_owner(folder)
    paths = sorted(folder.glob("*.so") if compiler is None else folder.glob(f"{compiler}.so"))
    if not paths:
        return None
    check_owner(paths[0])
    return paths[0]


def check_owner(path: Path) -> None:
    """Check that a path of the cache, and the directories of the cache above it, are this process's user's alone.

    The superuser's are taken, too: who has its rights needs no library to run code here. So is a cache's own directory
    that all may write but where nobody may replace another's entries, as in /tmp. What does not exist is nobody's.

    Raises:
        UntrustedCacheError: With path, owner, mode and the way out.
    """
    cache = cache_directory()
    inside = [path, *path.parents]
    for place in reversed(inside[: inside.index(cache) + 1]):
        try:
            found = place.stat() if place == cache else place.lstat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # so that nothing can be loaded from there, either
        sticky = place == cache and found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()):
            why = "another user owns it"
        elif stat.S_ISLNK(found.st_mode):
            why = "it is a link, whose target may be anybody's"
        elif found.st_mode & 0o022 and not sticky:
            why = "others may write it"
        else:
            continue
        raise UntrustedCacheError(
            f"{place} of the cache of native libraries is not this user's (uid {os.geteuid()}) alone: {why} "
            f"(owner {_name_of(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):04o}); remove it and what it holds, "
            f"or set {CACHE_VARIABLE} to a directory that only you may write"
        )


def _name_of(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name}, uid {uid}"
    except KeyError:  # as in a container that knows no such user
        return f"uid {uid}"


def _make_folder(path: Path) -> None:
    """Make the cache's directory, or one in it, for this user to write.

    Raises:
        UntrustedCacheError: If it is there and not this user's alone.
        OSError: If it cannot be made.
    """
    cache = cache_directory()
    cache.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
    check_owner(path)


@contextmanager
def turn(source: str) -> Iterator[None]:
    """Inside, no other process of this machine builds the same sources, if the file system has locks.

    Raises:
        UntrustedCacheError: If the place is not this user's alone.
    """
    try:
        folder = cache_directory() / source
        _make_folder(folder)
        lock = (folder / "lock").open("w")
    except UntrustedCacheError:
        raise
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # as on some network file systems: two builds at once cost time only
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def building() -> Iterator[Path]:
    """A fresh directory beside the cache's entries, or elsewhere if the cache cannot be written; removed at the end.

    Raises:
        UntrustedCacheError: If the cache is not this user's alone.
    """
    cache = cache_directory()
    try:
        _make_folder(cache)
        path = Path(tempfile.mkdtemp(prefix=f"building-{os.getpid()}-", dir=cache))
        _sweep(cache)
    except UntrustedCacheError:
        raise
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

    Raises:
        UntrustedCacheError: If the place is not this user's alone.
    """
    target = cache_directory() / source / f"{compiler}.so"
    try:
        _make_folder(target.parent)
        built.chmod(built.stat().st_mode & ~0o022)  # as the linker left it, group-writable under some umasks
        os.replace(built, target)  # in one step; readers that have the old file open keep it
    except UntrustedCacheError:
        raise
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
