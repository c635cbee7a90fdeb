"""Settings that are chosen for a transformers Trainer's training (`auto.enabled`), by a batch of its data."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from zero_strategy.auto.decide import check_batches_come
from zero_strategy.auto.example import Example, of_dataset

_logger = logging.getLogger(__name__)


def choose_for_trainer(trainer: Any) -> None:
    """Choose what nobody has set, and with `auto.global_batch` the arguments that make up a batch. A collective.

    Args:
        trainer: Before it trains.

    Raises:
        ValueError: If nothing fits, or slots make up the batch already; names ways out.
    """
    accelerator = trainer.accelerator
    config = accelerator.zero_config
    if config.reproducible.slots:
        check_batches_come(config, "reproducible.slots")
    if accelerator.example is None:
        accelerator.example = _example(trainer)
    if trainer.model is None:  # it is made when training begins, and prepared then
        check_batches_come(config, "the arguments, where model_init makes the model")
        return
    decision = accelerator.choose_settings(trainer.model, rows=trainer.args.train_batch_size)
    if config.auto.global_batch:
        trainer.args.per_device_train_batch_size = decision.rows
        trainer.args.gradient_accumulation_steps = decision.accumulation
        trainer._train_batch_size = trainer.args.train_batch_size


def _example(trainer: Any) -> Example | None:
    """A batch of the training data, with the Trainer's loss; None: the data cannot be looked at beforehand."""
    try:
        dataset = trainer.train_dataset
        if type(dataset).__module__.startswith("datasets."):
            dataset = trainer._remove_unused_columns(dataset, description="training")
            collate = trainer.data_collator
        else:
            collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="training")

        def loss(model: Any, batch: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                # Labels may be taken out of it.
                found: Tensor = trainer.compute_loss(model, dict(batch))
            return found

        return of_dataset(dataset, collate, trainer.args.train_batch_size, loss)
    except Exception as error:  # of a user's data; the training tells it where it belongs
        _logger.warning("settings are chosen without activations: the training data cannot be looked at: %s", error)
        return None
