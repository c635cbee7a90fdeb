"""Directories of `torch.distributed.checkpoint`, in and out.

    .metadata             pickle: flat key -> tensor (dtype, size, chunks) or bytes; (key, offset of chunk) -> place;
                          planner_data: flat key -> path in the nested state dict
    __<rank>_<n>.distcp   entries one after the other: each chunk of a tensor, and each other value, is a torch.save

Source of the format: torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py of torch 2.11 to 2.13.

Read is what `get_state_dict` or FSDP gave, under "model" and "optimizer" ("optimizer_0", ...) or names alike, nested or
flattened. Written is that, too:

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: ...}}, "param_groups": [{"params": [names], ...}]}}

with "optimizer_0", "optimizer_1", ... where there are several, and "counters", "lr_scheduler" and the like beside them.
fp32 master weights are the key "master" of a parameter's state, which plain torch does not ask for.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from zero_strategy.checkpoint.layout import TensorSpec, is_inner_path
from zero_strategy.convert.optimizer_form import is_optimizer_state, is_state_dict, lazy_torch
from zero_strategy.convert.pickle_globals import Record
from zero_strategy.convert.pickles import load_restricted, load_restricted_pickle
from zero_strategy.convert.portable import PortableState, Progress, StoredTensor, loaded
from zero_strategy.convert.torch_file import from_content, rest_of
from zero_strategy.runtime.regular_files import is_there, open_regular, read_regular, size_of

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
    """The full tensor of its chunks."""
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


class LazyPlanner(DefaultSavePlanner):  # type: ignore[misc, unused-ignore]
    """Plans with placeholders of the right dtype and shape, and loads a tensor when it is to be written.

    Args:
        progress: Is told of the bytes written.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        super().__init__(dedup_save_to_lowest_rank=False, enable_plan_caching=False)
        self._progress = progress
        self._stored: dict[int, tuple[torch.Tensor, StoredTensor]] = {}

    def placeholders(self, value: Any) -> Any:
        """The nested state, with a placeholder that takes no memory for each stored tensor."""
        if isinstance(value, StoredTensor):
            tensor = torch.empty((), dtype=value.spec.dtype).expand(value.spec.shape)
            self._stored[id(tensor)] = (tensor, value)
            return tensor
        if isinstance(value, dict):
            return {key: self.placeholders(item) for key, item in value.items()}
        return value

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object to write, loaded."""
        found = super().lookup_object(index)
        if id(found) not in self._stored:
            return found
        tensor = loaded(self._stored[id(found)][1])
        if self._progress is not None:
            self._progress(tensor.nbytes)
        return tensor


_NUMBERED = re.compile(r"optim(?:izer)?_(\d+)")


def detect(path: Path) -> bool:
    """True if it is a directory of torch.distributed.checkpoint."""
    return is_there(path / METADATA)


def read(path: Path, *, prefix: str | None = None, weights_only: bool = False) -> PortableState:
    """Reads a directory; its tensors stay on disk until they are asked for.

    Args:
        path: The directory.
        prefix: What to take off the beginnings of names; None: what DDP adds.
        weights_only: Leave optimizers out.

    Raises:
        ValueError: If it is damaged, or no model is found in it.
    """
    return from_content(content_of(path), str(path), prefix=prefix, weights_only=weights_only)


def content_of(path: Path) -> dict[str, Any]:
    """The nested dict that was saved, optimizers in torch's form and numbered ones as a list "optimizers"."""
    tree = DcpFiles(path).tree()
    while len(tree) == 1 and isinstance(inner := next(iter(tree.values())), dict) and _has_model(inner):
        tree = inner  # {"app": {"model": ..., "optimizer": ...}}
    for key, value in tree.items():
        if _is_optimizer(value):
            tree[key] = _optimizer(value)
        elif not is_state_dict(value):
            tree[key] = _resolved(value)
    numbers = {int(found[1]): key for key in tree if (found := _NUMBERED.fullmatch(str(key)))}
    if numbers:
        tree["optimizers"] = [tree.pop(numbers[number]) for number in sorted(numbers)]
    return tree


def write(state: PortableState, path: Path, *, progress: Progress | None = None) -> None:
    """Writes a directory; tensors are loaded one at a time.

    Args:
        state: What to write.
        path: The directory, which must not exist or be empty.
        progress: Is told of the bytes written.

    Raises:
        ValueError: If the directory has something in it.
        OSError: If the file system fails.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if path.exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists; it will not be overwritten")
    planner = LazyPlanner(progress)
    content = planner.placeholders(_nested(state))
    with warnings.catch_warnings():
        # It says that it runs without a process group, which is what is wanted.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        try:
            save(content, storage_writer=FileSystemWriter(path, thread_count=1), planner=planner, no_dist=True)
        except CheckpointException as wrapped:
            error, _ = next(iter(wrapped.failures.values()))
            raise error from None


def _nested(state: PortableState) -> dict[str, Any]:
    weights: dict[str, Any] = dict(state.weights)
    weights |= {alias: state.weights[name] for alias, name in state.aliases.items()}
    content: dict[str, Any] = {"model": weights}
    several = len(state.optimizers) > 1
    for number, optimizer in enumerate(state.optimizers):
        content[f"optimizer_{number}" if several else "optimizer"] = lazy_torch(optimizer, named=True)
    return content | rest_of(state)


def _has_model(value: Mapping[str, Any]) -> bool:
    return any(is_state_dict(item) for item in value.values())


def _is_optimizer(value: Any) -> bool:
    return is_optimizer_state(value) or _is_flat_optimizer(value) or _is_stateless(value)


def _is_stateless(value: Any) -> bool:
    """An optimizer without any state: an empty dict leaves no entry."""
    return isinstance(value, Mapping) and value.keys() == {"param_groups"}


def _is_flat_optimizer(value: Any) -> bool:
    """The form of `StateDictOptions(flatten_optimizer_state_dict=True)`."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and key.startswith(("state.", "param_groups.")) for key in value)
    )


def _optimizer(value: Mapping[str, Any]) -> dict[str, Any]:
    if not _is_flat_optimizer(value):
        return {"state": value.get("state", {}), "param_groups": [_resolved(group) for group in value["param_groups"]]}
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, item in value.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(name, {})[entry] = item
    groups: list[dict[str, Any]] = []
    for name, entries in options.items():  # parameters with equal options were one group, as far as can be told
        entries = _resolved(entries)
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == entries), None)
        if group is None:
            groups.append({**entries, "params": [name]})
        else:
            group["params"].append(name)
    return {"state": state, "param_groups": groups}


def _resolved(value: Any) -> Any:
    """Put tensors in the place of what can load them."""
    if isinstance(value, StoredTensor):
        return loaded(value)
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item) for item in value]
    return value
