"""Messages between stages: nested structures of tensors as one run of bytes.

The tensors are on one side, the structure around them on the other.

A structure is a value of JSON, so that it fits into a message's header:

    ["t", 0]                     tensor number 0; the same object at two places has one number
    ["v", 3]                     None, a bool, an integer, a float or a string
    ["tuple", [...]]             also "list"
    ["dict", [[key, ...], ...]]  keys are strings, numbers, None
    ["object", "module:Name", [[field, ...], ...]]
                                 a dataclass, a named tuple, or a dict of a class of its own, as ModelOutput

    | fixed header | description | gap | tensor 0 | gap | tensor 1 | ... | unused |
    0              64                  tensors begin at multiples of 128 bytes

The fixed header says what the message belongs to, so that a rank that is out of step is noticed at once. The
description is the structure, and of each tensor shape, dtype and whether it wants a gradient; while it stays the same,
neither side makes or reads it again. A message that does not fit into what the receiver has posted is announced: a
message of the posted size, of which the receiver reads the fixed header only, says how long the next one is.

Tensors of a device travel beside their message (`device_payloads`). The message then ends with the description, and the
tensors begin at byte 0 of a buffer of their own; whatever the host needs in order to go on reaches it over the host.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero_strategy.fsdp.dtensor import is_dtensor

Structure = list[Any]

_PLAIN = (bool, int, float, str, type(None))


def take_apart(value: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of a value, each once, and its structure.

    Raises:
        TypeError: If there is something in it that cannot be sent; names the place and the type.
    """
    tensors: list[Tensor] = []
    return tensors, _apart(value, tensors, {}, "")


def put_together(tensors: Sequence[Any], structure: Structure) -> Any:
    """The inverse of `take_apart`; `tensors` may be other ones, or anything else, in the same order."""
    kind = structure[0]
    if kind == "t":
        return tensors[structure[1]]
    if kind == "v":
        return structure[1]
    if kind in ("tuple", "list"):
        items = [put_together(tensors, item) for item in structure[1]]
        return tuple(items) if kind == "tuple" else items
    pairs = {key: put_together(tensors, item) for key, item in structure[-1]}
    return pairs if kind == "dict" else _make(structure[1], pairs)


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Put changed tensors into the same structure."""
    tensors, structure = take_apart(value)
    return put_together([change(tensor) for tensor in tensors], structure)


def describe(structure: Structure) -> str:
    """For messages: tensors as T, in the brackets of their containers."""
    kind = structure[0]
    if kind == "t":
        return "T"
    if kind == "v":
        return repr(structure[1])
    if kind in ("tuple", "list"):
        inner = ", ".join(describe(item) for item in structure[1])
        return f"({inner})" if kind == "tuple" else f"[{inner}]"
    inner = ", ".join(f"{key}: {describe(item)}" for key, item in structure[-1])
    return f"{{{inner}}}" if kind == "dict" else f"{structure[1].split(':')[1]}({inner})"


def _apart(value: Any, tensors: list[Tensor], numbers: dict[int, int], place: str) -> Structure:
    if isinstance(value, Tensor):
        if is_dtensor(value):
            raise TypeError(
                f"outputs{place} is a DTensor, which cannot be sent to another stage: let the last layer of a stage "
                "return plain tensors (use_local_output=True of torch's parallel styles, or to_local())"
            )
        if (number := numbers.get(id(value))) is None:
            # An id stays one tensor's, since the list keeps it alive.
            number = numbers[id(value)] = len(tensors)
            tensors.append(value)
        return ["t", number]
    kind = type(value)
    # The very types: of a subclass, such as an IntEnum or NumPy's float64, JSON would make its base.
    if kind in _PLAIN:
        return ["v", value]
    if kind in (tuple, list, torch.Size):
        name = "list" if kind is list else "tuple"
        return [name, [_apart(item, tensors, numbers, f"{place}[{i}]") for i, item in enumerate(value)]]
    if (fields := _fields(value)) is None:
        raise TypeError(
            f"outputs{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent on; tensors, "
            "numbers, strings and None can, in tuples, lists, dicts, named tuples and dataclasses"
        )
    # Pairs, and no JSON object: its keys would all become strings.
    pairs = []
    for key, item in fields.items():
        if type(key) not in _PLAIN:
            raise TypeError(f"outputs{place} has a key {key!r}; only strings, numbers and None can be sent as keys")
        pairs.append([key, _apart(item, tensors, numbers, f"{place}[{key!r}]")])
    return ["dict", pairs] if kind is dict else ["object", f"{kind.__module__}:{kind.__qualname__}", pairs]


def _fields(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # A class counts as a dataclass, too
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _make(path: str, pairs: dict[Any, Any]) -> Any:
    module, name = path.split(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    if dataclasses.is_dataclass(kind) or issubclass(kind, tuple):
        return kind(**pairs)
    return kind(pairs)


# A multiple of every dtype's size, so that each tensor can be a view of the buffer's storage.
ALIGNMENT = 128
FIRST_BYTES = 1024
"""What a receiver posts on a channel that has carried nothing yet."""
_FIXED = struct.Struct("<4sBxxxIIIIQQQ")  # Without '<', its size and order of bytes would be the host's
_MAGIC = b"ZSP1"
_HEADER_BYTES = 64
_DATA, _ANNOUNCEMENT = 1, 2
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


class Stamp(NamedTuple):
    """Place in the batch that a message belongs to.

    Attributes:
        run: Number of the sender's run of the pipeline.
        program: A digest of what the sender runs: schedule, micro-batches, training or not.
        micro_batch: Of this message.
        sequence: Number of the message on its channel in this run.
    """

    run: int
    program: int
    micro_batch: int
    sequence: int


class TensorKind(NamedTuple):
    """A tensor in a message: what there is to know of it without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Layout:
    """Layout of a message of this description.

    Attributes:
        description: Structure and tensors, as bytes.
        structure: Around the tensors.
        tensors: What they are.
        offsets: Where they begin, in the message or in their own buffer.
        nbytes: Of the whole message.
        payload_bytes: Of the tensors' own buffer; 0 where they are in the message, or take no bytes.
    """

    description: bytes
    structure: Structure
    tensors: tuple[TensorKind, ...]
    offsets: tuple[int, ...]
    nbytes: int
    payload_bytes: int = 0


