"""Messages between stages: nested structures of tensors as one run of bytes, sent while the ranks compute.

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

Messages to higher ranks and to lower ones have a process group each: on gloo a connection carries one direction, so
that none waits until another one has gone by. Channels on one connection are told apart by tags. NCCL knows no tags and
keeps one order per communicator, so there every channel has a group of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.comm.store import own_store
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.runtime.torch_private import PrefixStore, default_store
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.watchdog.diagnosis import FailureBoard
from zero_strategy.watchdog.waits import Awaited, BoundedWaits, Group
from zero_strategy.watchdog.watchdog import Watchdog

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
    """The same structure around changed tensors."""
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
            number = numbers[id(value)] = len(tensors)
            tensors.append(value)
        return ["t", number]
    kind = type(value)
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
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


ALIGNMENT = 128
FIRST_BYTES = 1024
"""What a receiver posts on a channel that has carried nothing yet."""
_FIXED = struct.Struct("<4sBxxxIIIIQQQ")
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
        offsets: Where they begin.
        nbytes: Of the whole message.
    """

    description: bytes
    structure: Structure
    tensors: tuple[TensorKind, ...]
    offsets: tuple[int, ...]
    nbytes: int


def layout(structure: Structure, tensors: Sequence[TensorKind]) -> Layout:
    """A message for these tensors in this structure."""
    kinds = [[list(kind.shape), str(kind.dtype).removeprefix("torch."), kind.wants_gradient] for kind in tensors]
    description = json.dumps([structure, kinds], separators=(",", ":")).encode()
    return _place(description, structure, tuple(tensors))


def read_layout(description: bytes) -> Layout:
    """The layout of a message with this description."""
    structure, kinds = json.loads(description)
    tensors = tuple(TensorKind(tuple(shape), _DTYPES[dtype], wants) for shape, dtype, wants in kinds)
    return _place(description, structure, tensors)


def _place(description: bytes, structure: Structure, tensors: tuple[TensorKind, ...]) -> Layout:
    offsets, end = [], _HEADER_BYTES + len(description)
    for kind in tensors:
        end = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(end)
        end += kind.nbytes
    return Layout(description, structure, tensors, tuple(offsets), end)


def kind_of(tensor: Tensor, wants_gradient: bool) -> TensorKind:
    """Description of a tensor.

    Raises:
        TypeError: If it is of a kind that is not only elements in memory: sparse, quantized, on the meta device.
    """
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
    _write(buffer, 0, _fixed(_DATA, stamp, plan.nbytes, len(plan.description)) + plan.description)
    for tensor, kind, offset in zip(tensors, plan.tensors, plan.offsets):
        if tensor is not None and kind.nbytes:
            _view(buffer, kind, offset).copy_(tensor.detach())


def announce(stamp: Stamp, nbytes: int, buffer: Tensor) -> None:
    """Write into a buffer of the posted size that the message follows in one of `nbytes`."""
    _write(buffer, 0, _fixed(_ANNOUNCEMENT, stamp, nbytes, 0))


class Header(NamedTuple):
    """A received message's own words."""

    stamp: Stamp
    announced: int | None
    """Bytes of the message that follows; None: this is one."""
    description: bytes


def read_header(buffer: Tensor) -> Header:
    """Description that a received message has of itself.

    Raises:
        ValueError: If these bytes are no message.
    """
    start = _read(buffer, 0, FIRST_BYTES)  # at once: each look at a tensor's bytes costs more than the bytes do
    magic, kind, run, program, micro_batch, sequence, nbytes, length, _ = _FIXED.unpack_from(start)
    if magic != _MAGIC or kind not in (_DATA, _ANNOUNCEMENT):
        raise ValueError(f"what came is no message of a pipeline: it begins with {start[:8]!r}")
    stamp = Stamp(run, program, micro_batch, sequence)
    if kind == _ANNOUNCEMENT:
        return Header(stamp, nbytes, b"")
    end = _HEADER_BYTES + length
    return Header(stamp, None, start[_HEADER_BYTES:end] if end <= len(start) else _read(buffer, _HEADER_BYTES, length))


