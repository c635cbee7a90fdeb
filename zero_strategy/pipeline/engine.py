"""The engine of one rank of a pipeline: a `ZeroEngine` for the layers that it has, and what joins it to the others.

    module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters())     # before the engine: a stage may have tied weights alone
    engine = PipelineEngine(module, {"stage": 1, "pipeline": {"micro_batches": 8}})
    engine.attach(optimizer)
    loss = engine.forward_backward(batches)     # all micro-batches of a step; gradients are reduced then
    engine.clip_grad_norm_(1.0)                 # the norm of all stages
    optimizer.step(); optimizer.zero_grad()

Every rank of the world calls the same methods. ZeRO shards among the data-parallel ranks of a stage.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.activation.offload import model_storages
from zero_strategy.checkpoint import StateReader
from zero_strategy.checkpoint.agreement import catalog_of
from zero_strategy.comm.process_group import default_group
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.materialize import device_of
from zero_strategy.pipeline.engine_setup import (
    AUTO,
    PIPE,
    ActivationBytes,
    Choice,
    apply_section,
    check_divided,
    choose,
    first_schedule,
    measured_costs,
    memory_left,
    part_of,
    prefix_of,
    resolved_for,
    with_units,
)
from zero_strategy.pipeline.executor import BatchFunction, Computation, Executor, ExecutorHooks, Run
from zero_strategy.pipeline.instructions import PipeSchedule
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import Kind, build_table, inference
from zero_strategy.pipeline.state import StageGroups, join_states, part_of_state
from zero_strategy.pipeline.ties import TiedWeights
from zero_strategy.planning.buckets import held_whole
from zero_strategy.runtime.compute_device import occupy
from zero_strategy.watchdog.peers import host

_logger = logging.getLogger(__name__)
_ADDS_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Forwarded = Callable[[int, Any, Tensor | None], object]
"""Called on the rank of the last stage with a micro-batch's number, its outputs and its loss, which may be None."""


