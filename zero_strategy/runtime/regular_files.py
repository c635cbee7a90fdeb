"""Regular files alone: opening and reading them; pipes, devices and directories are refused by name.

A pipe without a writer, or a device, would keep a reader waiting for ever, on every rank; a directory, or bytes that
are no text, would end in an error that does not say which file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, open for reading; the caller closes it.

    Raises:
        ValueError: If something else is there, naming it and saying what.
        OSError: If nothing is there, or it cannot be opened.
    """
    # Not blocking: so a pipe is opened at once, whoever puts it there and when. It has no effect on files.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _check(os.fstat(fd).st_mode, path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file.

    Raises:
        ValueError, OSError: As `open_regular`.
    """
    with open(open_regular(path), "rb", closefd=True) as file:
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The content of a regular file in UTF-8.

    Raises:
        ValueError, OSError: As `open_regular`; ValueError also if it is no UTF-8, naming the file.
    """
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: is no text in UTF-8 ({error})") from None


def size_of(path: str | os.PathLike[str]) -> int | None:
    """Bytes of a regular file; None if nothing is there.

    Raises:
        ValueError, OSError: As `open_regular`.
    """
    try:
        status = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    _check(status.st_mode, path)
    return status.st_size


def is_there(path: str | os.PathLike[str]) -> bool:
    """True if a regular file is there.

    Raises:
        ValueError, OSError: As `open_regular`, but not where nothing is.
    """
    return size_of(path) is not None


def odd_entry(directory: Path) -> str:
    """Something in a directory that is neither a file nor a directory, in words for an error's end; else nothing."""
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            if not path.is_dir():
                size_of(path)
        except ValueError as error:
            return f" ({error})"
    return ""


def path_of(fd: int, path: str | os.PathLike[str]) -> str:
    """A path that leads to an open file, whatever has its name by now; the name itself where the system has none."""
    own = f"/proc/self/fd/{fd}"
    return own if os.path.exists(own) else os.fspath(path)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "of an unknown kind")
        raise ValueError(f"{os.fspath(path)}: is {kind}, not a regular file")
