"""Entries of the zip files that torch.save writes: stored, not compressed, whole, and no larger than the file.

The standard module trusts an archive's directory; what is wrong with one ends here, in an error that names the file.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from collections.abc import Iterator
from typing import IO

from zero_strategy.runtime.shown import brief, shown

_DAMAGE = (
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    LookupError,
    RuntimeError,
    NotImplementedError,
    OverflowError,
    OSError,
    ValueError,
)


@contextlib.contextmanager
def opened_zip(file: IO[bytes], name: str) -> Iterator[zipfile.ZipFile]:
    """A zip file for the time of a `with`, whose entries are neither compressed nor encrypted.

    Args:
        file: The open file.
        name: Its name in errors.

    Raises:
        ValueError: If it is damaged, now or while entries are read, or no such archive; names it.
    """
    try:
        size = file.seek(0, io.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                # Not only strange: a compressed entry can be a thousand times as long as the file.
                stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
                if not stored or max(entry.compress_size, entry.file_size) > size:
                    raise ValueError(
                        f"{shown(name)}: entry {brief(entry.filename)} is compressed or encrypted: not of torch.save"
                    )
            yield archive
    except _DAMAGE as error:
        if str(error).startswith((name, shown(name))):
            raise
        raise ValueError(
            f"{shown(name)}: is truncated or damaged ({shown(error) or type(error).__name__}); take another copy of it"
        ) from None


def pickle_in(file: IO[bytes], name: str, most: int) -> bytes:
    """The pickle in a file of torch.save; of the older format the beginning, which holds it.

    Args:
        file: The open file.
        name: Its name in errors.
        most: Bytes that are read of the older format.

    Raises:
        ValueError: If it is a zip file, and damaged; names it.
    """
    file.seek(0)
    head = file.read(most)
    if not head.startswith(b"PK"):
        return head
    with opened_zip(file, name) as archive:
        entry = next((each for each in archive.namelist() if each.endswith("/data.pkl")), None)
        return archive.read(entry) if entry else b""
