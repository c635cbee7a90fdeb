"""The engine of a training script: what DeepSpeed's scripts call, on top of `ZeroEngine`, which owns the training.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

A micro-batch is one forward, one `backward` and one `step`; every `gradient_accumulation_steps()`-th `step` updates the
weights, with the mean gradient over the micro-batches and the ranks.

Its checkpoints hold the engine's counters, the scheduler, and what the script saves besides.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from zero_strategy.checkpoint.agreement import catalog_of
from zero_strategy.checkpoint.disk import beside, remove, sync
from zero_strategy.checkpoint.reader import StateReader
from zero_strategy.comm.store import together
from zero_strategy.compat.deepspeed.scripts.data import (
    OptimizerOwner,
    PlainBackward,
    SchedulerOwner,
    distributed_loader,
)
from zero_strategy.compat.deepspeed.scripts.optimizer_names import OptimizerNames
from zero_strategy.compat.deepspeed.scripts.settings import ScriptSettings
from zero_strategy.compat.deepspeed.scripts.throughput import ThroughputTimer
from zero_strategy.config.deepspeed.settings import MICRO, TRAIN, BatchSettings
from zero_strategy.diagnostics.monitor import Monitor
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.shard_storage import IN_BACKWARD
from zero_strategy.fsdp.uneven_batches import JoinedBatches
from zero_strategy.reproducible.loaders import in_slots

COUNTERS_KEY = "zero_strategy.script"
"""The key of the engine's counters in a checkpoint's client state."""
_COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


def _write_torch_file(tensors: Mapping[str, Tensor], place: Path) -> None:
    """The file appears whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = beside(place, uuid.uuid4().hex[:12], "tmp")
    try:
        torch.save(dict(tensors), temporary)
        sync(temporary)
        os.replace(temporary, place)
    finally:
        remove(temporary)


