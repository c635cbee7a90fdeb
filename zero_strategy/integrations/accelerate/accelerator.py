"""ZeRO for scripts written for Hugging Face Accelerate: a subclass in place of `Accelerator`, started as before.

    from zero_strategy.integrations.accelerate import ZeroAccelerator
    accelerator = ZeroAccelerator(zero_config={"stage": 3})      # or ZERO_STRATEGY_CONFIG=config.yaml
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The model that `prepare` returns is the user's own, sharded in place; there is no wrapper. Accelerate's distributed type
stays MULTI_GPU or MULTI_CPU, so all that it does beside sharding (loaders, gathering, trackers) is its own.

`accelerate launch --cpu --num_processes 2` starts one process (Accelerate wants `mpirun` there), and with
`--multi_gpu` on a machine without a GPU every process believes to be alone unless `cpu=True` is given.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import AutocastKwargs, DynamoBackend, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.auto.decide import Decision, check_batches_come, decide
from zero_strategy.auto.example import Example
from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.config import LATER_KEYS, Fact, ZeroConfig, check_owned, load_config, resolve
from zero_strategy.config.load import ConfigSource
from zero_strategy.diagnostics.norms import NormSettings
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate.float8 import check_installed, check_recipe, convert
from zero_strategy.integrations.accelerate.joint_clip import clip_together
from zero_strategy.integrations.accelerate.launch import (
    asked_parallelism,
    check_adoptable,
    check_format,
    check_processes,
    check_single_owner,
    check_uneven_batches,
    configured,
    needs_cpu,
    with_parallelism,
    without_parallelism,
)
from zero_strategy.integrations.accelerate.models import (
    PreparedModels,
    compile_in_place,
    facts_of_prepared,
    forget_prepared,
)
from zero_strategy.integrations.accelerate.optimizers import GroupedScheduler, ZeroOptimizer
from zero_strategy.integrations.accelerate.pipelines import check_dispatch, pipeline_engine, waiting_runners
from zero_strategy.integrations.accelerate.saving import load_prepared, save_prepared
from zero_strategy.integrations.accelerate.scaler import AgreedGradScaler, loss_scale_rule
from zero_strategy.integrations.accelerate.slots import SlotScheduler, SlotTraining, slot_backward
from zero_strategy.integrations.accelerate.survival import commit_prepared, restore_prepared
from zero_strategy.integrations.accelerate.uneven import Followers, batches_as_they_are, check_joinable
from zero_strategy.integrations.casts import tell_casts
from zero_strategy.integrations.huggingface.sequence_batches import cut_batches
from zero_strategy.integrations.huggingface.sequence_models import SequenceModel, divide_sequences, tiles_of
from zero_strategy.integrations.huggingface.tensor_models import divide_if_asked, use_replaced
from zero_strategy.integrations.takeover import hold, take_over
from zero_strategy.ops.library import norm_order
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.planning.model_shape import OptimizerState, state_of
from zero_strategy.sequence import SequenceGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from zero_strategy.survive import Run
    from zero_strategy.verify.compare import VerifyReport


__all__ = ["ZeroAccelerator"]


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Dtype of autocast by `mixed_precision`."""


