"""The restricted unpickler of `torch.save` files: an allow-list, no code of the file's choice.

Source of the format: `torch.save` writes a zip file with stored (not compressed) entries in one folder: `data.pkl`,
`byteorder`, `version`, and `data/<key>` per storage.

No module is imported, and no code that the file names runs.

    file --> container (zip, or torch's older format) --> survey of the opcodes --> pickle machine --> plain data
             sizes are checked against the file           globals, memo numbers     makers and records only

`torch.load(weights_only=True)` has the same aim and serves plain state dicts. It does not fit here: names can be added
to it only for the whole process, where other threads and libraries see them; it takes a storage's size from the
pickle without comparing it with the file, so that a mapped tensor may show its neighbours' bytes; and its errors
advise to switch the protection off.

What comes back is made of dict, list, tuple, set, str, numbers, bytes, `torch.Tensor` (detached, views of the mapped
file), `torch.Size`, dtypes, devices and `Record`. Classes derived from dict come back as dict; numpy numbers as
Python's, numpy arrays as tensors, paths as strings.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO, Any

import torch

from zero_strategy.convert.pickle_globals import (
    ATTRIBUTES,
    NumpyArray,
    NumpyDtype,
    Record,
    Storage,
    StorageType,
    known_globals,
    with_own,
)
from zero_strategy.convert.pickle_sizes import PickleSizes
from zero_strategy.convert.zip_entries import opened_zip
from zero_strategy.runtime.regular_files import open_regular, path_of, read_regular
from zero_strategy.runtime.shown import brief, shown

_CHUNK = 8 << 20
_MOST_LEVELS = 200
"""Of containers in each other, in what a pickle builds."""
_MOST_OBJECTS = 2_000_000
"""In it, each counted as often as it is reached, beside twenty for each container."""
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
            with opened_zip(opened, name) as archive:
                self._read_directory(archive, opened, size)
            if mmap and isinstance(file, (str, os.PathLike)):
                self._mapped = torch.UntypedStorage.from_file(path_of(opened.fileno(), file), False, size)

    def _read_directory(self, archive: zipfile.ZipFile, opened: IO[bytes], size: int) -> None:
        entries = archive.infolist()
        root = next((e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("/data.pkl")), None)
        names = [entry.filename for entry in entries]
        if root is None or f"{root}constants.pkl" in names or len(set(names)) != len(names):
            raise ValueError(f"{self._name}: is a zip file, but not one that torch.save wrote")
        if f"{root}byteorder" in names and (order := archive.read(f"{root}byteorder").decode()) != sys.byteorder:
            raise ValueError(f"{self._name}: has {shown(order)}-endian data; convert it on such a machine")
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
            raise ValueError(f"{self._name}: is truncated inside of entry {brief(entry.filename)}")
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


__all__ = ["ATTRIBUTES", "DEEPSPEED_GLOBALS", "Record", "load_restricted", "load_restricted_pickle"]

Loadable = str | os.PathLike[str] | IO[bytes]

_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamType",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus",
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum",
)
DEEPSPEED_GLOBALS: Mapping[str, None] = dict.fromkeys(_DEEPSPEED)
"""Names of classes in DeepSpeed's checkpoints, all read as records; for `load_restricted`'s `allow`."""

_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001


def load_restricted(
    file: Loadable,
    *,
    allow: Mapping[str, Callable[..., Any] | None] | None = None,
    mmap: bool = True,
    verify: bool = True,
) -> Any:
    """Contents of a file of `torch.save`.

    Args:
        file: Path, or an open file in memory.
        allow: Further globals by full name: None to read a class as `Record`, or a function that is called with the
            pickle's arguments, whatever they are. DeepSpeed's names are known already.
        mmap: Map the file instead of reading its tensors; not for torch's older format, which is always read whole.
        verify: Compare the CRCs of a mapped file's tensors, one pass over it; torch's older format has none.

    Returns:
        Plain data, see the module.

    Raises:
        ValueError: naming the file, if it is damaged or truncated, or holds a global that is not on the list (then
            naming the global, too), or a tensor that does not fit into its storage.
        OSError: if the file cannot be read.
    """
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else "<file in memory>"
    table = with_own(known_globals(), {**DEEPSPEED_GLOBALS, **(allow or {})})
    head = _head(file)
    if head.startswith(b"PK"):
        archive = TorchArchive(file, name, mmap=mmap)
        _survey(archive.pickle, name, table)
        if verify:
            archive.verify()
        return _Machine(archive.pickle, name, table, archive.storage).result()
    if head.startswith(b"\x80"):
        return _load_legacy(file, name, table)
    raise ValueError(f"{name}: is not a file that torch.save wrote (it begins with {head[:4]!r})")


def load_restricted_pickle(
    content: bytes, name: str, *, allow: Mapping[str, Callable[..., Any] | None] | None = None
) -> Any:
    """Contents of a plain pickle without tensors; see `load_restricted`.

    Args:
        content: The pickle.
        name: Its file, for errors.
        allow: As there.
    """
    table = with_own(known_globals(), dict(allow or {}))
    _survey(content, name, table)
    return _Machine(content, name, table, _no_storage).result()


def _head(file: Loadable) -> bytes:
    if isinstance(file, (str, os.PathLike)):
        with open(open_regular(file), "rb") as opened:
            return opened.read(16)
    file.seek(0)
    return file.read(16)


# ---- the survey: what must not reach the machine ----

_REFUSED = {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "PERSID"}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}


def _survey(data: bytes, name: str, table: Mapping[str, Any]) -> int:
    """Looks through the opcodes up to the end of the first pickle; returns its length.

    Raises:
        ValueError: naming all globals that are not in the table, or the opcode that `torch.save` never writes. A memo
            number beyond the pickle's length would have the machine allocate a memo of that size.
    """
    unknown: dict[str, None] = {}
    end, sizes = 0, PickleSizes(len(data))
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name in _REFUSED or (opcode.name in _PUTS and int(argument or 0) > len(data)):
                raise ValueError(f"{name}: its pickle has the opcode {opcode.name} {brief(argument)}; refused")
            sizes.follow(opcode, argument)
            if opcode.name in ("GLOBAL", "INST"):
                module, _, attribute = str(argument).partition(" ")
                if (full := _full_name(module, attribute)) not in table:
                    unknown[full] = None
            end = position or 0
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name}: its pickle is truncated or damaged ({shown(error)})") from None
    if unknown:
        raise _not_allowed(name, list(unknown))
    return end + 1


def _not_allowed(name: str, unknown: list[str]) -> ValueError:
    return ValueError(
        f"{name}: holds {shown(', '.join(unknown))}, neither plain data nor a known class; nothing was loaded. Write "
        "the file anew without such objects (with the program that wrote it, where you trust it), or, from Python, "
        "pass allow={name: None} to load_restricted to read such a class as inert data"
    )


_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg", "torch.tensor": "torch._tensor"}


def _full_name(module: str, attribute: str) -> str:
    return f"{_RENAMED.get(module, module)}.{attribute}"


# ---- the machine ----


class _Machine(pickle.Unpickler):
    """Python's pickle machine, with a table instead of imports."""

    def __init__(
        self,
        data: bytes,
        name: str,
        table: Mapping[str, Any],
        storage: Callable[[str, int], torch.UntypedStorage | None],
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._name = name
        self._table = table
        self._storage = storage
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, attribute: str) -> Any:
        full = _full_name(module, attribute)
        if full not in self._table:
            raise _not_allowed(self._name, [full])
        return self._table[full]

    def persistent_load(self, pid: Any) -> Storage:
        """A storage; the id is ("storage", type, key, location, elements[, view])."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise ValueError(f"a persistent id is {brief(pid)}")
        _, kind, key, _, numel, *view = pid
        if not isinstance(kind, StorageType) or not isinstance(key, str) or type(numel) is not int or numel < 0:
            raise ValueError(f"a persistent id is {brief(kind)}, {brief(key)}, {brief(numel)}")
        if view and view[0] is not None:
            raise ValueError(f"storage {brief(key)} is a view of another one, as only very old versions of torch wrote")
        if key not in self._storages:
            self._storages[key] = Storage(kind.dtype, numel, self._storage(key, numel * kind.dtype.itemsize))
        found = self._storages[key]
        if (found.dtype, found.numel) != (kind.dtype, numel):
            raise ValueError(
                f"storage {brief(key)} has {found.numel} of {found.dtype}, and {brief(numel)} of {kind.dtype}"
            )
        return found

    @property
    def storages(self) -> Mapping[str, Storage]:
        """The storages that the pickle named, by key."""
        return self._storages

    def result(self) -> Any:
        """Runs the machine and settles what it made."""
        try:
            return _Settled().of(self.load())
        except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, RuntimeError) as error:
            what = f"{type(error).__name__}: {_said(error)}"
            raise ValueError(f"{self._name}: its pickle is damaged or builds no plain data ({what})") from None
        except ValueError as error:
            if str(error).startswith(self._name):
                raise
            raise ValueError(f"{self._name}: {error}") from None


def _said(error: BaseException) -> str:
    """The message of an error, without the key of a KeyError: to print that may take for ever."""
    return f"no {brief(error.args[0])}" if isinstance(error, KeyError) and error.args else shown(error)


class _Settled:
    """Turns what the machine made into plain containers, each once, so that shared objects stay shared."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}
        self._sizes: dict[int, int] = {}
        self._depth = self._count = 0

    def of(self, value: Any) -> Any:
        """The settled form of a value.

        Raises:
            ValueError: If it is nested too deeply, or holds what is no plain data.
        """
        self._depth += 1
        if self._depth > _MOST_LEVELS:
            raise ValueError(f"its pickle is nested more than {_MOST_LEVELS} levels deep")
        try:
            return self._of(value)
        finally:
            self._depth -= 1

    def _of(self, value: Any) -> Any:
        if isinstance(value, (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size, torch.device)):
            return value
        if id(value) in self._done:
            self._count += self._sizes.get(id(value), 0)  # none as long as it is being settled: it holds itself
            self._check_count()
            return self._done[id(value)][1]
        before = self._count
        self._count += 1 + (len(value) if isinstance(value, (dict, list, tuple, set, frozenset, deque)) else 0)
        settled = self._container(value)
        self._sizes[id(value)] = self._count - before
        self._check_count()
        return settled

    def _check_count(self) -> None:
        if self._count > _MOST_OBJECTS + 20 * len(self._done):
            raise ValueError("its parts hold each other so often that to walk over them takes for ever")

    def _keep(self, value: Any, settled: Any) -> Any:
        self._done[id(value)] = (value, settled)  # the value, too: its id must not be used again
        return settled

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            target: dict[Any, Any] = self._keep(value, {})
            for key, item in dict.items(value):
                target[self.of(key)] = self.of(item)
            return target
        if isinstance(value, (list, deque)):
            items: list[Any] = self._keep(value, [])
            items.extend(self.of(item) for item in value)
            return items
        if isinstance(value, (tuple, set, frozenset)):
            return self._keep(value, type(value)(self.of(item) for item in value))
        if isinstance(value, Record):
            return self._record(self._keep(value, value))
        if isinstance(value, torch.Tensor):
            if ATTRIBUTES in vars(value):
                vars(value)[ATTRIBUTES] = self.of(vars(value)[ATTRIBUTES])
            return self._keep(value, value)
        if isinstance(value, NumpyArray):
            return self._keep(value, value.tensor)
        if isinstance(value, (slice, range, torch.layout)):
            return value
        if isinstance(value, NumpyDtype):
            return str(value.dtype)
        raise ValueError(f"holds {getattr(value, 'full_name', type(value).__name__)} itself as a value")

    def _record(self, record: Record) -> Record:
        record.arguments, record.state = self.of(record.arguments), self.of(record.state)
        record.entries, record.elements = self.of(record.entries), self.of(record.elements)
        return record


