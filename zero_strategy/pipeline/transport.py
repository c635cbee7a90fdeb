"""Transport between stages: channels, peers, and the errors that stop all ranks.

The receiver has one message posted, of the size that the channel carried last: as soon as the one before is over; with
NCCL, whose receives occupy the device while they wait, when the schedule comes to it. A longer one is announced in
a message of that size; a shorter one is sent in it, until it is less than half as long, which is what the next ones are
then expected to be. Both ends follow from what has gone over the channel, so they agree without talking about it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.pipeline.instructions import PipeInstruction, RecvActivation
from zero_strategy.pipeline.messages import (
    FIRST_BYTES,
    Channel,
    Header,
    Layout,
    PointToPoint,
    Stamp,
    Structure,
    TensorKind,
    announce,
    layout,
    pack,
    read_header,
    read_layout,
    unpack,
)
from zero_strategy.pipeline.model_chunk import StageMessage
from zero_strategy.pipeline.schedules import Placement
from zero_strategy.watchdog.diagnosis import DesyncError, Failure
from zero_strategy.watchdog.watchdog import Watchdog


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
    if isinstance(error, DesyncError) and error.failure is not None:
        return error.failure
    return Failure("raised", rank, f"{where}: {type(error).__name__}: {error}{more}", {})


def error_of(failure: Failure) -> Exception:
    """Error that is raised on the other ranks."""
    if failure.kind == "data":
        return DataEndedError(failure.text, **failure.details)
    return OutOfStepError(failure.text) if failure.kind == "step" else PipelineError(failure.text)


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


class PipelinePeers:
    """The channels of one rank.

    Args:
        placement: Where the stages are.
        rank: This one, in the pipeline.
        ranks: World ranks of the pipeline, in order.
        device: Of tensors.
        timeout: Seconds that a wait may take.
        patience: Seconds of a wait in which the neighbour must come to the same batch.
        name: Tells pipelines apart; equal on all ranks.
        ahead: Post receives before the schedule comes to them.
        watchdog: Of the engine.

    Attributes:
        title: This rank in words.
        counters: What was sent; None before the first run of several ranks.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        ranks: list[int],
        device: torch.device,
        timeout: float,
        patience: float,
        name: str,
        ahead: bool,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._placement, self._rank, self._ranks, self._device = placement, rank, ranks, device
        self._ahead, self._watchdog = ahead, watchdog
        self._timeout, self._patience, self._name = timeout, patience, name
        self._run, self._program = 0, 0
        self._transport: PointToPoint | None = None
        self._sent: Counter[tuple[bool, int]] = Counter()
        self._taken: Counter[tuple[bool, int]] = Counter()
        self._come_to: Counter[tuple[bool, int]] = Counter()
        self._outlets: dict[tuple[bool, int], Outlet] = {}
        self._inlets: dict[tuple[bool, int], Inlet] = {}
        self._loss_outlets: list[Outlet] = []
        self._loss_inlet: Inlet | None = None
        self._end_outlet: Outlet | None = None
        self._end_inlets: list[Inlet] = []
        stages = [placement.stage_of(rank, chunk) for chunk in range(placement.chunks)]
        self._stages = stages
        self.title = self._rank_label(rank)

    @property
    def counters(self) -> CommunicationCounters | None:
        """Messages and bytes sent: "activation", "gradient", "loss", "end", and "control" for announcements."""
        return None if self._transport is None else self._transport.counters

    def begin(self, receives: Counter[tuple[type[PipeInstruction], int]], program: int) -> None:
        """A batch begins: post the first receive of every channel.

        Args:
            receives: How many messages will come, by instruction and chunk.
            program: A digest of what is run, to be compared with the neighbours'.
        """
        if self._watchdog is not None:
            self._watchdog.check()
            self._watchdog.progress()
        if len(self._ranks) == 1:
            return
        if self._transport is None or self._transport.waits.broken:
            self._connect()
        self._run, self._program = self._run + 1, program
        assert self._transport is not None
        self._transport.waits.begin(self._run)
        self._sent.clear()
        self._taken.clear()
        self._come_to.clear()
        for (instruction, chunk), count in receives.items():
            forward = instruction is RecvActivation
            self._inlets[forward, self._stages[chunk]].expect(count)
        for inlet in [*self._end_inlets, *([] if self._loss_inlet is None else [self._loss_inlet])]:
            inlet.expect(1)

    def send_activation(self, stage: int, micro_batch: int, stage_message: StageMessage) -> None:
        """To the next stage."""
        self._send(True, stage, micro_batch, stage_message)

    def send_gradients(self, stage: int, micro_batch: int, stage_message: StageMessage) -> None:
        """To the stage before."""
        self._send(False, stage, micro_batch, stage_message)

    def come_to(self, instruction: type[PipeInstruction], stage: int, micro_batch: int) -> None:
        """The schedule has come to RecvActivation or RecvGrad of a stage."""
        at = instruction is RecvActivation, stage
        self._inlets[at].come_to(self._stamp(micro_batch, self._come_to[at]))
        self._come_to[at] += 1

    def activation(self, stage: int, micro_batch: int) -> StageMessage:
        """Message of the stage before `stage`; waits for it."""
        return self._take(True, stage, micro_batch)

    def gradients(self, stage: int, micro_batch: int) -> StageMessage:
        """Message of the stage after `stage`; waits for it."""
        return self._take(False, stage, micro_batch)

    def share_loss(self, loss: Tensor | None, micro_batches: int) -> Tensor | None:
        """The loss of the last stage's rank, on every rank, once all ranks have computed all; waits for that.

        So a rank that fails in its last backward, which no other one waits for, is still an error on all of them: what
        comes after, such as collectives over ranks that hold a tied weight, would wait for it for very long.

        Args:
            loss: On that rank; ignored on others.
            micro_batches: Of the batch.

        Returns:
            float32, on the CPU. None if that rank has none.
        """
        last = self._placement.rank_of(self._placement.stages - 1)
        if self._end_outlet is not None:
            self._end_outlet.send(self._stamp(micro_batches - 1, 0), ["v", None], [], [])
        if self._rank == last:
            for inlet in self._end_inlets:
                inlet.come_to(self._stamp(micro_batches - 1, 0))
            for inlet in self._end_inlets:
                inlet.take(self._stamp(micro_batches - 1, 0))
            value = None if loss is None else loss.detach().to("cpu", torch.float32).reshape(())
            there = [] if value is None else [value]
            for outlet in self._loss_outlets:
                kinds = [TensorKind((), torch.float32, False) for _ in there]
                outlet.send(self._stamp(0, 0), ["v", None], kinds, there)
            return value
        assert self._loss_inlet is not None
        self._loss_inlet.come_to(self._stamp(0, 0))
        _, tensors = self._loss_inlet.take(self._stamp(0, 0))
        return tensors[0].cpu().clone() if tensors else None

    def end(self) -> None:
        """A batch is over: everything that was sent has arrived."""
        if self._transport is not None:
            self._transport.finish_sends()
            self._transport.waits.rest()

    def fail(self, failure: Failure) -> Failure:
        """Tell all ranks; returns the failure that was first."""
        self.leave(failure)
        return failure if self._transport is None else self._transport.waits.fail(failure)

    def leave(self, failure: Failure) -> None:
        """This rank gives the batch up: those of other pipelines hear of it if they wait for this rank."""
        if self._watchdog is not None and self._watchdog.failure is None:
            self._watchdog.note(f"has left the batch ({failure.text})")

    def close(self) -> None:
        """End all connections."""
        if self._transport is not None:
            self._transport.close()
            self._transport = self._loss_inlet = self._end_outlet = None
            for channels in (self._outlets, self._inlets, self._loss_outlets, self._end_inlets):
                channels.clear()

    def _stamp(self, micro_batch: int, sequence: int) -> Stamp:
        return Stamp(self._run, self._program, micro_batch, sequence)

    def _send(self, forward: bool, stage: int, micro_batch: int, stage_message: StageMessage) -> None:
        at = forward, stage
        stamp = self._stamp(micro_batch, self._sent[at])
        self._sent[at] += 1
        self._outlets[at].send(stamp, stage_message.structure, stage_message.kinds, stage_message.tensors)

    def _take(self, forward: bool, stage: int, micro_batch: int) -> StageMessage:
        at = forward, stage
        stamp = self._stamp(micro_batch, self._taken[at])
        self._taken[at] += 1
        plan, tensors = self._inlets[at].take(stamp)
        return StageMessage(plan.structure, plan.tensors, tuple(tensors))

    def _rank_label(self, rank: int, stage: int | None = None) -> str:
        stages = [self._placement.stage_of(rank, chunk) for chunk in range(self._placement.chunks)]
        if stage is None and len(stages) > 1:
            return f"stages {', '.join(map(str, stages))} (rank {self._ranks[rank]})"
        return f"stage {stages[0] if stage is None else stage} (rank {self._ranks[rank]})"

    def _connect(self) -> None:
        """Make the groups, with all ranks of the pipeline."""
        if self._transport is not None:
            failure = self._transport.waits.board.first()
            if failure is not None and failure.kind == "gone":
                raise PipelineError(f"{failure.text}; without it the pipeline cannot go on")
            self._transport.close()
        placement, own, last = self._placement, self._rank, self._placement.stages - 1
        rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        ways = {}
        for stage in range(last):
            here, there = rank_of[stage], rank_of[stage + 1]
            if here != there:
                ways[True, stage] = Channel(here, there, 2 * stage)
                ways[False, stage + 1] = Channel(there, here, 2 * stage + 1)
        losses = {rank: Channel(rank_of[last], rank, 2 * last) for rank in range(placement.ranks)}
        del losses[rank_of[last]]
        ends = {rank: Channel(rank, rank_of[last], 2 * last + 1) for rank in losses}
        self._run = 0
        transport = self._transport = PointToPoint(
            self._ranks, [*ways.values(), *losses.values(), *ends.values()], device=self._device, timeout=self._timeout,
            patience=self._patience, name=self._name, title=self.title, watchdog=self._watchdog,
        )  # fmt: skip
        self._outlets, self._inlets, self._loss_outlets, self._loss_inlet = {}, {}, [], None
        self._end_outlet, self._end_inlets = None, []
        for (forward, stage), channel in ways.items():
            what, to = ("activation", stage + 1) if forward else ("gradient", stage - 1)
            if channel.source == own:
                self._outlets[forward, stage] = Outlet(transport, channel, what, self._device)
            if channel.target == own:
                peer, title = self._rank_label(channel.source, stage), self._rank_label(own, to)
                inlet = Inlet(transport, channel, what, peer, title, self._device, self._ahead)
                self._inlets[forward, to] = inlet
        for rank, channel in losses.items():
            if rank == own:
                peer = self._rank_label(channel.source, last)
                self._loss_inlet = Inlet(transport, channel, "loss", peer, self.title, self._device, self._ahead)
            elif channel.source == own:
                self._loss_outlets.append(Outlet(transport, channel, "loss", self._device))
        for rank, channel in ends.items():
            if rank == own:
                self._end_outlet = Outlet(transport, channel, "end", self._device)
            elif channel.target == own:
                peer = self._rank_label(rank)
                self._end_inlets.append(Inlet(transport, channel, "end", peer, self.title, self._device, self._ahead))
