"""Exchange of large tensors between ranks of one host through shared memory, and the pipes that signal it.

Each rank has a pipe, into which the others write. Telling costs one system call, and waiting two: less than a hundredth
of a millisecond, and no other thread has to run for it, where a message of gloo's passes through a thread on either
side. Each record is written in one piece (far below PIPE_BUF), so that several ranks can write into one pipe. A rank
whose process ends is noticed at once, by a descriptor of its process; whoever aborts tells the others and itself.

The pipes have no names: a rank opens another one's through /proc, as it does the memory that they share.

    round k, every rank:   copy what goes out into slot k % 2 of its own memory
                           tell each peer "k is there", wait for the same from each peer
                           copy what comes in from slot k % 2 of each peer's memory

Two slots are enough: a rank that overwrites slot k % 2 in round k + 2 has heard "k + 1" from every peer, who said so
after it had read round k. The memory is anonymous (memfd): it has no name, no limit but that of memory, and is gone
with its process, however that ends. Whether peers can open it is tried once; where one cannot, nobody does, and the
rank that could not says once why, for exchanges by gloo give the same bits and take longer.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import struct
import sys
import time
import warnings
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero_strategy.watchdog.flight_recorder import TransportError
from zero_strategy.watchdog.peers import host as _host

_CARD_BYTES = 256


class Message(Protocol):
    """A message to a peer, wherever its values lie."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """Copy bytes [start, stop) to a tensor of as many uint8; multiples of 64, but for the message's end."""


class TensorMessage:
    """A contiguous tensor.

    Args:
        tensor: It.
        nbytes: Of the message, of which the rest is not written; default: the tensor's.
    """

    def __init__(self, tensor: Tensor, nbytes: int | None = None) -> None:
        self._bytes = tensor.view(-1).view(torch.uint8)
        self.nbytes = tensor.nbytes if nbytes is None else nbytes

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """See `Message`."""
        values = self._bytes[start:stop]
        target[: values.numel()].copy_(values)