def unpack(buffer: Tensor, plan: Layout) -> list[Tensor]:
    """The tensors of a received message: they lie in `buffer`, and keep it alive.

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
    whole = torch.empty(0, dtype=kind.dtype, device=buffer.device)
    return whole.set_(buffer.untyped_storage(), start // kind.dtype.itemsize, kind.shape, tuple(reversed(strides)))


def _fixed(kind: int, stamp: Stamp, nbytes: int, length: int) -> bytes:
    words = _FIXED.pack(_MAGIC, kind, *(number & 0xFFFFFFFF for number in stamp), nbytes, length, 0)
    return words.ljust(_HEADER_BYTES, b"\0")


def _write(buffer: Tensor, offset: int, content: bytes) -> None:
    if buffer.is_cpu:
        buffer.numpy()[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        return
    words = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    buffer[offset : offset + len(content)].copy_(words)


def _read(buffer: Tensor, offset: int, length: int) -> bytes:
    return bytes(buffer[offset : offset + length].cpu().numpy()) if length else b""


_LARGE_BYTES = 1 << 20
"""Of a message that a thread posts: posting copies to the socket as much as it takes."""
_MOST_SMALL_BYTES = 32 << 20
"""Of small messages, until a thread lets go of those that have arrived."""
_LOOK_SECONDS = 0.0002
_BACKUP_SECONDS = 60.0
"""By which gloo's own time-out is longer than ours."""


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


class PointToPoint:
    """The transport between some ranks. Made, and made again after a failure, by all of them together.

    Args:
        ranks: World ranks that take part, in the order of their numbers here.
        channels: All that will be used, by any of them.
        device: Of the messages.
        timeout: Seconds that a wait may take.
        patience: Seconds of a wait in which the other rank must come to this rank's batch.
        name: Tells transports of these ranks apart where not all make them in one order; equal on all ranks.
        title: This rank in words, for errors.
        watchdog: Of the engine; its failure is one of this transport, too.

    Attributes:
        rank: This rank's number among `ranks`.
        counters: Messages and bytes sent, by kind.
        waits: How this rank waits.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        channels: Sequence[Channel],
        *,
        device: torch.device,
        timeout: float,
        patience: float,
        name: str,
        title: str,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.rank = self.ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        self.counters = CommunicationCounters()
        key = _unused_key(f"pipeline/{name}/{'-'.join(map(str, self.ranks))}", self.rank, len(self.ranks))
        self._groups = _make_groups(self.ranks, channels, device, timeout + _BACKUP_SECONDS, key)
        board = FailureBoard(own_store(len(self.ranks)), key)
        groups = list(dict.fromkeys(self._groups.values()))
        self.waits = BoundedWaits(self.ranks[self.rank], title, groups, board, timeout, patience, watchdog)
        end = self.waits.break_connections
        self._senders = {group: _DeviceSender() if group.on_device else _Sender(end) for group in groups}
        weakref.finalize(self, self.waits.stop)

    def post(self, buffer: Tensor, channel: Channel) -> Any:
        """Receive into a buffer what is sent next on a channel.

        Args:
            buffer: uint8; exactly as long as the message.

        Returns:
            To be given to `wait`.
        """
        with self.waits.watching(self._awaited("a message", channel.source)):
            return self._groups[channel].receive(buffer, channel.source, channel.tag)

    def send(self, buffer: Tensor, channel: Channel, kind: str, done: Callable[[], None]) -> None:
        """Send a buffer.

        Args:
            buffer: uint8; unchanged until `done` is called.
            channel: From this rank.
            kind: Under which it is counted.
            done: Called, maybe in a thread, when the buffer is free.
        """
        self.counters.add(kind, buffer.numel(), 1)
        group = self._groups[channel]

        def post() -> Any:
            return group.send(buffer, channel.target, channel.tag)

        with self.waits.watching(self._awaited("room for a message", channel.target)):
            self._senders[group].send(post, buffer.numel(), done)

    def wait(self, work: Any, what: str, peer: str, channel: Channel) -> None:
        """Wait for what `post` has returned.

        Raises:
            RankFailedError: If it cannot come; names `peer` and `what`, or what has failed elsewhere.
        """
        self.waits.wait(work, Awaited(what, peer, self.ranks[channel.source]))

    def finish_sends(self) -> None:
        """Wait until everything is sent."""
        for sender in self._senders.values():
            with self.waits.watching(Awaited("its messages to arrive", "a neighbour", self.ranks[self.rank])):
                sender.finish()

    def close(self) -> None:
        """End all connections."""
        self.waits.stop()
        self.waits.break_connections()

    def _awaited(self, what: str, rank: int) -> Awaited:
        return Awaited(what, f"rank {self.ranks[rank]}", self.ranks[rank])


class _Sender:
    """Posts messages in their order. Small ones are looked after at the end; for others a thread notices their end."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._poster, self._reaper = BackgroundWorker(interrupt=interrupt), BackgroundWorker(interrupt=interrupt)
        self._posting: Future[None] | None = None
        self._under_way: deque[Future[None]] = deque()
        self._small: list[tuple[Any, Callable[[], None]]] = []
        self._small_bytes = 0

    def send(self, post: Callable[[], Any], nbytes: int, done: Callable[[], None]) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        if nbytes < _LARGE_BYTES and (self._posting is None or self._posting.done()):
            self._small.append((post(), done))
            self._small_bytes += nbytes
            if self._small_bytes > _MOST_SMALL_BYTES:
                self._reap(self._small)
                self._small, self._small_bytes = [], 0
            return
        posted: list[tuple[Any, Callable[[], None]]] = []
        self._posting = self._poster.submit(lambda: posted.append((post(), done)))
        self._reap(posted, self._posting)

    def finish(self) -> None:
        for work, done in self._small:
            work.wait()
            done()
        self._small, self._small_bytes = [], 0
        while self._under_way:
            self._under_way.popleft().result()

    def _reap(self, posted: list[tuple[Any, Callable[[], None]]], after: Future[None] | None = None) -> None:
        def reap() -> None:
            if after is not None:
                after.result()
            while posted:
                work, done = posted.pop(0)
                work.wait()
                done()

        self._under_way.append(self._reaper.submit(reap))


