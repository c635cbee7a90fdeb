"""Reads the files of `torch.distributed.checkpoint`, without its machinery and without running what a pickle says.

    .metadata             pickle: flat key -> tensor (dtype, size, chunks) or bytes; (key, offset of chunk) -> place;
                          planner_data: flat key -> path in the nested state dict
    __<rank>_<n>.distcp   entries one after the other: each chunk of a tensor, and each other value, is a torch.save

Source of the format: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py of torch 2.11 to 2.13.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint.interop.pickles import Record, load_restricted, load_restricted_pickle
from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.checkpoint.names import is_inner_path
from zero_strategy.checkpoint.portable import StoredTensor
from zero_strategy.runtime.regular_files import open_regular, read_regular, size_of

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_CLASSES: Mapping[str, None] = dict.fromkeys(
    [
        *(
            f"{_MODULE}.metadata.{name}"
            for name in (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_MODULE}.filesystem._StorageInfo",
        f"{_MODULE}.filesystem._StoragePrefix",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class _Place:
    """Bytes [offset, offset + length) of a file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor: its first element's indices, its sizes, and where it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: _Place


class DcpFiles:
    """One directory of torch.distributed.checkpoint.

    Args:
        directory: It.

    Raises:
        ValueError: Naming the file and the entry, if anything is missing or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._source = directory / METADATA
        metadata = load_restricted_pickle(read_regular(self._source), str(self._source), allow=_CLASSES)
        self._entries = _fields(metadata, "state_dict_metadata", dict, self._source)
        self._paths = metadata.field("planner_data") or {}
        self._places = self._placed(_fields(metadata, "storage_data", dict, self._source))

    def tree(self) -> dict[str, Any]:
        """The nested state dict that was saved; tensors are `StoredTensor`s, all else is loaded."""
        root: dict[Any, Any] = {}
        for key, entry in self._entries.items():
            path = self._paths.get(key, (key,)) if isinstance(self._paths, dict) else (key,)
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = self._value(key, entry)
        found = _listed(root)
        assert isinstance(found, dict)
        return found

    def _value(self, key: str, entry: Any) -> Any:
        kind = getattr(entry, "full_name", "").rpartition(".")[2]
        if kind == "BytesStorageMetadata":
            return _load(self._place(key, ()), key)
        if kind != "TensorStorageMetadata":
            raise ValueError(f"{self._source}: entry {key!r} is a {kind or type(entry).__name__}")
        dtype = _dtype(_fields(entry, "properties", Record, self._source))
        size = tuple(_fields(entry, "size", torch.Size, self._source))
        spec = TensorSpec(key, dtype, size)
        chunks = [self._chunk(key, chunk) for chunk in _fields(entry, "chunks", list, self._source)]
        _check_cover(spec, chunks, self._source)
        return StoredTensor(spec, lambda: _assembled(spec, chunks))

    def _chunk(self, key: str, chunk: Any) -> _Chunk:
        offsets = tuple(_fields(chunk, "offsets", torch.Size, self._source))
        sizes = tuple(_fields(chunk, "sizes", torch.Size, self._source))
        return _Chunk(offsets, sizes, self._place(key, offsets))

    def _place(self, key: str, offsets: tuple[int, ...]) -> _Place:
        place = self._places.get((key, offsets))
        if place is None:
            raise ValueError(f"{self._source}: does not say where {key!r} at {offsets} is")
        return place

    def _placed(self, storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], _Place]:
        places = {}
        for index, info in storage.items():
            key, offset = _fields(index, "fqn", str, self._source), index.field("offset")
            name = _fields(info, "relative_path", str, self._source)
            if info.field("transform_descriptors"):
                raise ValueError(
                    f"{self._source}: {key!r} is stored with {info.field('transform_descriptors')}, which is not read; "
                    "save it without compression"
                )
            if not is_inner_path(name):
                raise ValueError(f"{self._source}: {name!r} is not the path of a file beside it")
            place = _Place(
                self._directory / name,
                _fields(info, "offset", int, self._source),
                _fields(info, "length", int, self._source),
            )
            places[key, tuple(offset or ())] = place
        self._check_files({place.path: 0 for place in places.values()}, places.values())
        return places

    def _check_files(self, ends: dict[Path, int], places: Any) -> None:
        for place in places:
            ends[place.path] = max(ends[place.path], place.offset + place.length)
        for path, end in ends.items():
            actual = size_of(path)
            if actual is None:
                raise ValueError(f"{self._directory}: file {path.name} is missing")
            if actual < end:
                raise ValueError(f"{path}: is truncated: it has {actual} bytes of at least {end}")


def _load(place: _Place, key: str) -> Any:
    fd = open_regular(place.path)
    try:
        content = os.pread(fd, place.length, place.offset)
    finally:
        os.close(fd)
    try:
        return load_restricted(io.BytesIO(content), mmap=False)
    except ValueError as error:
        raise ValueError(f"{place.path}: entry {key!r}: {error}") from None


def _assembled(spec: TensorSpec, chunks: list[_Chunk]) -> torch.Tensor:
    """The whole tensor of its chunks."""
    whole: torch.Tensor | None = None
    for chunk in chunks:
        part = _load(chunk.place, spec.name)
        if not isinstance(part, torch.Tensor) or part.dtype != spec.dtype or tuple(part.shape) != chunk.sizes:
            raise ValueError(f"{chunk.place.path}: entry {spec.name!r} is not what the metadata say: {spec}")
        if chunk.sizes == spec.shape:
            return part.contiguous()
        if whole is None:
            whole = torch.empty(spec.shape, dtype=spec.dtype)
        box = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = part
    return torch.empty(spec.shape, dtype=spec.dtype) if whole is None else whole


def _check_cover(spec: TensorSpec, chunks: list[_Chunk], source: Path) -> None:
    """Chunks lie inside the tensor, and their elements add up: a hole would be whatever memory held."""
    for chunk in chunks:
        ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(spec.shape) or any(end > size for end, size in zip(ends, spec.shape, strict=True)):
            raise ValueError(f"{source}: a chunk of {spec.name!r} at {chunk.offsets} is not within {spec.shape}")
    covered = sum(torch.Size(chunk.sizes).numel() for chunk in {chunk.offsets: chunk for chunk in chunks}.values())
    if covered != spec.numel:
        raise ValueError(f"{source}: the chunks of {spec.name!r} have {covered} of {spec.numel} elements")


def _fields(record: Any, name: str, kind: type, source: Path) -> Any:
    value = record.field(name) if isinstance(record, Record) else None
    if not isinstance(value, kind):
        raise ValueError(f"{source}: is no metadata of torch.distributed.checkpoint ({name!r} is {value!r})")
    return value


def _dtype(properties: Record) -> torch.dtype:
    # The class pickles itself as a tuple that begins with the dtype.
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else properties.field("dtype")
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor's dtype is {dtype!r}")
    return dtype


def _listed(node: Any) -> Any:
    """Turns dicts with the keys 0 to n - 1 into lists, which they were before they were flattened."""
    if not isinstance(node, dict):
        return node
    items = {key: _listed(value) for key, value in node.items()}
    if items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items
