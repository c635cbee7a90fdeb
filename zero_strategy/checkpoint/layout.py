"""Where every element of every tensor lies in a safetensors file, from names, dtypes and shapes alone.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zero_strategy.checkpoint.names import is_text

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
    def compute(
        cls, path: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> FileLayout:
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


def plan_files(
    specs: Iterable[TensorSpec],
    max_file_bytes: int,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[FileLayout]:
    """Divides tensors among files in the way of Hugging Face.

    Args:
        specs: the tensors; files are filled in this order.
        max_file_bytes: most bytes of tensor data in a file; a larger tensor gets a file of its own.
        stem: beginning of the file names.
        metadata: for each file's header.

    Returns:
        One layout `{stem}.safetensors`, or several `{stem}-00001-of-0000n.safetensors`.

    Raises:
        ValueError: if `max_file_bytes` is not positive or a name appears twice.
    """
    if max_file_bytes <= 0:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    groups: list[list[TensorSpec]] = [[]]
    seen: set[str] = set()
    filled = 0
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"tensor {spec.name!r} appears twice")
        seen.add(spec.name)
        if groups[-1] and filled + spec.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    if len(groups) == 1:
        return [FileLayout.compute(f"{stem}.safetensors", groups[0], metadata)]
    return [
        FileLayout.compute(f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for i, group in enumerate(groups, start=1)
    ]


def index_json(files: Sequence[FileLayout]) -> bytes:
    """The text of Hugging Face's `model.safetensors.index.json` for the files of one model."""
    weight_map = {name: layout.path for layout in files for name in layout.specs}
    index = {"metadata": {"total_size": sum(layout.data_bytes for layout in files)}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _header(path: str, ordered: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"{path}: header metadata must map strings to strings, got {key!r}: {value!r}")
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