class _DeviceSender(_Sender):
    """Posting takes no time, and a wait would hold the stream: messages are looked after now and then instead."""

    def __init__(self) -> None:
        self._posted: deque[tuple[Any, Callable[[], None]]] = deque()

    def send(self, post: Callable[[], Any], nbytes: int, done: Callable[[], None]) -> None:
        self._posted.append((post(), done))
        self._look()

    def finish(self) -> None:
        while self._posted:
            self._look()
            time.sleep(_LOOK_SECONDS if self._posted else 0)

    def _look(self) -> None:
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()[1]()


def _unused_key(name: str, rank: int, size: int) -> str:
    """A name in the store that no transport of these ranks has had before: each rank counts its own."""
    if size == 1:
        return name
    store: Any = default_store()
    return f"{name}/{store.add(f'zero_strategy/{name}/made/{rank}', 1)}"


def _make_groups(
    ranks: list[int], channels: Sequence[Channel], device: torch.device, seconds: float, key: str
) -> dict[Channel, Group]:
    """By channel, what carries it; only channels of this rank.

    They are made by their classes: `new_group` may give a group the name that a broken one of the same ranks had, and
    would find that one's addresses in the store.
    """
    if len(ranks) == 1:
        return {}
    local, timeout = ranks.index(dist.get_rank()), timedelta(seconds=seconds)
    store: Any = default_store()

    def place(name: str) -> PrefixStore:
        return PrefixStore(f"zero_strategy/{key}/{name}", store)

    if device.type == "cpu":
        down, up = (
            Group(dist.ProcessGroupGloo(place(way), local, len(ranks), timeout), list(range(len(ranks))))
            for way in ("down", "up")
        )
        return {channel: down if channel.source < channel.target else up for channel in channels}
    found = {}
    for channel in channels:
        pair = sorted(channel[:2])
        if local in pair:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(place("-".join(map(str, channel))), pair.index(local), 2, options)
            found[channel] = Group(backend, pair)
    return found
