"""The part of `ZeroAccelerator` that prepares: an engine for each model, which its optimizers attach to."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.config import LATER_KEYS, Fact, ZeroConfig, batch_fact, check_owned, resolve
from zero_strategy.diagnostics.norms import NormLog, NormSettings
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate_optimizer import ZeroOptimizer
from zero_strategy.integrations.accelerate_pipelines import PipelineAccelerator
from zero_strategy.integrations.accelerate_scaler import AgreedGradScaler
from zero_strategy.integrations.accelerate_uneven import Followers
from zero_strategy.pipeline.module import PipelineModule


class ShardingAccelerator(PipelineAccelerator):
    """Models are sharded in place when they are prepared.

    Attributes:
        zero_config: The settings.
        scaler: With mixed_precision="fp16", of all models together; else None.
    """

    zero_config: ZeroConfig
    scaler: AgreedGradScaler | None
    _engines: dict[int, ZeroEngine]
    _for_training: dict[int, bool]
    _unattached: list[Optimizer]
    _told_factor: bool
    _followers: Followers | None
    _facts: dict[str, Fact]
    _norm_settings: NormSettings | None
    _norm_logs: dict[int, NormLog]
    """By the engines' ids."""

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; models come first, in whatever order they are given, for optimizers update their shards."""
        models = [index for index, item in enumerate(objects) if isinstance(item, nn.Module)]
        order = models + [index for index in range(len(objects)) if index not in models]
        placement = None if device_placement is None else [device_placement[index] for index in order]
        prepared = super().prepare(*(objects[index] for index in order), device_placement=placement)
        check_owned(self.zero_config, self._facts_of_prepared(), later=LATER_KEYS)
        if len(objects) == 1:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[index] for index in range(len(objects)))

    def _facts_of_prepared(self) -> dict[str, Fact]:
        """The first loader is the one of the training; a single optimizer is that of the config."""
        found = dict(self._facts)
        total = getattr(self._dataloaders[0], "total_batch_size", None) if self._dataloaders else None
        if isinstance(total, int) and "train_batch_size" not in found:
            copies = self._copies()
            micro = total // copies
            found["micro_batch_per_rank"] = Fact(micro, "the first prepared DataLoader")
            found["samples_per_step"] = batch_fact(copies, micro, self.gradient_accumulation_steps)
        if len(self._optimizers) == 1:
            found["optimizer"] = Fact(self._optimizers[0].optimizer, "accelerator.prepare(...)")
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place; also one that is only evaluated, for it may not fit otherwise."""
        if id(model) in self._engines:
            self._prepare_again(model, device_placement, evaluation_mode)
            return model
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO  # compiling in a wrapper would leave hooks out
        try:
            whole = self.zero_config.stage < 3 and not is_deferred(model)  # else it may not fit
            placed = device_placement if whole else False
            prepared = super().prepare_model(model, placed, evaluation_mode=True)  # without DistributedDataParallel
        finally:
            plugin.backend = backend
        assert id(prepared) == id(model)  # with no wrapper wanted, Accelerate changes it in place
        if isinstance(model, PipelineModule):
            engine: ZeroEngine = self._pipeline_engine(model)
        else:
            engine = ZeroEngine(model, resolve(self.zero_config, self.num_processes), device=self.device)
        install_diagnostics(engine)
        engine.scaler = None if self.scaler is None else self.scaler.rule
        self._engines[id(model)] = engine
        if not isinstance(model, PipelineModule) and not hasattr(model, "no_sync"):
            object.__setattr__(model, "no_sync", NoSync(engine))
        if self._norm_settings is not None:
            self._norm_logs[id(engine)] = NormLog(engine, self._norm_settings)
        self._for_training[id(model)] = not evaluation_mode
        if backend != DynamoBackend.NO:
            compile_in_place(model, plugin.to_kwargs(), regions=bool(plugin.use_regional_compilation))
        waiting, self._unattached = self._unattached, []
        for optimizer in waiting:
            self._attach(optimizer)
        return model

    def _prepare_again(self, model: nn.Module, device_placement: bool | None, evaluation_mode: bool) -> None:
        """A model that was evaluated first is then trained; one that `free_memory` let go of is listed again."""
        listed = any(known is model for known in self._models)
        if listed and self._for_training[id(model)] and not evaluation_mode:
            raise ValueError(
                f"this {type(model).__name__} was prepared by this ZeroAccelerator already, in place: drop it from the "
                "second accelerator.prepare(...), and give that the other objects alone"
            )
        if not listed:
            super().prepare_model(model, device_placement, evaluation_mode=True)
        self._for_training[id(model)] = not evaluation_mode or (listed and self._for_training[id(model)])

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> ZeroOptimizer:
        """Let an optimizer update shards; its model may be prepared later."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            known: ZeroOptimizer = super().prepare_optimizer(optimizer)
            return known
        self._attach(optimizer)
        prepared = ZeroOptimizer(
            optimizer,
            lambda: self._engine_of_optimizer(optimizer).optimizer_state_dict(optimizer),
            lambda state: self._engine_of_optimizer(optimizer).load_optimizer_state_dict(optimizer, state),
            self.scaler,
            self._together,
            lambda: self._log_step(optimizer),
            lambda: self._measure_norms(prepared),
            lambda: self._engine_of_optimizer(optimizer).sharded(optimizer).skipped,
        )
        self._optimizers.append(prepared)
        return prepared

    def _log_step(self, optimizer: Optimizer) -> None:
        """What was recorded and measured of a step goes to the trackers, if there are any."""
        engine = self._engine_of_optimizer(optimizer)
        log = self._norm_logs.get(id(engine))
        found: dict[str, float] = {}
        if log is not None and self._followers is not None:
            log.drop()  # ranks without a batch would not measure
        elif log is not None:
            found = log.after_step()
        if self.zero_config.diagnostics.log and self.trackers:
            found = {**engine.step_metrics(), **found}
        if found and self.trackers:
            self.log(found, step=engine.steps.taken)

    def log_parameter_norms(
        self, every_n_steps: int = 50, *, gradients: bool = True, updates: bool = False
    ) -> None:
        """From now on tell trackers the norms of every parameter's gradient and update, every so many optimizer steps.

        The names are `zero/gradient_norm/PARAMETER` and `zero/update_norm/PARAMETER`. Gradients are those of a step, of
        all micro-batches and processes, unscaled, before `clip_grad_norm_`. All processes call it. Steps with a closure
        and those in `join_uneven_inputs` are not measured.

        Args:
            every_n_steps: Optimizer steps from one that is measured to the next; the first one is.
            gradients: The norms of gradients: from the pass of clipping, else a pass over them.
            updates: By how much each parameter moves: a copy of what each process owns, and a pass over it.

        Raises:
            ValueError: If there is nothing to measure, or the number of steps is less than 1.
        """
        for log in self._norm_logs.values():
            log.close()
        self._norm_logs, self._norm_settings = {}, NormSettings(every_n_steps, gradients, updates)
        for engine in self._engines.values():
            self._norm_logs[id(engine)] = NormLog(engine, self._norm_settings)

    def _measure_norms(self, prepared: ZeroOptimizer) -> None:
        """Before a step."""
        if self._norm_logs and self._followers is None:
            log = self._norm_logs[id(self._engine_of_optimizer(prepared.optimizer))]
            if log.due:
                self.unscale_gradients(prepared)
            log.before_step(prepared.optimizer)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerate's: a step of it is one per process, which is told once."""
        every = self.step_scheduler_with_optimizer and not self.split_batches
        if every and self.num_processes > 1 and not self._told_factor and self.is_local_main_process:
            self._told_factor = True
            warnings.warn(
                f"Accelerate steps a prepared {type(scheduler).__name__} {self.num_processes} times per optimizer "
                "step, once per process: its lengths must count the batches of a DataLoader that is not prepared. For "
                "one step per optimizer step: DataLoaderConfiguration(split_batches=True), or "
                "step_scheduler_with_optimizer=False and scheduler.step() after real optimizer steps only",
                stacklevel=2,
            )
        return super().prepare_scheduler(scheduler)

    def _attach(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        engines = [e for e in self._engines.values() if held & {id(p) for _, p in e.model.names()}]
        if not engines:
            self._unattached.append(optimizer)
            optimizer.register_step_pre_hook(self._check_attached)
            return
        if len(engines) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters of {len(engines)} models; give each model an optimizer "
                "of its own"
            )
        live = [prepared.optimizer for prepared in self._optimizers]
        if engines[0].optimizers and not any(sharded.optimizer in live for sharded in engines[0].optimizers):
            engines[0].detach()  # of a training before, which `free_memory` ended
        engines[0].attach(optimizer)

    def _check_attached(self, optimizer: Optimizer, *_: Any) -> None:
        if any(waiting is optimizer for waiting in self._unattached):
            raise ValueError(
                f"the parameters of {type(optimizer).__name__} are not those of a model that was prepared: prepare the "
                "model too, and make the optimizer from model.parameters() of that very object"
            )

    def engine(self, model: nn.Module) -> ZeroEngine:
        """The engine of a prepared model.

        Raises:
            ValueError: If it was not prepared.
        """
        if id(model) not in self._engines:
            raise ValueError(
                f"{type(model).__name__} was not prepared by this accelerator: model = accelerator.prepare(model)"
            )
        return self._engines[id(model)]

    def _together(self, name: str, prepared: Any, *arguments: Any) -> AbstractContextManager[None]:
        """Around what an optimizer does; in `join_uneven_inputs` ranks without a batch do it as well."""
        if self._followers is None:
            return nullcontext()
        return self._followers.training.together(name, self._followers.optimizer(prepared), *arguments)

    def _engine_of_optimizer(self, optimizer: Optimizer) -> ZeroEngine:
        for engine in self._engines.values():
            if any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                return engine
        raise ValueError(f"{type(optimizer).__name__} is not attached: prepare its model too")

    # ---- whole weights ----

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model itself: there is no wrapper."""
        if id(model) in self._engines:
            return model
        plain: nn.Module = super().unwrap_model(model)
        return plain

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole state dict on the host of rank 0, an empty one elsewhere; all ranks call it."""
        if id(model) not in self._engines:
            return dict(super().get_state_dict(model, unwrap))
        state = self._engines[id(model)].full_state_dict()
        return state if self.process_index == 0 else {}

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; engines of the models that are given end, others stay sharded for a next training.

        All ranks call it. A model whose engine has ended keeps what it has: at stage 3, this rank's slices.
        """
        for item in objects:
            self._for_training.pop(id(item), None)
            if (engine := self._engines.pop(id(item), None)) is not None:
                self._norm_logs.pop(id(engine), None)
                engine.close()
        return super().free_memory(*objects)

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has no engines: they hold process groups."""
        return {**self.__dict__, "_engines": {}, "_unattached": [], "_followers": None, "_norm_logs": {}}


