"""The executor: carries out the instructions of one rank and stops on all ranks if one fails.

It computes, sends, receives, and stops on all ranks when one fails.

Receives are posted before their instructions come (of a GPU's tensors: when they do), and waited for when a computation
needs what they bring; sends are under way while the rank goes on.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.comm.process_group import world_rank, world_size
from zero_strategy.pipeline.instructions import (
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from zero_strategy.pipeline.lowering import KINDS, Order, Orders, read_orders
from zero_strategy.pipeline.messages import describe, put_together
from zero_strategy.pipeline.model_chunk import Chunk, StageMessage
from zero_strategy.pipeline.peers import PipelinePeers
from zero_strategy.pipeline.schedules import Kind, Placement
from zero_strategy.pipeline.simulator import Event
from zero_strategy.pipeline.transport import DataEndedError, PipelineError, error_of, failure_of
from zero_strategy.runtime.observer import Observed
from zero_strategy.runtime.torch_private import tree_map
from zero_strategy.watchdog.waits import RankFailedError
from zero_strategy.watchdog.watchdog import Watchdog

BatchFunction = Callable[[Any], Any]


class StageInputs:
    """The micro-batches of one batch, read when they are needed.

    Args:
        data: Gives (inputs, labels); labels may be missing where nobody asks for them.
        needed: How many micro-batches there will be.
        batch_fn: Changes what `data` gives; None: as it is.
        device: Where tensors go.
        readers: How many times each micro-batch is asked for: its inputs, its labels or both.
    """

    def __init__(
        self,
        data: Iterator[Any] | None,
        needed: int,
        batch_fn: BatchFunction | None,
        device: torch.device,
        readers: int,
    ) -> None:
        self._data, self._needed, self._batch_fn, self._device = data, needed, batch_fn, device
        self._readers, self._read = readers, 0
        self._there: dict[int, tuple[Any, int]] = {}

    def load(self, micro_batch: int, stage: int) -> None:
        """Read up to a micro-batch.

        Raises:
            DataEndedError: If there are fewer.
            ValueError: If there is no iterator.
        """
        # An iterator gives micro-batches in order only; a schedule may come to a later one first.
        while self._read <= micro_batch:
            if self._data is None:
                raise ValueError(f"stage {stage} loads micro-batches, but this rank was given no data iterator")
            try:
                batch = next(self._data)
            except StopIteration as end:
                raise DataEndedError(
                    f"the data iterator of stage {stage} ended before micro-batch {self._read}; a batch needs "
                    f"{self._needed}. Drop the incomplete batch, or give an iterator that goes on (RepeatingLoader)",
                    stage, self._read, self._needed,
                ) from end  # fmt: skip
            if self._batch_fn is not None:
                batch = self._batch_fn(batch)
            if self._device.type != "cpu":
                batch = tree_map(self._move, batch)
            self._there[self._read] = batch, self._readers
            self._read += 1

    def take(self, micro_batch: int, part: int, stage: int) -> Any:
        """The inputs (part 0) or labels (part 1) of a micro-batch; None if it has no labels.

        Raises:
            DataEndedError: If there are not so many micro-batches.
            TypeError: If one is no tuple or list.
        """
        self.load(micro_batch, stage)
        batch, readers = self._there.pop(micro_batch)
        if readers > 1:  # Kept until the rank's other outer stage has taken its part of it
            self._there[micro_batch] = batch, readers - 1
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(
                f"the data iterator of stage {stage} gives {type(batch).__name__}; a pipeline takes pairs of inputs "
                "and labels (set_batch_fn can make them)"
            )
        return batch[part] if part < len(batch) else None

    def _move(self, leaf: Any) -> Any:
        # The copy is queued before what uses it, so the host need not wait for it.
        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


class Computation(NamedTuple):
    """A forward, a backward or half of one.

    Attributes:
        kind: Which.
        micro_batch: Of the batch.
        chunk: Of the rank.
        stage: The chunk's number among all stages.
        last: Nothing later in this batch adds gradients to the chunk's parameters.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    stage: int
    last: bool