class ZeroAccelerator(Accelerator):
    """Accelerate's `Accelerator` with ZeRO sharding.

    Example:
        ```python
        accelerator = ZeroAccelerator(zero_config={"stage": 3}, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        ```

    Args:
        zero_config: Anything `load_config` takes; default: the file that `ZERO_STRATEGY_CONFIG` names, else stage 3.
        **keywords: Everything that `Accelerator` takes, but other ways of sharding.

    Attributes:
        zero_config: The settings.
        scaler: With mixed_precision="fp16", of all models together; else None.
        example: A batch and its loss, by which activations are foreseen where settings are chosen (`auto.enabled`).
        slot_training: Everything that it does about `reproducible.slots`.
        doing: The call of a Trainer that trains with it now; "": none.
        loss_weight: That losses are multiplied by before `backward` gets them, by somebody who accumulates by himself.

    Raises:
        ValueError: If the launch or an argument asks for DeepSpeed, FSDP, Megatron or a parallelism config as well, or
            each of several processes would train alone; names what to change.
    """

    zero_config: ZeroConfig
    slot_training: SlotTraining
    scaler: AgreedGradScaler | None
    example: Example | None = None
    autocast_handler: AutocastKwargs | None
    loss_weight: float = 1.0
    doing: str = ""
    _models: list[Any]
    _asked: ParallelismConfig | None = None
    _distinct = _on_main = False
    _optimizer_state: str | OptimizerState = "AdamW"
    _share: tuple[int, int] | None = None

    def __init__(self, *arguments: Any, zero_config: ConfigSource | None = None, **keywords: Any) -> None:
        check_single_owner(keywords, os.environ)
        check_installed(arguments, keywords, os.environ)
        self._asked = asked_parallelism(keywords.pop("parallelism_config", None), os.environ)
        if needs_cpu(os.environ) and len(arguments) < 5:  # `cpu` is the fifth
            keywords.setdefault("cpu", True)
        with without_parallelism(os.environ):
            super().__init__(*arguments, **keywords)
        self._set_up(zero_config)

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        zero_config: ConfigSource | None = None,
        facts: Callable[[ZeroConfig], Mapping[str, Fact]] | None = None,
        parallelism: ParallelismConfig | None = None,
    ) -> Self:
        """Ours in the place of an Accelerator that somebody else has made and that has prepared nothing yet.

        Args:
            accelerator: Theirs.
            zero_config: As for making one.
            facts: Gives what its owner decides, to be held against a DeepSpeed JSON.
            parallelism: Sizes that its owner asks for.

        Raises:
            ValueError: As making one; or if it has prepared something.
        """
        check_adoptable(accelerator, os.environ)
        adopted = cls.__new__(cls)
        adopted.__dict__.update(accelerator.__dict__)
        adopted._asked = parallelism
        adopted._set_up(zero_config, facts)
        return adopted

    def _set_up(self, zero_config: Any, facts: Callable[[ZeroConfig], Mapping[str, Fact]] | None = None) -> None:
        check_processes(self.num_processes, os.environ)
        check_recipe(self)
        self.zero_config = with_parallelism(load_config(configured(zero_config)), self._asked, self.num_processes)
        check_uneven_batches(self.zero_config, type(self).__name__)
        check_format(self.zero_config)
        self._prepared, self._told_factor = PreparedModels(), False
        self._converted: WeakSet[nn.Module] = WeakSet()
        self._divided: dict[int, list[SequenceModel]] = {}
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        self.slot_training = SlotTraining(self, self.zero_config)
        if facts is None:  # else a Trainer accumulates by itself
            self.slot_training.take_accumulation()
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        self._facts = {
            "gradient_accumulation_steps": Fact(steps, f"ZeroAccelerator(gradient_accumulation_steps={steps})"),
            "training_precision": Fact(precision, f"ZeroAccelerator(mixed_precision={precision!r})"),
        }
        if facts is not None:
            self._facts = dict(facts(self.zero_config))
        check_owned(self.zero_config, self._facts, later=LATER_KEYS)
        if self.zero_config.stage == 3 and precision in _AUTOCAST:
            self.autocast_handler = _without_cache(self.autocast_handler)
        if precision == "fp16":
            self.native_amp = True  # on the CPU, too, where Accelerate's would compute in fp32 without a word
            rule = loss_scale_rule(self.zero_config, self.scaler_handler)
            self.scaler = AgreedGradScaler(
                rule, self._prepared.engine_of_optimizer, self.device.type, self._prepared.together
            )

    # ---- processes ----

    @property
    def num_processes(self) -> int:
        """Number of processes; while a loader is prepared, of those that get different data."""
        return int(super().num_processes) if self._share is None else self._share[0]

    @property
    def process_index(self) -> int:
        """This process's number; while a loader is prepared, which of those shares it gets."""
        return int(super().process_index) if self._share is None else self._share[1]

    # ---- prepare ----

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """See Accelerate's: models come first, in whatever order they are given, for optimizers update their shards."""
        models = [index for index, item in enumerate(objects) if isinstance(item, nn.Module)]
        order = models + [index for index in range(len(objects)) if index not in models]
        placement = None if device_placement is None else [device_placement[index] for index in order]
        self.slot_training.choose(objects)
        if self.zero_config.auto.enabled:
            given = [item for item in objects if isinstance(item, Optimizer)]
            self._optimizer_state = state_of(given[0]) if given else "AdamW"
        prepared = super().prepare(*(objects[index] for index in order), device_placement=placement)
        steps = self.gradient_accumulation_steps
        facts = facts_of_prepared(self._facts, self._dataloaders, self._optimizers, self._shares[0], steps)
        check_owned(self.zero_config, facts, later=LATER_KEYS)
        if len(objects) == 1:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[index] for index in range(len(objects)))

    def _prepare_ao(self, *objects: Any) -> tuple[Any, ...]:
        """See Accelerate's: convert models to float8; those that are sharded and converted have hooks, and stay."""
        for model in objects:
            if not isinstance(model, nn.Module):
                continue
            engine = self.engines.get(id(model))
            if engine is not None and model in self._converted:
                continue
            reason = f"linear layers of its {type(model).__name__} were converted to float8"
            if engine is not None:  # of an evaluation, for which Accelerate converts nothing
                engine.close(gather=True, reason=reason)
            take_over(model, reason, own=self.engines.values())
            convert(self, model)
            self._converted.add(model)
        return objects

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place; also one that is only evaluated, for it may not fit otherwise.

        A model that another Accelerator, Trainer or Fabric has prepared goes over to this one; see `take_over`.

        Raises:
            RuntimeError: If another one is working with it.
            ValueError: If it was prepared for training already, or a script's own engine shards it.
        """
        # First, as an engine that ends is no longer among those of prepared models.
        self._end_outgrown(model)
        if id(model) in self._prepared.engines:
            listed = any(known is model for known in self._models)
            self._prepared.add_again(model, listed=listed, training=not evaluation_mode)
            if not listed:
                # It only lists the model again, whose mark tells that it is prepared.
                super().prepare_model(model, device_placement, evaluation_mode=True)
            return model
        take_over(model, f"another {type(self).__name__} has prepared its module", own=self.engines.values())
        self._models = [known for known in self._models if known is not model]  # whose engine has ended
        config = self.zero_config
        if config.auto.enabled:
            if isinstance(model, PipelineModule):
                resolve(config, self.num_processes)  # which says that pipelines choose nothing
            check_batches_come(config, "the loader")
            self.choose_settings(model, evaluates=evaluation_mode)
        forward = vars(model).get("forward")
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
            self.slot_training.take_pipeline()
            engine: ZeroEngine = pipeline_engine(model, self.zero_config, self.num_processes, self.device, self)
        else:
            # Before the engine, which shards what each rank has of divided layers.
            self._replaced.update(divide_if_asked(model, self.zero_config, self._tensor_mesh))
            engine = ZeroEngine(model, resolve(self.zero_config, self.num_processes), device=self.device)
        # Accelerate's marks would let another accelerator pass over the model, and its autocast stay.
        engine.when_plain(partial(forget_prepared, model, forward, vars(model).get("forward")))
        hold(engine, self)
        if evaluation_mode and config.auto.enabled:  # what is trained is chosen for when it comes
            self.zero_config = config
            self.slot_training.take_config(config)
        self._divided[id(model)] = divide_sequences(engine)
        for divided in self._divided[id(model)]:
            divided.cut_already = self._loaders_cut
        install_diagnostics(engine)
        if (dtype := _AUTOCAST.get(self.mixed_precision)) is not None and not evaluation_mode:
            asked = f"mixed_precision={self.mixed_precision!r}"
            tell_casts(engine, dtype, asked, f'mixed_precision="no" and model.to({dtype}) before `prepare`')
        engine.use_loss_scaler(None if self.scaler is None else self.scaler.rule)
        waiting = self._prepared.add(model, engine, training=not evaluation_mode)
        # After the engine, whose hooks run inside of a module's compiled call.
        if backend != DynamoBackend.NO:
            compile_in_place(model, plugin.to_kwargs(), regions=bool(plugin.use_regional_compilation))
        for optimizer in waiting:
            self._attach(optimizer)
        return model

    def choose_settings(self, model: nn.Module, *, rows: int = 0, evaluates: bool = False) -> Decision:
        """Choose what nobody has set (`auto.enabled`), for the first model. A collective.

        Args:
            model: It is not sharded yet.
            rows: Of a micro-batch, where there is no example.
            evaluates: It is not trained.

        Raises:
            ValueError: If nothing fits; names ways out.
        """
        steps = self._facts.get("gradient_accumulation_steps", Fact(self.gradient_accumulation_steps, ""))
        example = self.example
        if example is not None and example.autocast is None and not evaluates:
            example = replace(example, autocast=_AUTOCAST.get(self.mixed_precision))
        decision = decide(
            self.zero_config, model, world_size=self.num_processes, device=self.device, rows=rows,
            optimizer=self._optimizer_state, accumulation=int(steps.value), example=None if evaluates else example,
            tiles=tiles_of(model),
        )  # fmt: skip
        self.zero_config = decision.config
        self.slot_training.take_config(self.zero_config)
        return decision

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> ZeroOptimizer:
        """Let an optimizer update shards; its model may be prepared later."""
        if isinstance(optimizer, ZeroOptimizer) and not optimizer.belongs_to(self._prepared):
            optimizer = optimizer.optimizer  # another accelerator's
        if isinstance(optimizer, ZeroOptimizer):
            # It only lists the optimizer again, as after `free_memory`.
            known: ZeroOptimizer = super().prepare_optimizer(optimizer)
            if not self._prepared.is_attached(known.optimizer):  # its engine has ended, and the model has another
                self._attach(known.optimizer)
            return known
        self._attach(optimizer)
        prepared = ZeroOptimizer(optimizer, self._prepared, self.scaler, self._before_step, self._after_step)
        self._optimizers.append(prepared)
        return prepared

    def _end_outgrown(self, model: nn.Module) -> None:
        """End the engine of a model that has got parameters since it was prepared, so that it is prepared anew."""
        engine = self.engines.get(id(model))
        if engine is not None and (names := engine.strangers()) and not isinstance(model, PipelineModule):
            engine.close(gather=True, reason=f"its module got parameters {names[:5]} and was prepared again")

    @property
    def busy(self) -> str:
        """See `takeover.Holder`; what a Trainer does with this accelerator, or a loop over uneven batches."""
        return self.doing or ("join_uneven_inputs" if self._prepared.followers is not None else "")

    def _tensor_mesh(self) -> DeviceMesh:
        """The ranks that divide layers with this one."""
        return make_device_mesh(self.device.type, tensor=self.zero_config.mesh.tensor or 1)["tp"]

    def _attach(self, optimizer: Optimizer) -> None:
        use_replaced(optimizer, self._replaced)
        self._prepared.attach(optimizer, [prepared.optimizer for prepared in self._optimizers])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """See Accelerate's: a step of it is one per process, which is told once."""
        every = self.step_scheduler_with_optimizer and not self.split_batches
        copies, _ = self._shares
        slotted = every and bool(self.slot_training.slots)
        if slotted:
            self.slot_training.tell_schedule(scheduler)
        elif every and copies > 1 and not self._told_factor and self.is_local_main_process:
            self._told_factor = True
            warnings.warn(
                f"Accelerate steps a prepared {type(scheduler).__name__} {copies} times per optimizer step, once per "
                "process with its own data: lengths must count the batches of a DataLoader that is not prepared. For "
                "one step per optimizer step: DataLoaderConfiguration(split_batches=True), or "
                "step_scheduler_with_optimizer=False and scheduler.step() after real optimizer steps only",
                stacklevel=2,
            )
        prepared = super().prepare_scheduler(scheduler)
        alike = not every or (copies == self.num_processes and not slotted)
        if alike or isinstance(prepared, (GroupedScheduler, SlotScheduler)):
            return prepared
        # Accelerate has listed its own wrapper, by which saving and loading find schedules.
        self._schedulers[-1] = SlotScheduler(prepared) if slotted else GroupedScheduler(prepared, copies)
        return self._schedulers[-1]

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, slots: bool | None = None, **keywords: Any) -> Any:
        """See Accelerate's: ranks of one pipeline, of one sequence, or of the same layers get the same batches.

        Args:
            data_loader: As Accelerate's.
            *arguments: As Accelerate's.
            slots: With `reproducible.slots`, whether its batches are slots of a training; None: if it shuffles, or is
                the first in a call of `prepare` with an optimizer, where none shuffles.
            **keywords: As Accelerate's.

        Raises:
            ValueError: If one process would read for all ranks, or samples of slots cannot be had from it.
        """
        shares = self._shares
        if self.slot_training.trains(data_loader, slots):
            micro_batches = 1 if (pipeline := self._pipeline) is None else self.engine(pipeline).slots.count
            data_loader, shares = self.slot_training.divided(data_loader, shares, micro_batches), (1, 0)
        if shares[0] == self.num_processes:
            return super().prepare_data_loader(data_loader, *arguments, **keywords)
        check_dispatch(self.dispatch_batches)
        # None would let Accelerate read an iterable data set in one process.
        dispatch, self.dataloader_config.dispatch_batches = self.dispatch_batches, False
        self._share = shares
        try:
            prepared = super().prepare_data_loader(data_loader, *arguments, **keywords)
        finally:
            self._share, self.dataloader_config.dispatch_batches = None, dispatch
        if self._loaders_cut:
            cut_batches(prepared, self._sequence)
        return prepared

    @property
    def _shares(self) -> tuple[int, int]:
        """Number of shares of the data, and the one that this process gets."""
        if (pipeline := self._pipeline) is not None:
            grid = pipeline.mpu()
            return grid.data_parallel_size, grid.data_parallel_id
        return max(1, self.num_processes // self._alike), self.process_index // self._alike

    @property
    def _alike(self) -> int:
        """Processes that get the same samples: they divide layers, or the tokens of sequences."""
        return (self.zero_config.mesh.tensor or 1) * self.zero_config.mesh.sequence

    @property
    def _loaders_cut(self) -> bool:
        """True if loaders give each rank its tokens, as Accelerate's do for `sp_size`; else the model takes them."""
        return self._asked is not None and self._asked.sp_size > 1

    def _sequence(self) -> SequenceGroup:
        """The ranks that divide sequences with this one.

        Raises:
            ValueError: If no model is prepared.
        """
        for engine in self.engines.values():
            return engine.sequence
        raise ValueError("the loader divides sequences among the ranks of a model: prepare the model first, or too")

    def gather(self, tensor: Any) -> Any:
        """See Accelerate's: of all processes; inside `gather_for_metrics` of those that had different samples."""
        found = super().gather(tensor)
        if not self._distinct:
            return found
        processes, every = self.num_processes, self._alike
        return recursively_apply(lambda x: torch.cat(x.chunk(processes)[::every]), found)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """See Accelerate's: of ranks that had the same samples, one counts."""
        self.slot_training.check_metrics(self._models)
        if self._alike == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        objects = use_gather_object or _has_objects(input_data)
        # Objects do not pass through `gather`, so ranks that had the same samples give none.
        if objects and self.process_index % self._alike:
            input_data = []
        # Accelerate's calls `gather`, which is also a call of scripts, and then of all ranks.
        self._distinct = True
        try:
            return super().gather_for_metrics(input_data, objects)
        finally:
            self._distinct = False

    @contextmanager
    def maybe_context_parallel(self, *arguments: Any, **keywords: Any) -> Iterator[None]:
        """See Accelerate's, but buffers stay whole: a prepared model takes this rank's tokens of what it is given."""
        if self.zero_config.mesh.sequence > 1:
            yield
            return
        with super().maybe_context_parallel(*arguments, **keywords):
            yield

    @property
    def _pipeline(self) -> PipelineModule | None:
        return next((model for model in self._models if isinstance(model, PipelineModule)), None)

    @property
    def engines(self) -> Mapping[int, ZeroEngine]:
        """The engines of prepared models, by the models' ids."""
        return self._prepared.engines

    def engine(self, model: nn.Module) -> ZeroEngine:
        """The engine of a prepared model.

        Raises:
            ValueError: If it was not prepared.
        """
        return self._prepared.engine(model)

    def divided(self, model: nn.Module) -> list[SequenceModel]:
        """The Hugging Face models in a prepared one whose sequences are divided or tiled."""
        return self._divided.get(id(model), [])

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model itself: there is no wrapper."""
        if id(model) in self.engines:
            return model
        plain: nn.Module = super().unwrap_model(model)
        return plain

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The full state dict on the host of every rank, as Accelerate's with DistributedDataParallel; all call it.

        It takes the bytes of all parameters and persistent buffers on each of them: on a host with R ranks R times
        those. `main_state_dict` keeps it on rank 0 alone, and `save_model` does so by itself.
        """
        if id(model) not in self.engines:
            return dict(super().get_state_dict(model, unwrap))
        return self.engines[id(model)].full_state_dict(keep=not self._on_main or self.process_index == 0)

    def main_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """See `get_state_dict`, but only on rank 0, and empty elsewhere, for saving; all ranks call it."""
        self._on_main = True
        try:
            return self.get_state_dict(model)
        finally:
            self._on_main = False

    def save_model(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """See Accelerate's, whose rank 0 writes: no other rank keeps the state dict."""
        # Accelerate's calls `get_state_dict`, to which it passes nothing of ours.
        self._on_main = True
        try:
            return super().save_model(model, *arguments, **keywords)
        finally:
            self._on_main = False

    def free_memory(self, *objects: Any) -> Any:
        """See Accelerate's: engines of the models that are given end, others stay sharded for a next training.

        All ranks call it. A model whose engine has ended keeps what it has: at stage 3, this rank's slices.
        """
        for item in objects:
            if self.scaler is not None and (engine := self.engines.get(id(item))) is not None:
                # Gradients may be unscaled, and no step have followed.
                self.scaler.forget(sharded.optimizer for sharded in engine.optimizers)
            self._prepared.end(item)
        return super().free_memory(*objects)

    # ---- a step ----

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """See Accelerate's: a pipeline's gradients, which are there already, come to light.

        Raises:
            RuntimeError: If the loss uses released parameters outside of their module's forward (stage 3), naming them.
        """
        waiting = waiting_runners(self._models)
        try:
            for engine in self.engines.values():
                engine.check_loss(loss, self.loss_weight)
            for runner in waiting:
                runner.begin_backward()
            if self.slot_training.slots:
                slot_backward(self, loss, keywords)
            else:
                super().backward(loss, **keywords)
        except BaseException:
            # Else a loop that goes on would have this loss refused after the next one's backward.
            for runner in waiting:
                runner.abandon_backward()
            raise
        scale = 1.0 if self.scaler is None or not self.scaler.is_enabled() else float(self.scaler.get_scale())
        for runner in waiting:
            runner.end_backward(scale)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """See Accelerate's; with `reproducible.slots` a micro-batch, whose random numbers are those of its slot."""
        with super().accumulate(*models):
            # A pipeline begins its micro-batches by itself.
            found = [self.engines.get(id(model)) for model in models if not isinstance(model, PipelineModule)]
            engines = [engine for engine in found if engine is not None]
            self.slot_training.begin(engines, position=(self.step - 1) % self.gradient_accumulation_steps)
            yield

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside may keep gradients on this rank."""
        engine = self.engines.get(id(model))
        with nullcontext() if engine is None else engine.no_sync():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Nothing to do: a backward outside of `no_sync` synchronises, wherever its forward was."""
        yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scale in the gradients of one optimizer, of several, or of all, where that is yet to be done.

        All ranks call it; nothing to do but in fp16.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            if not self.scaler.is_unscaled(one):
                self.scaler.unscale_(one)

    def _unscale_those_of(self, parameters: list[Any]) -> None:
        """Accelerate's unscales all optimizers, those that are between their own backwards, too."""
        ids = {id(parameter) for parameter in parameters}
        for prepared in [] if self.scaler is None else self._optimizers:
            if any(id(p) in ids for group in prepared.param_groups for p in group["params"]):
                self.unscale_gradients(prepared)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float | str = 2.0
    ) -> Tensor:
        """Scale the gradients of exactly these parameters so that their norm over all ranks is at most `max_norm`.

        They may be of several prepared models: the norm is one, of all of them together. In fp16 the loss scale is
        undone first, in all gradients of the optimizers that hold them.

        Returns:
            The norm before, without the loss scale, the same on all ranks.

        Raises:
            ValueError: If one belongs to no prepared model.
        """
        norm_type = norm_order(norm_type)
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        parts = self._prepared.engines_of_parameters(chosen)
        self._unscale_those_of(chosen)
        with self._prepared.clipping("clip_grad_norm_", parts, max_norm, norm_type):
            if len(parts) > 1:
                return clip_together(parts, max_norm, norm_type)
            return parts[0][0].clip_grad_norm_(max_norm, norm_type, parameters=chosen)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element of these parameters to [-clip_value, clip_value]."""
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        parts = self._prepared.engines_of_parameters(chosen)
        self._unscale_those_of(chosen)
        with self._prepared.clipping("clip_grad_value_", parts, clip_value):
            for engine, own in parts:
                engine.clip_grad_value_(clip_value, parameters=own)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A loop over batches of which ranks have different numbers (with `even_batches=False`).

        Ranks that have run out take part with zero gradients until no rank has a batch left: a gradient is the sum over
        ranks divided by all of them, as in Accelerate with DistributedDataParallel; also on the CPU, where Accelerate's
        does nothing. Ranks that followed take over the others' schedules.

        Inside, call the prepared objects: models as a whole, the clipping of the accelerator, prepared optimizers and
        schedulers; other calls that need all ranks (`gather`, `save_state`) would wait for those that are not there.

        Args:
            joinables: The models that are trained.
            even_batches: Whether prepared loaders repeat samples at the end instead; None: as the accelerator was made.

        Raises:
            ValueError: If a model is not prepared, or accumulation would end at different batches on different ranks.
            RuntimeError: If ranks with a batch left do different things.
        """
        why = "a step has all of its slots, which the sampler of a prepared loader fills; leave the context out"
        self.slot_training.refuse("join_uneven_inputs", why)
        even = self.even_batches if even_batches is None else even_batches
        with batches_as_they_are(self._dataloaders, even_batches if self.num_processes > 1 else None):
            if even or self.num_processes == 1:
                yield
                return
            check_joinable(self, map(self.engine, joinables))
            self._prepared.followers = Followers(self, self.engines.values())
            try:
                with self._prepared.followers.loop():
                    yield
            finally:
                self._prepared.followers = None

    def log_parameter_norms(self, every_n_steps: int = 50, *, gradients: bool = True, updates: bool = False) -> None:
        """Tell trackers from now on the norms of every parameter's gradient and update, every so many optimizer steps.

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
        self._prepared.measure(NormSettings(every_n_steps, gradients, updates))

    def _before_step(self, prepared: ZeroOptimizer) -> None:
        if self.slot_training.slots:
            self.slot_training.check_complete(prepared.engine)
        self._prepared.before_step(prepared.optimizer, partial(self.unscale_gradients, prepared))

    def _after_step(self, prepared: ZeroOptimizer) -> None:
        """Log figures of a step to the trackers, if there are any."""
        engine = prepared.engine
        found = self._prepared.after_step(engine)
        if self.zero_config.diagnostics.log and self.trackers:
            found = {**engine.step_metrics(), **found}
        if found and self.trackers:
            self.log(found, step=engine.steps.taken)

    # ---- saving and loading ----

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save everything that was prepared or registered; all ranks call it.

        The directory is a checkpoint of this package: of one model itself, of several one each in `model_0`,
        `model_1`... It is written in the background where `checkpoint.asynchronous` says so and no hook waits for it.

        Returns:
            The directory.

        Raises:
            ValueError: If no model is prepared, or the directory holds what is not of the checkpoint it would replace.
        """
        directory = save_prepared(self, [self.engine(model) for model in self._models], output_dir)
        self.project_configuration.iteration += 1
        return str(directory)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load what `save_state` saved at any number of processes and stage, or what Accelerate's own saved.

        All ranks call it.

        Raises:
            ValueError: If there is no checkpoint, or it does not fit what is prepared; names what differs.
        """
        # The checkpoint to load may be the one that is being written.
        for engine in self.engines.values():
            engine.saver.wait()
        load_prepared(self, [self.engine(model) for model in self._models], input_dir, load_kwargs, options)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See Accelerate's; with `reproducible.slots` these are whole steps.

        The loader itself goes on with the next epoch.

        Raises:
            ValueError: If a step would begin in the middle.
        """
        skipping = super().skip_first_batches(dataloader, num_batches)
        self.slot_training.skipped(dataloader, num_batches)
        return skipping

    def wait_for_saves(self) -> None:
        """Return when the checkpoints that are being written are there.

        Raises:
            OSError, ValueError, RuntimeError: Why one is not.
        """
        for engine in self.engines.values():
            engine.saver.finish()

    def restore(self, run: Run, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Load the newest copy in memory of a run that survives deaths, with schedules; all ranks call it.

        Args:
            run: As `survive` gives it to the training function.
            state: To begin with, where there is no copy.

        Returns:
            What `commit` was given, or `state`.

        Raises:
            ValueError: If not exactly one model is prepared.
        """
        return restore_prepared(self, run, state)

    def commit(self, run: Run, state: Mapping[str, Any]) -> None:
        """Copy the state at the end of a step, with schedules, and look who is there; all ranks call it.

        Args:
            run: As `survive` gives it to the training function.
            state: What the function needs to go on from here, JSON-able.

        Raises:
            ValueError: If not exactly one model is prepared.
            MembersChangedError: If ranks have changed; it must leave the function, which then begins anew.
        """
        commit_prepared(self, run, state)

    def end_training(self) -> None:
        """Finish saves and trackers; all ranks leave together.

        Where Accelerate ends the process group now, engines end before it. Elsewhere (one process, or one of a
        notebook's) models can be used as before.
        """
        # Ranks agree on saves by process groups, which end below.
        self.wait_for_saves()
        self.wait_for_everyone()
        if self.num_processes > 1 and not self.state.fork_launched:
            for engine in self.engines.values():
                engine.close()
        super().end_training()

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """Prove on a model of yours that these settings train it as one plain process does. All processes call it.

        Args:
            factory: Makes the model, its optimizer, batches and loss; see `verify.subject`.
            **keywords: As for `zero_strategy.verify`; accumulation and autocast are this accelerator's.

        Returns:
            What was compared, and the first tensor that differs.

        Raises:
            ValueError: In float8, which the factory's model would not be in.
        """
        if self.mixed_precision == "fp8":
            raise ValueError(
                "verify() makes models by a factory, which mixed_precision='fp8' does not convert: call torchao's "
                "convert_to_float8_training in the factory, and zero_strategy.verify(..., autocast=torch.bfloat16)"
            )
        keywords.setdefault("accumulation", self.gradient_accumulation_steps)
        if self.mixed_precision != "no":
            keywords.setdefault("autocast", _AUTOCAST.get(self.mixed_precision))
        if self.num_processes == 1:
            keywords.setdefault("ranks", 1)
        from zero_strategy.verify import verify

        return verify(factory, self.zero_config, **keywords)


def _without_cache(handler: AutocastKwargs | None) -> AutocastKwargs:
    """The autocast without its cache, which would hold casts of parameters that have been released since."""
    if handler is not None and handler.cache_enabled:
        warnings.warn(
            "AutocastKwargs(cache_enabled=True) is left aside at stage 3: the cache would hold a whole copy of the "
            "model in 16 bits on every rank; use stage 2, where parameters are whole anyway",
            stacklevel=2,
        )
    return AutocastKwargs(enabled=handler is None or handler.enabled, cache_enabled=False)


def _has_objects(data: Any) -> bool:
    """True for what is not made of tensors alone."""
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return True
    return False
