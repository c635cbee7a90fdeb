"""The container of a `torch.save` file: where its pickle and the bytes of its tensors lie. Nothing is unpickled here.

Source of the format: `torch.save` writes a zip file with stored (not compressed) entries in one folder: `data.pkl`,
`byteorder`, `version`, and `data/<key>` per storage.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
import zlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, Any

import torch

from zero_strategy.runtime.regular_files import open_regular, path_of

_CHUNK = 8 << 20
_LOCAL_HEADER = struct.Struct("<26xHH")


@dataclass(frozen=True)
class _Span:
    offset: int
    size: int
    crc: int


class TorchArchive:
    """A zip file of `torch.save`, its storages mapped into memory.

    Args:
        file: Path, or bytes in memory.
        name: The file's name in errors.
        mmap: Map the file (pages are read when tensors are used); otherwise each storage is read and its CRC compared.

    Raises:
        ValueError: naming the file, if it is truncated, damaged or not such an archive.
    """

    def __init__(self, file: str | os.PathLike[str] | IO[bytes], name: str, *, mmap: bool = True) -> None:
        self._name = name
        self._file = file
        self._mapped: Any = None
        with _opened(file) as opened:
            size = opened.seek(0, io.SEEK_END)
            try:
                with zipfile.ZipFile(opened) as archive:
                    self._read_directory(archive, opened, size)
            except (
                zipfile.BadZipFile,
                struct.error,
                EOFError,
                LookupError,
                RuntimeError,
                OSError,
                ValueError,
            ) as error:
                if str(error).startswith(name):
                    raise
                raise ValueError(f"{name}: is truncated or damaged ({error}); take another copy of it") from None
            if mmap and isinstance(file, (str, os.PathLike)):
                self._mapped = torch.UntypedStorage.from_file(path_of(opened.fileno(), file), False, size)

    def _read_directory(self, archive: zipfile.ZipFile, opened: IO[bytes], size: int) -> None:
        entries = archive.infolist()
        root = next((e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("/data.pkl")), None)
        names = [entry.filename for entry in entries]
        for entry in entries:
            # Not only strange: a compressed entry can be a thousand times as long as the file.
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size > size:
                raise ValueError(f"{self._name}: entry {entry.filename} is compressed or encrypted: not of torch.save")
        if root is None or f"{root}constants.pkl" in names or len(set(names)) != len(names):
            raise ValueError(f"{self._name}: is a zip file, but not one that torch.save wrote")
        if f"{root}byteorder" in names and (order := archive.read(f"{root}byteorder").decode()) != sys.byteorder:
            raise ValueError(f"{self._name}: has {order}-endian data; convert it on such a machine")
        self.pickle = archive.read(f"{root}data.pkl")
        self._spans: dict[str, _Span] = {}
        for entry in entries:
            if entry.filename.startswith(f"{root}data/"):
                self._spans[entry.filename[len(root) + 5 :]] = self._span(entry, opened, size)

    def _span(self, entry: zipfile.ZipInfo, opened: IO[bytes], size: int) -> _Span:
        opened.seek(entry.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(opened.read(_LOCAL_HEADER.size))
        offset = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if offset + entry.file_size > size:
            raise ValueError(f"{self._name}: is truncated inside of entry {entry.filename}")
        return _Span(offset, entry.file_size, entry.CRC)

    def verify(self) -> None:
        """Compares the CRCs of all storages; reads the file once, in pieces.

        Raises:
            ValueError: naming the file and the entry that is damaged.
        """
        with _opened(self._file) as opened:
            for key, span in self._spans.items():
                opened.seek(span.offset)
                crc, left = 0, span.size
                while left and (data := opened.read(min(left, _CHUNK))):
                    crc, left = zlib.crc32(data, crc), left - len(data)
                self._check(key, crc, complete=not left)

    def _check(self, key: str, crc: int, *, complete: bool) -> None:
        expected = self._spans[key].crc
        # torch can be told to compute no CRCs; it then writes zeros.
        if not complete or (expected and crc != expected):
            raise ValueError(f"{self._name}: entry data/{key} is damaged: its CRC is not the archive's")

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """The bytes of one storage.

        Args:
            key: Its name in the archive.
            nbytes: What the pickle says that it has.

        Raises:
            ValueError: naming the file and the entry, if there is none or it has another size.
        """
        span = self._spans.get(key)
        if span is None or span.size != nbytes:
            there = "is missing" if span is None else f"has {span.size} bytes"
            raise ValueError(f"{self._name}: entry data/{key} {there}, the pickle says {nbytes} bytes")
        if nbytes == 0:
            return torch.UntypedStorage(0)
        if self._mapped is not None:
            part: torch.UntypedStorage = self._mapped[span.offset : span.offset + nbytes]
            return part
        with _opened(self._file) as opened:
            opened.seek(span.offset)
            data = bytearray(opened.read(nbytes))
        self._check(key, zlib.crc32(data), complete=len(data) == nbytes)
        return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _opened(file: str | os.PathLike[str] | IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    """The file, opened; a caller's open file stays open."""
    return open(open_regular(file), "rb") if isinstance(file, (str, os.PathLike)) else nullcontext(file)
