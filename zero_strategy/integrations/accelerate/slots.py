"""Steps of slots (`reproducible.slots`) under a `ZeroAccelerator`: loaders, accumulation, schedules, data positions.

Accelerate counts batches of a process, and gives each process batches by the number of processes. Here a prepared
training loader gives each process the samples of its slots, `accumulate()` ends with a step of all slots, and a
schedule steps once with it. What is saved counts steps, so that another number of processes goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from zero_strategy.config import ZeroConfig, resolve
from zero_strategy.engine import ZeroEngine
from zero_strategy.reproducible.accumulation import accumulation_of, own_slots
from zero_strategy.reproducible.loaders import order_of, slot_loader, slot_sampler
from zero_strategy.reproducible.samples import SlotSampler
from zero_strategy.runtime.terminal import report

_logger = logging.getLogger(__name__)

ACCUMULATION = "gradient_accumulation_steps"


class SlotTraining:
    """Work of one accelerator where a step is a number of slots.

    Args:
        accelerator: The ZeroAccelerator.
        config: Its settings.

    Attributes:
        slots: Of a step; 0: it is no number of slots, and nothing here is asked.
        derived: The accumulation was derived, as none was given.
        seed: Of the order of samples; None: that of the launch, once it is asked for.
    """

    def __init__(self, accelerator: Any, config: ZeroConfig) -> None:
        self._accelerator, self._config = accelerator, config
        self.slots, self.derived = config.reproducible.slots, False
        self.seed: int | None = accelerator.dataloader_config.data_seed
        if self.seed is None:
            self.seed = config.reproducible.seed
        self._chosen: Any = None
        self._told = self._all_train = False

    def take_accumulation(self) -> None:
        """Let the accelerator accumulate the micro-batches of a step.

        Raises:
            ValueError: If its number was given, and does not fit.
        """
        accelerator, stages = self._accelerator, self._config.pipeline.stages
        given = accelerator.gradient_accumulation_steps
        ranks = accelerator.num_processes // stages
        # A batch of a pipeline has all slots of its ranks.
        if self.slots and stages > 1 and given == 1:
            return
        tells = accelerator.is_main_process
        wanted = accumulation_of(self._config, ranks, given, f"ZeroAccelerator({ACCUMULATION})", tells=tells)
        if wanted != given:
            self.derived, accelerator.gradient_accumulation_steps = True, wanted

    def take_pipeline(self) -> None:
        """A pipeline has come, of whose batches each has all slots of a rank."""
        if self.slots and self.derived:
            self._accelerator.gradient_accumulation_steps = 1

    def tell_schedule(self, scheduler: Any) -> None:
        """Say once how often a prepared schedule steps, since Accelerate's steps once per process."""
        if not self._told and self._accelerator.is_main_process:
            self._told = True
            report(
                _logger,
                "a prepared %s steps once per optimizer step, on any number of processes [reproducible.slots]: its "
                "lengths count optimizer steps; do not multiply them by num_processes",
                type(scheduler).__name__,
            )

    def refuse(self, call: str, why: str) -> None:
        """Raise if a step has slots.

        Raises:
            ValueError: Naming the call, and why it cannot be.
        """
        if self.slots:
            origin = self._config.origin_of("reproducible.slots")
            raise ValueError(f"{call} with reproducible.slots {self.slots} [{origin}]: {why}")

    # ---- loaders ----

    def take_config(self, config: ZeroConfig) -> None:
        """Take a config of which settings were chosen meanwhile."""
        self._config = config

    def choose(self, objects: Sequence[Any]) -> None:
        """Remember the loader of a training among objects that are prepared in one call.

        A loader that shuffles is one in any case. Where none does, the first is, if an optimizer comes with it.
        """
        loaders = [item for item in objects if isinstance(item, DataLoader)]
        shuffled = any(isinstance(loader.sampler, RandomSampler) for loader in loaders)
        trains = any(isinstance(item, Optimizer) for item in objects)
        self._chosen = loaders[0] if loaders and trains and not shuffled else None

    @contextmanager
    def all_train(self) -> Iterator[None]:
        """Loaders that are prepared inside are of a training."""
        self._all_train = True
        try:
            yield
        finally:
            self._all_train = False

    def trains(self, loader: Any, asked: bool | None) -> bool:
        """True if a loader is that of a training, whose batches are slots."""
        if not self.slots or getattr(loader, "_is_accelerate_prepared", False):
            return False
        if asked is not None:
            return asked
        return self._all_train or loader is self._chosen or isinstance(loader.sampler, RandomSampler)

    def divided(self, loader: DataLoader[Any], share: tuple[int, int], micro_batches: int) -> DataLoader[Any]:
        """A loader of this process's slots in the place of one that the script has made.

        Args:
            loader: The script's.
            share: Number of shares of the data, and this process's.
            micro_batches: Slots of a batch: of a pipeline.

        Raises:
            ValueError: If samples cannot be divided so; names why, and the way out.
        """
        accelerator, call = self._accelerator, "accelerator.prepare(a DataLoader)"
        if accelerator.split_batches:
            why = "split_batches=True divides a batch by the processes; leave it out, and give a slot's batch_size"
            self.refuse(call, why)
        if accelerator.dispatch_batches:
            self.refuse(call, "dispatch_batches=True lets one process read for all; leave it out")
        if accelerator.use_stateful_dataloader:
            why = "use_stateful_dataloader=True counts batches of one process; leave it out, and skip_first_batches"
            self.refuse(call, why)
        if not accelerator.even_batches and not loader.drop_last:
            why = "even_batches=False leaves a last step without some slots; use even_batches=True, or drop_last=True"
            self.refuse(call, why)
        shuffle, size = order_of(loader, self.slots), loader.batch_size
        assert size is not None
        if size % micro_batches:
            why = f"batch_size {size} is no multiple of the {micro_batches} micro-batches of a pipeline, each a slot"
            self.refuse(call, why)
        known = slot_sampler(loader)
        sampler = known or SlotSampler(
            len(loader.dataset),  # type: ignore[arg-type]
            self.slots,
            own_slots(resolve(self._config, share[0]), share[1]),
            size // micro_batches,
            shuffle=shuffle,
            seed=self._seed(),
            drop_last=loader.drop_last,
        )
        return slot_loader(loader, sampler, share[0])

    def _seed(self) -> int:
        """Seed of the order of samples, the same on all ranks. A collective the first time, where none was given."""
        if self.seed is None:
            own = torch.tensor([torch.initial_seed() & 0x7FFFFFFF], device=self._accelerator.device)
            self.seed = int(self._accelerator.gather(own)[0])
        return self.seed

    def loaders(self) -> list[tuple[Any, SlotSampler]]:
        """Prepared loaders of slots, in their order."""
        found = [(loader, slot_sampler(loader)) for loader in self._accelerator._dataloaders]
        return [(loader, sampler) for loader, sampler in found if sampler is not None]

    # ---- micro-batches ----

    def begin(self, engines: Iterable[ZeroEngine], *, position: int | None = None) -> None:
        """A micro-batch of these engines begins, before anything of it is computed or drawn.

        Args:
            engines: They train with it.
            position: Micro-batches of the step before it, by the count of who accumulates; None: it is not known.

        Raises:
            RuntimeError: If its batch is none of a slot, or others than one backward ran in each micro-batch before.
            ValueError: If the accumulation is another one by now.
        """
        if not self.slots:
            return
        active = [loader for loader in self._accelerator.gradient_state.dataloader_references if loader is not None]
        # One that gives batches of an evaluation may have been left in the middle.
        samplers = [sampler for loader in active if (sampler := slot_sampler(loader)) is not None]
        sampler = samplers[-1] if samplers else None
        if active and sampler is None:
            raise RuntimeError(
                f"reproducible.slots is {self.slots}, and this batch comes from a loader that gives ranks batches by "
                "their number: prepare it in one call with the optimizer, or by "
                "accelerator.prepare_data_loader(loader, slots=True)"
            )
        for engine in engines:
            slots = engine.slots
            if sampler is not None and list(sampler.own) != slots.own:
                raise RuntimeError(
                    f"the loader gives this rank slots {list(sampler.own)}, and the engine of its "
                    f"{type(engine.module).__name__} computes {slots.own}: prepare both by one accelerator"
                )
            if position is not None:
                self._check_position(engine, position)
            slots.begin()

    def _check_position(self, engine: ZeroEngine, position: int) -> None:
        slots, number = engine.slots, self._accelerator.gradient_accumulation_steps
        if number != slots.count:
            raise ValueError(
                f"{ACCUMULATION} is {number} by now, and on these ranks a step of reproducible.slots {self.slots} is "
                f"{slots.count} micro-batches of each: leave it at {slots.count}"
            )
        done = slots.count if slots.complete else slots.own.index(slots.slot)
        if done != position:
            raise RuntimeError(
                f"accumulate() begins micro-batch {position + 1} of {number}, and {done} backward(s) have run since "
                "the last step: with reproducible.slots each accumulate() has one backward, of the sum of all losses; "
                "call optimizer.step() and optimizer.zero_grad() in each accumulate()"
            )

    def check_complete(self, engine: ZeroEngine) -> None:
        """Raise if an optimizer's step comes before all micro-batches of a step.

        Raises:
            RuntimeError: Naming the numbers, and `accumulate`.
        """
        slots = engine.slots
        if not slots.complete and (done := slots.own.index(slots.slot)):
            raise RuntimeError(
                f"optimizer.step() after {done} of {slots.count} micro-batches: reproducible.slots is {self.slots}, so "
                f"that a step on these ranks is {slots.count} backwards of each. Put the loop's body in `with "
                "accelerator.accumulate(model):`, or step after as many"
            )

    def check_metrics(self, models: Sequence[Any]) -> None:
        """Before `gather_for_metrics`: a loader of slots fills its last step, and is none of an evaluation.

        Raises:
            RuntimeError: If models are evaluated with it.
        """
        active = self._accelerator.gradient_state.active_dataloader
        if not self.slots or active is None or slot_sampler(active) is None:
            return
        if models and not any(getattr(model, "training", False) for model in models):
            raise RuntimeError(
                f"reproducible.slots is {self.slots}, and this evaluation goes over a loader of a training, which "
                "repeats samples to fill its last step: prepare it by "
                "accelerator.prepare_data_loader(loader, slots=False)"
            )
        active.remainder = -1  # no sample is left out of the last batch

    # ---- where a training is ----

    def state(self) -> dict[str, Any]:
        """For a checkpoint: micro-batches of a step, and seed and epoch of each loader of slots."""
        if not self.slots:
            return {}
        active = self._accelerator.gradient_state.active_dataloader
        loaders = []
        for loader, sampler in self.loaders():
            # A loader that skips batches stands for the one that it was made of.
            current = active if active is not None and slot_sampler(active) is sampler else loader
            loaders.append({"seed": sampler.seed, "epoch": int(current.iteration)})
        return {ACCUMULATION: self._accelerator.gradient_accumulation_steps, "loaders": loaders}

    def load(self, saved: Mapping[str, Any], step: int) -> int:
        """Go on where `state` was; returns the accelerator's `step` on these ranks.

        Args:
            saved: A `state`, or nothing.
            step: The accelerator's when it was saved.
        """
        if not self.slots or not saved:
            return step
        for (loader, sampler), known in zip(self.loaders(), saved["loaders"], strict=False):
            sampler.seed = int(known["seed"])
            loader.set_epoch(int(known["epoch"]))
        return step // int(saved[ACCUMULATION]) * int(self._accelerator.gradient_accumulation_steps)

    def skipped(self, loader: Any, batches: int) -> None:
        """A loader is about to be passed over by so many batches.

        Raises:
            ValueError: If these are no whole steps.
        """
        sampler = slot_sampler(loader) if self.slots else None
        if sampler is None:
            return
        number = self._accelerator.gradient_accumulation_steps
        if batches % number:
            raise ValueError(
                f"skip_first_batches(..., {batches}) is {batches / number:g} steps of {number} batches of this rank: "
                "with reproducible.slots a position is a number of steps; skip steps x "
                f"accelerator.{ACCUMULATION}"
            )
        loader.iteration += 1  # its own next pass is the epoch after this one


class SlotScheduler(AcceleratedScheduler):
    """Accelerate's wrapper around a schedule that steps once with each optimizer step, on any number of processes.

    Args:
        prepared: Accelerate's.
    """

    def __init__(self, prepared: AcceleratedScheduler) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches)

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """Step if the optimizer has stepped."""
        stepped = self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers)
        if stepped or not self.step_with_optimizer:
            self.scheduler.step(*arguments, **keywords)


def slot_backward(accelerator: Any, loss: Tensor, keywords: Mapping[str, Any]) -> None:
    """Accelerate's `backward` without its division by the micro-batches: the engine takes the mean over slots.

    The gradient of the loss is exactly one, or the loss scale.
    """
    scaler = accelerator.scaler
    (loss if scaler is None else scaler.scale(loss)).backward(**keywords)
