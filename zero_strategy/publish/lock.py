"""The lock of a published folder: one training at a time publishes there.

Two would remove each other's versions, and readers would go from one's weights to the other's. The lock is the kernel's
(flock), held on an open file: it goes with the process, however that ends. Where a file system has no locks, a version
of another session that appears in the folder is what gives two trainings away; see `Publisher`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

from zero_strategy.checkpoint.disk import naming
from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_text
from zero_strategy.runtime.shown import brief, shown

LOCK_NAME = ".publisher"
_WAIT_SECONDS = 8.0
"""For a killed training's data loaders, which hold its open files and end some seconds after it."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    """Held from the beginning until `release_later` is called, or until nothing refers to this object.

    Args:
        folder: The folder, which is made if need be.

    Raises:
        OSError: If the file of the lock cannot be made.
        ValueError: If another training holds it; says which.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOCK_NAME
        # No link is followed, behind which a file would be overwritten, and no pipe is waited at.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o644)
        try:
            # Before the name is written: only its holder says whose it is.
            _take(fd, path)
            owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            with naming(path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, owner.encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        # The descriptor is the lock: it goes with this object, or with the process.
        self._end = weakref.finalize(self, _release, fd, os.getpid())

    @property
    def release_later(self) -> Callable[[], None]:
        """A function that lets others publish, once; it does not refer to this object."""
        return cast(Callable[[], None], self._end)


def _release(fd: int, pid: int) -> None:
    # By name: children that were forked since hold the same open file, and with it the lock, when it is closed here.
    # Where such a child comes here the lock is its parent's, and stays.
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _take(fd: int, path: Path) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            # Not every file system can: better without than not at all.
            if error.errno in _NO_LOCKS:
                return
            if error.errno != errno.EWOULDBLOCK:
                raise
        owner, lives = _owner(path)
        # A living training does not let go; of a dead one its children may, soon.
        if lives or time.monotonic() > end:
            raise ValueError(
                f"{shown(path.parent)}: another training publishes there ({owner}): end it, call its "
                "publisher.close() if it is one of this process, or publish in another folder"
            )
        time.sleep(0.05)


def _owner(path: Path) -> tuple[str, bool]:
    """The holder of the lock in words, and whether it is a process of this host that lives."""
    found = None
    with contextlib.suppress(ValueError, OSError):
        found = bounded_json.parse(read_text(path, 4096), str(path))
    if not isinstance(found, dict) or type(found.get("pid")) is not int:
        return "it has not said which", False
    pid, host = found["pid"], found.get("host")
    # Another host's processes cannot be seen here.
    lives = host == socket.gethostname() and 0 < pid < 1 << 31 and Path(f"/proc/{pid}").exists()
    return f"process {pid} on {brief(host)}", lives
