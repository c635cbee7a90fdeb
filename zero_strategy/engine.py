"""The engine: owns the training step of one module, on behalf of every integration.

engine = ZeroEngine(module, load_config(stage=3))
optimizer = torch.optim.AdamW(module.parameters())
engine.attach(optimizer)
loss = module(batch)            # gathers and releases by itself
loss.backward()                 # reduces by itself
engine.clip_grad_norm_(1.0)
optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.activation.functional import configure_from, timings
from zero_strategy.activation.settings import CheckpointTimings
from zero_strategy.activation.units import UnitActivations
from zero_strategy.auto.guard import guard_for
from zero_strategy.auto.trial import trial_for
from zero_strategy.checkpoint import StateReader, exports, full_tensors
from zero_strategy.checkpoint.deferred import close_deferred, open_deferred
from zero_strategy.checkpoint.load import Loader
from zero_strategy.checkpoint.preemption import StepWatch, save_on_signal
from zero_strategy.checkpoint.save import Saver
from zero_strategy.checkpoint.save_job import PendingSave
from zero_strategy.comm.collectives import CommunicationCounters
from zero_strategy.comm.process_group import default_group
from zero_strategy.config import ZeroConfig
from zero_strategy.convert.convert import checkpoint_in, open_any
from zero_strategy.engine_mesh import connect, settle
from zero_strategy.engine_slots import SlotSteps
from zero_strategy.fsdp.all_layers import run_all_layers
from zero_strategy.fsdp.materialize import device_of
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.reduce import StepAgreement, undivided
from zero_strategy.fsdp.shard_storage import GRADIENTS, PARAMETERS
from zero_strategy.fsdp.uneven_batches import JoinedBatches, SharedEvaluation, token_mean
from zero_strategy.offload.stores import OffloadStores
from zero_strategy.optim import GradientNorm, LossScaler, ShardedOptimizer
from zero_strategy.optim.attached import AttachedOptimizers
from zero_strategy.optim.averaging import Blend, WeightAverage, chosen_blend
from zero_strategy.optim.clipping import Clipping
from zero_strategy.optim.consistency import OptimizerConsistency
from zero_strategy.optim.dropped_state import DroppedState
from zero_strategy.optim.loss_scale import NonfiniteSteps
from zero_strategy.planning.held import ledger_of, state_bytes
from zero_strategy.planning.ledger import Ledger
from zero_strategy.publish.publisher import Publisher
from zero_strategy.publish.whole import WholeWeights
from zero_strategy.runtime.compute_device import occupy
from zero_strategy.runtime.observer import Observed
from zero_strategy.sequence.group import SequenceGroup
from zero_strategy.train_state import WHOLE, ModelPart
from zero_strategy.watchdog.diagnosis import Failure
from zero_strategy.watchdog.module_progress import report_to_watchdog

if TYPE_CHECKING:
    from typing_extensions import Self

    from zero_strategy.auto.example import Example


class ZeroEngine:
    """Shards a module in place and trains it like plain torch.

    Args:
        module: The module; its parameters' objects, names and shapes stay as they are.
        config: Anything `load_config` takes, or a resolved config.
        compute_dtype: Dtype that floating-point parameters and buffers take (bf16 or fp16 with fp32 master weights),
            or None to keep theirs.
        weights: A checkpoint or Hugging Face directory to take the weights from, each rank its own slices. A model
            built on the meta device then needs no `reset_parameters`. An open reader may hold a part of them: all
            that are on the meta device.
        device: Where parameters are moved to, or become real, unit by unit; default: where the module's tensors are,
            else the CPU. A GPU becomes the thread's current one.
        divisor: Asked when a backward begins: by what its gradients are to be divided, where losses are not.
        part: Of a model in several parts, what joins that of this rank, which the engine is for, to the others.
        example: A batch and its loss, by which activations are foreseen where settings are chosen (`auto.enabled`).

    Attributes:
        module: The module.
        part: See the argument.
        config: The resolved config.
        device: Where it computes, with its index; the current device of the thread that has made the engine.
        activations: What autograd keeps of its units, and which are computed again.
        optimizers: The attached optimizers.
        average: A running average of the weights, see `average_weights`; None: none is kept.
        sequence: Ranks that divide the tokens of the same sequences; this one alone unless `mesh.sequence` says more.
        scaler: The loss scaler, for fp16 only.
        offloaded: Where state is that is not on the device.
        untrained: Ids of trainable parameters that no optimizer needs to have; they stay as they are.
        saver: Its saves, those that go on in the background too.
        steps: Counts optimizer steps; what is agreed at them.
        slots: The slots of a step (`reproducible.slots`): its micro-batches, their random numbers and losses.
        gradient_watchers: Called on all ranks with what every norm of gradients found, before anything is scaled.
        holder: The integration that trains with it, held weakly; None: a script has made it by itself.
        nonfinite: Decides about steps whose gradients are not finite.

    Raises:
        ValueError: If the mesh does not fit the world, the module cannot be sharded (names the parameter), ranks were
            given different settings (names them), or the device is not there, or not that of the process group.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Any = None,
        *,
        compute_dtype: torch.dtype | None = None,
        weights: str | os.PathLike[str] | StateReader | None = None,
        device: torch.device | None = None,
        divisor: Callable[[], int] = undivided,
        part: ModelPart = WHOLE,
        example: Example | None = None,
    ) -> None:
        # The settings come first, with every open choice resolved for this world; they do not change any more.
        self.config, placed = settle(module, config, compute_dtype, part, device, example)
        zero: ZeroConfig = self.config.config
        if zero.deepspeed is not None:
            configure_from(zero.deepspeed.activations)
        self.module, self.part = module, part
        # Before any group is made: NCCL's communicators, streams and pins belong to the current device.
        self.device = occupy(device or device_of(module), default_group())
        device = None if device is None else self.device
        self.mesh = connect(self.config, placed, compute_dtype, self.device)
        self.sequence = SequenceGroup(self.mesh.sequence, zero.mesh.ulysses or zero.mesh.sequence)
        further = list(self.mesh.further.values())
        self._parts = [group for group in (*further, self.mesh.tensor) if group.size > 1]

        # Before the model is sharded: where its weights are about to be loaded, it draws no initial ones.
        deferred = open_deferred(module, device)
        weights = deferred if weights is None else weights
        self.offloaded = OffloadStores(zero.offload, self.device, self.mesh)
        self.optimizers: list[ShardedOptimizer] = []
        self.average: WeightAverage | None = None
        self._consistency = OptimizerConsistency(self.optimizers, self.mesh.control)
        self.saver = Saver(self)
        self.steps: StepWatch = StepWatch(self.saver)
        self._loader = Loader(self, self.saver, self.steps, open_any, self._publish_copies)
        self._ended_by = ""
        self.holder: ReferenceType[Any] | None = None
        self._model: ShardedModel | None = ShardedModel(
            module,
            self.mesh,
            zero,
            compute_dtype,
            device=device,
            initialise=weights is None,
            partly=isinstance(weights, StateReader),
            optimizer_store=self.offloaded.optimizer,
            parameter_store=self.offloaded.parameters,
            gradient_store=self.offloaded.gradients,
            optimizers=self.optimizers,
            agreement=StepAgreement(self.steps.own_flags, self._consistency.fingerprint, self._consistency.compare),
            further_norm_groups=further,
            divisor=divisor,
        )
        self.model.engine = self
        self.slots = SlotSteps(self.model, zero, self.steps)
        self._trial = trial_for(zero, self.model.unsharder, self.mesh.control.all_gather_objects, self.mesh.rank)
        guard = guard_for(zero, self.model, self.mesh.rank)
        tier = zero.offload.activations
        self.activations = UnitActivations(self.model, zero.activation_checkpointing, tier, guard)
        if compute_dtype is not None:
            self.model.cast_buffers(compute_dtype)
        self.scaler = LossScaler(zero.loss_scale) if compute_dtype == torch.float16 else None
        self.nonfinite = NonfiniteSteps(zero.nonfinite_gradients, self.model)
        self._clipping = Clipping(self.model, self.optimizers, self.nonfinite)
        self.gradient_watchers = self._clipping.watchers
        self.evaluation = SharedEvaluation(self.model, self.mesh)
        self.untrained: frozenset[int] = frozenset()
        self._attached = AttachedOptimizers(
            self.model, self.optimizers, self._before_step, self._after_step, self._declines
        )
        self._closing: list[Callable[[], None]] = [self.slots.close]
        self._undoing: list[Callable[[], None]] = []
        self._diagnosed = False
        if zero.stage == 3 and self.mesh.shard_size > 1 and not zero.units.may_skip:
            self._closing.append(run_all_layers(module))
        self._module_hooks = report_to_watchdog(self.mesh.watchdog, module, self._attached.left_inconsistent)
        # Last: a load asks for the saver, the average and the observers.
        if weights is not None:
            self._loader.weights(weights, strict=not isinstance(weights, StateReader))
            close_deferred(module, deferred, self.mesh.control)

    @property
    def model(self) -> ShardedModel:
        """Units and buckets of the module.

        Raises:
            RuntimeError: If the engine has given the module back; says how.
        """
        if self._model is None:
            raise RuntimeError(
                f"this engine has ended: {self._ended_by}. The {type(self.module).__name__} is a plain module, or "
                "another engine's; prepare it again, or make a new engine for it"
            )
        return self._model

    @property
    def ended(self) -> bool:
        """True after `close(gather=True)`: the module is no longer this engine's."""
        return self._model is None

    @property
    def ended_by(self) -> str:
        """A clause that says how it ended; "" while it lives."""
        return self._ended_by

    def strangers(self) -> list[str]:
        """Names of parameters that the module has got since it was sharded, and that this engine does not train."""
        return self.model.strangers()

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.model.placement.stage

    @property
    def order(self) -> Callable[[str], tuple[int, ...]] | None:
        """See `ModelPart.order`."""
        return self.part.order

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters: {alias: first name}; names of copies are such."""
        return self.model.aliases if self.part.copies is None else {**self.model.aliases, **self.part.copies.aliases()}

    @property
    def is_part(self) -> bool:
        """True if other ranks train other parts of the model."""
        return self.mesh.world_group.world_size != self.mesh.world_size

    @property
    def observed(self) -> Observed:
        """Observers of this engine; see `observing`."""
        return self.mesh.observed

    @property
    def counters(self) -> CommunicationCounters:
        """Bytes that this rank sent."""
        return self.mesh.counters

    @property
    def checkpoint_timings(self) -> CheckpointTimings:
        """Times that `profile` of this process's activation checkpointing measured; `as_metrics()` is for a logger."""
        return timings()

    # ---- optimizers ----

    def attach(self, *optimizers: Optimizer) -> None:
        """Let torch optimizers over this module's parameters update shards. Their `step()` and groups stay in use.

        Raises:
            TypeError: If one is not elementwise (stages 1 to 3).
            ValueError: If one holds a foreign parameter, or two hold the same one and their state is offloaded.
        """
        self.model.moved.check("attaching an optimizer")
        self._attached.attach(optimizers)
        self.offloaded.tell_step()

    def detach(self) -> None:
        """Let go of all optimizers, for example to attach new ones; their states are dropped."""
        if self.offloaded.files is not None:
            self.saver.rest()  # a save in the background reads them there
        self._attached.detach()
        self._consistency.forget()

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The shards behind an attached optimizer.

        Raises:
            ValueError: If it is not attached.
        """
        return self._attached.of(optimizer)

    def check_optimizers(self) -> None:
        """Raise if a trainable parameter is in no optimizer, or one in two whose state is offloaded.

        Raises:
            ValueError: Naming the parameters and the way out.
        """
        self._attached.check((n, p) for n, p in self.model.names() if id(p) not in self.untrained)

    # ---- the step: one hook before torch's `step()`, one behind it, both inside of the user's hooks ----

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        sharded = self.sharded(optimizer)
        self.model.moved.check("an optimizer's step")
        # With the other refusals, before gradients are reduced: a load fails on all ranks, and so do their next steps.
        self._loader.check_whole("an optimizer's step", [sharded])
        self.observed.mark("step begins")
        # What ranks agreed upon in the last reduction, those that train other parts too; a save in the background that
        # failed is raised here, before anything changes.
        self.steps.before(self.model.reducer.take_flags(self._parts), skipped=sharded.skip_next)
        self._consistency.note_step(optimizer)
        self.activations.choose(self.mesh.control)
        if self.average is not None:
            self.average.before_step()
        if self._attached.changed:  # the first step, or a group was added since
            self.check_optimizers()
            if (asked := self.config.config.asked_records()) and not self._diagnosed:
                raise RuntimeError(
                    f"{asked}, and nobody observes this engine: call "
                    "zero_strategy.diagnostics.recorder.install_diagnostics(engine) before its first step"
                )
        return sharded.begin_step(args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.sharded(optimizer).end_step()
        self._publish_copies()  # before observers are told that the step is over
        # Not before the step, whose closure may be what runs the model.
        if self.sequence.size > 1 and not self.sequence.used:
            self.sequence.check_used(self.config.config.origin_of("mesh.sequence"))
        if optimizer is self.optimizers[-1].optimizer:
            self.slots.step_over()
            self.steps.after(self.model.reducer.take_flags())
            if self.average is not None and not self.sharded(optimizer).skipped:
                self.average.after_step(self.steps.taken)
            self.observed.mark("step over", self.steps.taken)
            if not self.sharded(optimizer).skipped:
                self.activations.step_over(self.mesh.control)
            if self._trial is not None:
                self._trial.step_over()
                self._trial = None if self._trial.over else self._trial
        else:
            self.observed.mark("optimizer over")

    # ---- averages of the weights ----

    def average_weights(
        self,
        decay: float | None = 0.999,
        *,
        every_n_steps: int = 1,
        start_step: int = 0,
        warmup: bool = False,
        bias_correction: bool = False,
        blend: Blend | None = None,
        buffers: bool | None = True,
        device: torch.device | None = None,
    ) -> WeightAverage:
        """Keep a running average of the weights from now on, in place of an earlier one. A collective.

        Args:
            decay: Of an exponential moving average; None: the mean of all updates (SWA).
            every_n_steps: Optimizer steps from one update to the next; 0: only its `update()` updates it.
            start_step: Steps that are taken before the first update.
            warmup: See `ExponentialBlend`.
            bias_correction: See `ExponentialBlend`.
            blend: A function of your own instead of these, see `Blend`.
            buffers: Average the module's buffers, too; False: copy them at each update; None: the average has none.
            device: Where it lies, for state that is in memory; default: beside the weights.

        Returns:
            The average, which is `average` from now on. `with average.applied():` shows it.

        Raises:
            OSError: On all ranks, if a tier has no room.
            TypeError: If `blend` is not elementwise.
            ValueError: If an argument is out of range, or `blend` is given beside `warmup` or `bias_correction`.
        """
        blend = chosen_blend(decay, blend, warmup=warmup, bias_correction=bias_correction)
        self.drop_average()
        self.average = WeightAverage(
            self.model,
            self._publish_copies,
            blend,
            every_n_steps=every_n_steps,
            start_step=start_step,
            buffers=buffers,
            device=device,
        )
        return self.average

    def drop_average(self) -> None:
        """Keep no average any more, if one was kept.

        Raises:
            RuntimeError: If the module has the average's values.
        """
        if self.average is not None:
            self.average.close()
            self.average = None

    def _publish_copies(self) -> None:
        """Bring new values to the other parts of the model. A collective where there are copies of weights."""
        if self.part.copies is not None:
            self.part.copies.publish(self.model.gathered)

    def _declines(self, sharded: ShardedOptimizer) -> bool:
        """True if its step is not to be taken; where there is a loss scale, `unscale_gradients` has said so already."""
        if self.scaler is not None or not self.nonfinite.skips(sharded, self.steps.taken + self.steps.skipped):
            return False
        self.steps.skip()
        return True

    # ---- forward and backward ----

    @property
    def sampler_arguments(self) -> dict[str, int]:
        """`num_replicas` and `rank` of a `DistributedSampler`: ranks that divide sequences get the same samples."""
        size = self.sequence.size
        return {"num_replicas": self.mesh.world_size // size, "rank": self.mesh.rank // size}

    def token_mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """The loss of this rank, so that gradients are those of the mean over the tokens of all ranks. A collective.

        Ranks may have different numbers of tokens that count. The mean of what ranks get is the mean over tokens.

        Args:
            total: Sum of the losses of this rank's tokens, 0-d.
            count: How many of them count. The host waits for a tensor on a GPU; a number that the data loader's batch
                gives before it goes there costs nothing.

        Raises:
            ValueError: If no token of any rank counts.
        """
        self.slots.refuse("token_mean() takes the mean over the tokens of the ranks that compute at the same time")
        return token_mean(self.mesh.control, total, count)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside may keep gradients on this rank; legal at every stage (see `GradientReducer.no_sync`)."""
        return self.model.reducer.no_sync()

    def micro_batch(self, backwards: int = 1) -> AbstractContextManager[int]:
        """One micro-batch of a step of `reproducible.slots`, with all of its random numbers and backwards.

            for batch in loader:
                with engine.micro_batch():                  # gives the slot
                    model(batch).loss.backward()            # the mean over the slot; the engine takes that over slots
                if engine.slots.complete:
                    optimizer.step(); optimizer.zero_grad()

        Args:
            backwards: How many there are in it.

        Raises:
            ValueError: If `reproducible.slots` is 0.
        """
        return self.slots.micro_batch(backwards)

    @contextmanager
    def forward_scope(self, inputs: Any = None) -> Iterator[None]:
        """Code inside may use root parameters outside of any module's forward (a `training_step`).

        Args:
            inputs: What it computes with, for whoever observes.
        """
        self.model.moved.check("a forward", (PARAMETERS,))
        self.model.reducer.make_masters()
        if torch.is_grad_enabled() and self.module.training:
            self.slots.begin()
            self.slots.tell("inputs", inputs)
        with self.observed.forward(inputs), self.model.root_in_use():
            yield

    def check_loss(self, loss: Tensor, weight: float = 1.0) -> None:
        """Tell the observers of this engine the loss of a micro-batch; the integrations call it before each backward.

        Args:
            loss: The loss, not scaled, 0-d.
            weight: The factor that it was multiplied by already, such as 1 / micro-batches.
        """
        self.slots.note_loss(loss.detach() / weight)
        if self.observed.hears_marks:
            self.observed.mark("loss", loss.detach() / weight)

    # ---- gradients, between a backward and a step ----

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that no backward of this engine gave: this rank's, of which the mean over ranks is taken.

        It counts as one more micro-batch: the sum over ranks is added to that of the micro-batches. All ranks call it,
        for the same parameters, after the last backward and before the norm or the step.

        Args:
            parameter: A trainable parameter of the module.
            gradient: Of its shape.

        Raises:
            ValueError: If the parameter is not the module's, is frozen, or has another shape.
        """
        self.slots.refuse("add_gradient() adds a gradient of each rank")
        self.model.moved.check("add_gradient()")
        self.model.reducer.add(parameter, gradient)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        optimizer: Optimizer | None = None,
        error_if_nonfinite: bool = False,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`. A collective.

        Args:
            max_norm: The bound.
            norm_type: Any positive p, or inf, also as the string "inf".
            optimizer: Whose gradients; default: those of all attached optimizers together, or of all parameters if
                none is attached.
            error_if_nonfinite: Raise, on every rank, instead of multiplying by nan.
            parameters: Those whose gradients count and are scaled, the same on all ranks; default: all.

        Returns:
            The norm before clipping, 0-d float32.

        Raises:
            ValueError: If max_norm is negative.
            RuntimeError: If the norm is not finite and `error_if_nonfinite`.
        """
        if max_norm < 0:
            raise ValueError(f"max_norm must not be negative, not {max_norm}")
        self.model.moved.check("a norm of gradients", GRADIENTS)
        self.slots.tell("clip", ("norm", float(max_norm), self._is_part(optimizer, parameters)))
        with self.observed.span("clip"):
            norm = self._clipping.clip(
                max_norm,
                norm_type,
                *self._chosen(optimizer, parameters),
                error_if_nonfinite=error_if_nonfinite,
                decides=self.scaler is None,
            )
        return torch.tensor(norm.value, dtype=torch.float32)

    def clip_grad_value_(
        self, clip_value: float, optimizer: Optimizer | None = None, parameters: Iterable[nn.Parameter] | None = None
    ) -> None:
        """Clamp every gradient element, or those of `parameters`, to [-clip_value, clip_value].

        Raises:
            ValueError: If clip_value is negative.
        """
        if clip_value < 0:
            raise ValueError(f"clip_value must not be negative, not {clip_value}")
        self.model.moved.check("clip_grad_value_()")
        self.slots.tell("clip", ("value", float(clip_value), self._is_part(optimizer, parameters)))
        self._clipping.clamp(clip_value, *self._chosen(optimizer, parameters))

    def grad_norm(
        self,
        norm_type: float | str = 2.0,
        optimizer: Optimizer | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> GradientNorm:
        """Norm of the mean gradients over all ranks. A collective.

        Args:
            norm_type: Any positive p, or inf, also as the string "inf".
            optimizer: Whose gradients; default: those of all attached optimizers, of all parameters if there is none.
            parameters: Those whose gradients count, the same on all ranks; default: all.
        """
        self.model.moved.check("a norm of gradients", GRADIENTS)
        return self._clipping.norm(norm_type, *self._chosen(optimizer, parameters), decides=self.scaler is None)

    def scale_gradients(self, factor: float, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Multiply the mean gradients of some parameters (default: of all) by a factor that is equal on all ranks.

        Nothing is sent where they are reduced already, as after `grad_norm`.
        """
        self.model.moved.check("scale_gradients()", GRADIENTS)
        self.model.reducer.settle()
        self._clipping.scale(factor, *self._chosen(None, parameters))

    def _is_part(self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter] | None) -> bool:
        """True if not the gradients of all attached optimizers are meant."""
        return parameters is not None or (optimizer is not None and len(self.optimizers) > 1)

    def _chosen(
        self, optimizer: Optimizer | None, parameters: Iterable[nn.Parameter] | None
    ) -> tuple[ShardedOptimizer | None, set[int] | None]:
        """The optimizer and the ids of parameters whose gradients are meant, as `Clipping` takes them."""
        sharded = None if optimizer is None else self.sharded(optimizer)
        return sharded, None if parameters is None else {id(parameter) for parameter in parameters}

    # ---- fp16 ----

    def use_loss_scaler(self, scaler: LossScaler | None) -> None:
        """Scale losses by a rule that others share, such as a framework's plugin, or not at all (None)."""
        self.scaler = scaler

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: scaled in fp16, unchanged otherwise."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def unscale_gradients(self, optimizer: Optimizer, scale: float | None = None) -> bool:
        """Undo the loss scale in an optimizer's gradients; the next step is skipped if one is not finite.

        A collective: all ranks decide alike. Call once per step, before clipping.

        Args:
            optimizer: Whose gradients.
            scale: What the losses were multiplied by; default: the scaler's present scale.

        Returns:
            Whether the step will be taken.
        """
        if self.scaler is None:
            return True
        self.model.moved.check("unscale_gradients()", GRADIENTS)
        return self.sharded(optimizer).unscale(scale or self.scaler.scale)

    # ---- checkpoints: all ranks of the team take part ----

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        user: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        own_files: Mapping[str, bytes] | None = None,
        optimizers: bool = True,
        update_latest: bool = True,
        asynchronous: bool = False,
        weights_dtype: torch.dtype | None = None,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave:
        """Write a checkpoint directory; all ranks call it, each writes its own part in place.

        Args:
            directory: The checkpoint; replaced atomically if it exists. `latest` beside it names it afterwards.
            user: JSON-able values for the manifest.
            extra_files: Further small files, {relative path: bytes}; rank 0's are written.
            own_files: Small files of this rank alone, under paths that no other rank uses.
            optimizers: Write optimizer state and master weights too.
            update_latest: Let `latest` beside the directory name it.
            asynchronous: Return as soon as this rank's bytes are copied; they are written in the background.
            weights_dtype: Save floating-point weights in this dtype; only without optimizers.
            frozen: In place of the config's `checkpoint.frozen`.

        Returns:
            The save; its `wait()` returns when the checkpoint is there.

        Raises:
            BarrierError: If a rank does not call it in time, or with another directory.
            OSError, ValueError: On all ranks if one fails; an earlier checkpoint stays as it was. Of a save in the
                background: at the next optimizer step, the next save, `wait()`, or at exit.
        """
        self.model.moved.check("saving a checkpoint")
        self._loader.check_whole("saving a checkpoint", self.optimizers if optimizers else ())
        with self.mesh.observed.span("save", os.fspath(directory)):
            return self.saver.save(
                directory,
                user=user or {},
                extra_files=extra_files or {},
                own_files=own_files or {},
                counters=self.steps.counters(),
                optimizers=optimizers,
                update_latest=update_latest,
                asynchronous=asynchronous,
                weights_dtype=weights_dtype,
                frozen=frozen,
            )

    def save_pretrained(self, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
        """Write weights and config for Hugging Face's `from_pretrained`; see `checkpoint.exports.save_pretrained`."""
        exports.save_pretrained(self, directory, dtype=dtype)

    def load(
        self,
        directory: str | os.PathLike[str] | StateReader,
        *,
        strict: bool = True,
        optimizers: bool = True,
        weights: Callable[[StateReader], None] | None = None,
    ) -> StateReader:
        """Load a checkpoint written at any world size and stage; all ranks call it.

        Gradients that wait for a step are dropped: they belong to the weights of before.

        Args:
            directory: The checkpoint, the folder with `latest`, or what reads one.
            strict: Missing and unexpected names are errors.
            optimizers: Resume: load optimizer state, master weights, counters and the random state too.
            weights: Called with the reader in place of loading the weights.

        Returns:
            The reader, for the manifest and extra files.

        Raises:
            ValueError: Listing every tensor that does not fit.
        """
        return self._loader.load(directory, strict=strict, optimizers=optimizers, weights=weights)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        *,
        lr_scheduler: Any = None,
        asynchronous: bool = False,
        frozen: Literal["store", "reference"] | None = None,
    ) -> PendingSave:
        """Write the checkpoint `save_dir/tag`; see `checkpoint.exports.save_checkpoint`."""
        return exports.save_checkpoint(
            self,
            save_dir,
            tag,
            client_state or {},
            save_latest,
            lr_scheduler=lr_scheduler,
            asynchronous=asynchronous,
            frozen=frozen,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *,
        lr_scheduler: Any = None,
        weights: Callable[[StateReader], None] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load `load_dir/tag`; returns its path and the client state; see `checkpoint.exports.load_checkpoint`."""
        return exports.load_checkpoint(
            self,
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            checkpoint_in=checkpoint_in,
            lr_scheduler=lr_scheduler,
            weights=weights,
        )

    def load_random_state(self, reader: StateReader) -> None:
        """Give this rank its random state back, where the config says so; see `checkpoint.random_state`."""
        self._loader.random_state(reader)

    def load_weights(self, source: str | os.PathLike[str] | StateReader, *, strict: bool = True) -> StateReader:
        """Load weights and buffers only, each rank reading its own slices; also from a Hugging Face directory."""
        reader = self._loader.weights(source, strict=strict)
        self._publish_copies()
        return reader

    def load_optimizers(self, source: str | os.PathLike[str] | StateReader) -> None:
        """Load optimizer state, master weights and the loss scale only."""
        self._loader.optimizers(source)
        self._publish_copies()

    def save_on_signal(
        self, directory: str | os.PathLike[str], **options: Any
    ) -> AbstractContextManager[Callable[[], None]]:
        """Let all ranks save if a signal reaches any of them in the block; see `checkpoint.preemption`."""
        return save_on_signal(self, directory, **options)

    # ---- full tensors ----

    def full_state_dict(self, names: Collection[str] | None = None, *, keep: bool = True) -> dict[str, Any]:
        """The module's full parameters and persistent buffers, copied to the host, on every rank; all ranks call it.

        Names and order are `state_dict()`'s, tied names included. One unit at a time is whole on the device. What
        modules add to their state dicts besides (`get_extra_state`, metrics) follows, as this rank has it.

        Args:
            names: Those that are wanted, the same on all ranks; default: all.
            keep: Give them to this rank; otherwise it takes part, copies nothing and gets an empty dict.
        """
        return full_tensors.full_state_dict(self, names, keep=keep)

    def weights(
        self,
        names: Iterable[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
        merge_adapters: bool = True,
        module: nn.Module | None = None,
    ) -> WholeWeights:
        """The whole weights one by one, as an inference server loads them; see `WholeWeights`. All ranks iterate it.

            server.update(engine.weights(dtype=torch.bfloat16))       # pairs (name, tensor)

        Args:
            names: Those that are wanted, equal on all ranks; default: all.
            dtype: What floating-point tensors are converted to; default: as the forward computes with them.
            merge_adapters: Give PEFT's layers merged, under the base model's names, and no adapters.
            module: Part of the module by whose own names tensors go; default: the whole.

        Raises:
            ValueError: If a name is not one of them, a module is not the engine's, or adapters cannot be merged.
            TypeError: If `dtype` is not one of floating point.
        """
        return WholeWeights(self, names, dtype=dtype, merge_adapters=merge_adapters, module=module)

    def publish(
        self, to: str | os.PathLike[str], *, dtype: torch.dtype | None = None, anchor_every: int = 100, keep: int = 2
    ) -> Publisher:
        """Publish the weights in a folder, for readers in other processes and hosts; see `Publisher`. A collective.

            published = engine.publish(to="/shared/run-7", dtype=torch.bfloat16)
            ...                                     # a step
            published.update()                      # readers: zero_strategy.subscribe("/shared/run-7")

        Args:
            to: The folder; it is made if need be.
            dtype: Of floating-point weights; default: the parameters'.
            anchor_every: Versions from one anchor, a whole checkpoint, to the next.
            keep: Anchors that are kept, with the changes after them.

        Raises:
            TypeError: If `dtype` is not one of floating point.
            ValueError: If an argument is wrong, another training publishes there, or the model is divided by tensor or
                pipeline parallelism.
        """
        publisher = Publisher(self, to, dtype=dtype, anchor_every=anchor_every, keep=keep)
        self._closing.append(publisher.release)
        return publisher

    def optimizer_state_dict(self, optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """An attached optimizer's whole state, on the host of every rank, in the form of its own `state_dict()`.

        All ranks call it; those with `keep=False` take part and get an empty dict.
        """
        return full_tensors.optimizer_state_dict(self, self.sharded(optimizer), keep=keep)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Full optimizer state: {parameter name: {"exp_avg": tensor, ..., "step": tensor}}. All ranks call it."""
        return full_tensors.full_optimizer_state(self, self.sharded(optimizer))

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Divide a whole state, in the form of `optimizer.state_dict()`, among the ranks.

        Raises:
            ValueError: If its param groups do not fit.
        """
        self.model.moved.check("load_optimizer_state_dict()")
        sharded = self.sharded(optimizer)
        sharded.load_whole(state_dict)
        self._loader.loaded(sharded)

    # ---- states that are on the host for a while ----

    def offload_states(self, include: Iterable[str] | None = None, *, pin_memory: bool = True) -> None:
        """Move model states to the host until `reload_states()`, for who needs the device's memory meanwhile.

        What is there can be read (`full_state_dict`, `state_dict()`, `safe_get_*`). A forward needs the parameters, a
        backward the gradients, too, an optimizer's step and checkpoints all: an error says so. Parameters and gradients
        stay the same objects. Nothing is sent: ranks may call it at different times.

        Args:
            include: Of "optim_states", "hp_params" (fp32 master weights), "lp_params" (parameters, this rank's part of
                them at stage 3), "lp_grads" and "contiguous_grad_buffer"; None: all.
            pin_memory: Page-lock the memory there; of use with a GPU only.

        Raises:
            OSError: If the host has no memory for them; nothing has changed.
            RuntimeError: In a forward, a backward or a step.
            TypeError, ValueError: If `include` is no list of such names, or the config keeps a kind off the device.
        """
        self.model.moved.offload(include, pin_memory=pin_memory)

    def reload_states(self) -> None:
        """Move back to the device what `offload_states` has moved, bit by bit as it was.

        Raises:
            torch.OutOfMemoryError: If the device has no memory for it; nothing has changed.
        """
        self.model.moved.reload()

    # ---- ranks with different numbers of batches ----

    def join_batches(self, loader: Iterable[Any]) -> JoinedBatches:
        """Pairs of a batch and the weight of its loss, as many on all ranks; what for, `uneven_batches` says.

        All ranks call it, and go through it together; `len()` is the most that any rank has. See `joined`.

        Args:
            loader: This rank's batches.
        """
        return JoinedBatches(loader, self.mesh, self.config.config.uneven_batches)

    def shared_step(self) -> AbstractContextManager[None]:
        """One evaluation step of this rank; ranks without a batch left take part through `drain()` (stage 3)."""
        return self.evaluation.shared_step()

    def drain(self) -> None:
        """Take part in the other ranks' evaluation steps until no rank has a batch left (stage 3)."""
        self.evaluation.drain()

    def step_metrics(self) -> dict[str, float]:
        """Time and memory of the last recorded step, by names for a logger (`zero/step_time/...`).

        Empty without `diagnostics.run_dir`, and if they were asked for already.
        """
        found = None if self.observed.observer is None else self.observed.observer.take_metrics()
        return dict(found or {})

    def state_bytes(self) -> dict[str, int]:
        """Persistent bytes of model state on this rank: parameters, gradients, optimizer (master weights included)."""
        return state_bytes(self.model, self.optimizers, self.average)

    def ledger(self) -> Ledger:
        """Every long-lived buffer of this rank: category, owner, tier, bytes asked and taken; see `planning.ledger`.

        `planning.held.reconcile` holds it against the allocator and the process.
        """
        return ledger_of(self)

    @property
    def desync(self) -> Failure | None:
        """Why the ranks cannot go on together; None: as far as is known they can."""
        return None if self.mesh.watchdog is None else self.mesh.watchdog.failure

    def note_error(self, error: BaseException) -> None:
        """An exception is about to end training on this rank: ranks that wait for it are told, and raise, unless this
        rank comes back within `watchdog.silence_seconds`. What is raised in a forward is noted without this call.
        """
        if self.mesh.watchdog is not None:
            self.mesh.watchdog.note_error(error)

    def note_diagnostics(self, *closing: Callable[[], None]) -> None:
        """Start to record as the settings ask; `close` calls these first (`install_diagnostics` calls this)."""
        self._diagnosed = True
        self._closing += closing

    def when_plain(self, undo: Callable[[], None]) -> None:
        """Call this when `close(gather=True)` makes the module plain: what somebody else has set on it goes, too."""
        self._undoing.append(undo)

    def close(self, *, gather: bool = False, optimizers: bool = False, reason: str = "") -> None:
        """End this engine: saves under way are finished, process groups, threads and files let go. All ranks call it.

        Without `gather` the module stays as it is: at stage 3 each rank keeps its slices, and it cannot be gathered any
        more. Ranks wait for each other for some seconds, not where one is known to have failed. A second call does
        nothing; `with ZeroEngine(...) as engine:` calls it, too.

        With `gather` the module becomes plain: its parameters are the same objects, each whole on every rank in memory
        of its own, of the dtype in which the forward computes; no hooks are left, and no gradients. It takes the whole
        model's memory on the device of every rank, and one unit's more meanwhile. Plain torch, `deepcopy`,
        `save_pretrained`, `resize_token_embeddings`, DistributedDataParallel or another engine can go on with it. This
        engine is of no use then, and says so.

        Args:
            gather: Make the module plain.
            optimizers: Give the attached optimizers their whole state on every rank (Adam: two more models' memory), so
                that they go on as plain ones; otherwise it is dropped, and their next step raises.
            reason: How it ended, for the errors of later uses.

        Raises:
            RuntimeError: In a forward, a backward or a step, after a failure of another rank, or where the slices of
                stage 3 can be gathered no more.
            ValueError: If the module is one of several parts of a model (pipelines), or divides sequences.
        """
        if gather and self._model is not None:
            self._make_plain(optimizers, reason or "engine.close(gather=True) was called")
        if self.mesh.closed:
            return
        try:
            if self.desync is None:
                self.saver.finish()
                if self._model is not None:
                    self._model.arrivals.finish()
        finally:
            while self._closing:
                self._closing.pop()()
            self.mesh.close()
            self.offloaded.close()

    def abandon(self, reason: str) -> None:
        """End this engine by itself, where other ranks are gone: nothing is saved, and nobody is waited for.

        The module is plain, as after `close(gather=True)`, but its parameters have no values of use: another engine
        loads some. It may be called wherever an exception has left a forward, a backward or a step.
        """
        if self._model is None:
            return
        model, closing = self._model, [*self._closing, *self._undoing]
        while closing:
            with suppress(Exception):  # of groups that are broken
                closing.pop()()
        self._closing.clear()
        self._undoing.clear()
        attached = [sharded.optimizer for sharded in self.optimizers]
        self._attached.detach()
        self._consistency.forget()
        self.average = None
        model.dissolve(values=False)
        for optimizer in attached:
            DroppedState(optimizer, reason)
        self.activations.undo()
        for hook in self._module_hooks:
            hook.remove()
        self.mesh.close(together=False)
        self.offloaded.close()
        self._model, self._ended_by = None, reason

    def _make_plain(self, keep_states: bool, reason: str) -> None:
        model, call = self.model, "close(gather=True)"
        if self.sequence.size > 1:
            raise ValueError(f"{call}: ranks divide the sequences of this model (mesh.sequence); build it anew")
        model.check_gatherable(call)
        if self.desync is not None:
            raise RuntimeError(f"{call}: ranks cannot go on together: {self.desync}")
        model.moved.check(call)
        model.come_to_rest(parameters=False, call=call)
        if self.average is not None:
            self.average.check_not_shown(call)
        attached = [sharded.optimizer for sharded in self.optimizers]
        states: list[dict[str, Any]] = []
        if not self.mesh.closed:
            self.saver.finish()  # it may read what is about to go
            self.mesh.barrier.wait_for_all(call)
            states = [self.optimizer_state_dict(optimizer) for optimizer in attached if keep_states]
        self.detach()
        self.drop_average()
        model.dissolve()
        for optimizer, state in zip(attached, states, strict=False):
            optimizer.load_state_dict(state)
        for optimizer in attached[len(states) :]:
            DroppedState(optimizer, reason)
        self.activations.undo()
        for hook in self._module_hooks:
            hook.remove()
        while self._closing:  # observers have hooks, too
            self._closing.pop()()
        while self._undoing:
            self._undoing.pop()()
        self._model, self._ended_by = None, reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self.mesh.watchdog is not None and not self.mesh.closed:
            self.mesh.watchdog.note_error(error, ended=True)
        self.close()

    def reset(self) -> None:
        """Return to the resting state after an exception was caught in a forward or a backward."""
        self.model.reducer.reset()
        self.model.guards.reset()
        for sharded in self.optimizers:
            sharded.restore()
        if self.model.unsharder is not None:
            self.model.unsharder.reset()
