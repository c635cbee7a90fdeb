"""Verification of pipelines, against one process that runs all layers.

Ranks of a pipeline draw random numbers in the order of their own forwards, and add gradients up in the order of their
own backwards. So forwards take the order of the schedule, each in the random state and with the buffers of its rank;
the backward of a micro-batch is one through all layers. A weight that several stages use is one leaf per stage, all of
one storage, so that what each stage gives is known: it is added up as `pipeline/ties.py` says.

The reference is one process that runs all layers over the micro-batches of all replicas.

    def factory():                                              # the same at every call: every rank calls it
        layers = [LayerSpec(Embedding, ...), ..., LayerSpec(Head, ...)]
        batches = [(inputs, labels) for ... in range(20)]
        return layers, lambda m: torch.optim.AdamW(m.parameters()), batches, lambda outputs, labels: ...

    def factory():                                              # or a LightningModule with configure_pipeline()
        return MyPipelineModel(), DataLoader(...)

Micro-batch a of copy d in step s is batch number (s x micro-batches + a) x copies + d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.activation.rng import RandomState
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.process_group import world_rank
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.layout import gradient_dtypes
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.engine_setup import AUTO
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import Kind, Table, build_table
from zero_strategy.runtime.torch_private import buffers_of, parameters_of
from zero_strategy.verify.reference_run import ReferenceRun, StepRecord, Tensors, add_gradients, flat_state
from zero_strategy.verify.session import ShardedRun, Verification, check_anew
from zero_strategy.verify.subject import (
    Factory,
    Subject,
    VerifySettings,
    call_factory,
    lightning_optimizer,
    named,
    take_batches,
)

_GIVES_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
Parts = dict[tuple[int, int], dict[str, Tensor]]
"""Gradients by name, of each stage and micro-batch."""


@dataclass(frozen=True)
class Layout:
    """Roles of the ranks.

    Attributes:
        table: What every rank of a pipeline computes, in order.
        parts: Bounds of the stages in the layers.
        pipes: World ranks of each copy of the pipeline, in its order.
    """

    table: Table
    parts: list[int]
    pipes: list[list[int]]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank of the world."""
        place = next(pipe.index(rank) for pipe in self.pipes if rank in pipe)
        return [self.table.placement.stage_of(place, chunk) for chunk in range(self.table.chunks)]


@dataclass
class _Stage:
    """Layers in a row.

    Attributes:
        calls: What runs them.
        leaves: What gradients come to, by the parameters' names.
        swaps: Where a leaf of its own stands while they run: module, key, parameter, leaf.
        buffers: Where buffers are: module, key, name.
    """

    calls: list[Any]
    leaves: dict[str, nn.Parameter] = field(default_factory=dict)
    swaps: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = field(default_factory=list)
    buffers: list[tuple[nn.Module, str, str]] = field(default_factory=list)


