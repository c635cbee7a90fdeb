"""The channels of one rank of a pipeline to the ranks of the stages beside its own, and the end of a batch.

Losses, and that all have come to the end, go over the host, whatever the device.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.offload.tier import DeviceCopies, HostMemory, Landing
from zero_strategy.pipeline.instructions import PipeInstruction, RecvActivation
from zero_strategy.pipeline.messages import Channel, Stamp, TensorKind
from zero_strategy.pipeline.model_chunk import StageMessage
from zero_strategy.pipeline.point_to_point import PointToPoint
from zero_strategy.pipeline.schedules import Placement
from zero_strategy.pipeline.transport import Inlet, Outlet, PipelineError
from zero_strategy.watchdog.diagnosis import Failure
from zero_strategy.watchdog.waits import Awaited
from zero_strategy.watchdog.watchdog import Watchdog

_HOST = torch.device("cpu")


def goes_beside(device: torch.device) -> bool:
    """True if tensors of a device go from device to device, beside the messages of the host."""
    return device.type != "cpu"


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
        self._beside = goes_beside(device)
        self._copies = DeviceCopies(device)
        self._loss: HostMemory | None = None
        stages = [placement.stage_of(rank, chunk) for chunk in range(placement.chunks)]
        self._stages = stages
        self.title = self._rank_label(rank)

    @property
    def counters(self) -> CommunicationCounters | None:
        """Messages and bytes sent: "activation", "gradient", "loss", "end", and "control".

        The last are announcements; on a device also the messages beside which tensors go.
        """
        return None if self._transport is None else self._transport.counters

    def begin(self, receives: Counter[tuple[type[PipeInstruction], int]], program: int) -> None:
        """A batch begins: post the first receive of every channel.

        Args:
            receives: How many messages will come, by instruction and chunk.
            program: A digest of what is run, to be compared with the neighbours'.
        """
        if self._watchdog is not None:
            # Before anything is posted: ranks that were told of a failure have left, and nobody would answer.
            self._watchdog.check()
            self._watchdog.progress()
        if len(self._ranks) == 1:
            return
        # Broken connections do not mend; whoever has caught the failure (the end of data) may go on over new ones.
        if self._transport is None or self._transport.waits.broken:
            self._connect()
        self._run, self._program = self._run + 1, program
        assert self._transport is not None
        self._transport.waits.begin(self._run)
        # Messages are numbered within a batch, so that the first one shows a neighbour that is out of step.
        self._sent.clear()
        self._taken.clear()
        self._come_to.clear()
        for (instruction, chunk), count in receives.items():
            forward = instruction is RecvActivation
            self._inlets[forward, self._stages[chunk]].expect(count)
        for inlet in [*self._end_inlets, *([] if self._loss_inlet is None else [self._loss_inlet])]:
            inlet.expect(1)

    def send_activation(self, stage: int, micro_batch: int, stage_message: StageMessage) -> None:
        """Send an activation to the next stage."""
        self._send(True, stage, micro_batch, stage_message)

    def send_gradients(self, stage: int, micro_batch: int, stage_message: StageMessage) -> None:
        """Send gradients to the stage before."""
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
        # Begun first: the copy runs while the other ranks are waited for.
        value = self._fetch(loss) if self._rank == last and loss is not None else None
        if self._end_outlet is not None:
            self._end_outlet.send(self._stamp(micro_batches - 1, 0), ["v", None], [], [])
        if self._rank == last:
            for inlet in self._end_inlets:
                # All of them before the first wait: where receives are not posted ahead, this posts them.
                inlet.come_to(self._stamp(micro_batches - 1, 0))
            for inlet in self._end_inlets:
                inlet.take(self._stamp(micro_batches - 1, 0))
            # Only now: the loss tells the others that all ranks have come to the end.
            there = [] if value is None else [self._fetched(*value)]
            for outlet in self._loss_outlets:
                kinds = [TensorKind((), torch.float32, False) for _ in there]
                outlet.send(self._stamp(0, 0), ["v", None], kinds, there)
            return there[0] if there else None
        assert self._loss_inlet is not None
        self._loss_inlet.come_to(self._stamp(0, 0))
        _, tensors = self._loss_inlet.take(self._stamp(0, 0))
        return tensors[0].clone() if tensors else None  # the tensor itself would keep the message's buffer

    def _fetch(self, loss: Tensor) -> tuple[Tensor, Landing]:
        """Begin to copy a loss to the host."""
        value = loss.detach().to(torch.float32).reshape(())
        if not self._beside:
            return value, Landing()
        if self._loss is None:
            self._loss = HostMemory(value.nbytes, pinned=True)  # into pageable memory the copy would hold the host
        there = self._loss.bytes[: value.nbytes].view(torch.float32).reshape(())
        return there, self._copies.down(value, there)

    def _fetched(self, value: Tensor, landing: Landing) -> Tensor:
        """That loss, when the device has come to it: for which it may have to wait for other stages' devices."""
        if self._transport is None:
            landing.on_host()  # there is no other rank that could fail meanwhile
        elif self._beside:
            # Its device waits for nobody but the stage before, so that is who gets named.
            before = max(self._placement.stages - 2, 0)
            rank = self._placement.rank_of(before)
            awaited = Awaited("the loss, which its device computes", self._rank_label(rank, before), self._ranks[rank])
            self._transport.waits.wait_until(landing.is_over, awaited)
        return value.clone() if self._beside else value  # the next batch's loss comes into the same memory

    def end(self) -> None:
        """A batch is over: everything that was sent has arrived, and no device waits for another stage."""
        if self._transport is not None:
            # Waited for before the thread that looks may sleep: only then is nothing under way.
            self._transport.finish_sends()
            self._transport.waits.rest()

    def fail(self, failure: Failure) -> Failure:
        """Tell all ranks; returns the failure that was first."""
        # Ranks of other pipelines wait in collectives of this rank's data-parallel group: the watchdog tells them.
        self.leave(failure)
        return failure if self._transport is None else self._transport.waits.fail(failure)

    def leave(self, failure: Failure) -> None:
        """This rank gives the batch up: those of other pipelines hear of it if they wait for this rank."""
        # With a failure of its own the watchdog has told all ranks already.
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
            # The dead do not come to make new groups: all others would wait there for the time-out.
            if failure is not None and failure.kind == "gone":
                raise PipelineError(f"{failure.text}; without it the pipeline cannot go on", failure)
            self._transport.close()
        placement, own, last = self._placement, self._rank, self._placement.stages - 1
        rank_of = [placement.rank_of(stage) for stage in range(placement.stages)]
        ways = {}
        for stage in range(last):
            here, there = rank_of[stage], rank_of[stage + 1]
            if here != there:  # else both stages are this rank's, and nothing is sent
                ways[True, stage] = Channel(here, there, 2 * stage)
                ways[False, stage + 1] = Channel(there, here, 2 * stage + 1)
        # Tags above those of the stages, which end at 2 * last - 1.
        losses = {rank: Channel(rank_of[last], rank, 2 * last) for rank in range(placement.ranks)}
        del losses[rank_of[last]]
        ends = {rank: Channel(rank, rank_of[last], 2 * last + 1) for rank in losses}
        # Ranks may have failed in different batches: all of them count from one again.
        self._run = 0
        transport = self._transport = PointToPoint(
            self._ranks, [*ways.values(), *losses.values(), *ends.values()],
            beside=list(ways.values()) if self._beside else (), device=self._device, timeout=self._timeout,
            patience=self._patience, name=self._name, title=self.title, watchdog=self._watchdog,
        )  # fmt: skip
        self._outlets, self._inlets, self._loss_outlets, self._loss_inlet = {}, {}, [], None
        self._end_outlet, self._end_inlets = None, []
        for (forward, stage), channel in ways.items():
            what, to = ("activation", stage + 1) if forward else ("gradient", stage - 1)
            if channel.source == own:
                self._outlets[forward, stage] = Outlet(transport, channel, what, self._device, self._beside)
            if channel.target == own:
                peer, title = self._rank_label(channel.source, stage), self._rank_label(own, to)
                inlet = Inlet(transport, channel, what, peer, title, self._device, self._ahead, self._beside)
                self._inlets[forward, to] = inlet
        for rank, channel in losses.items():
            if rank == own:
                peer = self._rank_label(channel.source, last)
                self._loss_inlet = Inlet(transport, channel, "loss", peer, self.title, _HOST, self._ahead)
            elif channel.source == own:
                self._loss_outlets.append(Outlet(transport, channel, "loss", _HOST))
        for rank, channel in ends.items():
            if rank == own:
                self._end_outlet = Outlet(transport, channel, "end", _HOST)
            elif channel.target == own:
                peer = self._rank_label(rank)
                self._end_inlets.append(Inlet(transport, channel, "end", peer, self.title, _HOST, self._ahead))
