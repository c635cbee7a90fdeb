"""The layout of a safetensors file: where each element lies, headers, names.

    byte 0        8                                    data_start (a multiple of 4096)        size
         +--------+---------------------+--------------+--------------+---------+-------------+
         | length | JSON header         | spaces       | tensor 0     | tensor 1| ...         |
         +--------+---------------------+--------------+--------------+---------+-------------+

All ranks compute the same layout without talking to each other, so each can write its own element ranges
in place. Inside a file, tensors of wider elements come first (otherwise in the given order): the format
allows no holes, and this alone keeps every tensor aligned to its element size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import torch

from zero_strategy.runtime import bounded_json

MAX_NAME_BYTES = 255
"""Most bytes of a file's name, on all common file systems."""


def is_text(name: str) -> bool:
    """True if it has characters only, as UTF-8 and JSON need it, and not half of a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def wrong_in_file_name(name: object) -> str:
    """Says why something cannot be the name of one file or folder; empty where it can."""
    if not isinstance(name, str):
        return f"is a {type(name).__name__}, not a string"
    if name in ("", ".", ".."):
        return "is no name of a file"
    if "/" in name or "\0" in name:
        return "has a '/'" if "/" in name else "has a NUL"
    if not is_text(name):
        return "has half of a surrogate pair, which is no character"
    size = len(name.encode())
    return f"takes {size} bytes, and a file's name at most {MAX_NAME_BYTES}" if size > MAX_NAME_BYTES else ""


def check_file_name(name: object, what: str, suffix: str = "") -> None:
    """Checks that a name, with a suffix, can be that of one file or folder, and so leads out of none.

    Args:
        name: Anything, such as a key of a file that anybody may have written.
        what: What it names, for errors: "parameter".
        suffix: What comes after it.

    Raises:
        ValueError: Naming it, and saying why.
    """
    # First alone: with a suffix even an empty name, or '..', would look like one.
    if wrong := wrong_in_file_name(name) or wrong_in_file_name(f"{name}{suffix}"):
        shown = repr(name) if len(repr(name)) <= 120 else f"{name!r:.117}..."
        raise ValueError(f"{what} {shown} cannot name a file: it {wrong}")


def folders_above(path: str) -> list[str]:
    """The folders that a relative path lies in: ["a", "a/b"] of "a/b/c"."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def is_inner_path(path: object) -> bool:
    """True if a relative path written with "/" stays inside its directory."""
    return isinstance(path, str) and not any(map(wrong_in_file_name, path.split("/")))


# Data begin at a page: their whole pages can be written past the page cache.
PAGE = 4096
MAX_HEADER_BYTES = 100_000_000  # readers of the format refuse longer headers
METADATA_KEY = "__metadata__"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}
"""Dtype names of the safetensors format."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one tensor.

    Attributes:
        name: the tensor's own name, unique in its file.
        dtype: any dtype in `DTYPES`.
        shape: as `torch.Tensor.shape`; () for a scalar.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name == METADATA_KEY or not is_text(self.name):
            raise ValueError(f"{self.name!r} cannot be the name of a tensor in a safetensors file")
        if self.dtype not in DTYPE_NAMES:
            raise TypeError(f"tensor {self.name!r}: safetensors has no dtype {self.dtype}")
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: shape {self.shape} has a negative size")
        if self.dtype == torch.float4_e2m1fn_x2 and not self.shape:
            raise ValueError(f"tensor {self.name!r}: a scalar cannot have the packed dtype {self.dtype}")

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        """Describes a tensor of any device, meta included."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """The layout of one safetensors file.

    Attributes:
        path: path relative to the checkpoint directory, with "/".
        specs: the tensors by name, in the order of their data.
        offsets: byte offset of each tensor's first element, from the start of the file.
        metadata: the header's string-to-string map.
        header: everything before the data section.
        size: bytes of the whole file.
    """

    path: str
    specs: Mapping[str, TensorSpec]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]
    header: bytes = field(repr=False)
    size: int

    @classmethod
    def compute(cls, path: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> FileLayout:
        """Lays out a file.

        Args:
            path: relative path of the file.
            specs: its tensors, each name once.
            metadata: for the header; "format": "pt" is added, as loaders expect.

        Returns:
            The layout, the same for the same arguments everywhere.

        Raises:
            ValueError: if a name appears twice or the header would exceed the format's limit.
            TypeError: if the metadata is not string to string.
        """
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        by_name = {spec.name: spec for spec in ordered}
        if len(by_name) != len(ordered):
            names = [spec.name for spec in ordered]
            raise ValueError(f"{path}: duplicate tensors {sorted({n for n in names if names.count(n) > 1})}")
        full_metadata = {"format": "pt", **(metadata or {})}
        header = _header(path, ordered, full_metadata)
        offsets, end = {}, len(header)
        for spec in ordered:
            offsets[spec.name] = end
            end += spec.nbytes
        return cls(path, by_name, offsets, full_metadata, header, end)

    @property
    def data_bytes(self) -> int:
        """Bytes of the data section."""
        return self.size - len(self.header)

    def span(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Locates elements [start, stop) of a row-major tensor.

        Returns:
            (offset, nbytes): offset from the start of the file and length, both in bytes.

        Raises:
            ValueError: if the range is not within the tensor.
        """
        spec = self.specs[name]
        if not 0 <= start <= stop <= spec.numel:
            raise ValueError(
                f"{self.path}: elements [{start}, {stop}) are not within tensor {name!r} "
                f"of shape {spec.shape} ({spec.numel} elements)"
            )
        size = spec.dtype.itemsize
        return self.offsets[name] + start * size, (stop - start) * size