class PipelineEngine(ZeroEngine):
    """Trains one rank's stages of a model, in step with the other ranks.

    Args:
        module: This rank's layers. Weights that another rank owns become plain tensors in it.
        config: See `ZeroEngine`; `pipeline.stages` is that of the module, `pipeline.chunks` too.
        compute_dtype: See `ZeroEngine`.
        weights: See `ZeroEngine`.
        device: See `ZeroEngine`.
        batch_fn: Makes pairs of inputs and labels of what data iterators give.
        autocast: Makes the context in which forwards run.
        root: A module that has `module` below it and nothing else that is trained; parameters then have their names
            there. None: `module` itself.

    Attributes:
        module: The root.
        pipeline: This rank's layers.
        executor: What carries schedules out.
        pipe: One rank of every stage, on the host.
        chosen: What `pipeline.schedule: auto` has chosen, from the end of the first step on.

    Raises:
        ValueError: If the config asks for other stages or chunks than the module has, or for a schedule that does not
            go with them.
    """

    def __init__(
        self,
        module: PipelineModule,
        config: Any = None,
        *,
        compute_dtype: torch.dtype | None = None,
        weights: str | os.PathLike[str] | StateReader | None = None,
        device: torch.device | None = None,
        batch_fn: BatchFunction | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        root: nn.Module | None = None,
    ) -> None:
        # Settings come first: what does not fit is refused before anything is replaced, or a group made.
        resolved = resolved_for(module, config, compute_dtype)
        pipeline, grid = resolved.config.pipeline, module.mpu()
        root = module if root is None else root
        prefix = prefix_of(module, root)
        if resolved.config.deepspeed is not None:
            apply_section(module, resolved.config.deepspeed.pipeline)
        if grid.slice_parallel_size > 1:
            check_divided(module)
        # Before the ties, whose replicas are made there.
        place = occupy(device or device_of(module), default_group())
        # Before the base class shards what is a parameter: weights that another rank owns must have left the module by
        # then.
        ties = TiedWeights(module, module.ties, compute_dtype, place, prefix)
        super().__init__(
            root,
            with_units(resolved, module, prefix),
            compute_dtype=compute_dtype,
            weights=weights,
            device=None if device is None else place,
            part=part_of(module, root, prefix, ties, resolved.config.timeout_seconds),
        )
        # After the base class, which makes the mesh: no method that is overridden here runs in its constructor and
        # would lack these.
        self.pipeline, self.pipe = module, self.mesh.further[PIPE]
        self._prefix, self._ties = prefix, ties
        self._schedules: dict[tuple[bool, int], PipeSchedule] = {}
        self.chosen: Choice | None = None
        self._steps_agreed = self._timeline_begun = self._torn = False
        if self.slots.slots:
            self.slots.in_a_batch = self.slots.count
        self._hooks = _Hooks(self)
        self.executor = Executor(
            module.chunk_functions(),
            module.placement,
            ranks=grid.pp_group,
            loss_fn=module.loss_fn,
            hooks=self._hooks,
            batch_fn=batch_fn,
            device=self.model.device,
            autocast=autocast,
            timeout=resolved.config.timeout_seconds,
            # Pipelines beside each other, and engines over the same ranks, must not find each other's addresses in the
            # store.
            name=self.mesh.world_group.barrier.prefix + f".{grid.pipeline_id()}",
            record=bool(pipeline.timeline),
            watchdog=self.mesh.watchdog,
            observed=self.observed,
        )
        # Before the first exchange among holders, which is then watched, too.
        if self.mesh.watchdog is not None:
            ties.guarded(self.mesh.watchdog)
        # Weights that the base class has loaded or initialised are those of owners alone.
        self.publish_ties()

    def join_batches(self, loader: Iterable[Any]) -> NoReturn:
        """Not for pipelines.

        Raises:
            ValueError: Always; says what to do.
        """
        raise ValueError(
            "join_batches is for whole modules: a pipeline runs the micro-batches of a step by a schedule that all its "
            "copies share; give all of them as many batches"
        )

    # ---- schedules ----

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, as configured."""
        found = self.config.config.pipeline.micro_batches
        assert found is not None, "resolve() derives pipeline.micro_batches"
        return found

    def schedule(self, micro_batches: int, *, training: bool = True) -> PipeSchedule:
        """This rank's instructions for so many micro-batches."""
        key = training, micro_batches
        if key not in self._schedules:
            module, pipeline = self.pipeline, self.config.config.pipeline
            if training:
                name = pipeline.schedule
                if name == AUTO:
                    name = first_schedule(module.placement) if self.chosen is None else self.chosen.schedule
                table = build_table(name, module.num_stages, micro_batches, pipeline.chunks)
            else:
                table = inference(module.placement, micro_batches)
            self._schedules[key] = lower(table)[module.stage_id]
        return self._schedules[key]

    # ---- running ----

    def forward_backward(
        self,
        data: Iterable[Any] | None,
        micro_batches: int | None = None,
        *,
        loss_weight: float = 1.0,
        forwarded: Forwarded | None = None,
    ) -> Tensor:
        """Run all micro-batches of a step forward and backward, and reduce their gradients. All ranks call it.

        Args:
            data: Gives pairs of inputs and labels, one for each micro-batch; read on the ranks of the first and the
                last stage only, which must get the same; may be None on others.
            micro_batches: How many; default: `pipeline.micro_batches`.
            loss_weight: What gradients of the loss are multiplied by.
            forwarded: See `Forwarded`; outputs have their graph, so that keeping them keeps all activations.

        Returns:
            The mean of the micro-batches' losses over all data-parallel ranks, on every rank: 0-d, on the CPU. Under
            `reproducible.slots` by the tree of slots, in float64, and rounded once.

        Raises:
            DataEndedError: On all ranks, if the data ends early; a StopIteration.
            PipelineError: If another rank fails, is gone or out of step; names its stage.
            ValueError: If the micro-batches are not those of this rank's slots (`reproducible.slots`).
            RuntimeError: If the step has its slots already.
        """
        count = self.micro_batches if micro_batches is None else micro_batches
        schedule = self.schedule(count)
        if self.slots.slots:
            self._begin_slots(count)
        # The user may have written to a tied weight, or frozen it, since the last step: replicas follow before they are
        # used.
        self._ties.follow(self.model.gathered, self.mesh.control.all_gather_small)
        measures = self.config.config.pipeline.schedule == AUTO and self.chosen is None
        # Each chunk adds to its gradients once per micro-batch, in a whole backward or a weight half.
        self._hooks.begin(count * self.pipeline.chunks, measures=measures, weight=loss_weight, forwarded=forwarded)
        with ExitStack() as stack:
            # Recorded for this step only, however it ends: the setting is the user's.
            stack.callback(setattr, self.executor, "record", self.executor.record)
            self.executor.record |= measures or self.observed.observer is not None
            # Gathered here once for the step; other units are by each micro-batch.
            if held := self._held_whole():
                stack.enter_context(self.model.gathered(held, until_step=True))
            stack.enter_context(self.observed.forward(count))
            found = self.executor.run(schedule, None if data is None else iter(data))
        self._torn = False
        assert found.loss is not None
        self.observed.mark("timeline", found.events)
        # Collectives, which would wait for a rank that has failed, come after the run, at whose end all ranks have met.
        self._agree_on_optimizers()
        self._write_timeline(found)
        if measures:
            self._choose(count, found)
        loss = self._mean_over_slots(found.loss.dtype) if self.slots.slots else self._mean_loss(found.loss)
        self.observed.mark("loss", loss)
        return loss

    def _begin_slots(self, micro_batches: int) -> None:
        if micro_batches != self.slots.count:
            raise ValueError(
                f"micro_batches is {micro_batches}, and reproducible.slots is {self.slots.slots}: a step of each of "
                f"the {self.mesh.world_size} data-parallel rank(s) is {self.slots.count} micro-batches, one per slot"
            )
        if self._torn:
            warnings.warn("the last batch failed: gradients since the last step are dropped", stacklevel=3)
            self.model.reducer.drop()
        self.model.reducer.begin_slots()
        self._torn = True

    def _agree_on_optimizers(self) -> None:
        """Until there are optimizers: a stage without one would let the others wait in their steps."""
        if self._steps_agreed:
            return
        everyone = [int(count) for count in self.pipe.all_gather_small(torch.tensor([len(self.optimizers)]))]
        if len(set(everyone)) > 1:
            ranks = self.pipeline.mpu().pp_group
            counts = ", ".join(f"rank {rank}: {count}" for rank, count in zip(ranks, everyone, strict=True))
            raise ValueError(
                f"the stages of a pipeline have different numbers of optimizers ({counts}), and all take part in a "
                "step; where one has nothing to train, attach one without parameters: AdamW([{'params': []}])"
            )
        self._steps_agreed = everyone[0] > 0  # With none attached yet, the next batch asks again

    def _held_whole(self) -> list[nn.Parameter]:
        """The parameters that stay gathered during a step."""
        if self.stage < 3:  # Parameters are always whole there
            return []
        units = self.model.units
        sizes = [sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in unit.buckets) for unit in units]
        held = held_whole(sizes, self.config.config.pipeline)
        return [parameter for number in held for bucket in units[number].buckets for parameter in bucket.parameters]

    def _choose(self, micro_batches: int, found: Run) -> None:
        """Take the schedule for all further steps, the same on all ranks."""
        grid, placement = self.pipeline.mpu(), self.pipeline.placement
        held = self._hooks.bytes.by_chunk
        # Hosts are told apart by their boot, without the PID namespace: containers may share the memory of one. Where
        # it cannot be said it is "", and such ranks count as on one host: less is then counted on than there is.
        boot = host().partition(" ")[0]
        boots = self.mesh.world_group.control.all_gather_objects(boot)
        left = memory_left(self.model.device, boots.count(boot), sum(held.values()))
        mine = grid.pipeline_id(), grid.stage_id, found.events, held, left
        everyone = sorted(self.mesh.world_group.control.all_gather_objects(mine), key=lambda one: one[:2])
        # Times of one pipeline for all of them: replicas with different schedules would not meet in their reductions.
        first = everyone[: grid.pipe_parallel_size]
        costs = measured_costs(placement, [one[2] for one in first], [one[3] for one in first])
        limits = [
            # The replica with the least memory decides for its stage, since the schedule is the same.
            min((one[4] for one in everyone if one[1] == rank and one[4] is not None), default=None)
            for rank in range(grid.pipe_parallel_size)
        ]
        self.chosen = choose(placement, micro_batches, costs, limits)
        self._schedules.clear()  # Made for the first step's schedule
        _logger.info(
            "pipeline.schedule auto: %s, expected to be idle %.1f %% of a step and to hold %s bytes of activations",
            self.chosen.schedule,
            100 * self.chosen.idle,
            [int(nbytes) for nbytes in self.chosen.activation_bytes],
        )

    @torch.no_grad()
    def evaluate(
        self, data: Iterable[Any] | None, micro_batches: int | None = None, *, forwarded: Forwarded | None = None
    ) -> Run:
        """Run micro-batches forward only. All ranks call it.

        Args:
            data: As in `forward_backward`.
            micro_batches: How many; default: `pipeline.micro_batches`.
            forwarded: See `Forwarded`.

        Returns:
            The loss as in `forward_backward`, and on the last stage's rank the outputs.
        """
        count = self.micro_batches if micro_batches is None else micro_batches
        self._ties.follow(self.model.gathered, self.mesh.control.all_gather_small)
        with self.observed.span("evaluation"):
            found = self.run_forward(data, count, forwarded=forwarded)
        if found.loss is not None:
            found.loss = self._mean_loss(found.loss)
        return found

    @torch.no_grad()
    def run_forward(self, data: Iterable[Any] | None, micro_batches: int, *, forwarded: Forwarded | None = None) -> Run:
        """Evaluate with the loss of this copy alone: copies may have different numbers of micro-batches."""
        self._hooks.begin(0, forwarded=forwarded)
        return self.executor.run(self.schedule(micro_batches, training=False), None if data is None else iter(data))

    def _mean_loss(self, loss: Tensor) -> Tensor:
        if self.mesh.world_size == 1:
            return loss
        # Gathered, not reduced: every rank sums in the same order and gets the same bits; float64 rounds once, at the
        # end.
        everyone = self.mesh.control.all_gather_small(loss.reshape(1).double())
        return torch.stack(everyone).mean().to(loss.dtype)

    def _mean_over_slots(self, dtype: torch.dtype) -> Tensor:
        """The mean of all losses, each by itself: its bits do not depend on the number of stages and copies."""
        placement = self.pipeline.placement
        last = placement.rank_of(placement.stages - 1)
        mine = torch.zeros(1, dtype=torch.float64)
        if self.pipeline.stage_id == last:
            losses = self._hooks.losses
            ordered = torch.stack([losses[number] for number in range(self.slots.count)])
            mine = self.slots.mean(ordered.double().tolist()).reshape(1)
        mean = self.pipe.all_gather_small(mine)[last].reshape(())
        self.slots.note_mean(mean)
        return mean.to(dtype)

    def _write_timeline(self, found: Run) -> None:
        """Write what the first pipeline's ranks did into the file that is configured, which a new run begins anew."""
        path = self.config.config.pipeline.timeline
        # Alike on all ranks of a pipe, so the exchange below has all of them or none.
        if not self.executor.record or not path or self.pipeline.mpu().pipeline_id() > 0:
            return
        everyone = self.pipe.all_gather_objects(found.events)
        if self.pipeline.stage_id == 0:
            step = self.steps.taken + self.steps.skipped + 1  # The one that this batch is for, not taken yet
            with Path(path).open("a" if self._timeline_begun else "w") as file:
                file.writelines(json.dumps(asdict(replace(e, step=step))) + "\n" for events in everyone for e in events)
            self._timeline_begun = True

    def reduce_tied_gradients(self) -> None:
        """Add what replicas of tied weights have collected to their owners' gradients. A collective."""
        for parameter, gradient in self._ties.exchange_gradients(self.mesh.control.all_gather_small):
            self.add_gradient(parameter, gradient)

    def publish_ties(self) -> None:
        """Give replicas of tied weights the owners' values. A collective."""
        self._publish_copies()

    def replicas(self) -> dict[str, Any]:
        """This rank's copies of weights that another rank owns, by their names here; no copies of them, to be read."""
        return self._ties.values()

    # ---- what is different for a part of a model ----

    def attach(self, *optimizers: Optimizer) -> None:
        """See `ZeroEngine.attach`. Weights that another rank owns leave the groups: its own optimizer updates them."""
        weights = list(self._ties.removed())
        removed = {id(weight) for weight in weights}
        for optimizer in optimizers:
            for weight in weights:
                optimizer.state.pop(weight, None)  # some, such as Adagrad, have it from the start
            for group in optimizer.param_groups:
                stays = [id(p) not in removed for p in group["params"]]
                for key in {"params", "param_names"} & group.keys():  # names: of optimizers that were made with them
                    group[key] = list(compress(group[key], stays))
        super().attach(*optimizers)

    def full_state_dict(self, names: Collection[str] | None = None, *, keep: bool = True) -> dict[str, Any]:
        """See `ZeroEngine.full_state_dict`: that of all stages, tied names included."""
        aliases = catalog_of(self).aliases
        # A further name may be on another rank than the weight, which is asked for by the name that its owner has.
        asked = None if names is None else {*names, *(name for alias, name in aliases.items() if alias in names)}
        everyone = self.pipe.all_gather_objects(super().full_state_dict(asked))
        # Only after the gather, in which all ranks take part.
        if not keep:
            return {}
        whole = {name: tensor for part in everyone for name, tensor in part.items()}
        whole |= {alias: whole[name] for alias, name in aliases.items() if name in whole}
        return {name: tensor for name, tensor in whole.items() if names is None or name in names}

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """See `ZeroEngine.full_optimizer_state`: that of all stages."""
        everyone = self.pipe.all_gather_objects(super().full_optimizer_state(optimizer))
        return {name: state for part in everyone for name, state in part.items()}

    def optimizer_state_dict(self, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """See `ZeroEngine.optimizer_state_dict`: that of one optimizer over the whole model. Ranks pass their own.

        Raises:
            ValueError: On all ranks, if stages have different numbers of param groups, or other orders in them than
                their modules have.
        """
        mine = self._groups_of(optimizer), super().optimizer_state_dict(optimizer)
        everyone = self.pipe.all_gather_objects(mine)
        joined = join_states([one[0] for one in everyone], [one[1] for one in everyone], self._prefix)
        return joined if keep else {}  # Joined by all ranks, so that what does not fit is an error on all

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """See `ZeroEngine.load_optimizer_state_dict`: each rank takes its stages' part. All ranks call it.

        Raises:
            ValueError: If its param groups do not fit.
        """
        own = self._groups_of(optimizer)
        part = part_of_state(self.pipe.all_gather_objects(own), own, state_dict, self._prefix)
        super().load_optimizer_state_dict(optimizer, part)

    def _groups_of(self, optimizer: Optimizer) -> StageGroups:
        """The names in an optimizer's groups, and their places in the layers."""
        assert self.order is not None
        names = {id(parameter): name for name, parameter in self.model.names()}
        param_groups = self.sharded(optimizer).optimizer.param_groups
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in param_groups]
        return StageGroups(groups, {name: self.order(name) for group in groups for name in group})

    def close(self, *, gather: bool = False, optimizers: bool = False, reason: str = "") -> None:
        """See `ZeroEngine.close`. What the PipelineModule has made stays with it.

        Raises:
            ValueError: With `gather`.
        """
        if gather:
            raise ValueError(
                "close(gather=True): layers of a pipeline are spread over its stages; save them "
                "(engine.save_pretrained, engine.save), and load the whole model from there"
            )
        # First, as ranks meet in it: before that, a neighbour may still wait for a message, and would take the end of
        # the connection for a failure.
        super().close()
        self.executor.close()
        self._ties.unguarded()  # Their groups stay, but the watchdog ends with the engine

    def abandon(self, reason: str) -> None:
        """See `ZeroEngine.abandon`. Weights of which another rank has had the values stay plain tensors."""
        # First, as threads look after its connections, which break with those of the ranks that are gone.
        self.executor.close()
        super().abandon(reason)
        self._ties.unguarded()

    def reset(self) -> None:
        """See `ZeroEngine.reset`."""
        super().reset()
        self._ties.forget_gradients()