def layout(structure: Structure, tensors: Sequence[TensorKind], beside: bool = False) -> Layout:
    """A message for these tensors in this structure.

    Args:
        structure: Around them.
        tensors: What they are.
        beside: They are in a buffer of their own.
    """
    kinds = [[list(kind.shape), str(kind.dtype).removeprefix("torch."), kind.wants_gradient] for kind in tensors]
    description = json.dumps([structure, kinds], separators=(",", ":")).encode()
    return _place(description, structure, tuple(tensors), beside)


def read_layout(description: bytes, beside: bool = False) -> Layout:
    """The layout of a message with this description."""
    structure, kinds = json.loads(description)
    tensors = tuple(TensorKind(tuple(shape), _DTYPES[dtype], wants) for shape, dtype, wants in kinds)
    return _place(description, structure, tensors, beside)


def _place(description: bytes, structure: Structure, tensors: tuple[TensorKind, ...], beside: bool) -> Layout:
    begin = _HEADER_BYTES + len(description)
    offsets, end = [], 0 if beside else begin
    for kind in tensors:
        end = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(end)
        end += kind.nbytes
    message, payload = (begin, end) if beside else (end, 0)
    return Layout(description, structure, tensors, tuple(offsets), message, payload)


def kind_of(tensor: Tensor, wants_gradient: bool) -> TensorKind:
    """Description of a tensor.

    Raises:
        TypeError: If it is of a kind that is not only elements in memory: sparse, quantized, on the meta device.
    """
    # Quantized ones have scales besides, which a message has no place for.
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of layout {tensor.layout} on {tensor.device} cannot be sent to another stage")
    return TensorKind(tuple(tensor.shape), tensor.dtype, wants_gradient)


def pack(stamp: Stamp, plan: Layout, tensors: Sequence[Tensor | None], buffer: Tensor) -> None:
    """Write a message.

    Args:
        stamp: What it belongs to.
        plan: Of `tensors`.
        tensors: Their elements are copied; None: left as it is in the buffer.
        buffer: uint8, of `plan.nbytes` or more.
    """
    write_header(stamp, plan, buffer)
    write_tensors(plan, tensors, buffer)


