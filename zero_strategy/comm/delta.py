"""Changes of values from one version to the next, coded without loss: places, and what is to be xored there.

At usual learning rates of fine-tuning most bfloat16 weights do not change in a step, and those that do change in their
last bits. A payload has the places of changed elements, as gaps of a byte each where they are few, else as a bitmap,
and the xors of their bits, byte plane by byte plane. Zstandard (RFC 8878) makes few bits of both, mostly by
Huffman codes, at its lowest level. Where that is no smaller than the values themselves, these are sent.

    header   kind, bytes per element, elements, changed elements, gaps of 255 and more, lengths of the coded streams
    streams  places; low bytes; high bytes; or the values as they are

Changes that follow each other are one payload behind the other.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    import zstandard

_HEADER = struct.Struct("<BBxxxxxxQQQQQQ")
_DENSE, _GAPS, _BITMAP = 0, 1, 2
_LONG = 255  # the most that a byte holds: longer gaps are told apart, in four bytes each
_FEW = 64
"""Gaps are smaller and quicker than a bitmap where at most one element of so many has changed."""
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Words = NDArray[np.unsignedinteger]
Payload = bytes | memoryview


def words_of(values: Tensor) -> Words:
    """The bits of a flat contiguous tensor on the host, as integers that share its memory."""
    size = values.element_size()
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    found: Words = values.detach().view(_SIGNED[size]).numpy().view(_INTEGERS[size])
    return found


def encode(old: Words, new: Words) -> bytes:
    """The change from `old` to `new`, arrays of one size and dtype; empty if there is none."""
    xors = old ^ new
    at = np.flatnonzero(xors)
    changed = len(at)
    if not changed:
        return b""
    kind, long = _BITMAP, np.empty(0, "<u4")
    if changed * _FEW <= len(new):
        kind = _GAPS
        gaps = np.diff(at, prepend=-1) - 1
        long = gaps[gaps >= _LONG].astype("<u4")
        places = np.minimum(gaps, _LONG).astype(np.uint8).tobytes() + long.tobytes()
    else:
        places = np.packbits(xors != 0).tobytes()
    # In planes, as changes are mostly in the low bits: the high planes are nearly all zeros, and become few bytes.
    planes = xors.take(at).view(np.uint8).reshape(changed, -1)
    low, high = planes[:, 0].tobytes(), np.ascontiguousarray(planes[:, 1:].T).tobytes()
    coder = _compressor()
    streams = [coder.compress(stream) for stream in (places, low, high)]
    lengths = [len(stream) for stream in streams]
    if sum(lengths) >= new.nbytes:
        return dense(new, changed)
    return _HEADER.pack(kind, new.itemsize, len(new), changed, len(long), *lengths) + b"".join(streams)


def dense(new: Words, changed: int | None = None) -> bytes:
    """The values as they are; `changed` of them, by default all, are others than before."""
    count = len(new) if changed is None else changed
    return _HEADER.pack(_DENSE, new.itemsize, len(new), count, 0, 0, 0, 0) + new.tobytes()


def _compressor() -> zstandard.ZstdCompressor:
    import zstandard  # which imports of an engine do without

    options = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)  # shorter matches are chance
    return zstandard.ZstdCompressor(compression_params=options)


def _decoded(data: memoryview, size: int) -> bytes:
    """Raises ValueError unless it is so many bytes."""
    import zstandard

    try:
        # Asked before decoding, which takes as much memory as the frame states, whoever wrote it.
        if (stated := zstandard.frame_content_size(data)) != size:
            raise ValueError(f"a stream of a payload of {stated} bytes, where {size} belong")
        found = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"a payload that cannot be decoded: {error}") from None
    if len(found) != size:
        raise ValueError(f"a stream of a payload of {len(found)} bytes, where {size} belong")
    return found


def elements_of(payload: Payload) -> int:
    """Elements of the values that a payload belongs to.

    Raises:
        ValueError: If it has no header.
    """
    if len(payload) < _HEADER.size:
        raise ValueError(f"a payload of {len(payload)} bytes has no header")
    return int(_HEADER.unpack_from(payload)[2])


def changed_of(payload: Payload) -> int:
    """Elements that a payload, or several one behind the other, change; an element counts each time."""
    found, at = 0, 0
    while at < len(payload):
        kind, itemsize, numel, changed, _, *lengths = _HEADER.unpack_from(payload, at)
        found += changed
        at += _HEADER.size + (itemsize * numel if kind == _DENSE else sum(lengths))
    return found


def apply(payload: Payload, values: Words) -> int:
    """Make new values of old ones, in place; gives the number of changed elements.

    Raises:
        ValueError: If the payload is not one for these values; they are as they were before that one.
    """
    left, changed = memoryview(payload), 0
    while len(left):
        count, length = _apply_first(left, values)
        changed += count
        left = left[length:]
    return changed


def _apply_first(payload: memoryview, values: Words) -> tuple[int, int]:
    """Changed elements, and the length of the first payload."""
    if len(payload) < _HEADER.size:
        raise ValueError(f"a payload of {len(payload)} bytes has no header")
    kind, itemsize, numel, changed, long, *lengths = _HEADER.unpack_from(payload)
    if (itemsize, numel) != (values.itemsize, len(values)):
        raise ValueError(
            f"a payload for {numel} elements of {itemsize} bytes, where {len(values)} of {values.itemsize} are"
        )
    body = payload[_HEADER.size :]
    if kind == _DENSE:
        if len(body) < values.nbytes:
            raise ValueError(f"a payload with {len(body)} bytes of values, where {values.nbytes} belong")
        values[:] = np.frombuffer(body[: values.nbytes], values.dtype)
        return int(changed), _HEADER.size + values.nbytes
    if kind not in (_GAPS, _BITMAP) or not 0 < changed <= numel or long > changed or sum(lengths) > len(body):
        raise ValueError(f"a payload of kind {kind} with {changed} changes of {numel} elements in {len(body)} bytes")
    ends = np.cumsum([0, *lengths]).tolist()
    sizes = (changed + 4 * long if kind == _GAPS else -(-numel // 8), changed, changed * (itemsize - 1))
    places, low, high = (
        _decoded(body[start:stop], size) for start, stop, size in zip(ends, ends[1:], sizes, strict=False)
    )
    at = _places(places, kind, numel, changed, long)
    xors = np.empty((changed, itemsize), np.uint8)
    xors[:, 0] = np.frombuffer(low, np.uint8)
    xors[:, 1:] = np.frombuffer(high, np.uint8).reshape(itemsize - 1, changed).T
    # The first write to the values: all that can be wrong with a payload has been found before.
    values[at] ^= xors.view(values.dtype)[:, 0]
    return int(changed), _HEADER.size + sum(lengths)


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
    if found[-1] >= numel:  # places grow, so the last one is the largest
        raise ValueError(f"a payload that changes element {found[-1]} of {numel}")
    return found
