"""Durable changes of names in a directory: after each call the change survives a loss of power.

Names beside a target `T` while it is being saved under a token `k`:

    .T.k.tmp   being written; after an exchange, for a moment, what T was before
    .T.k.old   what T was before, where the file system cannot exchange two names
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TOKEN = r"[A-Za-z0-9_-]+"  # no dot, so that the names of targets "a" and "a.b" cannot be confused


def beside(target: Path, token: str, suffix: str) -> Path:
    """The sibling `.{target}.{token}.{suffix}` of a target.

    Raises:
        ValueError: if the token has other characters than letters, digits, "_" and "-".
    """
    if not re.fullmatch(_TOKEN, token):
        raise ValueError(f"token {token!r} may have only letters, digits, '_' and '-'")
    return target.parent / f".{target.name}.{token}.{suffix}"


def all_beside(target: Path, suffix: str) -> list[Path]:
    """All such siblings, of any token, oldest first."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{_TOKEN}\.{re.escape(suffix)}")
    try:
        found = [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda path: path.lstat().st_mtime_ns)


def sync(path: Path) -> None:
    """Flushes a file or a directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file and flushes it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file's content: a reader sees the old one or the new one, never less."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, content)
    os.replace(temporary, path)
    sync(path.parent)


def remove(path: Path) -> None:
    """Removes a file, a link or a tree; nothing there is no error."""
    if path.is_symlink() or not path.is_dir():
        try:
            path.unlink(missing_ok=True)
            return
        except (IsADirectoryError, PermissionError):
            if not path.is_dir():
                raise
            # Another rank has made it meanwhile.
    shutil.rmtree(path, ignore_errors=True)


def replace_directory(source: Path, target: Path, aside: Path, *, keep_old: bool = False) -> Path | None:
    """Gives `source` the name `target`, then removes what had that name.

    Where the system can exchange two names, there is no moment without a `target`. Elsewhere the old one
    is at `aside` for that moment, and is put back if the second step fails.

    Args:
        source: a directory whose content is already flushed.
        target: its new name, on the same file system.
        aside: a free name beside the target.
        keep_old: leave the removal, which may take as long as writing did, to the caller.

    Returns:
        What is left to remove.
    """
    if not os.path.lexists(target):
        os.rename(source, target)
        sync(target.parent)
        return None
    old = source
    if not _exchange(source, target):
        old = aside
        os.rename(target, aside)
        try:
            os.rename(source, target)
        except OSError:
            os.rename(aside, target)
            raise
    sync(target.parent)
    if keep_old:
        return old
    remove(old)
    return None


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges two names in one step; False where that cannot be done."""
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second))
    if renameat2(*arguments, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))