class ExecutorHooks:
    """Does nothing at each place; an engine overrides what it needs."""

    def before(self, computation: Computation) -> None:
        """Called before every computation."""

    def after(self, computation: Computation) -> None:
        """Called after every computation."""

    def failed(self, error: BaseException) -> None:
        """Called in place of `after`, where a computation or the call of `before` has raised."""

    def scale_loss(self, loss: Tensor, micro_batches: int) -> Tensor:
        """Tensors that the backward of a micro-batch begins at."""
        return loss / micro_batches

    def forwarded(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        """The last stage has forwarded a micro-batch.

        Args:
            micro_batch: Of the batch.
            outputs: Of the stage; in training with their graph, so that keeping them keeps all activations.
            loss: Without a graph; None if there is none.
        """

    def reduce_tied_grads(self) -> None:
        """ReduceTiedGrads."""

    def reduce_grads(self) -> None:
        """ReduceGrads."""

    def optimizer_step(self) -> None:
        """OptimizerStep."""


LossFunction = Callable[[Any, Any], Any]


@dataclass
class Run:
    """Result of one batch.

    Attributes:
        loss: Mean of the micro-batches' losses, on every rank, on the CPU; None if there was nothing to average.
        outputs: Of a run without backwards on the rank of the last stage: one of each micro-batch.
        events: When this rank did what, if recording is on.
    """

    loss: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Executor:
    """One rank of a pipeline.

    Args:
        chunks: The rank's stages, in the order of the placement's chunks. Each takes one value: what the stage before
            returned, or the inputs of a micro-batch.
        placement: Where the stages are.
        ranks: World ranks of the pipeline, in order; None: all ranks of the process group.
        loss_fn: Of the last stage's outputs and the labels; None: the outputs are the loss, if they are one number.
        hooks: What an engine does around instructions.
        batch_fn: Makes pairs of inputs and labels of what the data iterator gives.
        device: Of what stages compute with.
        autocast: Makes the context in which forwards run.
        timeout: Seconds that this rank waits for a message.
        patience: Seconds that it waits for one from a rank that has not come to the same batch.
        name: Tells pipelines of the same ranks apart, where not all of them run their first batches in one order.
        record: Whether runs have events.
        ahead: Post receives of the host before the schedule comes to them.
        watchdog: Of the engine.
        observed: Who is told of waits for other stages; None: nobody.

    Attributes:
        rank: This rank in the pipeline.
        placement: Where the stages are.
        chunks: The rank's stages.
        batch_fn: May be changed between runs.
        record: Likewise.
        loss_fn: Likewise.
        keep_outputs: Likewise; whether runs without backwards keep the last stage's outputs.
        observed: See the argument.
    """

    keep_outputs = True

    def __init__(
        self,
        chunks: Sequence[Callable[[Any], Any]],
        placement: Placement,
        *,
        ranks: Sequence[int] | None = None,
        loss_fn: LossFunction | None = None,
        hooks: ExecutorHooks | None = None,
        batch_fn: BatchFunction | None = None,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        timeout: float = 1800.0,
        patience: float = 60.0,
        name: str = "pipeline",
        record: bool = False,
        ahead: bool = True,
        watchdog: Watchdog | None = None,
        observed: Observed | None = None,
    ) -> None:
        own = world_rank()
        world = list(range(world_size())) if ranks is None else list(ranks)
        if len(world) != placement.ranks or own not in world:
            raise ValueError(f"a pipeline of {placement.ranks} ranks with this one ({own}) in it cannot be on {world}")
        if len(chunks) != placement.chunks:
            raise ValueError(f"{len(chunks)} stages for a rank that has {placement.chunks} chunks")
        self.rank, self.placement, self.loss_fn = world.index(own), placement, loss_fn
        self.batch_fn, self.record = batch_fn, record
        self.observed = observed or Observed()
        self._hooks, self._device = hooks or ExecutorHooks(), torch.device(device)
        self._autocast, self._own = autocast, own
        stages = [placement.stage_of(self.rank, chunk) for chunk in range(placement.chunks)]
        last = placement.stages - 1
        self.chunks = [Chunk(module, stage, stage == last) for module, stage in zip(chunks, stages)]
        self._pipeline_peers = PipelinePeers(
            placement, self.rank, world, self._device, timeout, patience, name, ahead, watchdog
        )
        # A rank with the first and the last stage has one iterator for inputs and labels: each batch of it serves both.
        self._readers = (0 in stages) + (last in stages)
        self._read: Orders | None = None
        self._doing: str | Computation = ""
        # Between stages of this rank, and between a computation and its message, by stage and micro-batch.
        self._activations: dict[tuple[int, int], StageMessage] = {}
        self._gradients: dict[tuple[int, int], StageMessage] = {}
        self._losses: Tensor | None = None
        self._actions: dict[type[PipeInstruction], Callable[[], None]] = {
            ReduceTiedGrads: self._hooks.reduce_tied_grads,
            ReduceGrads: self._hooks.reduce_grads,
            OptimizerStep: self._hooks.optimizer_step,
        }

    @property
    def counters(self) -> CommunicationCounters | None:
        """Messages and bytes sent, by kind; None before the first run, and for one rank."""
        return self._pipeline_peers.counters

    def run(self, schedule: PipeSchedule, data: Iterator[Any] | None = None) -> Run:
        """Carry out a batch. All ranks of the pipeline call this together, with their parts of one schedule.

        Args:
            schedule: This rank's.
            data: Gives pairs of inputs and labels, one for each micro-batch; needed where the first and the last stage
                are, and read nowhere else.

        Returns:
            The loss, and outputs or events if they were asked for.

        Raises:
            DataEndedError: On all ranks, if a data iterator ended early.
            PipelineError: If another rank has failed, is gone, does not come or is out of step; names its stage.
            Exception: What this rank's own stages raised, with a note that names the stage.
        """
        # Engines pass the same schedule at every step; reading one goes over all its instructions.
        orders = self._read
        if orders is None or orders.schedule is not schedule:
            orders = self._read = read_orders(schedule, self.placement, self.rank)
        self._doing = "at the beginning"
        try:
            return self._carry_out(orders, data)
        except RankFailedError as error:
            # The wait that raised has read or posted the failure, and broken the connections; what is left is to tell
            # the ranks of other pipelines, which may wait for this one in a reduction.
            self._pipeline_peers.leave(error.failure)
            raise error_of(error.failure) from error
        # KeyboardInterrupt too: where the process lives on without a word, the other ranks wait until they time out.
        except BaseException as error:
            where, change = f"{self._pipeline_peers.title}, {_words(self._doing)}", self._change()
            first = self._pipeline_peers.fail(failure_of(error, self._own, where, change))
            if first.rank != self._own:  # this is only what the first failure led to
                raise error_of(first) from error
            if not isinstance(error, (PipelineError, DataEndedError)):  # both name the stage
                _note(error, f"in {where}{change}")
            raise
        finally:
            # After a failure too: what is in flight holds activations, and the next batch has the same micro-batch
            # numbers.
            self._activations.clear()
            self._gradients.clear()
            self._losses = None
            for chunk in self.chunks:
                chunk.clear()

    def close(self) -> None:
        """End all connections; a later run makes them anew."""
        self._pipeline_peers.close()

    def _carry_out(self, orders: Orders, data: Iterator[Any] | None) -> Run:
        result, micro_batches, met = Run(), orders.schedule.micro_batches, False
        stage_inputs = StageInputs(data, micro_batches, self.batch_fn, self._device, self._readers)
        # Each message carries a digest of the schedule: a neighbour that runs another one is noticed at its first.
        self._pipeline_peers.begin(orders.receives, zlib.crc32(orders.title.encode()))
        with torch.set_grad_enabled(orders.training):
            for order in orders.orders:
                if (kind := KINDS.get(order.instruction)) is not None:
                    self._compute(kind, order, orders, stage_inputs, result)
                elif order.micro_batch >= 0:
                    self._exchange(order, stage_inputs)
                else:
                    if not met:
                        met = self._meet(result, micro_batches)
                    self._doing = f"in {order.instruction.__name__}"
                    started = time.perf_counter()
                    self._actions[order.instruction]()
                    self._record(result, order.instruction.__name__, started, None, 0)
        # A schedule for inference has no instructions at its end, before which ranks would have met.
        if not met:
            self._meet(result, micro_batches)
        with self.observed.span("bubble"):
            # A send that fails late is then an error of this batch, and the next one finds nothing under way.
            self._pipeline_peers.end()
        return result

    def _meet(self, result: Run, micro_batches: int) -> bool:
        """All ranks have computed; what engines do then are collectives that know nothing of failures."""
        self._doing = "at the end of the batch"
        losses = None if self._losses is None else self._losses / micro_batches
        with self.observed.span("bubble"):
            result.loss = self._pipeline_peers.share_loss(losses, micro_batches)
        return True

    def _exchange(self, order: Order, stage_inputs: StageInputs) -> None:
        chunk = self.chunks[order.chunk]
        at = chunk.stage, order.micro_batch
        if order.instruction is LoadMicroBatch:
            self._doing = f"loading micro-batch {order.micro_batch}"
            stage_inputs.load(order.micro_batch, chunk.stage)
        elif order.instruction is SendActivation:
            # Popped, so that outputs go as soon as they are in a message; their graph keeps edges alone.
            self._pipeline_peers.send_activation(*at, self._activations.pop(at))
        elif order.instruction is SendGrad:
            self._pipeline_peers.send_gradients(*at, self._gradients.pop(at))
        else:
            assert order.instruction in (RecvActivation, RecvGrad), order
            self._pipeline_peers.come_to(order.instruction, *at)

    def _compute(self, kind: Kind, order: Order, orders: Orders, stage_inputs: StageInputs, result: Run) -> None:
        chunk, micro_batch = self.chunks[order.chunk], order.micro_batch
        computation = Computation(kind, micro_batch, order.chunk, chunk.stage, order.last)
        self._doing = computation
        started = time.perf_counter()
        with self.observed.span("bubble"):
            needed = self._needed(kind, chunk, micro_batch, orders.training, stage_inputs)
        # Waits and hooks are in no computation's time: `auto` compares schedules by that of computations alone.
        self._record(result, "wait", started, micro_batch, order.chunk)
        try:
            self._hooks.before(computation)
            started = time.perf_counter()
            if kind is Kind.FORWARD:
                self._forward(chunk, micro_batch, needed, orders, stage_inputs, result)
            elif kind is Kind.BACKWARD_WEIGHT:
                chunk.backward_weight(micro_batch)
            else:
                backward = chunk.backward if kind is Kind.BACKWARD else chunk.backward_input
                gradients = backward(micro_batch, needed)
                if chunk.stage > 0:  # Nobody takes those of the model's inputs
                    self._gradients[chunk.stage, micro_batch] = gradients
        except BaseException as error:
            # Here, and not when the next run begins: what hooks have opened has to end with the failure, and meanwhile
            # the user may go on with the model.
            self._hooks.failed(error)
            raise
        self._record(result, kind.value, started, micro_batch, order.chunk)
        self._hooks.after(computation)

    def _needed(self, kind: Kind, chunk: Chunk, micro_batch: int, training: bool, stage_inputs: StageInputs) -> Any:
        """Start of a computation: of the data, of a neighbouring stage of this rank, or of a message."""
        stage = chunk.stage
        # The weight half starts from what the input half has kept, and the last stage from its loss.
        if kind is Kind.BACKWARD_WEIGHT or (kind is not Kind.FORWARD and chunk.last):
            return ()
        if kind is not Kind.FORWARD:
            found = self._gradients.pop((stage + 1, micro_batch), None)
            if found is None:
                found = self._pipeline_peers.gradients(stage, micro_batch)
            return put_together(found.tensors, found.structure)
        if stage == 0:
            inputs = stage_inputs.take(micro_batch, 0, stage)
            self.observed.mark("batch", inputs)
            return inputs
        stage_message = self._activations.pop((stage - 1, micro_batch), None)
        if stage_message is None:
            stage_message = self._pipeline_peers.activation(stage, micro_batch)
        return chunk.accept(micro_batch, stage_message, training)

    def _forward(
        self, chunk: Chunk, micro_batch: int, value: Any, orders: Orders, stage_inputs: StageInputs, result: Run
    ) -> None:
        labels = stage_inputs.take(micro_batch, 1, chunk.stage) if chunk.last else None
        if self._autocast is None:
            found, loss = self._call(chunk, micro_batch, value, labels)
        else:
            with self._autocast():
                found, loss = self._call(chunk, micro_batch, value, labels)
        if not chunk.last:
            self._activations[chunk.stage, micro_batch] = chunk.pack(micro_batch, found, orders.training)
            return
        if loss is not None:
            # In float32, as a half-precision sum would be rounded at each loss; not read here, where the host would
            # have to wait for the device.
            added = loss.detach().float()
            self._losses = added if self._losses is None else self._losses + added
        if orders.training:
            if loss is None:
                raise ValueError(f"the last stage returned {type(found).__name__} and there is no loss_fn: no loss")
            chunk.end(micro_batch, self._hooks.scale_loss(loss, orders.schedule.micro_batches))
        else:
            chunk.end(micro_batch, None)
            if self.keep_outputs:
                result.outputs.append(found)
        self._hooks.forwarded(micro_batch, found, None if loss is None else loss.detach())

    def _call(self, chunk: Chunk, micro_batch: int, value: Any, labels: Any) -> tuple[Any, Tensor | None]:
        """A stage's outputs; of the last one, the loss as well, if there can be one."""
        found = chunk.forward(micro_batch, value)
        if not chunk.last:
            return found, None
        # Labels may be missing where only outputs are wanted.
        with_loss = self.loss_fn is not None and (labels is not None or torch.is_grad_enabled())
        loss = self.loss_fn(found, labels) if self.loss_fn is not None and with_loss else found
        return found, loss if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def _record(self, result: Run, kind: str, started: float, micro_batch: int | None, chunk: int) -> None:
        if self.record:
            result.events.append(Event(self.rank, started, time.perf_counter(), kind, micro_batch, chunk))

    def _change(self) -> str:
        """Words on a stage that has just been given something that looks different; "" if none has."""
        for chunk in self.chunks:
            if (changed := chunk.changed) is not None:
                before, now = map(describe, changed)
                return f"; what stage {chunk.stage} was given has changed its structure from {before} to {now}"
        return ""


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input half of the backward",
    Kind.BACKWARD_WEIGHT: "weight half of the backward",
}


def _words(doing: str | Computation) -> str:
    if isinstance(doing, str):
        return doing
    return f"{_WORDS[doing.kind]} of micro-batch {doing.micro_batch} in stage {doing.stage}"


def _note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):  # `add_note` came with it
        error.add_note(text)