class PipelineReferenceRun(ReferenceRun):
    """One process that trains what all ranks of all copies of a pipeline train.

    Args:
        subject: Of its own; its model is a `PipelineModule` of one stage.
        config: The sharded side's settings.
        settings: How it trains; `accumulation` are the micro-batches.
        layout: Who runs what on the sharded side.
        jitter: See `ReferenceRun`.
    """

    def __init__(
        self,
        subject: Subject,
        config: ResolvedConfig,
        settings: VerifySettings,
        layout: Layout,
        jitter: int | None = None,
    ) -> None:
        super().__init__(subject, config, settings, jitter)
        assert isinstance(subject.model, PipelineModule)
        self.layout, self.copies = layout, len(layout.pipes)
        self._owners: dict[str, int] = {}
        """The place in a pipeline of the rank that owns each parameter: of the first stage that uses it."""
        self._stages = [self._stage(subject.model, number) for number in range(len(layout.parts) - 1)]

    def _stage(self, module: PipelineModule, number: int) -> _Stage:
        start, stop = self.layout.parts[number : number + 2]
        stage = _Stage(module.forward_funcs[start:stop])
        names = {id(parameter): name for name, parameter in self.named.items()}
        buffers = {id(buffer): name for name, buffer in module.named_buffers()}
        before = set(self._owners)
        modules = {name: one for layer in module.layer_modules()[start:stop] for name, one in layer.items()}
        for child in (child for one in modules.values() for child in one.modules()):
            for key, parameter in parameters_of(child).items():
                if parameter is None:
                    continue
                name = names[id(parameter)]
                self._owners.setdefault(name, self.layout.table.placement.rank_of(number))
                if name not in before:
                    stage.leaves[name] = parameter
                    continue
                if name not in stage.leaves:
                    stage.leaves[name] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                stage.swaps.append((child, key, parameter, stage.leaves[name]))
            own = buffers_of(child).items()
            stage.buffers += [(child, key, buffers[id(at)]) for key, at in own if id(at) in buffers]
        return stage

    # ---- gradients in the order of the schedule ----

    def _gradients(self, record: StepRecord) -> dict[str, Tensor]:
        parts = [self._copy(record, copy) for copy in range(self.copies)]
        self._mean_losses(record)
        total: dict[str, Tensor] = {}
        per_step = self.config.config.gradient_reduction == "per_step"
        if per_step:
            sums: list[dict[str, Tensor]] = [{} for _ in parts]
            for place, stage, micro in self._backwards():
                for found, part in zip(sums, parts, strict=True):
                    add_gradients(found, self._owned(part[stage, micro], place))
            add_gradients(total, self._averaged(sums))
        else:
            for place, stage, micro in self._backwards():
                add_gradients(total, self._averaged(self._owned(part[stage, micro], place) for part in parts))
        add_gradients(total, self._averaged(map(self._of_replicas, parts)))
        return total

    def _backwards(self) -> Iterator[tuple[int, int, int]]:
        """(place, stage, micro-batch) of what gives gradients, in each rank's order."""
        table = self.layout.table
        for place, row in enumerate(table.rows):
            for kind, micro, chunk in row:
                if kind in _GIVES_GRADIENTS:
                    yield place, table.placement.stage_of(place, chunk), micro

    def _owned(self, found: dict[str, Tensor], place: int) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in found.items() if self._owners[name] == place}

    def _of_replicas(self, parts: Parts) -> dict[str, Tensor]:
        """Gradients of ranks that hold copies of others' weights: each its own sum, added up in the ranks' order."""
        sums: dict[int, dict[str, Tensor]] = {}
        for place, stage, micro in self._backwards():
            found = parts[stage, micro]
            wide = {
                name: gradient.to(torch.promote_types(self.named[name].dtype, torch.float32))
                for name, gradient in found.items()
                if self._owners[name] != place
            }
            add_gradients(sums.setdefault(place, {}), wide)
        total: dict[str, Tensor] = {}
        for place in sorted(sums):
            add_gradients(total, sums[place])
        return {name: gradient.to(self._dtypes(name)[0]) for name, gradient in total.items()}

    # ---- one copy of the pipeline ----

    def _copy(self, record: StepRecord, copy: int) -> Parts:
        """Run all micro-batches of a copy, forwards in an order in which its ranks could."""
        table, ranks = self.layout.table, self.layout.pipes[copy]
        rows = [[action for action in row if action.kind is Kind.FORWARD] for row in table.rows]
        outputs: dict[tuple[int, int], Any] = {}
        labels: dict[int, Any] = {}
        parts: Parts = {}
        with self._disturbed():
            while any(rows):
                ready = False
                for place, row in enumerate(rows):
                    while row:
                        micro, stage = row[0].micro_batch, table.placement.stage_of(place, row[0].chunk)
                        if stage == 0:
                            number = self.settings.number(self.steps_taken, micro, copy, self.copies)
                            outputs[-1, micro], labels[micro] = self.subject.batch(number, self.settings.device)
                        if (stage - 1, micro) not in outputs:
                            break
                        row.pop(0)
                        ready = True
                        value = outputs.pop((stage - 1, micro))
                        with self._as_rank(ranks[place], stage), self.settings.forward_context():
                            for call in self._stages[stage].calls:
                                value = call(value)
                            if stage == len(self._stages) - 1:
                                value = self.subject.loss(value, labels.pop(micro))
                        outputs[stage, micro] = value
                        if stage == len(self._stages) - 1:
                            record.losses[ranks[place]][f"loss of micro-batch {micro}"] = value.detach().clone()
                            self._backward(outputs.pop((stage, micro)), micro, parts)
                assert ready, "rows of a table do not wait for each other"
        return parts

    def _backward(self, loss: Tensor, micro: int, parts: Parts) -> None:
        self._scaled(loss / self.settings.accumulation).backward()
        for number, stage in enumerate(self._stages):
            found = parts[number, micro] = {}
            for name, leaf in stage.leaves.items():
                if leaf.grad is not None:
                    dtype = gradient_dtypes(leaf.dtype, self.config.config.precision)[0]
                    gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                    found[name] = self._noisy(gradient).to(dtype, copy=True)
                    leaf.grad = None

    @contextmanager
    def _as_rank(self, rank: int, number: int) -> Iterator[None]:
        """Run with a rank's random numbers and buffers, and a stage's own leaves."""
        stage, buffers = self._stages[number], self._buffers[rank]
        self._random[rank].restore()
        for child, key, _, leaf in stage.swaps:
            parameters_of(child)[key] = leaf
        for child, key, name in stage.buffers:
            buffers_of(child)[key] = buffers[name]
        try:
            yield
        finally:
            for child, key, name in stage.buffers:
                buffers[name] = buffers_of(child)[key]
            for child, key, parameter, _ in stage.swaps:
                parameters_of(child)[key] = parameter
            self._random[rank] = RandomState.now()

    def _mean_losses(self, record: StepRecord) -> None:
        means = []
        last = self.layout.table.placement.rank_of(len(self._stages) - 1)
        for ranks in self.layout.pipes:
            # In the order in which the last stage's rank made them.
            losses = [loss.float() for loss in record.losses[ranks[last]].values() if loss is not None]
            means.append((_summed(losses) / self.settings.accumulation).reshape(()).cpu())
        mean = means[0] if self.copies == 1 else torch.stack([one.double() for one in means]).mean().float()
        record.phases["mean loss"] = {"mean loss": mean}

    def step(self, follow: StepRecord | None = None) -> StepRecord:
        """See `ReferenceRun.step`."""
        record = super().step(follow)
        record.buffers = [self._buffers_of(rank) for rank in range(self.ranks)]
        return record

    def _share_buffers(self) -> None:
        """Give the ranks of each stage the buffers of the first one that has it."""
        for ranks in self.layout.pipes[1:]:
            for first, rank in zip(self.layout.pipes[0], ranks, strict=True):
                self._buffers[rank] |= self._buffers_of(first)

    def _buffers_of(self, rank: int) -> Tensors:
        names = {name for stage in self.layout.stages_of(rank) for _, _, name in self._stages[stage].buffers}
        found = self._buffers[rank]
        return {name: None if (value := found[name]) is None else value.detach().clone() for name in names}