def write_header(stamp: Stamp, plan: Layout, buffer: Tensor, number: int = 0) -> None:
    """Write a message's own words.

    Args:
        stamp: What it belongs to.
        plan: Of its tensors.
        buffer: uint8, on the host.
        number: Of the tensors' own buffer among all that go from this rank to that one, from 1; 0: there is none.
    """
    _write(buffer, 0, _fixed(_DATA, stamp, plan.nbytes, len(plan.description), number) + plan.description)


def write_tensors(plan: Layout, tensors: Sequence[Tensor | None], buffer: Tensor) -> None:
    """Copy tensors to where the layout has them in a buffer; the host does not wait for a device."""
    for tensor, kind, offset in zip(tensors, plan.tensors, plan.offsets):
        if tensor is not None and kind.nbytes:
            # Pageable memory has been read when the call returns; pinned memory is read later, and may change by then.
            is_read_late = buffer.is_cuda and tensor.is_cpu and tensor.is_pinned()
            _view(buffer, kind, offset).copy_(tensor.detach(), non_blocking=not is_read_late)


def announce(stamp: Stamp, nbytes: int, buffer: Tensor) -> None:
    """Write into a buffer of the posted size that the message follows in one of `nbytes`."""
    _write(buffer, 0, _fixed(_ANNOUNCEMENT, stamp, nbytes, 0, 0))


class Header(NamedTuple):
    """A received message's own words."""

    stamp: Stamp
    announced: int | None
    """Bytes of the message that follows; None: this is one."""
    description: bytes
    number: int
    """Of the buffer that its tensors are in, see `write_header`."""


def read_header(buffer: Tensor) -> Header:
    """Description that a received message has of itself.

    Raises:
        ValueError: If these bytes are no message.
    """
    start = _read(buffer, 0, FIRST_BYTES)  # at once: each look at a tensor's bytes costs more than the bytes do
    magic, kind, run, program, micro_batch, sequence, nbytes, length, number = _FIXED.unpack_from(start)
    if magic != _MAGIC or kind not in (_DATA, _ANNOUNCEMENT):
        raise ValueError(f"what came is no message of a pipeline: it begins with {start[:8]!r}")
    stamp = Stamp(run, program, micro_batch, sequence)
    if kind == _ANNOUNCEMENT:
        return Header(stamp, nbytes, b"", 0)
    end = _HEADER_BYTES + length
    description = start[_HEADER_BYTES:end] if end <= len(start) else _read(buffer, _HEADER_BYTES, length)
    return Header(stamp, None, description, number)


def unpack(buffer: Tensor, plan: Layout) -> list[Tensor]:
    """The tensors of a received message: they lie in `buffer`, the message or their own, and keep it alive.

    Each has a version counter of its own, so that changing one in place does not make the others look changed.
    """
    return [_view(buffer, kind, offset) for kind, offset in zip(plan.tensors, plan.offsets)]


def _view(buffer: Tensor, kind: TensorKind, offset: int) -> Tensor:
    if not kind.nbytes:
        return torch.empty(kind.shape, dtype=kind.dtype, device=buffer.device)
    start = buffer.storage_offset() + offset
    assert start % kind.dtype.itemsize == 0
    strides, step = [], 1
    for size in reversed(kind.shape):
        strides.append(step)
        step *= size
    # By `set_` and not as a view of the buffer: all views have one version counter.
    whole = torch.empty(0, dtype=kind.dtype, device=buffer.device)
    return whole.set_(buffer.untyped_storage(), start // kind.dtype.itemsize, kind.shape, tuple(reversed(strides)))


def _fixed(kind: int, stamp: Stamp, nbytes: int, length: int, payload: int) -> bytes:
    words = _FIXED.pack(_MAGIC, kind, *(number & 0xFFFFFFFF for number in stamp), nbytes, length, payload)
    return words.ljust(_HEADER_BYTES, b"\0")


def _write(buffer: Tensor, offset: int, content: bytes) -> None:
    buffer.numpy()[offset : offset + len(content)] = np.frombuffer(content, np.uint8)


def _read(buffer: Tensor, offset: int, length: int) -> bytes:
    return bytes(buffer[offset : offset + length].numpy()) if length else b""


class Channel(NamedTuple):
    """A way from one rank to another one, with an order of its own.

    Attributes:
        source: Rank that sends, among the transport's ranks.
        target: Rank that receives.
        tag: Tells channels between the same two ranks apart; small.
    """

    source: int
    target: int
    tag: int
