"""The two ends of a channel between stages: what is sent, and what has been posted to receive it.

The receiver has one message posted, of the size that the channel carried last: as soon as the one before is over; with
NCCL, whose receives occupy the device while they wait, when the schedule comes to it. A longer one is announced in
a message of that size; a shorter one is sent in it, until it is less than half as long, which is what the next ones are
then expected to be. Both ends follow from what has gone over the channel, so they agree without talking about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_strategy.distributed.point_to_point import Channel, PointToPoint
from zero_strategy.pipeline.errors import OutOfStepError
from zero_strategy.pipeline.messages import (
    FIRST_BYTES,
    Header,
    Layout,
    Stamp,
    TensorKind,
    announce,
    layout,
    pack,
    read_header,
    read_layout,
    unpack,
)
from zero_strategy.pipeline.trees import Structure

_SPARE_BUFFERS = 2


def _next_size(posted: int, nbytes: int) -> int:
    """Bytes that the next message will be received in, after one of `nbytes` in `posted`."""
    return max(nbytes, FIRST_BYTES) if 2 * nbytes < posted else posted


class Outlet:
    """The sending end.

    Args:
        transport: What carries the messages.
        channel: From this rank.
        kind: Under which bytes are counted: "activation" or "gradient".
        device: Of the tensors.
    """

    def __init__(self, transport: PointToPoint, channel: Channel, kind: str, device: torch.device) -> None:
        self._transport, self._channel, self._kind, self._device = transport, channel, kind, device
        self._size = FIRST_BYTES
        self._layout: Layout | None = None
        self._text = ""
        """The structure in it."""
        self._spare: deque[Tensor] = deque()

    def send(
        self, stamp: Stamp, structure: Structure, kinds: Sequence[TensorKind], tensors: Sequence[Tensor | None]
    ) -> None:
        """Send tensors in a structure; they may be changed or let go of afterwards."""
        plan = self._layout
        # As texts: True equals 1, and -0.0 equals 0.0, but a stage may treat them differently.
        text = repr(structure)
        if plan is None or plan.tensors != tuple(kinds) or self._text != text:
            plan, self._text = layout(structure, kinds), text
            self._layout = plan
        if plan.nbytes > self._size:
            notice = self._buffer(self._size)
            announce(stamp, plan.nbytes, notice)
            self._post(notice, "control")
            self._size = plan.nbytes
        buffer = self._buffer(self._size)
        pack(stamp, plan, tensors, buffer)
        self._post(buffer, self._kind)
        self._size = _next_size(self._size, plan.nbytes)

    def _post(self, buffer: Tensor, kind: str) -> None:
        self._transport.send(buffer, self._channel, kind, partial(self._keep, buffer))

    def _keep(self, buffer: Tensor) -> None:
        if len(self._spare) < _SPARE_BUFFERS:
            self._spare.append(buffer)

    def _buffer(self, size: int) -> Tensor:
        while self._spare:
            buffer = self._spare.popleft()
            if buffer.numel() == size:
                return buffer
        return torch.empty(size, dtype=torch.uint8, device=self._device)


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
    ) -> None:
        self._transport, self._channel, self._device, self._ahead = transport, channel, device, ahead
        self._what, self._peer, self._own = what, peer, own
        self._size = FIRST_BYTES
        self._expected = 0
        self._posted: tuple[Tensor, Any] | None = None
        self._stamp: Stamp | None = None
        self._arrived: deque[tuple[Header, Tensor, Layout]] = deque()
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
            if self._posted is not None:
                assert self._stamp is not None
                self._arrived.append(self._receive(self._stamp))
            self._stamp = stamp
            self._post_next()

    def take(self, stamp: Stamp) -> tuple[Layout, list[Tensor]]:
        """Wait for the next message.

        Args:
            stamp: What it must belong to.

        Returns:
            Its layout and its tensors.

        Raises:
            RankFailedError: If it cannot come.
            OutOfStepError: If it belongs to something else.
        """
        header, buffer, plan = self._arrived.popleft() if self._arrived else self._receive(stamp)
        self._check(header.stamp, stamp)
        return plan, unpack(buffer, plan)

    def _receive(self, stamp: Stamp) -> tuple[Header, Tensor, Layout]:
        assert self._posted is not None
        buffer, work = self._posted
        self._posted = None
        self._wait(work, stamp)
        header = read_header(buffer)
        if header.announced is not None:
            self._check(header.stamp, stamp)
            self._size = header.announced
            buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._wait(self._transport.post(buffer, self._channel), stamp)
            header = read_header(buffer)
        plan = self._layout
        if plan is None or plan.description != header.description:
            plan = self._layout = read_layout(header.description)
        self._size = _next_size(self._size, plan.nbytes)
        if self._ahead:
            self._post_next()
        return header, buffer, plan

    def _post_next(self) -> None:
        self._posted = None
        if self._expected:
            self._expected -= 1
            buffer = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._posted = buffer, self._transport.post(buffer, self._channel)

    def _wait(self, work: Any, stamp: Stamp) -> None:
        what = f"the {self._what} of micro-batch {stamp.micro_batch}"
        self._transport.wait(work, what, self._peer, self._channel)

    def _check(self, found: Stamp, expected: Stamp) -> None:
        if found == expected:
            return
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
