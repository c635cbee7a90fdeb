"""The two ends of a channel between stages, and the errors that stop all ranks.

The receiver has one message posted, of the size that the channel carried last: as soon as the one before is over. A
longer one is announced in a message of that size; a shorter one is sent in it, until it is less than half as long,
which is what the next ones are then expected to be. Both ends follow from what has gone over the channel, so they agree
without talking about it.

With tensors of a device, the message is a header on the host, and the tensors follow from device to device. The
receiver takes the header when the schedule comes to the receive, and begins to receive exactly its tensors, beside what
the device computes then. So the host waits there for the sender's host, which need not have computed anything; that no
schedule waits for ever so is what `lowering.check` proves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_strategy.pipeline.messages import (
    FIRST_BYTES,
    Channel,
    Header,
    Layout,
    Stamp,
    Structure,
    TensorKind,
    announce,
    layout,
    read_header,
    read_layout,
    unpack,
    write_header,
    write_tensors,
)
from zero_strategy.pipeline.point_to_point import PointToPoint
from zero_strategy.watchdog.diagnosis import DesyncError, Failure


class PipelineError(DesyncError):
    """A stage has failed, is gone, does not come or is out of step; the message names it and the cause."""


class OutOfStepError(PipelineError):
    """A stage runs something else than its neighbour."""


class DataEndedError(StopIteration):
    """The data iterator ended before the last micro-batch of a batch.

    Attributes:
        stage: Global stage that was loading.
        micro_batch: That it did not get.
        needed: Micro-batches of the batch.
    """

    def __init__(self, message: str, stage: int, micro_batch: int, needed: int) -> None:
        super().__init__(message)
        self.stage, self.micro_batch, self.needed = stage, micro_batch, needed


def failure_of(error: BaseException, rank: int, where: str, more: str = "") -> Failure:
    """Message to the other ranks about an error.

    Args:
        error: Raised here.
        rank: This one, in the world.
        where: The stage and what it was doing.
        more: What else there is to say.
    """
    if isinstance(error, DataEndedError):
        details: dict[str, Any] = {"stage": error.stage, "micro_batch": error.micro_batch, "needed": error.needed}
        return Failure("data", rank, str(error), details)
    if isinstance(error, OutOfStepError):
        return Failure("step", rank, str(error), {})
    # Told on as it is: posted as this rank's own it would hide the rank that caused it.
    if isinstance(error, DesyncError) and error.failure is not None:
        return error.failure
    return Failure("raised", rank, f"{where}: {type(error).__name__}: {error}{more}", {})


def error_of(failure: Failure) -> Exception:
    """Error that is raised on the other ranks."""
    if failure.kind == "data":
        return DataEndedError(failure.text, **failure.details)
    return (OutOfStepError if failure.kind == "step" else PipelineError)(failure.text, failure)


# One may still be on its way while the next one is written.
_SPARE_BUFFERS = 2


def _next_size(posted: int, nbytes: int) -> int:
    """Bytes that the next message will be received in, after one of `nbytes` in `posted`."""
    # Not smaller after each shorter message: the next longer one would have to be announced.
    return max(nbytes, FIRST_BYTES) if 2 * nbytes < posted else posted


class Outlet:
    """The sending end.

    Args:
        transport: What carries the messages.
        channel: From this rank.
        kind: Under which bytes are counted: "activation" or "gradient".
        device: Of the tensors.
        beside: They go from device to device, beside their messages.
    """

    def __init__(
        self, transport: PointToPoint, channel: Channel, kind: str, device: torch.device, beside: bool = False
    ) -> None:
        self._transport, self._channel, self._kind, self._device = transport, channel, kind, device
        self._beside = beside
        self._size = FIRST_BYTES
        self._layout: Layout | None = None
        self._text = ""
        """The structure in it."""
        self._spare: deque[Tensor] = deque()
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        """Tensors that are sent from the device, with what it may have to wait for."""

    def send(
        self, stamp: Stamp, structure: Structure, kinds: Sequence[TensorKind], tensors: Sequence[Tensor | None]
    ) -> None:
        """Send tensors in a structure; they may be changed or let go of afterwards."""
        plan = self._layout
        # As texts: True equals 1, and -0.0 equals 0.0, but a stage may treat them differently.
        text = repr(structure)
        if plan is None or plan.tensors != tuple(kinds) or self._text != text:
            plan, self._text = layout(structure, kinds, self._beside), text
            self._layout = plan
        if plan.nbytes > self._size:
            # Of the size that the receiver has posted, in which the message itself does not fit.
            notice = self._buffer(self._size)
            announce(stamp, plan.nbytes, notice)
            self._post(notice, "control")
            self._size = plan.nbytes
        buffer = self._buffer(self._size)
        if plan.payload_bytes:
            # The header leaves first: the receiver posts the transfer by it while the tensors are being copied here.
            write_header(stamp, plan, buffer, self._transport.payload_number(self._channel))
            self._post(buffer, "control")  # the tensors' bytes are counted with the payload
            self._send_payload(plan, tensors)
        else:
            write_header(stamp, plan, buffer)
            if not self._beside:
                write_tensors(plan, tensors, buffer)
            self._post(buffer, self._kind)
        # The receiver computes the same when it has read this message.
        self._size = _next_size(self._size, plan.nbytes)

    def _send_payload(self, plan: Layout, tensors: Sequence[Tensor | None]) -> None:
        payload = self._payload_buffer(plan.payload_bytes)
        write_tensors(plan, tensors, payload)
        # The transfer reads the memory later: it is kept until `_payload_buffer` lets the device wait for that.
        self._leaving.append((self._transport.send_payload(payload, self._channel, self._kind), payload))

    def _payload_buffer(self, nbytes: int) -> Tensor:
        """Memory of the device; of at most so many messages, however far the host is ahead of the devices."""
        if len(self._leaving) == _SPARE_BUFFERS:
            work, payload = self._leaving.popleft()
            work.wait()  # what the device does next with this memory comes after it has left
            if payload.numel() == nbytes:
                return payload
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _post(self, buffer: Tensor, kind: str) -> None:
        # Free only when it has left: until then gloo reads from it.
        self._transport.send(buffer, self._channel, kind, partial(self._keep, buffer))

    def _keep(self, buffer: Tensor) -> None:
        # Maybe in a thread, while `_buffer` takes some away: append and popleft of a deque are atomic.
        if len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(buffer)

    def _buffer(self, size: int) -> Tensor:
        while self._spare:
            buffer = self._spare.popleft()
            if buffer.numel() == size:
                return buffer
        return torch.empty(size, dtype=torch.uint8)


class _Arrival(NamedTuple):
    """A message that has come.

    Attributes:
        header: Its own words.
        plan: Of its tensors.
        buffer: That they are in.
        work: What the device waits for before it uses them; None: they are there.
    """

    header: Header
    plan: Layout
    buffer: Tensor
    work: Any = None


class _Reading:
    """A message on its way. Its header is read inside of the wait, which also watches a transport that holds nobody."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer
        self.header: Header | None = None

    def wait(self) -> None:
        self._work.wait()
        # Not after the wait: of broken connections the bytes are anybody's, and the wait explains that error, too.
        self.header = read_header(self._buffer)


