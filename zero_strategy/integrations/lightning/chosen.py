"""Settings that are chosen for a Trainer's fit (`auto.enabled`), by a batch of its training data."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from zero_strategy.auto.decide import check_batches_come, decide
from zero_strategy.auto.example import Example, of_dataset
from zero_strategy.auto.foreseen import states_kept
from zero_strategy.config import ZeroConfig
from zero_strategy.integrations.huggingface.sequence_models import tiles_of

_logger = logging.getLogger(__name__)


def choose_for_fit(
    strategy: Any, config: ZeroConfig, trainer: Any, world_size: int, compute_dtype: torch.dtype | None
) -> ZeroConfig:
    """The config with chosen settings. A collective.

    Args:
        strategy: The Trainer's.
        config: As it was given.
        trainer: Its module is set up, and not sharded yet.
        world_size: Number of ranks.
        compute_dtype: Dtype of parameters in computation, or None.

    Raises:
        ValueError: If nothing fits; names ways out.
    """
    check_batches_come(config, "the Trainer's loader")
    module = trainer.lightning_module
    example = strategy.example
    if example is None and trainer.state.fn == "fit":  # on all ranks, whose hooks may wait for each other
        example = _example(strategy, trainer, module)
    return decide(
        config, module, world_size=world_size, compute_dtype=compute_dtype, device=strategy.root_device,
        accumulation=int(trainer.accumulate_grad_batches), example=example, tiles=tiles_of(module),
    ).config  # fmt: skip


def _example(strategy: Any, trainer: Any, module: Any) -> Example | None:
    """A batch of the training data, as its loader would make it; None: there is no such loader."""
    try:
        with states_kept():
            loader = trainer.fit_loop._data_source.dataloader()
        if not isinstance(loader, DataLoader) or loader.batch_size is None:
            return None

        def loss(step: Any, batch: Any) -> Tensor:
            with strategy.precision_plugin.train_step_context(), _without_trainer(step):
                made = step.training_step(batch, 0)
            found = made["loss"] if isinstance(made, Mapping) else made
            assert isinstance(found, Tensor)
            return found

        found = of_dataset(loader.dataset, loader.collate_fn, loader.batch_size, loss)
        # Lightning leaves modules in the modes that they have.
        return None if found is None else replace(found, trains=False)
    except Exception as error:  # of a user's data; the fit tells it where it belongs
        _logger.warning("settings are chosen without activations: the training data cannot be looked at: %s", error)
        return None


@contextlib.contextmanager
def _without_trainer(module: Any) -> Iterator[None]:
    """Inside, what a step logs goes nowhere."""
    kept, module._trainer = module._trainer, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*self.log.*")
            yield
    finally:
        module._trainer = kept