def compile_in_place(module: nn.Module, settings: Mapping[str, Any], *, regions: bool) -> None:
    """Compile a module, keeping its object and hooks.

    Args:
        module: The module.
        settings: Keywords of `torch.compile`.
        regions: Compile the members of every ModuleList of one class each by itself, which is quicker to begin with;
            so are the parts beside them.
    """
    if regions and _repeats(module):
        for block in module.children():
            block.compile(**settings)
    elif regions and any(_repeats(part) for part in module.modules()):
        for child in module.children():
            compile_in_place(child, settings, regions=True)
    else:
        module.compile(**settings)


def _repeats(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


class NoSync:
    """`model.no_sync()` of a prepared model, as `DistributedDataParallel` has it; a copy of the model syncs nothing.

    Args:
        engine: It is held weakly, as it holds the model.
    """

    def __init__(self, engine: ZeroEngine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self) -> AbstractContextManager[None]:
        """Keep gradients on this rank.

        Raises:
            RuntimeError: For Accelerate's `LocalSGD`, which averages parameters that differ between ranks.
        """
        if sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            raise RuntimeError(
                "LocalSGD lets each rank's parameters go their own way between averages; ranks that share parameters "
                "or optimizer state have one value of each. Use accelerator.accumulate(model), which sends gradients "
                "once in so many batches, or prepare the model by a plain Accelerator"
            )
        engine = None if self._engine is None else self._engine()
        return nullcontext() if engine is None else engine.no_sync()

    def __deepcopy__(self, memo: object) -> NoSync:
        return NoSync(None)

    def __reduce__(self) -> tuple[type[NoSync], tuple[None]]:
        return NoSync, (None,)
