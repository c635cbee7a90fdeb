"""The Trainer's strategy for pipelines: the layers of a LightningModule divided among ranks.

connect -> setup_environment -> setup: configure_pipeline, an engine for this rank's layers, configure_optimizers
training_step       the module's own, in which self.pipeline.loss(batch) runs all forwards and backwards
validation_step...  the module's own, in which self.pipeline.loss(batch) and self.pipeline.outputs(inputs) run forwards
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from zero_strategy.checkpoint.agreement import catalog_of, state_dict_entries
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.store import together
from zero_strategy.config import Fact, ResolvedConfig, ZeroConfig, batch_fact, resolve
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning.checkpoint_dict import untouched, whole
from zero_strategy.integrations.lightning.module_engine import engine_for, engine_of
from zero_strategy.integrations.lightning.setup import count_processes, schedulers_left_alone
from zero_strategy.integrations.lightning.trainer import StrategySettings
from zero_strategy.integrations.lightning.uneven import same_number
from zero_strategy.integrations.pipeline_runs import IntegrationRunner
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.engine_setup import AUTO, derive_schedule
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import Placement, build_table
from zero_strategy.pipeline.topology import PipeModelDataParallelTopology

if TYPE_CHECKING:
    from zero_strategy.integrations.lightning.trainer import TrainerStrategy as _Base
    from zero_strategy.verify.compare import VerifyReport
else:
    _Base = object

STAGES_VARIABLE = "ZERO_STRATEGY_PIPELINE_STAGES"
"""Number of stages where neither config nor keyword nor module says one; else all ranks are stages of one pipeline."""

ATTRIBUTE = "pipeline"
"""Where a LightningModule has its PipelineModule; names of parameters begin with it."""


class TrainerPipeline(_Base):
    """Addition of `PipelineStrategy` of both Trainer namespaces to `ZeroStrategy`."""

    compares_batches = False  # but all numbers, in `_begin_loop`

    def __init__(
        self,
        config: ZeroConfig | dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        stages: int | None = None,
        schedule: str | None = None,
        micro_batches: int | None = None,
        zero_stage: int | None = None,
        chunks: int | None = None,
        partition: str | None = None,
        gather: str | None = None,
        gather_bytes: int | None = None,
        timeline: str | None = None,
        **settings: Unpack[StrategySettings],
    ) -> None:
        """Takes a config, or its settings as keywords; keywords win. See `PipelineConfig` for those of pipelines.

        Args:
            config: A `ZeroConfig`, a mapping, or the path of a YAML file.
            stages: Ranks that one copy of the model is divided among. Default: what `configure_pipeline` returns says,
                else the variable ZERO_STRATEGY_PIPELINE_STAGES, else all ranks.
            schedule: In which order ranks do forwards and backwards.
            micro_batches: Parts that each batch of the data loader is divided into. Default: as many as stages.
            zero_stage: ZeRO stage among the copies of the pipeline (`stage` of `ZeroStrategy`). Default: 1.
            chunks: Parts of the model that each rank holds.
            partition: What stages have equal shares of.
            gather: Stage 3: how often parameters are gathered.
            gather_bytes: Stage 3: bytes of full parameters that a rank may hold during a step.
            timeline: File into which rank 0 writes what ranks did when.
            settings: All that `ZeroStrategy` takes.
        """
        if zero_stage is not None:
            if settings.get("stage") is not None:
                raise ValueError(f"zero_stage={zero_stage} and stage={settings['stage']} set the same thing; give one")
            settings["stage"] = zero_stage
        own = {
            "stages": stages,
            "schedule": schedule,
            "micro_batches": micro_batches,
            "chunks": chunks,
            "partition": partition,
            "gather": gather,
            "gather_bytes": gather_bytes,
            "timeline": timeline,
        }
        given = {name: value for name, value in own.items() if value is not None}
        # The section is checked when it is made, and refuses chunks beside its default of one stage.
        if stages is None and chunks is not None and STAGES_VARIABLE in os.environ:
            given["stages"] = _stages_of_environment()
        if given:
            settings["pipeline"] = {**_as_dict(settings.get("pipeline")), **given}
        super().__init__(config, **settings)
        if self.config.origin_of("stage") == "default":
            self.config.record("stage", 1, "default of PipelineStrategy")

    def __repr__(self) -> str:
        name = f"{type(self).__module__}.{type(self).__name__}"
        return f"{name}(stages={self.config.pipeline.stages}, zero_stage={self.config.stage}), for a Trainer"

    @property
    def _engine(self) -> PipelineEngine:
        assert isinstance(self.engine, PipelineEngine)
        return self.engine

    @property
    def _runner(self) -> IntegrationRunner:
        runner = self._engine.pipeline.runner
        assert isinstance(runner, IntegrationRunner)
        return runner

    # ---- settings ----

    def _resolve(self) -> ResolvedConfig:
        return resolve(self._with_stages(self._world), self._world, self._facts())

    @property
    def _world(self) -> int:
        return count_processes(self)

    def _with_stages(self, world: int) -> ZeroConfig:
        # What is derived here may be another number in the next run.
        config = deepcopy(self.config)
        there = getattr(self._lightning_module, ATTRIBUTE, None)
        if isinstance(there, PipelineModule) and config.mesh.tensor is None and there.mpu().slice_parallel_size > 1:
            config.mesh.record("tensor", there.mpu().slice_parallel_size, "derived: the PipelineModule's topology")
        if config.origin_of("pipeline.stages") == "default":
            if isinstance(there, PipelineModule):
                config.pipeline.record("stages", there.num_stages, "derived: the PipelineModule")
                derive_schedule(config, there)
            elif STAGES_VARIABLE in os.environ:
                config.pipeline.record("stages", _stages_of_environment(), STAGES_VARIABLE)
            else:
                config.pipeline.record("stages", max(1, world // (config.mesh.tensor or 1)), "derived: all ranks")
        return config

    def _copies(self, world: int) -> int:
        """Copies of the pipeline, each with data of its own."""
        config = self._with_stages(world)
        return max(1, world // (config.pipeline.stages * (config.mesh.tensor or 1)))

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """See `ZeroStrategy.verify`; a factory of layers, or of a LightningModule: `verify.pipeline`."""
        ranks = dist.get_world_size() if dist.is_initialized() else keywords.get("ranks") or 2
        from zero_strategy.verify import verify

        return verify(factory, self._with_stages(ranks), **keywords)

    def _facts(self) -> dict[str, Fact]:
        facts = super()._facts()
        per_rank = facts.get("micro_batch_per_rank")
        if per_rank is not None:
            accumulation = self.lightning_module.trainer.accumulate_grad_batches
            facts["samples_per_step"] = batch_fact(self._copies(self._world), per_rank.value, accumulation)
        return facts

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For a sampler: ranks of one pipeline see the same data, copies of the pipeline different ones."""
        if self.engine is None:
            copies, tensor = self._copies(self._world), self.config.mesh.tensor or 1
            return {"num_replicas": copies, "rank": self.global_rank // tensor % copies}
        grid = self._engine.pipeline.mpu()
        return {"num_replicas": grid.data_parallel_size, "rank": grid.data_parallel_id}

    # ---- set-up ----

    def make_tensor_mesh(self) -> None:
        """A pipeline's layers are divided when they are built; see `PipelineModule.tensor_mesh`."""

    def setup(self, trainer: Any) -> None:
        """Divide the layers, unless that is done; then as `ZeroStrategy`."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync:
            raise ValueError(
                "sync_batchnorm=True averages over all ranks, and ranks of a pipeline have different layers; leave it "
                "out, or use torch.nn.SyncBatchNorm with the group self.pipeline.mpu().get_data_parallel_group()"
            )
        if trainer.state.fn == "fit" and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__}.automatic_optimization is False, but a pipeline runs backwards together with "
                "forwards, so that training_step cannot decide between them; leave it True"
            )
        if self.precision_plugin.float8 is not None:
            raise ValueError(
                "ZeroPrecision(float8=...) converts a module's layers before it is sharded, and a pipeline builds its "
                "own later: call torchao's convert_to_float8_training in configure_pipeline(), or in the layers' own "
                "factories"
            )
        if engine_of(module) is None:
            self._configure_pipeline(module)
        super().setup(trainer)
        runner = self._runner
        runner.begin(self.precision_plugin.forward_context)

    def setup_optimizers(self, trainer: Any) -> None:
        """See `ZeroStrategy`: what fails on one stage, such as an optimizer without parameters, fails on all.

        Raises:
            ValueError: What torch raised, or that another rank failed; says what to do about an empty stage.
        """
        pipeline = self._engine.pipeline

        def make() -> None:
            try:
                super(TrainerPipeline, self).setup_optimizers(trainer)
            except ValueError as error:
                if any(parameter.requires_grad for parameter in pipeline.parameters()):
                    raise
                raise ValueError(
                    f"configure_optimizers() failed on stage {', '.join(map(str, pipeline.stages))}, which has nothing "
                    f"to train ({error}); pass param groups, of which torch allows empty ones, such as "
                    "AdamW([{'params': self.parameters()}]), or divide the layers otherwise (partition, bounds)"
                ) from error

        together(self._engine.mesh.world_group.control, make)

    def _configure_pipeline(self, module: Any) -> None:
        """Make `module.pipeline`.

        Raises:
            TypeError: If the module has no `configure_pipeline`, or it returns something else.
            ValueError: If the module has parameters or buffers outside of it; names them.
        """
        make = getattr(module, "configure_pipeline", None)
        if not callable(make):
            raise TypeError(
                f"{type(module).__name__} has no configure_pipeline(): PipelineStrategy divides what it returns, a "
                "PipelineModule, a list of layers or an nn.Sequential"
            )
        with self.tensor_init_context(), self.model_sharded_context(), self.precision_plugin.module_init_context():
            made = make()
            pipeline = made if isinstance(made, PipelineModule) else self._module_of(made)
        if pipeline.loss_fn is None:
            pipeline.loss_fn = getattr(module, "pipeline_loss", None)
        setattr(module, ATTRIBUTE, pipeline)
        _check_nothing_else(module)

    def _module_of(self, layers: Any) -> PipelineModule:
        if layers is None:
            raise TypeError("configure_pipeline() returned None; it returns a PipelineModule, or layers in their order")
        config = resolve(self._with_stages(self._world), self._world).config
        pipeline, tensor = config.pipeline, config.mesh.tensor or 1
        count, chunks, shape = pipeline.micro_batches or 1, pipeline.chunks or 1, Placement(1).shape
        if pipeline.schedule != AUTO:  # which chooses among the schedules of a placement
            shape = build_table(pipeline.schedule, pipeline.stages, count, chunks).placement.shape
        copies, divided = self._copies(self._world), None
        if tensor > 1:
            divided = PipeModelDataParallelTopology(num_pp=pipeline.stages, num_mp=tensor, num_dp=copies)
        return PipelineModule(
            layers,
            pipeline.stages,
            divided,
            partition_method=pipeline.partition,
            chunks=chunks,
            placement=shape,
        )

    def _engine_for(self, module: Any, compute_dtype: torch.dtype | None) -> ZeroEngine:
        def make(root: Any, config: ResolvedConfig, **more: Any) -> ZeroEngine:
            pipeline: PipelineModule = getattr(root, ATTRIBUTE)
            engine = PipelineEngine(pipeline, config, root=root, autocast=context, **more)
            pipeline.runner = IntegrationRunner(engine, getattr(root, "pipeline_batch", None))
            return engine

        def context() -> Any:  # a later Trainer may have another precision plugin
            runner = getattr(module, ATTRIBUTE).runner
            return nullcontext() if runner.forward_context is None else runner.forward_context()

        return engine_for(module, self._resolve(), compute_dtype, self.root_device, make)

    # ---- steps ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`, which runs the batch forward and backward by `self.pipeline.loss`."""
        module, engine, runner = self.lightning_module, self._engine, self._runner
        assert module is not None
        accumulation = module.trainer.accumulate_grad_batches
        runner.accumulation = accumulation
        runner.begin_step(first=module.trainer.fit_loop.epoch_loop.batch_idx % accumulation == 0)
        # Layers enter the precision's context one by one, since their backwards run in none.
        with engine.forward_scope(), schedulers_left_alone(module):
            return module.training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Old gradients have been removed: give the module those that the pipeline made."""
        self._runner.begin_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Look whether the module returned the loss as it is."""
        scaler = self.precision_plugin.scaler
        self._runner.end_backward(1.0 if scaler is None else scaler.scale)

    @contextmanager
    def _evaluation_step(self, context: Any) -> Any:
        with super()._evaluation_step(nullcontext()) as module:  # layers have the precision's context themselves
            yield module

    def process_dataloader(self, dataloader: Any) -> Any:
        """A data loader that is about to be iterated over; without a length it is watched."""
        dataloader = super().process_dataloader(dataloader)
        if _has_length(dataloader):
            return dataloader
        return same_number(dataloader, *self._alike())

    def _alike(self) -> tuple[Communicator, list[int]]:
        """Ranks that need the same number of batches: all ranks in training, else those of a pipeline."""
        if self.lightning_module.trainer.training:
            return self._engine.mesh.world_group.control, list(range(self._engine.mesh.world_group.world_size))
        return self._engine.pipe, self._engine.pipeline.mpu().pp_group

    def on_train_start(self) -> None:
        """See `ZeroStrategy`: ranks of a pipeline compare how many batches they have."""
        super().on_train_start()
        self._begin_loop([self.lightning_module.trainer.num_training_batches], "train_dataloader")

    def on_validation_start(self) -> None:
        """See `on_train_start`."""
        super().on_validation_start()
        trainer = self.lightning_module.trainer
        sanity = trainer.sanity_checking
        self._begin_loop(trainer.num_sanity_val_batches if sanity else trainer.num_val_batches, "val_dataloaders")

    def on_test_start(self) -> None:
        """See `on_train_start`."""
        super().on_test_start()
        self._begin_loop(self.lightning_module.trainer.num_test_batches, "test_dataloaders")

    def on_predict_start(self) -> None:
        """See `on_train_start`."""
        super().on_predict_start()
        self._begin_loop(self.lightning_module.trainer.num_predict_batches, "predict_dataloaders")

    def _begin_loop(self, batches: Any, what: str) -> None:
        self._runner.compares = True
        control, ranks = self._alike()
        everyone = control.all_gather_objects(list(batches))
        if any(other != everyone[0] for other in everyone):
            raise ValueError(
                f"{what}: the ranks of a pipeline need the same batches, but have different numbers of them: "
                f"{', '.join(f'rank {rank}: {counts}' for rank, counts in zip(ranks, everyone, strict=True))}. Leave "
                "use_distributed_sampler=True, or divide data by trainer.strategy.distributed_sampler_kwargs"
            )

    # ---- checkpoints ----

    def _own_files(self, rest: dict[str, Any]) -> dict[str, bytes]:
        # Ranks of one pipeline have the same state of data loaders.
        return super()._own_files(rest) if self._engine.pipeline.stage_id == 0 else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the live shards."""
        weights = checkpoint["state_dict"]
        if untouched(weights) and self.engine is not None:
            super().load_model_state_dict(checkpoint, strict)
            return
        self._load_whole(whole(weights), strict)

    def _load_whole(self, weights: Mapping[str, Any], strict: bool) -> None:
        """Take this rank's layers out of a state dict of all."""
        engine, module = self._engine, self.lightning_module
        catalog = catalog_of(engine)
        first, aliases = set(catalog.names()), dict(catalog.aliases)
        there = {aliases.get(name, name) for name in weights}
        missing, unexpected = sorted(first - there), sorted(there - first)
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state dict does not fit {type(module).__name__}: missing {missing}, unexpected {unexpected}"
            )
        by_first = {aliases.get(name, name): value for name, value in weights.items()}
        own = {
            name: by_first[aliases.get(name, name)]
            for name, _ in state_dict_entries(engine.module, tied=True)
            if aliases.get(name, name) in by_first
        }
        # Names of other stages are missing here.
        module.load_state_dict(own, strict=False)
        engine.publish_ties()


def _has_length(loader: Any) -> bool:
    """True if a loader knows how many batches it gives."""
    try:
        len(loader)
    # Lightning takes either for a loader without a length.
    except (TypeError, NotImplementedError):
        return False
    return True


def _as_dict(section: Any) -> dict[str, Any]:
    """Settings of a section that were given, as keywords may be added to them."""
    if section is None or isinstance(section, Mapping):
        return dict(section or {})
    return {
        key.removeprefix("pipeline."): setting.value
        for key, setting in section.settings()
        if setting.origin != "default"
    }


def _stages_of_environment() -> int:
    text = os.environ[STAGES_VARIABLE]
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{STAGES_VARIABLE}={text!r} must be a number of stages, from 1")
    return int(text)


def _check_nothing_else(module: nn.Module) -> None:
    names = [name for name, _ in state_dict_entries(module) if not name.startswith(f"{ATTRIBUTE}.")]
    if names:
        raise ValueError(
            f"{type(module).__name__} has parameters or buffers outside of its pipeline: {', '.join(names)}. A stage "
            "trains the layers that configure_pipeline() returns: make them layers, build them there without keeping "
            "them in an attribute, or register buffers with persistent=False"
        )
