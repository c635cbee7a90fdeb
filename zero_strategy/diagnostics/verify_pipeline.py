"""`verify` of pipelines: layers divided among ranks against one process that runs them all.

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
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.activation.seeds import RandomState
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.install import install_diagnostics
from zero_strategy.diagnostics.verify_pipeline_twin import Layout, PipelineTwin
from zero_strategy.diagnostics.verify_run import ShardedRun
from zero_strategy.diagnostics.verify_session import Verification, check_anew
from zero_strategy.diagnostics.verify_settings import VerifySettings
from zero_strategy.diagnostics.verify_subject import (
    Factory,
    Subject,
    call_factory,
    lightning_optimizer,
    named,
    take_batches,
)
from zero_strategy.diagnostics.verify_twin import Tensors, Twin, flat_state
from zero_strategy.distributed import Communicator
from zero_strategy.distributed.world import world_rank
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.engine_setup import AUTO
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.registry import build_table
from zero_strategy.pipeline_engine import PipelineEngine

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
        """Of each rank: its stages, its lane, and of each parameter offset and slice size, or None if it is whole."""
        own: dict[str, tuple[int, int] | None] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            place = engine.model.place(parameter)
            assert place is not None
            layout, sharded = place[0].layout, place[0].placement.shard_optimizer
            own[name] = (layout.segments[place[1]].offset, layout.slice_numel) if sharded else None
        return engine.mesh.team.control.gather_objects((module.stages, module.mpu().dp_group, own))

    @property
    def control(self) -> Communicator:
        """All ranks of all stages."""
        return self.engine.mesh.team.control

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
        for _, lane, own in self._places:
            if name in own:
                return None if own[name] is None else lane[(own[name][0] + element) // own[name][1]]
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
        self._held: list[tuple[set[str], set[str]]] = run.control.gather_objects(
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

    def _twin(self, sharded: Subject, jitter: int | None = None) -> Twin:
        assert self.layout is not None
        subject = pipeline_subject(self.factory, self.config, self.settings, alone=True)
        check_anew(sharded, subject)
        return PipelineTwin(subject, self.config, self.settings, self.layout, jitter)

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


def pipeline_subject(
    factory: Factory, config: ResolvedConfig, settings: VerifySettings, *, alone: bool
) -> Subject:
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
