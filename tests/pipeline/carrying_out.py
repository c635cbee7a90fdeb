"""Carries out the schedules of all ranks with a thread per rank and sends that wait for their receives.

Knows nothing of the checker: what a stage computes is a name for it, made of the names of what it was computed from.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_strategy.pipeline import PipeSchedule, Placement
from zero_strategy.pipeline.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

TIMEOUT = 20.0


class Rendezvous:
    """A channel on which a send returns when the receive has taken it."""

    def __init__(self) -> None:
        self._offered = threading.Semaphore(0)
        self._taken = threading.Semaphore(0)
        self._what: Any = None

    def send(self, what: Any) -> None:
        self._what = what
        self._offered.release()
        if not self._taken.acquire(timeout=TIMEOUT):
            raise TimeoutError("nobody receives")

    def receive(self) -> Any:
        if not self._offered.acquire(timeout=TIMEOUT):
            raise TimeoutError("nobody sends")
        what = self._what
        self._taken.release()
        return what


@dataclass
class Buffer:
    inputs: Any = None
    outputs: Any = None
    gradient: Any = None
    input_gradient: Any = None


@dataclass
class Rank:
    """One rank: its buffers, and in which order it has added weight gradients of which micro-batch."""

    schedule: PipeSchedule
    placement: Placement
    channels: dict[tuple[int, int, str], Rendezvous]
    gradients: dict[int, list[str]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _run(self) -> None:
        rank, last = self.schedule.stage_id, self.placement.stages - 1
        buffers = [Buffer() for _ in range(self.schedule.num_pipe_buffers())]
        handed: dict[tuple[str, int, int], Any] = {}  # between chunks of this rank
        loads: dict[int, int] = {}
        for step in self.schedule:
            for instruction in step:
                if not hasattr(instruction, "buffer_id"):
                    continue
                one: Any = instruction
                buffer, stage = buffers[one.buffer_id], self.placement.stage_of(rank, one.chunk)
                match instruction:
                    case LoadMicroBatch():
                        number = loads[one.chunk] = loads.get(one.chunk, -1) + 1
                        if stage == 0:
                            buffer.inputs = f"x{number}"
                        if stage == last:
                            handed["labels", one.buffer_id, one.chunk] = f"y{number}"
                    case RecvActivation():
                        buffer.inputs = self._channel(stage - 1, stage, "a").receive()
                    case ForwardPass():
                        if stage and self.placement.rank_of(stage - 1) == rank:
                            buffer.inputs = handed.pop(("a", stage, one.micro_batch))
                        buffer.outputs = f"{buffer.inputs}>{stage}"
                        if stage == last:
                            label = handed.pop(("labels", one.buffer_id, one.chunk))
                            self.outputs.append(f"{buffer.outputs}?{label}")
                            buffer.gradient = f"{buffer.outputs}?{label}"
                        elif self.placement.rank_of(stage + 1) == rank:
                            handed["a", stage + 1, one.micro_batch] = buffer.outputs
                    case SendActivation():
                        self._channel(stage, stage + 1, "a").send(buffer.outputs)
                    case RecvGrad():
                        buffer.gradient = self._channel(stage + 1, stage, "g").receive()
                    case BackwardPass() | BackwardInput():
                        if stage < last and self.placement.rank_of(stage + 1) == rank:
                            buffer.gradient = handed.pop(("g", stage, one.micro_batch))
                        buffer.input_gradient = f"{buffer.gradient}<{stage}"
                        if stage and self.placement.rank_of(stage - 1) == rank:
                            handed["g", stage - 1, one.micro_batch] = buffer.input_gradient
                        if isinstance(instruction, BackwardPass):
                            self._add(stage, buffer)
                    case BackwardWeight():
                        self._add(stage, buffer)
                    case SendGrad():
                        self._channel(stage, stage - 1, "g").send(buffer.input_gradient)

    def _channel(self, sender: int, receiver: int, kind: str) -> Rendezvous:
        return self.channels[self.placement.rank_of(sender), self.placement.rank_of(receiver), kind]

    def _add(self, stage: int, buffer: Buffer) -> None:
        self.gradients.setdefault(stage, []).append(f"{buffer.inputs} {buffer.gradient}")


def carry_out(schedules: Sequence[PipeSchedule]) -> list[Rank]:
    """Run all ranks to their end; raises what a rank raised."""
    placement = schedules[0].placement
    numbers = range(len(schedules))
    channels = {(a, b, kind): Rendezvous() for a in numbers for b in numbers for kind in "ag"}
    ranks = [Rank(schedule, placement, channels) for schedule in schedules]
    threads = [threading.Thread(target=rank.run, daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        if rank.failure is not None:
            raise rank.failure
    return ranks


def expected_gradient(stage: int, stages: int, micro_batch: int) -> str:
    """The name of what a stage adds to its weights' gradients for a micro-batch."""
    inputs = f"x{micro_batch}" + "".join(f">{one}" for one in range(stage))
    outputs = f"x{micro_batch}" + "".join(f">{one}" for one in range(stages))
    back = "".join(f"<{one}" for one in range(stages - 1, stage, -1))
    return f"{inputs} {outputs}?y{micro_batch}{back}"