class Inlet:
    """The receiving end.

    Args:
        transport: What carries the messages.
        channel: To this rank.
        what: Is received: "activation" or "gradient".
        peer: Who sends it, in words.
        own: This stage, in words.
        device: Of the tensors.
        ahead: Post each receive when the one before it is over; else when the schedule comes to it.
        beside: Tensors come from device to device, beside their messages.
    """

    def __init__(
        self,
        transport: PointToPoint,
        channel: Channel,
        what: str,
        peer: str,
        own: str,
        device: torch.device,
        ahead: bool = True,
        beside: bool = False,
    ) -> None:
        self._transport, self._channel, self._device, self._ahead = transport, channel, device, ahead
        self._what, self._peer, self._own, self._beside = what, peer, own, beside
        self._size = FIRST_BYTES
        self._expected = 0
        self._posted: tuple[Tensor, Any] | None = None
        self._stamp: Stamp | None = None
        self._arrived: deque[_Arrival] = deque()
        self._layout: Layout | None = None

    def expect(self, count: int) -> None:
        """So many messages will come in this run; the first is received from now on, if receives are posted ahead."""
        assert self._posted is None and not self._arrived
        self._expected = count
        if self._ahead:
            self._post_next()

    def come_to(self, stamp: Stamp) -> None:
        """The schedule has come to a receive; the one before it must be over by now, if the sender follows it, too.

        Args:
            stamp: What the message must belong to.
        """
        if not self._ahead:
            # The sizes on a channel follow from one message to the next, so that one receive is posted at a time.
            if self._posted is not None:
                assert self._stamp is not None
                self._arrived.append(self._receive(self._stamp))
            self._stamp = stamp
            self._post_next()
        if self._beside:
            # Now, not in `take`: the transfer then runs beside what the device computes before it.
            self._arrived.append(self._receive(stamp))

    def take(self, stamp: Stamp) -> tuple[Layout, list[Tensor]]:
        """Wait for the next message; for tensors of a device, it is the device that waits.

        Args:
            stamp: What it must belong to.

        Returns:
            Its layout and its tensors.

        Raises:
            RankFailedError: If it cannot come.
            OutOfStepError: If it belongs to something else.
        """
        arrival = self._arrived.popleft() if self._arrived else self._receive(stamp)
        self._check(arrival.header.stamp, stamp)
        if arrival.work is not None:
            self._wait(arrival.work, stamp)
        return arrival.plan, unpack(arrival.buffer, arrival.plan)

    def _receive(self, stamp: Stamp) -> _Arrival:
        assert self._posted is not None
        buffer, work = self._posted
        self._posted = None
        header = self._read(work, buffer, stamp)
        if header.announced is not None:
            # Before memory is taken for it: a rank out of step may announce any size.
            self._check(header.stamp, stamp)
            self._size = header.announced
            buffer = torch.empty(self._size, dtype=torch.uint8)
            header = self._read(self._transport.post(buffer, self._channel), buffer, stamp)
        plan = self._layout
        if plan is None or plan.description != header.description:
            plan = self._layout = read_layout(header.description, self._beside)
        # Before the next receive is posted, which needs the size that the sender uses from now on.
        self._size = _next_size(self._size, plan.nbytes)
        if self._ahead:
            self._post_next()
        return self._receive_payload(header, plan, stamp) if self._beside else _Arrival(header, plan, buffer)

    def _receive_payload(self, header: Header, plan: Layout, stamp: Stamp) -> _Arrival:
        """Begin to receive the tensors that a header tells of."""
        # Before the transfer begins: the device would take the bytes of any message.
        self._check(header.stamp, stamp)
        payload = torch.empty(plan.payload_bytes, dtype=torch.uint8, device=self._device)
        if not plan.payload_bytes:
            return _Arrival(header, plan, payload)  # no transfer follows, and the sender has counted none
        number = self._transport.payload_number(self._channel)
        if header.number != number:
            raise OutOfStepError(
                f"{self._peer} sends its messages to {self._own} in another order than these are received in: the "
                f"{self._what} of micro-batch {stamp.micro_batch} is its number {header.number}, and here {number}; "
                "on a GPU the messages between two ranks have one order (zero_strategy.pipeline.check)"
            )
        work = self._transport.post_payload(payload, self._channel, f"the tensors of {self._named(stamp)}", self._peer)
        return _Arrival(header, plan, payload, work)

    def _post_next(self) -> None:
        self._posted = None
        if self._expected:
            self._expected -= 1
            # A new one each time: the tensors of the message before lie in theirs, maybe until a backward.
            buffer = torch.empty(self._size, dtype=torch.uint8)
            self._posted = buffer, self._transport.post(buffer, self._channel)

    def _read(self, work: Any, buffer: Tensor, stamp: Stamp) -> Header:
        reading = _Reading(work, buffer)
        self._wait(reading, stamp)
        assert reading.header is not None
        return reading.header

    def _wait(self, work: Any, stamp: Stamp) -> None:
        self._transport.wait(work, self._named(stamp), self._peer, self._channel)

    def _named(self, stamp: Stamp) -> str:
        return f"the {self._what} of micro-batch {stamp.micro_batch}"

    def _check(self, found: Stamp, expected: Stamp) -> None:
        if found == expected:
            return
        # The widest difference is named: where batch or program differ, micro-batches differ by that alone.
        if found.run != expected.run:
            differs = f"is in its batch number {found.run} of this pipeline, {self._own} in number {expected.run}"
        elif found.program != expected.program:
            differs = f"runs another schedule or number of micro-batches than {self._own}, or evaluates while it trains"
        else:
            differs = (
                f"sent the {self._what} of micro-batch {found.micro_batch} as its message {found.sequence} where "
                f"{self._own} takes that of micro-batch {expected.micro_batch} as message {expected.sequence}"
            )
        raise OutOfStepError(f"{self._peer} is out of step: it {differs}; all ranks must make the same calls")