class Scattered:
    """A flat buffer whose values lie elsewhere: what is sent is copied once, not into a whole buffer before.

    Flat tensors stand for parts of it; what none covers is zero.

    Args:
        numel: Elements of the whole.
        parts: First element and values of each, in order; contiguous, of one dtype. Nobody may change them.
        like: A tensor of that dtype and device, should there be no part.
    """

    def __init__(self, numel: int, parts: Iterable[tuple[int, Tensor]], like: Tensor) -> None:
        self.numel, self.dtype, self.device = numel, like.dtype, like.device
        self._starts, self._parts = list[int](), list[Tensor | None]()
        end = 0
        for start, values in parts:
            assert start >= end and values.dim() == 1 and values.is_contiguous() and values.dtype == self.dtype
            if start > end:
                self._add(end, None)
            if values.numel():
                self._add(start, values)
            end = max(end, start + values.numel())
        assert end <= numel
        if end < numel:
            self._add(end, None)
        self._starts.append(numel)

    def _add(self, start: int, values: Tensor | None) -> None:
        self._starts.append(start)
        self._parts.append(values)

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Elements [start, stop): of each part of them where it begins and ends, and its values; None: zeros."""
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            begin, values = self._starts[number], self._parts[number]
            end = min(stop, self._starts[number + 1])
            yield start, end, None if values is None else values[start - begin : end - begin]
            start, number = end, number + 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.dtype.itemsize

    def slice(self, start: int, stop: int) -> ScatteredSlice:
        """Elements [start, stop) as a message."""
        return ScatteredSlice(self, start, stop)


class ScatteredSlice:
    """A part of a scattered buffer that is sent."""

    def __init__(self, source: Scattered, start: int, stop: int) -> None:
        self._source, self._start = source, start
        self.nbytes = (stop - start) * source.dtype.itemsize

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Parts of the buffer in a slice, as `Scattered.between` gives them, counted from the slice's first element."""
        for low, high, values in self._source.between(self._start + start, self._start + stop):
            yield low - self._start, high - self._start, values

    def write(self, start: int, stop: int, target: Tensor) -> None:
        """Copy bytes [start, stop) of the slice; whole elements."""
        size = self._source.dtype.itemsize
        into, first = target.view(self._source.dtype), start // size
        for low, high, values in self.parts(first, stop // size):
            place = into[low - first : high - first]
            if values is None:
                place.zero_()
            else:
                place.copy_(values)


def encode_card(text: str) -> Tensor:
    """A short text as bytes of a fixed length."""
    encoded = text.encode()
    assert len(encoded) <= _CARD_BYTES
    # Not of `bytes`: torch warns of memory that cannot be written to.
    return torch.frombuffer(bytearray(encoded.ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8)


def decode_card(card: Tensor) -> str:
    """The inverse."""
    return bytes(card.tolist()).rstrip(b"\0").decode()


_RECORD = struct.Struct("<iqq")
"""Who tells; two numbers."""
_ABORTED = -1
"""In place of the first number: this rank has broken off."""


class MeetingPipes:
    """This rank's pipe, and those of its peers.

    Args:
        rank: In the group.
        timeout: Seconds that a wait may take.

    Raises:
        OSError: If this system gives no pipe.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        # Reads come back with what is there: waiting is for `poll`, which also hears of processes that end. This rank
        # has its own writing end open, too, so that `abort` of another thread can wake it.
        self._own, self._own_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptors = [self._own, self._own_end]
        self._ends: dict[int, int] = {}
        self._processes: dict[int, int] = {}
        self._ended = set[int]()
        self._told: dict[int, deque[tuple[int, int]]] = {}
        self._poll = select.poll()
        self._poll.register(self._own, select.POLLIN)
        self._broken: TransportError | None = None
        # The list grows as descriptors are opened: what a `connect` that fails has opened is closed as well.
        weakref.finalize(self, _close, self._descriptors)

    @property
    def number(self) -> int:
        """Descriptor of the end that peers open."""
        return self._own_end

    def connect(self, peer: int, pid: int, number: int) -> None:
        """Open a peer's pipe.

        Raises:
            OSError: If that cannot be done here.
        """
        # For reading, too: a write to a rank that has ended shall be no signal (SIGPIPE), which may be deadly.
        end = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        self._descriptors.append(end)
        process = os.pidfd_open(pid)
        self._descriptors.append(process)
        self._ends[peer], self._processes[process], self._told[peer] = end, peer, deque()
        self._poll.register(process, select.POLLIN)

    def wait_for_all(self, number: int, value: int) -> dict[int, tuple[int, int]]:
        """Tell every peer two numbers, and wait for theirs; what each told, in the order of its telling.

        Args:
            number: Not negative.
            value: Of 64 bits.

        Raises:
            TransportError: If a peer's process has ended, some rank has aborted, or the time is over.
        """
        self._check()
        record = _RECORD.pack(self._rank, number, value)
        for end in self._ends.values():
            os.write(end, record)
        deadline = 0.0
        while missing := [peer for peer, told in self._told.items() if not told]:
            if not self._read():
                # The clock is read only if somebody has not come yet: mostly all are there.
                deadline = deadline or time.monotonic() + self._timeout
                self._await(missing, deadline)
        return {peer: told.popleft() for peer, told in self._told.items()}

    def abort(self) -> None:
        """End every wait, here and of peers for this rank; from any thread."""
        record = _RECORD.pack(self._rank, _ABORTED, 0)
        for end in (self._own_end, *self._ends.values()):
            os.write(end, record)

    def _read(self) -> bool:
        """Take what has come; returns whether anything had."""
        try:
            # A multiple of the record: each was written in one piece, so none is cut.
            data = os.read(self._own, 64 * _RECORD.size)
        except BlockingIOError:
            return False
        for peer, number, value in _RECORD.iter_unpack(data):
            if number == _ABORTED:
                whose = "this rank has" if peer == self._rank else f"rank {peer} of the group has"
                self._broken = TransportError(f"{whose} broken off")
            else:
                self._told[peer].append((number, value))
        self._check()
        return True

    def _await(self, missing: list[int], deadline: float) -> None:
        """Wait until something has come; nothing had just now."""
        gone = [peer for peer in missing if peer in self._ended]
        if gone:  # all that it told has been read
            self._broken = TransportError(f"the process of rank {gone[0]} of the group has ended")
            self._check()
        left = deadline - time.monotonic()
        ready = {descriptor for descriptor, _ in self._poll.poll(max(left, 0.0) * 1e3)}
        for process in ready - {self._own}:
            # A process that has ended stays ready: every `poll` from now on would return at once.
            self._poll.unregister(process)
            self._ended.add(self._processes.pop(process))
        if not ready:
            self._broken = TransportError(f"rank {missing[0]} of the group did not come within {self._timeout:g} s")
            self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise TransportError(str(self._broken))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


VARIABLE = "ZERO_STRATEGY_SHARED_MEMORY"
"""Set to 0, exchanges go through gloo alone."""
SLOT_BYTES = 1 << 20
"""Two of each rank are resident in every rank of the group; larger ones are no faster."""
LEAST_BYTES = 64 << 10
"""Of a message to one peer; smaller ones, which are few in a step, go by gloo."""
_HEADER = 4096  # a page, for the token, so that the slots begin at pages
_NBYTES = _HEADER + 2 * SLOT_BYTES
"""Of each rank's memory."""
_WAYS_OUT = {
    errno.EFBIG: "raise the largest size of a file (ulimit -f), which counts for such memory, too",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENFILE: "raise the number of open files of the system (fs.file-max)",
    errno.ENOMEM: "raise the limit of the process's memory (ulimit -v, or the container's)",
    errno.ENOSPC: "raise the limit of the container's memory",
    errno.ENOSYS: "allow memfd_create and pidfd_open (Linux 5.3, or the container's seccomp profile)",
    errno.EACCES: "run the ranks as one user, and where they may look at each other in /proc",
    errno.EPERM: "run the ranks as one user, and where they may look at each other in /proc",
    errno.ENOENT: "run the ranks of a host in one container, with /proc",
}

Exchange = Callable[[list[Tensor], list[Tensor]], None]
"""Sends outgoing[r] to each other rank r while incoming[r] arrives from it."""


class Round(NamedTuple):
    """A part of every message.

    Attributes:
        start, stop: Its bytes of each message.
        parts: What came from each peer: uint8.
        spare: As many bytes for whoever needs them until the next round.
    """

    start: int
    stop: int
    parts: dict[int, Tensor]
    spare: Tensor


class SharedMemoryExchange:
    """This rank's memory and its views of the peers'. Made by all ranks together.

    Args:
        rank: In the group.
        size: Of the group.
        plain: Moves small tensors, to find out whether there is such memory.
        timeout: Seconds that a rank may be waited for.

    Attributes:
        available: Whether all ranks can read each other's memory.
    """

    def __init__(self, rank: int, size: int, plain: Exchange, timeout: float) -> None:
        self._rank, self._size, self._round = rank, size, 0
        self._used = 0
        self._memory: dict[int, mmap.mmap] = {}
        self._pipes: MeetingPipes | None = None
        local, refused = None, ""
        # A rank without memory takes part in both exchanges all the same, with an empty card: they take all ranks.
        cards = [encode_card("") for _ in range(size)]
        if _is_wanted():
            try:
                local = _create()
                self._pipes = MeetingPipes(rank, timeout)
            except OSError as error:
                refused = _refused("its own", error)
            else:
                descriptor, self._memory[rank], token = local
                cards[rank] = encode_card(f"{_host()} {os.getpid()} {self._pipes.number} {descriptor} {token}")
        plain([cards[rank]] * size, cards)
        opened = self._pipes is not None
        for peer in (peer for peer in range(size) if peer != rank):
            try:
                # Nothing more is opened after the first failure: then nobody uses any of it.
                opened = opened and self._open(peer, decode_card(cards[peer]))
            except OSError as error:
                opened, refused = False, _refused(f"that of rank {peer}", error)
        flags = [torch.tensor([int(opened)]) for _ in range(size)]
        plain([flags[rank]] * size, flags)
        self.available = all(map(bool, flags))
        if local is not None:
            # Peers open the memory through this descriptor. Now all have: the exchange of flags was a meeting as well.
            os.close(local[0])
        if not self.available:
            self._memory.clear()
            self._pipes = None
        if refused:
            warnings.warn(f"rank {rank} of {size}: {refused}", RuntimeWarning, stacklevel=2)

    def _open(self, peer: int, card: str) -> bool:
        """Open a peer's memory and pipe; False if it is on another host, has none, or the numbers are another one's.

        Raises:
            OSError: If this process may not, or cannot.
        """
        memory = _open(card)
        if memory is None or self._pipes is None:
            return False
        self._memory[peer] = memory
        _, pid, pipe, _, _ = card.rsplit(" ", 4)
        self._pipes.connect(peer, int(pid), int(pipe))
        return True

    def abort(self) -> None:
        """End this rank's waits, and those of others for it; from any thread."""
        if self._pipes is not None:
            self._pipes.abort()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's memory that have been used; the rest takes no memory."""
        return 2 * self._used

    def rounds(self, outgoing: Sequence[Message]) -> Iterator[Round]:
        """Sends outgoing[r] to each other rank r, a part of it in each round.

        Args:
            outgoing: All of the same bytes, on all ranks.

        Yields:
            What came, to be read before the next round.
        """
        peers = [peer for peer in range(self._size) if peer != self._rank]
        # One message for all peers, as in a gather, is written once; the slot then holds a larger part of it.
        alike = all(outgoing[peer] is outgoing[peers[0]] for peer in peers)
        sent = [outgoing[peer] for peer in (peers[:1] if alike else peers)]
        step, total = step_bytes(len(sent)), sent[0].nbytes
        for start in range(0, total, step):
            stop = min(start + step, total)
            slot, size = _slot(self._round), stop - start
            spare = self._view(self._rank, _slot(self._round + 1), size)  # nobody reads the last round's any more
            for part, message in enumerate(sent):
                message.write(start, stop, self._view(self._rank, slot + part * step, size))
            self._used = max(self._used, size * len(sent))
            self._meet(size)
            # A peer's parts are in the order of its own peers.
            mine = {peer: 0 if alike else self._rank - (peer < self._rank) for peer in peers}
            parts = {peer: self._view(peer, slot + mine[peer] * step, size) for peer in peers}
            yield Round(start, stop, parts, spare)

    def __call__(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], most: int) -> None:
        """Sends outgoing[r] to each other rank r while incoming[r] arrives from it; `most` bytes at most, on all."""
        # One object for each tensor: `rounds` tells by identity that all peers get the same.
        messages = {id(tensor): TensorMessage(tensor, most) for tensor in outgoing}
        for one in self.rounds([messages[id(tensor)] for tensor in outgoing]):
            for peer, part in one.parts.items():
                wanted = incoming[peer].view(-1).view(torch.uint8)[one.start : one.stop]
                wanted.copy_(part[: wanted.numel()])

    def _view(self, rank: int, offset: int, nbytes: int) -> Tensor:
        return torch.frombuffer(self._memory[rank], dtype=torch.uint8, offset=offset, count=nbytes)

    def _meet(self, nbytes: int) -> None:
        """Everybody has written this round's bytes."""
        assert self._pipes is not None
        mine = self._round, nbytes
        for peer, theirs in self._pipes.wait_for_all(*mine).items():
            if theirs != mine:
                raise RuntimeError(
                    f"rank {self._rank} of the group is at exchange {mine[0]} of {mine[1]} bytes, rank {peer} at "
                    f"exchange {theirs[0]} of {theirs[1]} bytes: they do not run the same program"
                )
        self._round += 1


def _slot(number: int) -> int:
    return _HEADER + number % 2 * SLOT_BYTES


def step_bytes(parts: int) -> int:
    """Most bytes of each message in a round, where so many different ones go out."""
    return SLOT_BYTES // parts // 64 * 64  # 64: a multiple of every element's size, so that no part cuts one


def used_bytes(message: int, parts: int) -> int:
    """Bytes of a rank's memory that exchanges of so many messages of this size take."""
    return 2 * min(message, step_bytes(parts)) * parts if message >= LEAST_BYTES else 0


def _is_wanted() -> bool:
    """True if this system has such memory and nobody has switched it off."""
    off = os.environ.get(VARIABLE, "1").lower() in ("0", "false", "no", "off")
    return sys.platform.startswith("linux") and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open") and not off


def _refused(whose: str, error: OSError) -> str:
    """Says what memory there is not, why, what follows from it, and the way out."""
    way = _WAYS_OUT.get(error.errno or 0, "mend that")
    return (
        f"no shared memory for exchanges with ranks of this host: {whose}, {_NBYTES} bytes of anonymous memory "
        f"(memfd, not /dev/shm), cannot be had: {error}. They go by gloo, which is slower. To have it, {way}; "
        f"{VARIABLE}=0 does without, and without this warning"
    )


def _create() -> tuple[int, mmap.mmap, str]:
    """Descriptor, new memory and the token in it.

    Raises:
        OSError: If there is none.
    """
    descriptor = os.memfd_create("zero_strategy exchange")
    try:
        os.ftruncate(descriptor, _NBYTES)
        memory = mmap.mmap(descriptor, _NBYTES)
    except BaseException:
        os.close(descriptor)
        raise
    token = secrets.token_hex(16)
    memory[: len(token)] = token.encode()
    return descriptor, memory, token


def _open(card: str) -> mmap.mmap | None:
    """A peer's memory; None if it is on another host, or has none, or another one is under the same numbers.

    Raises:
        OSError: If it is on this host and out of reach.
    """
    try:
        host, pid, _, number, token = card.rsplit(" ", 4)
    except ValueError:
        return None
    if host != _host():
        return None
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != _NBYTES:
            return None
        memory = mmap.mmap(descriptor, _NBYTES)
    finally:
        os.close(descriptor)
    return memory if memory[: len(token)] == token.encode() else None
