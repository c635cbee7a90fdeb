"""Changes of values from one version to the next, coded without loss: places, and what is to be xored there.

At usual learning rates of fine-tuning most bfloat16 weights do not change in a step, and those that do change in their
last bits. A payload has the places of changed elements, as gaps of a byte each where they are few, else as a bitmap,
and the xors of their bits, byte plane by byte plane. Deflate (zlib) makes few bits of both: Huffman codes for places
and low bytes, which have no repetitions, run lengths for high bytes, which are mostly zero. Where that is no smaller
than the values themselves, these are sent.

    header   kind, bytes per element, elements, changed elements, gaps of 255 and more, lengths of the deflated streams
    streams  places; low bytes; high bytes; or the values as they are
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HEADER = struct.Struct("<BBxxxxxxQQQQQQ")
_DENSE, _GAPS, _BITMAP = 0, 1, 2
_LONG = 255
_FEW = 64
"""Gaps are smaller and quicker than a bitmap where at most one element of so many has changed."""
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Words = NDArray[np.unsignedinteger]


def words_of(values: Tensor) -> Words:
    """The bits of a flat contiguous tensor on the host, as integers that share its memory."""
    size = values.element_size()
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    found: Words = values.detach().view(_SIGNED[size]).numpy().view(_INTEGERS[size])
    return found


def encode(old: Words, new: Words) -> bytes:
    """The change from `old` to `new`, arrays of one size and dtype; empty if there is none."""
    differ = old != new
    changed = int(np.count_nonzero(differ))
    if not changed:
        return b""
    kind, long, at = _BITMAP, np.empty(0, "<u4"), np.flatnonzero(differ)
    if changed * _FEW <= len(new):
        kind = _GAPS
        gaps = np.diff(at, prepend=-1) - 1
        long = gaps[gaps >= _LONG].astype("<u4")
        places = np.minimum(gaps, _LONG).astype(np.uint8).tobytes() + long.tobytes()
    else:
        places = np.packbits(differ).tobytes()
    planes = (old[at] ^ new[at]).view(np.uint8).reshape(changed, -1)
    low, high = planes[:, 0].tobytes(), np.ascontiguousarray(planes[:, 1:].T).tobytes()
    quick = zlib.Z_HUFFMAN_ONLY if kind == _GAPS or changed * 8 > len(new) else zlib.Z_RLE
    streams = [_deflated(places, quick), _deflated(low, zlib.Z_HUFFMAN_ONLY), _deflated(high, zlib.Z_RLE)]
    lengths = [len(stream) for stream in streams]
    if sum(lengths) >= new.nbytes:
        return _HEADER.pack(_DENSE, new.itemsize, len(new), changed, 0, 0, 0, 0) + new.tobytes()
    return _HEADER.pack(kind, new.itemsize, len(new), changed, len(long), *lengths) + b"".join(streams)


def _deflated(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(data) + coder.flush()


def _inflated(data: memoryview, size: int) -> bytes:
    """Raises ValueError unless it is so many bytes."""
    try:
        found = zlib.decompressobj(-15).decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"a payload that cannot be inflated: {error}") from None
    if len(found) != size:
        raise ValueError(f"a stream of a payload of {len(found)} bytes, where {size} belong")
    return found


def elements_of(payload: bytes) -> int:
    """Elements of the values that a payload belongs to.

    Raises:
        ValueError: If it has no header.
    """
    if len(payload) < _HEADER.size:
        raise ValueError(f"a payload of {len(payload)} bytes has no header")
    return int(_HEADER.unpack_from(payload)[2])


def changed_of(payload: bytes) -> int:
    """Elements that a payload changes."""
    return int(_HEADER.unpack_from(payload)[3])


def apply(payload: bytes, values: Words) -> int:
    """Make new values of old ones, in place; gives the number of changed elements.

    Raises:
        ValueError: If the payload is not one for these values; they are as they were.
    """
    if not payload:
        return 0
    if len(payload) < _HEADER.size:
        raise ValueError(f"a payload of {len(payload)} bytes has no header")
    kind, itemsize, numel, changed, long, *lengths = _HEADER.unpack_from(payload)
    if (itemsize, numel) != (values.itemsize, len(values)):
        raise ValueError(
            f"a payload for {numel} elements of {itemsize} bytes, where {len(values)} of {values.itemsize} are"
        )
    body = memoryview(payload)[_HEADER.size :]
    if kind == _DENSE:
        if len(body) != values.nbytes:
            raise ValueError(f"a payload with {len(body)} bytes of values, where {values.nbytes} belong")
        values[:] = np.frombuffer(body, values.dtype)
        return int(changed)
    if kind not in (_GAPS, _BITMAP) or not 0 < changed <= numel or long > changed or sum(lengths) != len(body):
        raise ValueError(f"a payload of kind {kind} with {changed} changes of {numel} elements in {len(body)} bytes")
    ends = np.cumsum([0, *lengths]).tolist()
    sizes = (changed + 4 * long if kind == _GAPS else -(-numel // 8), changed, changed * (itemsize - 1))
    places, low, high = (
        _inflated(body[start:stop], size) for start, stop, size in zip(ends, ends[1:], sizes, strict=False)
    )
    at = _places(places, kind, numel, changed, long)
    xors = np.empty((changed, itemsize), np.uint8)
    xors[:, 0] = np.frombuffer(low, np.uint8)
    xors[:, 1:] = np.frombuffer(high, np.uint8).reshape(itemsize - 1, changed).T
    values[at] ^= xors.view(values.dtype)[:, 0]
    return int(changed)


def _places(stream: bytes, kind: int, numel: int, changed: int, long: int) -> NDArray[Any]:
    """Indices of the changed elements."""
    if kind == _BITMAP:
        found: NDArray[Any] = np.flatnonzero(np.unpackbits(np.frombuffer(stream, np.uint8), count=numel))
        if len(found) != changed:
            raise ValueError("a payload whose bitmap has not as many bits as it says")
        return found
    gaps = np.frombuffer(stream, np.uint8, changed).astype(np.int64)
    if int((gaps == _LONG).sum()) != long:
        raise ValueError("a payload whose long gaps are not as many as it says")
    gaps[gaps == _LONG] = np.frombuffer(stream, "<u4", long, changed)
    found = np.cumsum(gaps + 1) - 1
    if found[-1] >= numel:
        raise ValueError(f"a payload that changes element {found[-1]} of {numel}")
    return found
