"""Whose a state file is, by its name; and the removal of those whose process is gone.

    zero-strategy.<host>.<boot>.<pid>.<start>.<label>.rank<r>.<random>.state

Most files have lost their names before anything is in them (`part_file.py`), so there is little to find: what a process
left that was killed in that moment, and what lies on file systems where an open file must keep its name. A file is
stale if its process is gone: in this boot and PID namespace no process has the number, or one that was started at
another time. Nobody may hold the lock, besides, that a living owner has on its file. Process numbers of another boot or
namespace (a container that shares a directory and a host's name) say nothing: there the lock alone decides, and where
the file system has no locks the file stays. Files of other hosts are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"zero-strategy\.([^.]+)\.([^.]+)\.(\d+)\.(\d+)\.[^.]*\.rank\d+\.[^.]+\.state")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN = "unknown"
_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Owner:
    """A process among all of all hosts and times.

    Attributes:
        host: Name of the host.
        boot: Which run of the host's kernel, and which PID namespace in it, or "unknown".
        pid: Number of the process.
        start: When it was started, in ticks since the boot; 0 if unknown.
    """

    host: str
    boot: str
    pid: int
    start: int

    def gone(self) -> bool:
        """Whether the process has ended for certain; False for those of other hosts, boots and PID namespaces."""
        here = this_process()
        if self.host != here.host or self.boot != here.boot or here.boot == _UNKNOWN:
            return False
        started = _started(self.pid)
        return started is None or (started != self.start and 0 not in (started, self.start))

    def unseen(self) -> bool:
        """Whether it ran on a host of this name, but in another boot or PID namespace, or in one that is not known."""
        here = this_process()
        return self.host == here.host and (self.boot != here.boot or here.boot == _UNKNOWN)


def this_process() -> Owner:
    """The one that asks."""
    boot = ""
    try:
        if os.readlink("/proc/self") == str(os.getpid()):  # else /proc shows the processes of another namespace
            namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
            boot = f"{_BOOT_ID.read_text().strip().replace('-', '')[:16]}-{namespace}"
    except OSError:
        pass
    return Owner(_plain(socket.gethostname()) or _UNKNOWN, boot or _UNKNOWN, os.getpid(), _started(os.getpid()) or 0)


def new_name(label: str, rank: int) -> str:
    """A name for a file of this process that no other file has."""
    me = this_process()
    where = f"{me.host}.{me.boot}.{me.pid}.{me.start}"
    return f"zero-strategy.{where}.{_plain(label)}.rank{rank}.{secrets.token_hex(4)}.state"


def owner_of(name: str) -> Owner | None:
    """Who made the file of this name; None if it is none of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else Owner(found[1], found[2], int(found[3]), int(found[4]))


def lock(fd: int) -> None:
    """Says that the file is in use, as long as it is open; nothing on file systems without locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_stale(directory: Path) -> list[Path]:
    """Removes the state files in a directory whose processes are gone; returns them."""
    removed = []
    for path in sorted(directory.glob("zero-strategy.*.state")):
        owner = owner_of(path.name)
        if owner is None or not (owner.gone() or owner.unseen()):
            continue
        locked = _locked(path)
        if locked or (locked is None and not owner.gone()):
            continue
        with contextlib.suppress(OSError):  # another process has removed it, or it is another user's
            path.unlink()
            removed.append(path)
    return removed


def _locked(path: Path) -> bool | None:
    """Whether somebody holds the lock, and not for a moment only: a ring of a killed process ends a little after it.

    None if that cannot be asked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks for writing only what is open for it
    except OSError:
        return None
    end = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    return None
            if time.monotonic() > end:
                return True
            time.sleep(0.01)
    finally:
        os.close(fd)


def _started(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None if there is none, 0 if that cannot be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] in "ZX" else int(fields[19])  # one that has ended and only waits for its parent
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else 0
    except ProcessLookupError:
        return None
    except (OSError, IndexError, ValueError):
        return 0


def _plain(text: str) -> str:
    return re.sub("[^A-Za-z0-9_-]", "-", text)[:48]