def _summed(losses: list[Tensor]) -> Tensor:
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


_ACCEPTED = (
    "with pipeline stages return (layers, optimizer, batches, loss), where layers are what PipelineModule takes, "
    "optimizer(model) makes the optimizer of a stage, batches are pairs of inputs and labels, and loss(outputs, "
    "labels) is the loss; or (LightningModule with configure_pipeline, batches)"
)


class PipelineRun(ShardedRun):
    """One rank's training of its stages; see `ShardedRun`.

    Attributes:
        engine: The engine of this rank's layers.
        copy: Which copy of the pipeline this rank is in.
        copies: How many there are.
        mean_loss: Of the last step.
    """

    engine: PipelineEngine
    mean_loss: Tensor

    def build(self) -> tuple[ZeroEngine, Optimizer]:
        """Make the engine and the optimizer of this rank's layers."""
        module, settings = self.model, self.settings
        assert isinstance(module, PipelineModule)
        optimizer = self.subject.optimizer(module)  # first: a stage may have tied weights alone
        engine = PipelineEngine(
            module,
            self.config,
            compute_dtype=settings.compute_dtype,
            device=settings.device,
            autocast=None if settings.autocast is None else settings.forward_context,
        )
        install_diagnostics(engine)
        engine.attach(optimizer)
        self.copy, self.copies = module.mpu().data_parallel_id, module.mpu().data_parallel_size
        self._losses: Tensors = {}
        self._places = self._where(engine, module)
        return engine, optimizer

    @staticmethod
    def _where(engine: PipelineEngine, module: PipelineModule) -> list[tuple[list[int], list[int], dict[str, Any]]]:
        """Stages and data-parallel group of each rank; each parameter's offset and slice size, None if it is full."""
        own: dict[str, tuple[int, int] | None] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            place = engine.model.place(parameter)
            assert place is not None
            layout, sharded = place[0].layout, place[0].placement.shard_optimizer
            own[name] = (layout.segments[place[1]].offset, layout.slice_numel) if sharded else None
        return engine.mesh.world_group.control.all_gather_objects((module.stages, module.mpu().dp_group, own))

    @property
    def control(self) -> Communicator:
        """All ranks of all stages."""
        return self.engine.mesh.world_group.control

    # ---- the training ----

    def seed(self) -> None:
        """Let this rank draw random numbers of its own."""
        RandomState.seeded(self.settings.seed + world_rank()).restore()

    def train(self, step: int) -> Tensors:
        """All micro-batches of a step; returns their losses, where the last stage is."""
        self._losses = {}
        self.mean_loss = self.engine.forward_backward(self.batches(step), forwarded=self._keep_loss)
        return self._losses

    def seen_in_training(self) -> list[tuple[str, Callable[[], Tensors]]]:
        """The mean loss of all copies, which every rank is told."""
        return [("mean loss", lambda: {"mean loss": self.mean_loss.detach().clone()})]

    def batches(self, step: int) -> Iterator[Any]:
        """The micro-batches of this rank's copy."""
        for micro in range(self.settings.accumulation):
            number = self.settings.number(step, micro, self.copy, self.copies)
            yield self.subject.batch(number, self.settings.device)

    def _keep_loss(self, micro_batch: int, outputs: Any, loss: Tensor | None) -> None:
        if loss is not None:
            self._losses[f"loss of micro-batch {micro_batch}"] = loss.detach().clone()

    # ---- what can be seen of it ----

    def state(self) -> Tensors:
        """The state of the optimizer of this rank's layers, each parameter's whole. A collective."""
        return flat_state(ZeroEngine.full_optimizer_state(self.engine, self.optimizer))

    def parameters(self) -> Tensors:
        """This rank's copy of its layers' parameters, under all their names; of tied ones that others own, too."""
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        found = ZeroEngine.full_state_dict(self.engine, names)
        replicas = {name: tensor.detach().cpu().clone() for name, tensor in self.engine.replicas().items()}
        return {**{name: found[name] for name in names if name in found}, **replicas}

    def held(self) -> set[str]:
        """Names of the parameters that are seen on this rank, replicas left out."""
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def owner(self, name: str, element: int) -> int | None:
        """See `ShardedRun.owner`; of any stage's parameters."""
        for _, dp_group, own in self._places:
            if name in own:
                return None if own[name] is None else dp_group[(own[name][0] + element) // own[name][1]]
        return None

    def title(self, rank: int) -> str:
        """A rank and its stages."""
        stages = self._places[rank][0]
        return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"


class PipelineVerification(Verification):
    """One rank's part of a verification of a pipeline; see `Verification`.

    Raises:
        ValueError: If the settings are not such that a pipeline can be verified.
    """

    def __init__(
        self,
        factory: Factory,
        config: ResolvedConfig,
        settings: VerifySettings,
        run_class: Callable[..., ShardedRun] | None = None,
    ) -> None:
        settings = _fitting(config, settings)
        self.layout: Layout | None = None
        super().__init__(factory, config, settings, run_class or PipelineRun)
        run = cast(PipelineRun, self.run_of)
        self._held: list[tuple[set[str], set[str]]] = run.control.all_gather_objects(
            (run.held(), run.held() | run.engine.replicas().keys())
        )

    def _subject(self) -> Subject:
        """The sharded side's: this rank's layers."""
        pipeline = self.config.config.pipeline
        subject = pipeline_subject(self.factory, self.config, self.settings, alone=False)
        module = cast(PipelineModule, subject.model)
        table = build_table(pipeline.schedule, module.num_stages, self.settings.accumulation, pipeline.chunks)
        self.layout = Layout(table, list(module.parts), module.mpu().pipe_groups)
        return subject

    def _reference(self, sharded: Subject, jitter: int | None = None) -> ReferenceRun:
        assert self.layout is not None
        subject = pipeline_subject(self.factory, self.config, self.settings, alone=True)
        check_anew(sharded, subject)
        return PipelineReferenceRun(subject, self.config, self.settings, self.layout, jitter)

    def _expected(self, phase: str, rank: int) -> Tensors:
        found = super()._expected(phase, rank)
        if phase in ("loss", "mean loss", "buffer", "norm", "loss scale"):
            return found
        names = self._held[rank][phase in ("start", "parameter")]
        if phase == "start" and rank == 0:  # whatever no rank has is missed here
            names = names | (found.keys() - set().union(*(both[1] for both in self._held)))
        return {name: one for name, one in found.items() if name.rpartition(" of ")[2] in names}


def _fitting(config: ResolvedConfig, settings: VerifySettings) -> VerifySettings:
    """Settings whose accumulation is that of the pipeline."""
    pipeline, tensor = config.config.pipeline, config.config.mesh.tensor or 1
    if pipeline.schedule == AUTO:
        raise ValueError(
            "pipeline.schedule is 'auto', which chooses by the time that things take: name the schedule to verify"
        )
    if tensor > 1:
        raise ValueError(f"mesh.tensor is {tensor}: verify trains layers that are whole; set it to 1")
    micro_batches = pipeline.micro_batches
    assert micro_batches is not None, "resolve() derives pipeline.micro_batches"
    if settings.accumulation not in (1, micro_batches):
        raise ValueError(
            f"accumulation is {settings.accumulation}, but pipeline.micro_batches is {micro_batches}, which says how "
            "many micro-batches a step has: leave accumulation out"
        )
    return replace(settings, accumulation=micro_batches)


def pipeline_subject(factory: Factory, config: ResolvedConfig, settings: VerifySettings, *, alone: bool) -> Subject:
    """Call a factory of layers, and divide them. A collective unless alone.

    Args:
        factory: See the top.
        config: Says into how many stages, and how.
        settings: The seed, and how many batches are taken.
        alone: All layers in one stage, for one process.

    Raises:
        ValueError: If it returns something else than asked for; says what.
    """
    pipeline = config.config.pipeline
    copies = config.world_size // pipeline.stages
    layers, optimizer, batches, loss = _made(call_factory(factory, settings.seed))
    if isinstance(layers, nn.Module) and not isinstance(layers, nn.Sequential):
        raise ValueError(f"the factory's layers are {named(layers)}: {_ACCEPTED}")
    for name, value in (("optimizer", optimizer), ("loss", loss)):
        if not callable(value) or isinstance(value, Optimizer):
            raise ValueError(f"the factory's {name} is {named(value)}, not a function: {_ACCEPTED}")
    pairs = take_batches(batches, settings.batches(copies))
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"the factory's batches have {named(pair)} among them, not pairs: {_ACCEPTED}")
    if alone:
        return Subject(PipelineModule(layers, 1, rank=0), optimizer, pairs, loss)
    table = build_table(pipeline.schedule, pipeline.stages, settings.accumulation, pipeline.chunks)
    module = PipelineModule(
        layers,
        pipeline.stages,
        loss_fn=loss,
        partition_method=pipeline.partition,
        chunks=table.chunks,
        placement=table.placement.shape,
    )
    return Subject(module, optimizer, pairs, loss)


def _made(made: Any) -> tuple[Any, Any, Any, Any]:
    if isinstance(made, (tuple, list)) and len(made) == 2 and hasattr(made[0], "configure_pipeline"):
        module = made[0]
        layers, loss = module.configure_pipeline(), getattr(module, "pipeline_loss", None)
        if loss is None or isinstance(layers, PipelineModule):
            raise ValueError(
                f"{type(module).__name__}: verify divides the layers itself, so configure_pipeline() has to return "
                f"layers, and pipeline_loss(outputs, labels) the loss; or {_ACCEPTED}"
            )
        make = getattr(module, "pipeline_batch", None)
        batches = made[1] if make is None else map(make, made[1])

        def optimizer_of(pipeline: nn.Module) -> torch.optim.Optimizer:
            module.pipeline = pipeline
            return lightning_optimizer(module)

        return layers, optimizer_of, batches, loss
    if not isinstance(made, (tuple, list)) or len(made) != 4:
        raise ValueError(f"the factory returned {named(made)}: {_ACCEPTED}")
    return cast("tuple[Any, Any, Any, Any]", tuple(made))
