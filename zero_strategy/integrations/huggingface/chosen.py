"""A batch by which the settings of a transformers Trainer's training are chosen (`auto.enabled`)."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from zero_strategy.auto.example import Example, of_dataset

_logger = logging.getLogger(__name__)


def trainer_example(trainer: Any) -> Example | None:
    """A batch of the training data, with the Trainer's loss; None: the data cannot be looked at beforehand.

    Args:
        trainer: Of transformers, before it trains.
    """
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
        _logger.info("the training data cannot be looked at beforehand: %s", error)
        return None