class _Hooks(ExecutorHooks):
    """Work of the engine around instructions.

    Attributes:
        bytes: What forwards keep.
        losses: On the rank of the last stage, under `reproducible.slots`: of each micro-batch of this run, 0-d.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine, self._scope, self._left, self._trains = engine, ExitStack(), 0, False
        self.bytes = ActivationBytes(lambda: model_storages(engine.model))
        self._measures, self._weight = False, 1.0
        self._forwarded: Forwarded | None = None
        self.losses: dict[int, Tensor] = {}

    def begin(
        self, backwards: int, *, measures: bool = False, weight: float = 1.0, forwarded: Forwarded | None = None
    ) -> None:
        """A run begins.

        Args:
            backwards: So many computations add to gradients.
            measures: Measure what forwards keep.
            weight: What gradients of the loss are multiplied by.
            forwarded: Whom to tell of micro-batches.
        """
        self._left, self._measures, self._weight, self._forwarded = backwards, measures, weight, forwarded
        self._trains = backwards > 0
        self.losses.clear()

    def before(self, computation: Computation) -> None:
        """Backwards but the last of the step may keep their gradients on this rank.

        Under `reproducible.slots` a computation belongs to the slot of its micro-batch, whatever the schedule's order;
        each that adds gradients is one backward on all copies, also where some copy has none.
        """
        # One micro-batch tells the bytes; hooks on saved tensors would slow the others, whose times are measured.
        if self._measures and computation.kind is Kind.FORWARD and computation.micro_batch == 0:
            self._scope.enter_context(self.bytes.count(computation.chunk))
        adds, slots = computation.kind in _ADDS_GRADIENTS, self._engine.model.slots
        self._left -= adds
        # An input half is followed by its weight half, so it is never the last of the step.
        is_last = adds and self._left == 0
        if slots is not None and self._trains:
            self._scope.enter_context(slots.at(computation.micro_batch, ends=is_last))
        if computation.kind is Kind.FORWARD:
            return
        reducer = self._engine.model.reducer
        parameters = self._engine.pipeline.chunk_parameters(computation.chunk)
        if not is_last:
            self._scope.enter_context(self._engine.no_sync())
        # Otherwise the reducer would expect gradients of the rank's other chunks, and send their buckets, too.
        self._scope.enter_context(reducer.within(parameters))
        if computation.kind is Kind.BACKWARD_INPUT:
            # Units see the end of their backward here, but their parameters have no gradients before the weight half.
            self._scope.enter_context(reducer.paused())
        elif computation.kind is Kind.BACKWARD_WEIGHT or slots is not None:
            # The weight half is several calls of autograd, and the reduction is due after the last.
            self._scope.enter_context(reducer.joined(anyway=slots is not None))
            # Units' own hooks are on the way that the input half has gone.
            if computation.kind is Kind.BACKWARD_WEIGHT and self._engine.stage == 3:
                self._scope.enter_context(self._engine.model.gathered(parameters))

    def after(self, computation: Computation) -> None:
        """The end of the same."""
        self._scope.close()

    def failed(self, error: BaseException) -> None:
        """Contexts get the exception: a weight half that ended well would be reduced, which takes the other ranks."""
        self._scope.__exit__(type(error), error, error.__traceback__)

    def scale_loss(self, loss: Tensor, micro_batches: int) -> Tensor:
        """The mean over micro-batches, scaled where gradients would underflow; that over slots the engine takes."""
        mean = loss if self._engine.slots.slots else loss / micro_batches
        return self._engine.scale_loss(mean if self._weight == 1.0 else mean * self._weight)

    def forwarded(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        """Tell whoever wants to know."""
        if self._engine.slots.slots and loss is not None:
            self.losses[micro_batch] = loss
        if self._forwarded is not None:
            self._forwarded(micro_batch, outputs, loss)

    def reduce_tied_grads(self) -> None:
        """Gradients of tied weights come together."""
        self._engine.reduce_tied_gradients()

    def reduce_grads(self) -> None:
        """Reduce all gradients that are not reduced yet."""
        self._engine.model.reducer.settle()
