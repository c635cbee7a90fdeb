"""The Trainer's strategy: which engine call each of Lightning's hooks is. Shared by both Trainer namespaces.

connect -> setup_environment -> [configure_model] -> setup: move, shard, configure_optimizers, attach
training_step, backward, optimizer_step, clipping     the engine's hooks do the work
validation_step, ...                                  ranks may have different numbers of batches
save_checkpoint, load_checkpoint                      see `checkpoint`
teardown                                              nothing moves: shards stay usable for saving, testing, fitting
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from zero_strategy.config import (
    LATER_KEYS,
    Fact,
    ResolvedConfig,
    ZeroConfig,
    ZeroSettings,
    check_owned,
    resolve,
)
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.materialize import parameters_on_meta
from zero_strategy.integrations.lightning.averaging import average_on_shards, connect_averages
from zero_strategy.integrations.lightning.callbacks import (
    FailureAgreement,
    SavesOnSignals,
    end_children_at_exit,
)
from zero_strategy.integrations.lightning.checkpoint import TrainerCheckpoints
from zero_strategy.integrations.lightning.chosen import choose_for_fit
from zero_strategy.integrations.lightning.module_engine import OtherStrategy, end_other_engines, engine_for, engine_of
from zero_strategy.integrations.lightning.namespaces import MODULES
from zero_strategy.integrations.lightning.precision import TrainerPrecision, precision_of
from zero_strategy.integrations.lightning.setup import (
    TensorMesh,
    check_device,
    check_world_size,
    count_processes,
    read_settings,
    schedulers_left_alone,
    shows_settings,
    trainer_facts,
)
from zero_strategy.integrations.lightning.slots import set_accumulation, slot_loader, start_inside
from zero_strategy.integrations.lightning.surviving import FormedRanks
from zero_strategy.integrations.lightning.uneven import TrainingBatches
from zero_strategy.integrations.takeover import engines_over, hold

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.auto.example import Example
    from zero_strategy.integrations.lightning.callbacks import BatchEnd
    from zero_strategy.integrations.lightning.surviving import CopiesInMemory, SurvivingFit
    from zero_strategy.verify.compare import VerifyReport
else:
    _Base = object


class StrategySettings(ZeroSettings, total=False):
    """Keywords of a Trainer's strategy: the settings, and what Lightning hands to each of its strategies."""

    load_weights_only: bool | None
    accelerator: Any
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    checkpoint_io: Any
    precision_plugin: Any
    process_group_backend: str | None
    timeout: timedelta | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


