"""The one way to read files that others wrote: regular files alone, of a bounded size, with errors that name them.

A pipe without a writer, or a device, would keep a reader waiting for ever, on every rank; a directory, or bytes that
are no text, would end in an error that does not say which file; a file of holes may be larger than the memory.
`tests/runtime/test_one_reader.py` holds all modules that read such files to these functions.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from zero_strategy.runtime.shown import shown

MOST_TEXT_BYTES = 64 << 20
"""Of a file of text, such as a config or the name of the latest checkpoint."""

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


def open_below(directory: str | os.PathLike[str], path: str) -> int:
    """A descriptor of a regular file below a directory, which no link leads out of; the caller closes it.

    Args:
        directory: The directory, which may itself be a link.
        path: The file's path below it, with "/" between names.

    Raises:
        ValueError: If a name is "..", or a link or something else than a regular file is there; names it.
        OSError: As `open_regular`.
    """
    *parents, name = path.split("/")
    whole = f"{shown(directory)}/{shown(path)}"
    if not all(each not in ("", ".", "..") for each in (*parents, name)):
        raise ValueError(f"{whole}: is no path below its folder")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    folder = os.open(directory, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        for parent in parents:
            inner = os.open(parent, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        fd = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # the second is what some BSDs say
            raise ValueError(f"{whole}: is a link, and links are not followed here") from None
        raise OSError(error.errno, error.strerror, whole) from None
    finally:
        os.close(folder)
    try:
        _check(os.fstat(fd).st_mode, whole)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        path: The file.
        most: How many bytes it may have; None: as many as there is memory for.

    Raises:
        ValueError, OSError: As `open_regular`; ValueError also if it has more, before any is read.
    """
    return read_open(open_regular(path), path, most)


def read_open(fd: int, path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a file that `open_regular` or `open_below` opened, which is closed; see `read_regular`."""
    with open(fd, "rb", closefd=True) as file:
        size = os.fstat(fd).st_size
        bound = _memory_bytes() if most is None else most
        if size > bound:
            raise ValueError(f"{shown(path)}: has {size} bytes, and at most {bound} are read")
        try:
            content = file.read(size + 1)
        except MemoryError:
            raise ValueError(f"{shown(path)}: has {size} bytes, for which there is no memory") from None
    if len(content) > size:
        raise ValueError(f"{shown(path)}: grows while it is read, beyond its {size} bytes")
    return content


def read_text(path: str | os.PathLike[str], most: int = MOST_TEXT_BYTES) -> str:
    """The content of a regular file in UTF-8.

    Raises:
        ValueError, OSError: As `read_regular`; ValueError also if it is no UTF-8, naming the file.
    """
    try:
        return read_regular(path, most).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown(path)}: is no text in UTF-8 ({error})") from None


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
        raise ValueError(f"{shown(path)}: is {kind}, not a regular file")


def _memory_bytes() -> int:
    """All memory of this machine: a larger file cannot be read at once."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
