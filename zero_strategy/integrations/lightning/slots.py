"""A Trainer's steps as slots (`reproducible.slots`): accumulation, samples, and progress at another number of ranks.

A rank's batches of a step are its slots, so a Trainer that accumulates nothing is told to accumulate as many. Lightning
counts batches of a rank; a checkpoint's counts are those of the ranks that saved it, and become those of the ranks that
there are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from zero_strategy.engine import ZeroEngine
from zero_strategy.engine_slots import MICRO, SlotSteps
from zero_strategy.reproducible.samples import SlotSampler

_logger = logging.getLogger(__name__)


def set_accumulation(trainer: Any, slots: SlotSteps) -> None:
    """Let a Trainer accumulate a rank's slots of a step; says so where it changes something.

    Raises:
        ValueError: If it was given another number; names both.
    """
    wanted, given = slots.batches, trainer.accumulate_grad_batches
    if given == wanted:
        return
    if given != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={given}), and reproducible.slots is {slots.slots}: on "
            f"{trainer.world_size} rank(s) a step is {wanted} batch(es) of each; leave accumulate_grad_batches out"
        )
    trainer.accumulate_grad_batches = wanted
    if trainer.is_global_zero:
        _logger.warning(
            "accumulate_grad_batches is %d: reproducible.slots is %d, on %d rank(s)",
            wanted,
            slots.slots,
            trainer.world_size,
        )


def slot_loader(dataloader: Any, engine: ZeroEngine, trainer: Any) -> Any:
    """A training loader whose batches are this rank's slots.

    Raises:
        ValueError: If its samples cannot be those of slots; names why and the way out.
    """
    slots = engine.slots
    if isinstance(getattr(dataloader, "sampler", None), SlotSampler):
        return dataloader
    sampler = getattr(dataloader, "sampler", None)
    shuffle, drop_last, seed = _order_of(dataloader, sampler, slots)
    if (size := dataloader.batch_size) % slots.in_a_batch:
        raise ValueError(
            f"reproducible.slots is {slots.slots}, and a batch of {size} samples is {slots.in_a_batch} slots of a "
            f"pipeline's copy: make batch_size a multiple of {slots.in_a_batch}, as slots have equal sizes"
        )
    own = SlotSampler(
        dataloader.dataset,
        slots.slots,
        slots.own,
        dataloader.batch_size // slots.in_a_batch,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )
    # A user's class may be a Trainer's.
    places = (kind.__module__ for kind in type(trainer).__mro__)
    namespace = next(place for place in places if place.endswith(".trainer.trainer")).partition(".trainer")[0]
    update = import_module(f"{namespace}.utilities.data")._update_dataloader
    return update(dataloader, own)


def _order_of(dataloader: Any, sampler: Any, slots: SlotSteps) -> tuple[bool, bool, int]:
    """Order of a loader: samples are shuffled, the last ones are dropped; and the seed."""
    problem = ""
    if not isinstance(dataloader, DataLoader):
        problem = f"is a {type(dataloader).__name__}: let it be a DataLoader with a map-style dataset"
    elif isinstance(dataloader.dataset, IterableDataset):
        problem = "has an iterable dataset, which has no sample by number: use a map-style dataset"
    elif type(dataloader.batch_sampler) is not BatchSampler or dataloader.batch_size is None:
        problem = "has a batch sampler of its own: give batch_size, or a zero_strategy.reproducible.samples.SlotSampler"
    elif type(sampler) is DistributedSampler:
        return sampler.shuffle, sampler.drop_last or dataloader.drop_last, sampler.seed
    elif type(sampler) is SequentialSampler:
        return False, dataloader.drop_last, 0
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, dataloader.drop_last, _seed()
    else:
        problem = (
            f"has a {type(sampler).__name__}, which knows ranks and no slots: leave it out, or take "
            "trainer.strategy.engine.slots.sampler(dataset, batch_size)"
        )
    raise ValueError(f"reproducible.slots is {slots.slots}, and the training loader {problem}")


def _seed() -> int:
    """The seed with which Lightning makes a distributed sampler."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0)


def start_inside(dataloader: Any, loop: Any, slots: SlotSteps) -> None:
    """Let a loader begin in the epoch, and at the step, of a fit loop, which may have been resumed inside of one."""
    sampler, done = getattr(dataloader, "sampler", None), loop.epoch_loop.batch_progress.current.ready // slots.batches
    if isinstance(sampler, SlotSampler):
        sampler.set_epoch(loop.epoch_progress.current.processed)
    if isinstance(sampler, SlotSampler) and loop.restarting and 0 < done < sampler.steps:
        sampler.start_at(done)


def progress_here(checkpoint: dict[str, Any], counters: Mapping[str, Any], slots: SlotSteps) -> None:
    """Make a checkpoint's counts of batches those of this number of ranks.

    Raises:
        ValueError: If it was saved inside of a step.
    """
    before, now = counters.get(MICRO), slots.batches
    fit = checkpoint.get("loops", {}).get("fit_loop")
    if not fit or not before:
        return
    fit.get("state_dict", {}).pop("combined_loader", None)  # where a rank's loader was: samples follow from the step
    progress = fit["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        if ready % before:
            raise ValueError(
                f"the checkpoint was saved after {ready} batches, inside of a step of {before}: with "
                "reproducible.slots save at the end of a step (every_n_train_steps, or after an optimizer step)"
            )
        # What is counted behind `ready` is the batch at whose end it was saved.
        for name, value in counts.items():
            counts[name] = ready // before * now - (ready - value)