class TrainerStrategy(FormedRanks, TrainerCheckpoints, TensorMesh, _Base):
    """Common base of `ZeroStrategy` of both Trainer namespaces.

    Attributes:
        config: The settings, as given.
        engine: The engine of the connected module, from `setup` on.
        load_weights_only: See the argument.
    """

    model: Any
    precision_class: ClassVar[type[TrainerPrecision]]
    batch_end_class: ClassVar[type[BatchEnd]]
    """`BatchEnd` as a callback of the Trainer's namespace."""
    copies_class: ClassVar[type[CopiesInMemory]]
    """`CopiesInMemory` likewise."""
    sigterm_exception: ClassVar[type[BaseException]]
    """What Lightning leaves the Trainer by."""
    compares_batches: ClassVar[bool] = True
    """Whether ranks' numbers of training batches are compared here; pipelines look by themselves."""

    @shows_settings
    def __init__(
        self,
        config: ZeroConfig | dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        load_weights_only: bool | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Unpack[ZeroSettings],
    ) -> None:
        """Takes a config, or its settings as keywords; keywords win. See `ZeroConfig` for each.

        Args:
            config: A `ZeroConfig`, a mapping, or the path of a YAML file.
            load_weights_only: False lets checkpoints hold arbitrary pickled objects. (A Trainer does not pass
                `fit(weights_only=...)` on to a strategy that loads after set-up, as this one does.)
            accelerator: As in Lightning's strategies.
            parallel_devices: As in Lightning's strategies.
            cluster_environment: As in Lightning's strategies.
            checkpoint_io: Writes checkpoints as whole files, from rank 0; by default they are sharded directories.
            precision_plugin: A `ZeroPrecision`; by default made from `Trainer(precision=...)`.
            process_group_backend: As in Lightning's strategies.
            timeout: `timeout_seconds` under the name that Lightning's strategies have.
            start_method: How processes are started: `popen`, `spawn`, `fork` or `forkserver`.
        """
        self.config = read_settings(config, timeout, settings)
        if self.config.checkpoint.keep_last:
            raise ValueError(
                f"checkpoint.keep_last={self.config.checkpoint.keep_last}: which checkpoints of a Trainer stay is "
                "decided by ModelCheckpoint; give it save_top_k instead"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeout_seconds),
            start_method=start_method,
        )
        self.load_weights_only = load_weights_only
        self.engine: ZeroEngine | None = None
        self._whole_files = checkpoint_io is not None
        self._failure = FailureAgreement(self.config.barrier_seconds)
        self._failed = False
        self._run: Any = None  # the Trainer of the run that goes on
        self._drained = True
        self._signals = SavesOnSignals(self)
        self._batches = TrainingBatches(self)
        self._slot_loss: Any = None
        self.surviving: SurvivingFit | None = None
        self.example: Example | None = None
        self._asked: ZeroConfig | None = None
        self._chosen_for_fit = False

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy of a Trainer, by pickle or deepcopy: its next fit makes engine and optimizers anew."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "engine": None, "_run": None, "surviving": None, "_optimizers": [], "lr_scheduler_configs": []}

    # ---- plugins and settings ----

    @property
    def is_distributed(self) -> bool:
        """Ranks see different data; without this Lightning neither samples nor logs as if they did."""
        return True

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, always a `ZeroPrecision` once the Trainer is made."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, self.precision_class):
            plugin = self.precision_class(precision_of(plugin, "Trainer"))
        self._precision_plugin = plugin

    def explain(self) -> str:
        """A table of every setting in effect: key, value, where it was set; the Trainer's, too, once it has this."""
        # Before a Trainer has taken the strategy there are no devices to count.
        known = self.num_processes and not self.config.auto.enabled
        return self._resolve().explain() if known else self.config.explain()

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """Prove on a model of yours that these settings train it as one plain process does.

        Args:
            factory: Makes the model, its optimizer, batches and loss; see `verify.subject`.
            **keywords: `ranks`, `steps`, `accumulation`, `clip_norm` and the rest: see `zero_strategy.verify`.

        Returns:
            What was compared, and the first tensor that differs.
        """
        from zero_strategy.verify import verify

        return verify(factory, self.config, **keywords)

    def __repr__(self) -> str:
        # Lightning shows this where it is handed a strategy of another namespace.
        name = f"{type(self).__module__}.{type(self).__name__}"
        mine = next((one for one, module in MODULES.items() if module == type(self).__module__), "")
        others = ", ".join(f"{one} takes {module}.ZeroStrategy" for one, module in MODULES.items() if one != mine)
        return f"{name}(stage={self.config.stage}), for the Trainer of {mine or 'its base class'}; {others}"

    def _resolve(self) -> ResolvedConfig:
        return resolve(self.config, count_processes(self), self._facts())

    def _facts(self) -> dict[str, Fact]:
        module = self._lightning_module
        trainer = None if module is None else module._trainer
        alike = (self.config.mesh.tensor or 1) * self.config.mesh.sequence
        return {} if trainer is None else trainer_facts(trainer, count_processes(self), alike)

    def leave(self) -> None:
        """Forget a world that is no more, and its fit; who calls it abandons the engine."""
        self._signals.forget()
        self._failure.forget()
        self.forget_save()
        self._failed, self._run, self._drained, self._slot_loss = False, None, True, None
        # Others may have come, who choose now: all do.
        self.config, self._chosen_for_fit = self._asked or self.config, False
        self._random_state, self._loader_states = None, ()
        self.engine, self.model = None, None

    # ---- set-up ----

    def setup_environment(self) -> None:
        """Process group, and the checks that need no model."""
        # First, as there may be no device for this rank; and once more for the group.
        check_world_size(self, "Trainer")
        check_device(self.root_device, "Trainer")
        super().setup_environment()
        check_world_size(self, "Trainer")
        self.precision_plugin.device_type = self.root_device.type
        assert self.lightning_module is not None
        self.make_tensor_mesh()
        self.lightning_module._device_mesh = self._device_mesh  # what its `device_mesh` shows to `configure_model`
        trainer = self.lightning_module.trainer
        # Before the callbacks' own `setup`, which copies the module.
        if trainer.state.fn == "fit":
            average_on_shards(trainer.callbacks)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        """Modules built inside; with `empty_init` their parameters are on the meta device until they are sharded.

        Under stage 3 they are built on the host, as the whole model may not fit a device.
        """
        device = torch.device("cpu") if self.config.stage == 3 else self.root_device
        with parameters_on_meta() if empty_init else nullcontext(), device, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the module, unless that is done; make and attach its optimizers when fitting."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module, fitting = self.lightning_module, trainer.state.fn == "fit"
        self._end_left_runs(module)
        compute_dtype = self.precision_plugin.plan.compute_dtype
        self._choose(trainer, compute_dtype)
        # First, since a module becomes plain by it and is converted again.
        end_other_engines(module, self._resolve(), compute_dtype)
        self.precision_plugin.convert_layers(module)
        if new := engine_of(module) is None:
            # Later calls would replace modules that are sharded.
            if fitting and self._layer_sync:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
        # Loader and optimizer are not there yet; `on_train_start` checks what speaks of them.
        if fitting:
            check_owned(self.config, self._facts(), later=LATER_KEYS)
        self.engine = self._engine_for(module, compute_dtype)
        if new:
            self.engine.when_plain(module.register_forward_pre_hook(OtherStrategy()).remove)
        hold(self.engine, self)
        if fitting and self.engine.slots.slots:
            set_accumulation(trainer, self.engine.slots)
        self._run = trainer
        self.precision_plugin.adopt(self.engine, self.config.loss_scale)
        self.model = module
        if fitting:
            self.setup_optimizers(trainer)
            connect_averages(trainer.callbacks, self.engine, self.root_device)
            if self.surviving is not None:
                self.surviving.set_up(self.engine)
        self.setup_precision_plugin()

    def _choose(self, trainer: Any, compute_dtype: torch.dtype | None) -> None:
        """Choose settings (`auto.enabled`): for a module that is not sharded yet, and for a fit after an evaluation."""
        if self.config.auto.enabled:
            self._asked = self.config
        fitting, module = trainer.state.fn == "fit", self.lightning_module
        if self._asked is None or (engine_of(module) is not None and (self._chosen_for_fit or not fitting)):
            return
        if (engine := engine_of(module)) is not None:  # of an evaluation: the module becomes plain
            engine.close(gather=True, reason="settings are chosen for a fit")
        self.config = choose_for_fit(self, self._asked, trainer, count_processes(self), compute_dtype)
        self._chosen_for_fit = fitting

    def _engine_for(self, module: Any, compute_dtype: torch.dtype | None) -> ZeroEngine:
        return engine_for(module, self._resolve(), compute_dtype, self.root_device, mesh=self._device_mesh)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers` and let its optimizers update shards."""
        assert self.engine is not None
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        self.engine.detach()  # those of an earlier fit
        # Lightning's stand-in for an optimizer where `configure_optimizers` returns None.
        real = [optimizer for optimizer in self.optimizers if type(optimizer).__name__ != "_MockOptimizer"]
        self.engine.attach(*real)
        if real:
            # A finetuning callback adds parameters later; those of batch norm are trainable till then.
            kinds = {base.__name__ for callback in trainer.callbacks for base in type(callback).__mro__}
            held = {id(p) for optimizer in real for group in optimizer.param_groups for p in group["params"]}
            left = {id(p) for p in self.engine.module.parameters()} - held if "BaseFinetuning" in kinds else ()
            self.engine.untrained = frozenset(left)
            self.engine.check_optimizers()

    def model_to_device(self) -> None:
        """Nothing: the module was moved before it was sharded."""

    def configure_ddp(self) -> None:
        """Nothing: there is no wrapper."""

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    # ---- steps ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `training_step`, its root parameters whole."""
        assert self.lightning_module is not None and self.engine is not None
        module, scope = self.lightning_module, self.engine.forward_scope((args, kwargs))
        with self.precision_plugin.train_step_context(), scope, schedulers_left_alone(module):
            found = module.training_step(*args, **kwargs)
            if self.engine.slots.slots:
                # Before it is divided by batches, which would round.
                self._slot_loss = found.get("loss") if isinstance(found, Mapping) else found
            return found

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `validation_step`."""
        with self._evaluation_step(self.precision_plugin.val_step_context()) as module:
            return module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `test_step`."""
        with self._evaluation_step(self.precision_plugin.test_step_context()) as module:
            return module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `predict_step`."""
        with self._evaluation_step(self.precision_plugin.predict_step_context()) as module:
            return module.predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation_step(self, context: Any) -> Iterator[Any]:
        assert self.lightning_module is not None and self.engine is not None
        self._drained = False
        # Outermost: ranks without a batch are told before anything is gathered.
        with self.engine.shared_step(), context, self.engine.forward_scope():
            yield self.lightning_module
        if self._ends_a_loader():
            self._drain()

    def _ends_a_loader(self) -> bool:
        """True if this rank's loop is known to have had the last batch of a data loader.

        Ranks without a batch must drain there: what follows is a reduction of metrics over all ranks.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        predicting = trainer.state.fn == "predict"
        loop: Any = trainer.predict_loop if predicting else trainer._evaluation_loop
        if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
            return False  # the step itself takes batches, any number of them
        if loop.batch_progress.is_last_batch:
            return True
        one_after_the_other = loop._combined_loader._mode == "sequential"
        return one_after_the_other and loop.batch_progress.current.ready in accumulate(loop.max_batches)

    def _drain(self) -> None:
        if not self._drained:
            self._drained = True
            assert self.engine is not None
            self.engine.drain()

    def on_train_start(self) -> None:
        """Before the first batch: now there are the loader and the optimizer that a DeepSpeed config may speak of."""
        facts = self._facts()
        if len(self.optimizers) == 1:
            facts["optimizer"] = Fact(self.optimizers[0], "configure_optimizers()")
        check_owned(self.config, facts)
        self._signals.watch()
        super().on_train_start()
        if self.surviving is not None:
            self.surviving.begin_training()

    def on_train_end(self) -> None:
        """After the last batch."""
        super().on_train_end()
        self._signals.end_training()

    def process_dataloader(self, dataloader: Any) -> Any:
        """A data loader that is about to be iterated over; one for training may have to go on longer."""
        # First, as states are loaded into the loader itself.
        dataloader = super().process_dataloader(dataloader)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.engine is not None and self.engine.slots.slots and trainer.training:
            dataloader = slot_loader(dataloader, self.engine, trainer)
            start_inside(dataloader, trainer.fit_loop, self.engine.slots)
        compared = self.compares_batches and self.lightning_module.trainer.training and self.world_size > 1
        return self._batches.joined(dataloader) if compared else dataloader

    def on_validation_start(self) -> None:
        """A loop begins in which this rank may have fewer batches than others."""
        self._drained = False

    def on_test_start(self) -> None:
        """See `on_validation_start`."""
        self._drained = False

    def on_predict_start(self) -> None:
        """See `on_validation_start`."""
        self._drained = False

    def on_validation_end(self) -> None:
        """Wait for the other ranks if the last batch was not known."""
        self._drain()

    def on_test_end(self) -> None:
        """See `on_validation_end`."""
        self._drain()

    def on_predict_end(self) -> None:
        """See `on_validation_end`."""
        self._drain()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """The loss scale follows the steps of the batch before; ranks without a batch of their own weigh it by 0."""
        super().on_train_batch_start(batch, batch_idx)
        self.precision_plugin.weigh(self._batches.weight() * self._undivided())
        self.precision_plugin.update_scale()

    # ---- backward and optimizer ----

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Backwards of accumulated micro-batches: gradients may stay on this rank."""
        assert self.engine is not None
        with self.engine.no_sync():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Look for released parameters in the loss; gradients are reduced by hooks."""
        assert self.engine is not None
        assert self.lightning_module is not None
        slot_loss, self._slot_loss = self._slot_loss, None
        if isinstance(slot_loss, Tensor):
            self.engine.check_loss(slot_loss)
        else:
            self.engine.check_loss(closure_loss, 1 / self.lightning_module.trainer.accumulate_grad_batches)

    def _undivided(self) -> float:
        """The number by which Lightning divides a loss that is to count as it is; the mean is taken over slots."""
        assert self.engine is not None and self.lightning_module is not None
        if not self.engine.slots.slots or not self.lightning_module.automatic_optimization:
            return 1.0
        return float(self.lightning_module.trainer.accumulate_grad_batches)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing: gradients are reduced when `loss.backward()` returns, before the user's hooks."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """See Lightning's: what was recorded of the step goes to the Trainer's loggers, beside what the module logs."""
        result = super().optimizer_step(*args, **kwargs)
        assert self.engine is not None and self.lightning_module is not None
        if self.config.diagnostics.log and (metrics := self.engine.step_metrics()):
            trainer: Any = self.lightning_module.trainer
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._log_slots()
        return result

    def _log_slots(self) -> None:
        """Log the mean loss over all slots of the step where the Trainer logs: the same bits on any ranks."""
        assert self.engine is not None and self.lightning_module is not None
        trainer: Any = self.lightning_module.trainer
        stepped = trainer.fit_loop.epoch_loop._batches_that_stepped
        if not self.engine.slots.slots or not trainer.log_every_n_steps or (stepped + 1) % trainer.log_every_n_steps:
            return
        if (loss := self.engine.slots.step_loss()) is not None and (not self.surviving or self.surviving.logs(stepped)):
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics({"zero/loss": float(loss)}, step=stepped)

    def optimizer_state(self, optimizer: Optimizer) -> Any:
        """The optimizer's whole state, made when it is looked into; all ranks must then look."""
        return self._optimizer_state(getattr(optimizer, "_optimizer", optimizer))

    # ---- the end ----

    @property
    def busy(self) -> str:
        """See `takeover.Holder`."""
        # Not where a callback's `on_exception` has raised: Lightning leaves out `on_exception` and `teardown` here.
        return "a run of a Trainer" if self._run is not None and self._run.state.status != "interrupted" else ""

    def _end_left_runs(self, module: nn.Module) -> None:
        """End runs with this strategy, or of this module, that had no `teardown`; see `busy`."""
        engines = engines_over(module)
        holders = [None if engine.holder is None else engine.holder() for engine in engines]
        former = [one for one in holders if isinstance(one, TrainerStrategy) and (one is self or not one.busy)]
        for left in (self, *former):
            if left._run is not None:
                left._failure.forget()
                left._signals.abandon()
                left._failed, left._run = True, None
        # An interrupted step has left gradients and reductions behind, which ending an engine refuses, too.
        for engine, holder in zip(engines, holders, strict=True):
            if any(one is holder and one._failed for one in former):
                engine.reset()
        self._failed = False

    @property
    def _interrupted(self) -> bool:
        module = self._lightning_module
        trainer = None if module is None else module._trainer
        return trainer is not None and trainer.state.status == "interrupted"

    def _alone(self) -> bool:
        """True if other ranks may be waiting elsewhere, so that no collective may be begun."""
        if not self._interrupted:
            return False
        assert self._lightning_module is not None
        if self.engine is not None and self.engine.desync is not None:
            return True  # connections are broken: there is nothing that ranks could still do together
        engine = "" if self.engine is None else self.engine.mesh.world_group.barrier.prefix
        return not self._failure.together(f"global step {self._lightning_module.trainer.global_step}", engine)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; nothing after an exception of this rank alone.

        The one before the first loop of a fit comes right after Lightning has set its handlers of signals.
        """
        if not self._alone():
            super().barrier(name)
            if name == "run-stage":
                self._signals.watch()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`; this rank's own after an exception of this rank alone."""
        return obj if self._alone() else super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; this rank's own after an exception of this rank alone."""
        return tensor if self._alone() else super().reduce(tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Remember that a step was interrupted, and let no child process wait for this one for ever."""
        self._failed = True
        if self.engine is not None:
            self.engine.note_error(exception)
        # Callbacks have been called by now, and ranks may have parted since they asked.
        self._failure.forget()
        end_children_at_exit(self.launcher)

    def _end_saves(self) -> None:
        """Wait, after an exception of all ranks, for a save in the background; what goes wrong is no second exception.

        Callbacks save on exceptions, too, and who catches the exception may look at the files next.
        """
        try:
            self.finish_saves()
        except Exception as error:
            warnings.warn(f"a checkpoint that was being saved when the run failed is not there: {error}", stacklevel=2)

    def teardown(self) -> None:
        """Tear the plugins down. No collective, and nothing is moved: shards stay where they are."""
        # First: what follows may raise, and others may take the module over all the same.
        self._run = None
        # Before Lightning, which puts back what its own handlers have replaced.
        self._signals.forget()
        if not self._failed:
            self.precision_plugin.update_scale()
            self.finish_saves()
        elif self.engine is not None and self.engine.saver.busy() and not self._alone():  # which may wait for seconds
            self._end_saves()
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