def _header(path: str, ordered: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"{path}: header metadata must map strings to strings, got {key!r}: {value!r}")
    # Sorted: all ranks, and all saves, write the same bytes.
    content: dict[str, object] = {METADATA_KEY: dict(sorted(metadata.items()))}
    begin = 0
    for spec in ordered:
        content[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": _stored_shape(spec),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    # The format allows spaces behind the JSON, and nothing else between it and the data.
    padded = -(-(8 + len(text)) // PAGE) * PAGE - 8
    if padded > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: the header takes {padded} bytes, the format allows {MAX_HEADER_BYTES}; use more files"
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def _stored_shape(spec: TensorSpec) -> list[int]:
    # The format counts 4-bit elements, torch counts the bytes that hold two of them.
    if spec.dtype == torch.float4_e2m1fn_x2:
        return [*spec.shape[:-1], 2 * spec.shape[-1]]
    return list(spec.shape)


def parse_object(data: bytes, source: str) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        data: UTF-8 text.
        source: the file it came from, for errors.

    Returns:
        The object, not yet decoded.

    Raises:
        ValueError: naming `source`, if the text is not strict JSON, has a key twice, or is no object.
    """
    value = bounded_json.parse(data, source, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return result


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def read_layout(fd: int, path: str, source: str) -> FileLayout:
    """Reads and checks the layout of an open file, ours or any other tool's.

    Args:
        fd: descriptor of the file, open for reading.
        path: the file's path relative to its checkpoint; becomes `FileLayout.path`.
        source: the file's name in errors.

    Returns:
        The layout; its tensors exactly fill the file from the header's end to the file's end.

    Raises:
        ValueError: naming the file, and the tensor where one is concerned, if the header is damaged or
            does not agree with itself or with the size of the file.
    """
    size = os.fstat(fd).st_size
    return parse_layout(_read_header(fd, size, source), size, path, source)


def parse_layout(header: bytes, size: int, path: str, source: str) -> FileLayout:
    """Parses the header of a file of so many bytes: see `read_layout`."""
    content = parse_object(header[8:], source)
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{source}: {METADATA_KEY} does not map strings to strings")
    parsed = [_parse_tensor(name, entry, source) for name, entry in content.items()]
    # By the end as well: a tensor without elements comes before the one that begins in its place.
    parsed.sort(key=lambda item: (item[1], item[1] + item[0].nbytes))
    _check_extent(parsed, size - len(header), source)
    return FileLayout(
        path=path,
        specs={spec.name: spec for spec, _ in parsed},
        offsets={spec.name: len(header) + begin for spec, begin in parsed},
        metadata=metadata,
        header=header,
        size=size,
    )


def tensors_cut_off(fd: int, source: str) -> list[str]:
    """The tensors that do not end within an open file whose header is whole, in the order of their bytes.

    Raises:
        ValueError: naming the file, if the header is cut off or damaged too.
    """
    size = os.fstat(fd).st_size
    header = _read_header(fd, size, source)
    content = parse_object(header[8:], source)
    content.pop(METADATA_KEY, None)
    parsed = sorted((_parse_tensor(name, entry, source) for name, entry in content.items()), key=lambda item: item[1])
    return [spec.name for spec, begin in parsed if len(header) + begin + spec.nbytes > size]


def _read_header(fd: int, size: int, source: str) -> bytes:
    prefix = os.pread(fd, 8, 0)
    length = int.from_bytes(prefix, "little")
    # Before so many bytes are read: any file has some number there. '{}' has two.
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or length < 2:
        raise ValueError(f"{source}: not a safetensors file (no valid header length in its first 8 bytes)")
    if 8 + length > size:
        raise ValueError(f"{source}: truncated inside its header ({size} bytes of at least {8 + length})")
    header = os.pread(fd, 8 + length, 0)
    # As the format demands it; readers elsewhere refuse anything before the brace.
    if len(header) != 8 + length or header[8:9] != b"{":
        raise ValueError(f"{source}: not a safetensors file (its header is no JSON object)")
    return header


def _parse_tensor(name: str, entry: Any, source: str) -> tuple[TensorSpec, int]:
    """Returns the tensor and the offset of its first byte in the data section."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{source}: header entry of tensor {name!r} must have dtype, shape, data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{source}: tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    shape, span = entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape) or not _is_sizes(span) or len(span) != 2:
        raise ValueError(f"{source}: tensor {name!r} has the malformed shape {shape!r} or offsets {span!r}")
    if dtype == torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{source}: tensor {name!r} of dtype F4 has an odd last dimension {shape}")
        shape = [*shape[:-1], shape[-1] // 2]
    try:
        spec = TensorSpec(name, dtype, tuple(shape))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if span[1] - span[0] != spec.nbytes:
        raise ValueError(
            f"{source}: tensor {name!r} of dtype {entry['dtype']} and shape {entry['shape']} "
            f"takes {spec.nbytes} bytes, its offsets {span} give {span[1] - span[0]}"
        )
    return spec, span[0]


def _check_extent(parsed: list[tuple[TensorSpec, int]], data_bytes: int, source: str) -> None:
    end = 0
    for spec, begin in parsed:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            raise ValueError(f"{source}: tensor {spec.name!r} {what} (offset {begin}, expected {end})")
        end += spec.nbytes
        if end > data_bytes:
            raise ValueError(
                f"{source}: truncated: tensor {spec.name!r} ends at byte {end} of the data section, "
                f"which has {data_bytes} bytes"
            )
    if end != data_bytes:
        raise ValueError(f"{source}: has {data_bytes - end} bytes after its last tensor")


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