def forward_context(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward: autocast to a dtype, or none.

    Autocast keeps no cache: at stage 3 it would hold casts of parameters that have been released since.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class ScriptEngine:
    """A module in training; calling it runs the module.

    What is not found here is looked up in the module (`engine.config`, a method of one's own).

    Args:
        zero: The engine that owns the module, with the optimizer attached.
        settings: What the config says.
        plain: Of backwards that the script starts itself; its `divisor` is that of `zero`.
        optimizer: The optimizer, or None for an engine that only evaluates.
        watchdog: Of the optimizer; lets only this engine step it.
        lr_scheduler: Anything with `step()`; stepped after each step of the optimizer that was taken.
        device: Where the module is.
        local_rank: Of this process on its host.
        collate_fn: For `deepspeed_io`.
        monitor: Writes what the config asks for; None: nothing.

    Attributes:
        module: The user's module.
        optimizer: The user's optimizer, or the config's.
        lr_scheduler: The scheduler.
        tput_timer: Counts epochs, micro-batches, steps and samples per second.
        device: Where the module is.
        local_rank: Of this process on its host.
        training_dataloader: What `initialize` made of its training data.
        micro_steps: Calls of `step`.
        global_steps: Calls of `step` at a boundary, skipped ones included.
        global_samples: Samples of those steps, over all ranks; 0 where the config says no batch size.
        skipped_steps: Steps that were not taken since gradients were not finite (fp16, `nonfinite_gradients: skip`).
    """

    def __init__(
        self,
        zero: ZeroEngine,
        settings: ScriptSettings,
        *,
        plain: PlainBackward,
        optimizer: Optimizer | None = None,
        watchdog: OptimizerOwner | None = None,
        lr_scheduler: Any = None,
        device: torch.device | None = None,
        local_rank: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.zero, self.settings, self.module = zero, settings, zero.module
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.device, self.local_rank = device or torch.device("cpu"), local_rank
        self.training_dataloader: Iterable[Any] | None = None
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._collate_fn, self.monitor = collate_fn, monitor
        self._boundary: bool | None = None
        self._held_back = False
        self._norm: float | None = None
        self._applied = False
        self._watchdog, self._scheduled, self._plain = watchdog, SchedulerOwner(), plain
        self._names = None if optimizer is None else OptimizerNames(optimizer, zero)
        self.tput_timer = ThroughputTimer(self)
        self._tell_monitor()

    # ---- the module ----

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, under autocast where `torch_autocast` of the JSON asks for it."""
        with forward_context(self.settings.autocast, self.zero.model.device):
            return self.module(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the engine."""
        return self(*inputs, **kwargs)

    def train(self, mode: bool = True) -> ScriptEngine:
        """Put the module into training mode, or out of it."""
        self.module.train(mode)
        return self

    def eval(self) -> ScriptEngine:
        """Put the module into evaluation mode."""
        return self.train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, whole on every rank; all ranks call it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load full weights into the module; all ranks call it with the same."""
        return self.module.load_state_dict(state_dict, strict=strict)

    module_state_dict = state_dict
    load_module_state_dict = load_state_dict

    def destroy(self) -> None:
        """End this engine and what it holds; see `ZeroEngine.close`."""
        if self._names is not None:
            self._names.remove()
        self.zero.close()

    def __getattr__(self, name: str) -> Any:
        if name in ("module", "__setstate__") or "module" not in self.__dict__:  # while being made or unpickled
            raise AttributeError(name)
        try:
            return getattr(self.module, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor the module {type(self.module).__name__} has an attribute {name!r}"
            ) from None

    # ---- backward ----

    def backward(
        self,
        loss: Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        *,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Backpropagate a micro-batch's loss, divided by the number of micro-batches per step and scaled in fp16.

        Args:
            loss: 0-d, this rank's mean over its samples.
            allreduce_gradients: False puts the averaging over the ranks off to the next backward that averages, or to
                the optimizer's step: ranks never step with different gradients. Stages 2 and 3 keep no full gradients
                that could wait, and average all the same; the result is then unchanged but for the order of the sum.
            release_loss: Return a copy of the value that does not hold on to the graph.
            retain_graph: Keep the graph for another backward.
            scale_wrt_gas: Divide by the number of micro-batches per step; not with `reproducible.slots`, of which the
                engine takes the mean.

        Returns:
            The loss as it was divided, without the loss scale.

        Raises:
            RuntimeError: If there is no optimizer, or the loss uses parameters that are not whole; names them.
            ValueError: If the loss is no 0-d tensor.
        """
        self._check_loss(loss)
        self.zero.model.moved.check("backward()", IN_BACKWARD)
        divides = scale_wrt_gas and not self.zero.slots.slots
        if divides and self.gradient_accumulation_steps() > 1:
            loss = loss / self.gradient_accumulation_steps()
        self.zero.check_loss(loss, 1 / self.gradient_accumulation_steps() if divides else 1.0)
        averages = allreduce_gradients and not self._held_back and self.is_gradient_accumulation_boundary()
        with self._plain.of_engine(), nullcontext() if averages else self.zero.no_sync():
            self.zero.scale_loss(loss).backward(retain_graph=retain_graph)
        return loss.detach().clone() if release_loss else loss

    def scale(self, loss: Tensor) -> Tensor:
        """A loss for `engine.scale(loss).backward()`: multiplied by the loss scale in fp16.

        The gradients of such a backward, like those of `loss.backward()` where there is no loss scale, are divided by
        the number of micro-batches per step.

        Raises:
            RuntimeError, ValueError: As `backward`.
        """
        self._check_loss(loss)
        self.zero.check_loss(loss)
        self._plain.was_scaled()
        return self.zero.scale_loss(loss)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not averaged over the ranks yet, as with `allreduce_gradients=False`."""
        before, self._held_back = self._held_back, True
        try:
            with self.zero.no_sync():
                yield
        finally:
            self._held_back = before

    def _check_loss(self, loss: Any) -> None:
        self._trained()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"backward() takes a loss of one element, not {given}")

    def _trained(self) -> Optimizer:
        """The optimizer, where something is trained."""
        if self.optimizer is None:
            raise RuntimeError("this engine has no optimizer; pass one to initialize(), or name one in the config")
        return self.optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the module."""
        self.module.zero_grad(set_to_none=set_to_none)

    # ---- the step ----

    def is_gradient_accumulation_boundary(self) -> bool:
        """True if this micro-batch is the last of a step, so that `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say it oneself, from now on, instead of counting."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch. At a boundary: clip, step the optimizer, zero the gradients, step the scheduler.

        Args:
            lr_kwargs: Keyword arguments for the scheduler's `step`.

        Raises:
            RuntimeError: If there is no optimizer, inside of `no_sync()`, or if the script steps the scheduler, too.
            FloatingPointError: If fp16 gradients overflow at the smallest loss scale, or gradients are not finite and
                `nonfinite_gradients` is `raise`.
        """
        optimizer = self._trained()
        self.zero.model.moved.check("step()")
        if self._held_back:
            raise RuntimeError("step() inside of no_sync(): call it after the block, when gradients may be averaged")
        if self.is_gradient_accumulation_boundary():
            self._scheduled.check(self.lr_scheduler, optimizer)
            self._update(optimizer, lr_kwargs or {})
        else:
            self._applied = False
        self.micro_steps += 1
        self.tput_timer.micro_step_count += 1
        self._plain.step_over()

    def _update(self, optimizer: Optimizer, lr_kwargs: Mapping[str, Any]) -> None:
        asked = self._names is not None and self._names.takes_skip()
        overflow = not self.zero.unscale_gradients(optimizer)
        if overflow:
            self._norm = float("inf")
        elif self.settings.clipping > 0:
            self._norm = float(self.zero.clip_grad_norm_(self.settings.clipping, optimizer=optimizer))
        else:
            self._norm = self.zero.grad_norm(optimizer=optimizer).value
        sharded = self.zero.sharded(optimizer)
        if asked:
            sharded.skip_next = True
        with nullcontext() if self._watchdog is None else self._watchdog.stepping():
            optimizer.step()
        self._applied = not sharded.skipped
        overflow = overflow if asked else sharded.skipped
        self.zero_grad()
        if self.zero.scaler is not None and (overflow or not asked):
            self.zero.scaler.update(finite=not overflow)
        self._tell_names(overflow=overflow)
        self.tput_timer.stepped()
        if not self._applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
            self._scheduled.stepped(self.lr_scheduler)
        self.global_steps += 1
        self.global_samples += self.settings.batch.train_batch_size or 0

    def _tell_names(self, *, overflow: bool) -> None:
        if self._names is not None:
            self._names.tell(overflow=overflow, scale=self.loss_scale)

    def was_step_applied(self) -> bool:
        """True if the last `step()` changed the weights."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the mean gradient over all ranks at the last update, before clipping; None before the first.

        inf where fp16 gradients overflowed.
        """
        return self._norm

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Average what `backward(loss, allreduce_gradients=False)` and `no_sync()` have put off; all ranks call it.

        `bucket_size` is without effect: buckets follow the units of the model.
        """
        self.zero.model.reducer.settle()

    def empty_partition_cache(self) -> None:
        """Release the full parameters that are held for a next use (stage 3); all ranks call it."""
        if self.zero.model.unsharder is not None:
            self.zero.model.unsharder.release_idle()

    def offload_states(
        self,
        include: Iterable[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move model states to the host until `reload_states()`; see `ZeroEngine.offload_states`.

        Args:
            include: Members of `OffloadStateTypeEnum`, or their names; None: all.
            device: Accepted is "cpu".
            pin_memory: Page-lock the memory there; of use with a GPU only.
            non_blocking: Without effect: when the call returns the device's memory is free.

        Raises:
            RuntimeError: In a forward, a backward or a step.
            TypeError, ValueError: If an argument is not accepted, or the config keeps a kind off the device.
        """
        if str(getattr(device, "value", device)) != "cpu":
            raise ValueError(f"offload_states(device={device!r}) is not done; accepted: 'cpu'")
        self.zero.offload_states(include, pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved; `non_blocking` is without effect."""
        self.zero.reload_states()

    # ---- batch sizes ----

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Take another number of samples per step: the number of micro-batches follows, their size stays.

        Raises:
            ValueError: If it is no multiple of a micro-batch on every rank, or the config says no micro-batch size.
        """
        micro, ranks = self.train_micro_batch_size_per_gpu(), self._ranks()
        steps = train_batch_size // (micro * ranks)
        if steps < 1 or train_batch_size != steps * micro * ranks:
            raise ValueError(f"train_batch_size {train_batch_size} is no multiple of {MICRO} {micro} x {ranks} rank(s)")
        if (slots := self.zero.slots.slots) and steps * ranks != slots:
            raise ValueError(
                f"train_batch_size {train_batch_size} is {steps * ranks} micro-batches of {micro}, and a step of "
                f"reproducible.slots {slots} is {slots} of them: use set_train_micro_batch_size"
            )
        self._take_batch(train_batch_size, micro, steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Take micro-batches of another size; their number stays, and `train_batch_size` follows."""
        if micro_batch_size < 1:
            raise ValueError(f"{MICRO} must be 1 or more, not {micro_batch_size}")
        steps = self.gradient_accumulation_steps()
        self._take_batch(micro_batch_size * steps * self._ranks(), micro_batch_size, steps)

    def _ranks(self) -> int:
        samples, micro, steps = self.get_batch_info()
        return samples // (micro * steps)

    def _take_batch(self, train: int, micro: int, steps: int) -> None:
        self.settings = replace(self.settings, batch=BatchSettings(train, micro, steps))
        self._plain.micro_batches = steps
        self._tell_monitor()

    def _tell_monitor(self) -> None:
        if self.monitor is not None:
            self.monitor.samples_per_step = self.settings.batch.train_batch_size

    # ---- getters ----

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks.

        Raises:
            ValueError: If the config says no batch size.
        """
        return _known(self.settings.batch.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch.

        Raises:
            ValueError: If the config says no batch size.
        """
        return _known(self.settings.batch.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.settings.batch.gradient_accumulation_steps or 1

    def gradient_clipping(self) -> float:
        """Bound on the gradient norm; 0: none."""
        return self.settings.clipping

    def steps_per_print(self) -> float | None:
        """Number in the JSON; nothing is printed here."""
        return cast("float | None", self._in_json("steps_per_print"))

    def wall_clock_breakdown(self) -> bool:
        """True if the JSON asks for it; `zero-strategy report` has the times of a step."""
        return bool(self._in_json("wall_clock_breakdown"))

    def _in_json(self, key: str) -> Any:
        found = self.settings.zero.deepspeed
        return next((report.value for report in found.found if report.key == key), None) if found is not None else None

    def get_lr(self) -> list[Any]:
        """Learning rate of each param group; empty without an optimizer."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """`momentum` of each param group of SGD and RMSprop, `betas` of others; 0.0 where there is neither."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return self._of_groups("momentum" if any("momentum" in group for group in groups) else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(key, 0.0) for group in self.optimizer.param_groups]

    def zero_optimization(self) -> bool:
        """True if anything is sharded."""
        return self.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.zero.stage

    def fp16_enabled(self) -> bool:
        """True if the module is in fp16."""
        return self.settings.compute_dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """True if the module is in bf16."""
        return self.settings.compute_dtype == torch.bfloat16

    def torch_autocast_enabled(self) -> bool:
        """True if the engine's forward runs under autocast."""
        return self.settings.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Dtype of autocast around the engine's forward; None where there is none."""
        return self.settings.autocast

    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale grows and falls."""
        scaler = self.zero.scaler
        return scaler is not None and scaler.config.initial != scaler.config.minimum

    def zero_cpu_offload(self) -> bool:
        """True if the optimizer's state is off the device."""
        return self.zero.config.config.offload.optimizer != "none"

    def get_batch_info(self) -> tuple[int, int, int]:
        """`train_batch_size()`, `train_micro_batch_size_per_gpu()` and `gradient_accumulation_steps()`."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    @property
    def dp_world_size(self) -> int:
        """Ranks among which samples are divided."""
        return self.zero.mesh.world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks among which each layer is divided."""
        return self.zero.mesh.tensor.size

    @property
    def loss_scale(self) -> float:
        """Factor of losses: 1 unless in fp16."""
        return 1.0 if self.zero.scaler is None else self.zero.scaler.scale

    cur_scale = loss_scale

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.zero.mesh.world_size

    @property
    def global_rank(self) -> int:
        """This process among them."""
        return self.zero.mesh.rank

    # ---- data ----

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches of a dataset; see `distributed_loader`.

        `route` is without effect, but with `reproducible.slots`: only a loader for training ("train") gives this rank
        the samples of its slots, in the same order on any number of ranks.

        Raises:
            ValueError: If samples of slots cannot be had with `data_sampler`.
        """
        loader = distributed_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.zero.mesh.rank,
            world_size=self.zero.mesh.world_size,
            collate_fn=collate_fn or self._collate_fn,
            sampler=data_sampler,
            pin_memory=pin_memory,
            num_workers=num_local_io_workers,
            drop_last=self.settings.drop_last,
        )
        slots = self.zero.slots
        if not slots.slots or route != "train":
            return loader
        return in_slots(loader, slots.slots, slots.own, self.zero.config.config.reproducible.seed)

    def take_training_data(self, dataset: Dataset[Any]) -> None:
        """Make `training_dataloader` of a dataset."""
        self.training_dataloader = self.deepspeed_io(dataset)

    def join_batches(self, loader: Iterable[Any]) -> JoinedBatches:
        """Pairs of a batch and what its loss is multiplied by, as many on all ranks; see `ZeroEngine.join_batches`.

        `engine.backward(loss * weight)` and `engine.step()` are called for each. `global_samples` counts batches that
        are repeated, too.

        Raises:
            RuntimeError: With `reproducible.slots`, of which a step has all.
        """
        self.zero.slots.refuse("join_batches() repeats batches where ranks have fewer")
        return self.zero.join_batches(loader)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the checkpoint `save_dir/tag` (default tag: `global_step{n}`); all ranks call it.

        The scheduler's state and the counters go with it; see `ZeroEngine.save_checkpoint`. Frozen parameters that are
        excluded are named with a digest, and must be in the model that loads it (`checkpoint.frozen: reference`).

        Returns:
            True, when it is there.
        """
        counters = {name: getattr(self, name) for name in _COUNTERS}
        state = {**(client_state or {}), COUNTERS_KEY: counters}
        tag = f"global_step{self.global_steps}" if tag is None else tag
        frozen: Literal["reference"] | None = "reference" if exclude_frozen_parameters else None
        self.zero.save_checkpoint(
            save_dir, tag, state, save_latest, lr_scheduler=self.lr_scheduler, frozen=frozen
        ).wait()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load `load_dir/tag`, or what `latest` names; all ranks call it; see `ZeroEngine.load_checkpoint`.

        Gradients that wait for a step are dropped, and the accumulation begins anew.

        Args:
            load_dir: The folder of checkpoints, or one checkpoint.
            tag: The checkpoint's name; None for the one that `latest` names.
            load_module_strict: Missing and unexpected names are errors.
            load_optimizer_states: Load optimizer state, master weights, counters and the random state.
            load_lr_scheduler_states: Load the scheduler's state.
            load_module_only: Load weights (and master weights with them) alone, whatever the two others say.
            custom_load_fn: Called as `custom_load_fn(src=state_dict, dst=module)` in place of the module's loading,
                with the checkpoint's whole state dict on the host, and the module's parameters whole.

        Returns:
            (path, client state); (None, {}) with a warning where there is none.
        """
        if load_module_only:
            load_optimizer_states = load_lr_scheduler_states = False
        path, state = self.zero.load_checkpoint(
            load_dir,
            tag,
            load_module_strict and custom_load_fn is None,
            load_optimizer_states,
            load_lr_scheduler_states,
            lr_scheduler=self.lr_scheduler,
            weights=None if custom_load_fn is None else partial(self._load_by, custom_load_fn),
        )
        counters = state.pop(COUNTERS_KEY, None)
        self._scheduled.forget()
        self._tell_names(overflow=False)
        if path is not None:
            if load_optimizer_states:
                self._take_counters(counters)
            else:
                self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        return path, state

    def _load_by(self, function: Callable[..., Any], reader: StateReader) -> None:
        """Let the user's function load a checkpoint's weights into the whole module."""
        whole = {name: reader.full(name) for name in reader.weights}
        whole |= {alias: whole[first] for alias, first in reader.aliases.items()}
        model = self.zero.model
        model.invalidate_unsharded()
        with model.gathered() as buckets, torch.no_grad():
            function(src=whole, dst=self.module)
            for bucket in buckets:
                bucket.adopt()
        model.forget_unsharded()

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the module's full state dict, in the dtype that it computes in, as a file of torch; all ranks call it.

        Args:
            save_dir: A folder, which is made where it does not exist.
            save_filename: Of the file.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True, when it is there.

        Raises:
            OSError: If rank 0 cannot write it; on all ranks.
        """
        kept = self._full_16bit_state_dict(exclude_frozen_parameters)
        world_group, place = self.zero.mesh.world_group, Path(save_dir, save_filename)
        together(world_group.control, lambda: _write_torch_file(kept, place) if world_group.rank == 0 else None)
        return True

    save_fp16_model = save_16bit_model

    def _full_16bit_state_dict(self, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
        """All tensors of the state dict in the dtype that the module computes in, on the host. All ranks call it."""
        state = self.zero.full_state_dict()
        dtype = self.settings.compute_dtype
        frozen = catalog_of(self.zero).frozen if exclude_frozen_parameters else frozenset[str]()
        return {
            name: value.to(dtype) if dtype is not None and value.is_floating_point() else value
            for name, value in state.items()
            if name not in frozen and isinstance(value, torch.Tensor)
        }

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The full state dict in the dtype that the module computes in, on rank 0; None on others. All ranks call it.

        Scripts of OpenRLHF, GPT-NeoX and others call it under this name.

        Args:
            exclude_frozen_parameters: Leave out parameters that are not trained.
        """
        state = self._full_16bit_state_dict(exclude_frozen_parameters)
        return state if self.zero.mesh.world_group.rank == 0 else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def _take_counters(self, counters: Mapping[str, int] | None) -> None:
        if counters is None:  # of DeepSpeed, or of a `ZeroEngine` in a loop
            steps = self.zero.steps
            counters = {
                "global_steps": steps.taken,
                "skipped_steps": steps.skipped,
                "global_samples": steps.taken * (self.settings.batch.train_batch_size or 0),
                "micro_steps": steps.taken * self.gradient_accumulation_steps(),
            }
        for name in _COUNTERS:
            setattr(self, name, int(counters[name]))
        # A checkpoint holds no partial gradients, and the number of micro-batches per step may be another one now.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()


def _known(size: int | None) -> int:
    if size is None:
        raise ValueError(f"the config says no batch size; set {MICRO!r} or {TRAIN!r}")
    return size