# ---- torch's older format: pickles one after the other, then the storages ----


def _load_legacy(file: Loadable, name: str, table: Mapping[str, Any]) -> Any:
    """Five pickles (magic number, protocol, system, object, storage keys), then per key a count and the elements."""
    if isinstance(file, (str, os.PathLike)):
        content = memoryview(read_regular(file))
    else:
        file.seek(0)
        content = memoryview(file.read())
    parts, place = [], 0
    for _ in range(5):
        end = place + _survey(bytes(content[place:]) if place else content.tobytes(), name, table)
        parts.append(bytes(content[place:end]))
        place = end
    magic, protocol, system = (_Machine(part, name, table, _no_storage).result() for part in parts[:3])
    if magic != _MAGIC or protocol != _LEGACY_PROTOCOL or not isinstance(system, dict):
        raise ValueError(f"{name}: is a pickle, but not one that torch.save wrote")
    if system.get("little_endian") is not (sys.byteorder == "little"):
        raise ValueError(f"{name}: has the other byte order; convert it on such a machine")
    survey = _Machine(parts[3], name, table, _no_storage)
    survey.result()
    keys = _Machine(parts[4], name, table, _no_storage).result()
    data = _legacy_storages(content, place, keys, survey.storages, name)
    return _Machine(parts[3], name, table, lambda key, _: data[key]).result()


def _no_storage(key: str, nbytes: int) -> None:
    return None


def _legacy_storages(
    content: memoryview, place: int, keys: Any, wanted: Mapping[str, Storage], name: str
) -> dict[str, torch.UntypedStorage]:
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{name}: its list of storages is none of names")
    if set(keys) != set(wanted) or len(set(keys)) != len(keys):
        raise ValueError(f"{name}: its list of storages is not that of its tensors")
    data: dict[str, torch.UntypedStorage] = {}
    for key in keys:
        storage, begin = wanted[key], place + 8
        end = begin + storage.numel * storage.dtype.itemsize
        if end > len(content):
            raise ValueError(f"{name}: is truncated inside of storage {brief(key)}")
        if (count := int.from_bytes(content[place:begin], "little")) != storage.numel:
            raise ValueError(f"{name}: storage {key} has {count} elements, the pickle says {storage.numel}")
        copied = bytearray(content[begin:end])
        empty = torch.UntypedStorage(0)
        data[key] = torch.frombuffer(copied, dtype=torch.uint8).untyped_storage() if copied else empty
        place = end
    return data
