"""Reads the header of a safetensors file, trusting nothing in it."""

from __future__ import annotations

import os
from typing import Any

import torch

from zero_strategy.checkpoint.exact_json import parse_object
from zero_strategy.checkpoint.layout import DTYPES, MAX_HEADER_BYTES, METADATA_KEY, FileLayout, TensorSpec


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
    header = _read_header(fd, size, source)
    content = parse_object(header[8:], source)
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{source}: {METADATA_KEY} does not map strings to strings")
    parsed = [_parse_tensor(name, entry, source) for name, entry in content.items()]
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
    if len(prefix) < 8 or length > MAX_HEADER_BYTES or length < 2:
        raise ValueError(f"{source}: not a safetensors file (no valid header length in its first 8 bytes)")
    if 8 + length > size:
        raise ValueError(f"{source}: truncated inside its header ({size} bytes of at least {8 + length})")
    header = os.pread(fd, 8 + length, 0)
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
