"""Steps of slots (`reproducible.slots`) under the transformers Trainer: micro-batches, token means, logged losses.

    loss of a slot    sum over its tokens / (tokens of the step / slots), or the model's own mean
    of a step         the mean over slots, taken by the engine: the sum over all tokens / their number

The Trainer divides losses by its micro-batches, and multiplies them by the number of processes; neither happens here,
so that the gradient of a slot's loss is one on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.huggingface.survival import alone_yet
from zero_strategy.reproducible.accumulation import accumulation_of

_AVERAGES = "average_tokens_across_devices"


def fit_arguments(args: Any, config: ZeroConfig) -> None:
    """Let the Trainer accumulate the micro-batches of a step; before it derives numbers of steps from its arguments.

    Args:
        args: The TrainingArguments; `gradient_accumulation_steps` may be set.
        config: The settings.

    Raises:
        ValueError: If a number does not fit, or an argument lets results depend on the ranks.
    """
    slots = config.reproducible.slots
    if not slots:
        return
    for name, wrong, why in (
        ("auto_find_batch_size", True, "a slot would have as many samples as fit some rank's memory; set the size"),
        (_AVERAGES, False, "the mean over a rank's own tokens depends on the ranks; leave it at True"),
    ):
        if getattr(args, name, not wrong) == wrong:
            origin = config.origin_of("reproducible.slots")
            raise ValueError(f"TrainingArguments({name}={wrong}) with reproducible.slots {slots} [{origin}]: {why}")
    given, name = args.gradient_accumulation_steps, "TrainingArguments(gradient_accumulation_steps)"
    tells = args.process_index == 0 and not alone_yet(config)
    args.gradient_accumulation_steps = accumulation_of(config, args.world_size, given, name, tells=tells)


class SlotBatchList(list[Any]):
    """The batches of a step; before one is taken out its micro-batch begins.

    Args:
        batches: This rank's.
        begin: Called then.
    """

    def __init__(self, batches: list[Any], begin: Callable[[], object]) -> None:
        super().__init__(batches)
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self._begin()
            yield batch


class SlotSteps:
    """Part of a Trainer's mixin: what it does about slots. Without them everything is the Trainer's own."""

    accelerator: Any
    args: Any
    state: Any
    control: Any
    current_gradient_accumulation_steps: int
    _globalstep_last_logged: int
    _tr_loss: Tensor
    _slot_losses: list[Tensor]
    """Those of micro-batches since something was logged, of steps whose means are not in `_loss_means`."""
    _loss_means: list[float]
    """Those of steps since something was logged, the same on all ranks."""

    _counts_step = False
    """The batches are those of a step."""

    @property
    def zero_engine(self) -> ZeroEngine | None:
        """The engine, once there is one."""
        raise NotImplementedError

    @property
    def _slots(self) -> int:
        return int(self.accelerator.slot_training.slots)

    # ---- data ----

    def get_train_dataloader(self) -> Any:
        """See the Trainer's: with slots each rank gets the samples of its own, in the same order on any ranks."""
        with self.accelerator.slot_training.all_train():
            return super().get_train_dataloader()  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """See the Trainer's: before a batch is taken out of the list, the random numbers of its slot begin."""
        self._counts_step = True
        try:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        finally:
            self._counts_step = False
        return SlotBatchList(batches, self._begin_slot) if self._slots else batches, items

    def _begin_slot(self) -> None:
        engine = self.zero_engine
        if self._slots and engine is not None:
            if self.args.gradient_accumulation_steps != engine.slots.count:
                raise ValueError(
                    f"gradient_accumulation_steps is {self.args.gradient_accumulation_steps} by now, and on these "
                    f"ranks a step of reproducible.slots {self._slots} is {engine.slots.count} micro-batches of each: "
                    f"leave it at {engine.slots.count}"
                )
            self.accelerator.slot_training.begin([engine])

    # ---- losses ----

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """See the Trainer's; with slots the tokens of the whole step, exactly counted, divided by the slots.

        The batch of an evaluation is no slot.
        """
        find = super()._get_num_items_in_batch  # type: ignore[misc]
        if not self._slots or not self._counts_step:
            return find(batch_samples, device)
        with self._averaged_here():
            # One by one, as the Trainer's sum is a float32.
            found = [find([batch], device) for batch in batch_samples]
        if not found or any(one is None for one in found):
            return None
        own = torch.stack([torch.as_tensor(one, device=device).sum().long() for one in found]).sum()
        return (self.accelerator.gather(own).sum().double() / self._slots).float()

    @contextmanager
    def _averaged_here(self) -> Iterator[None]:
        """Inside, the Trainer neither gathers numbers of tokens nor multiplies losses by the number of processes."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    def training_step(self, model: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's, which divides losses by the micro-batches of a step; with slots it does not."""
        if not self._slots:
            # The last step of an epoch may have fewer.
            parts = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
            self.accelerator.loss_weight = 1 / parts
            return super().training_step(model, *arguments, **keywords)  # type: ignore[misc]
        self._begin_slot()
        before = getattr(self, "current_gradient_accumulation_steps", 1)
        self.current_gradient_accumulation_steps, self.accelerator.loss_weight = 1, 1.0
        try:
            with self._averaged_here():
                loss: Tensor = super().training_step(model, *arguments, **keywords)  # type: ignore[misc]
        finally:
            self.current_gradient_accumulation_steps = before
        self._slot_losses.append(loss)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's, which logs the mean of the ranks' sums; with slots it gets one that all ranks have."""
        log: Callable[..., Any] = super()._maybe_log_save_evaluate  # type: ignore[misc]
        logs = self.control.should_log and self.state.global_step > self._globalstep_last_logged
        if not self._slots or not logs:
            return log(tr_loss, *arguments, **keywords)
        total = self._take_losses(tr_loss)
        tr_loss.zero_()
        return log(total, *arguments, **keywords)

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's: the mean loss of the training has the losses since something was logged."""
        if self._slots:
            self._tr_loss = self._take_losses(self._tr_loss)
        return super()._finalize_training(*arguments, **keywords)  # type: ignore[misc]

    def _take_losses(self, like: Tensor) -> Tensor:
        """The sum of the losses of steps since something was logged, the same on all ranks. A collective.

        A float32 in a float64: of several equal ones the Trainer's mean is that very number.
        """
        self._settle_losses()
        means, self._loss_means, total = self._loss_means, [], 0.0
        for number, loss in enumerate(means):
            if self.args.logging_nan_inf_filter and not math.isfinite(loss):
                loss = total / (1 + number)  # as the Trainer: the mean of those before
            total += loss
        return torch.tensor(total, dtype=torch.float32, device=like.device).double()

    def _settle_losses(self) -> None:
        """Turn losses of whole steps into their means. A collective."""
        engine, losses = self.zero_engine, self._slot_losses
        assert engine is not None
        count, self._slot_losses = engine.slots.count, []
        for start in range(0, len(losses) - count + 1, count):
            self._loss_means.append(float(engine.slots.mean(losses[start : start + count])))
