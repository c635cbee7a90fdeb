"""Going on, under the Trainer, exactly where a checkpoint was saved.

Lightning restores its loops from rank 0's checkpoint dict and leaves random states alone. Here every rank gets back
its own state of stateful data loaders, and its own random state twice: with the rest of the training state, and again
right before the first batch if the checkpoint lies inside an epoch, since loaders and hooks draw random numbers when
a run begins, which the uninterrupted run did earlier.

Where Lightning goes on differently from the uninterrupted run, this makes up for it:

- saved at the end of an epoch: Lightning drops the states of loaders, which would shuffle as in their first epoch;
- saved there in a run that `max_steps` bounds: Lightning takes a batch more in the epoch that is over;
- saved after the last batch of an epoch, before its end: Lightning goes on inside of the next epoch, with the loader's
  old iterator, which is at its end. It leaves out the validation in between, whose loaders draw a random number each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zero_strategy.checkpoint import random_state
from zero_strategy.integrations import rank_states
from zero_strategy.integrations.joined_loader import bare, bare_state

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.checkpoint import StateReader
    from zero_strategy.engine import ZeroEngine
else:
    _Base = object

_WHAT = "stateful data loaders"


def own_files(checkpoint: Mapping[str, Any], engine: ZeroEngine) -> dict[str, bytes]:
    """This rank's states of the training data loaders, from the checkpoint dict that Lightning made on it."""
    states = _fit_state(checkpoint).get("combined_loader")
    return rank_states.own_file({"combined_loader": states} if states else {}, engine.mesh)


def give_own_states(
    checkpoint: Mapping[str, Any], reader: StateReader, engine: ZeroEngine, weights_only: bool | None
) -> None:
    """Put this rank's states of the training data loaders in place of rank 0's."""
    own = rank_states.load_own(reader, engine.mesh, weights_only, _WHAT)
    if own is not None:
        _fit_state(checkpoint)["combined_loader"] = own["combined_loader"]


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


class TrainerResume(_Base):
    """The part of `TrainerStrategy` that makes a resumed run the uninterrupted one."""

    engine: ZeroEngine | None
    _random_state: bytes | None = None
    _loader_states: Sequence[Any] = ()

    def resume_random_state(self, reader: StateReader) -> None:
        """With the training state: give this rank its random state, and keep it for the first batch."""
        engine = self.engine
        assert engine is not None
        engine.steps.load_counters(reader.manifest.counters)
        self._random_state = None
        self._loader_states = list(self.lightning_module.trainer.fit_loop._combined_loader_states_to_load)
        if engine.config.config.checkpoint.random_state and random_state.path_of(0) in reader.manifest.files:
            engine.load_random_state(reader)
            self._random_state = random_state.capture()

    def process_dataloader(self, dataloader: Any) -> Any:
        """A data loader that is about to be iterated over."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop
        if trainer.training:
            _set_epoch(dataloader, loop.epoch_progress.current.processed)
            if not loop.restarting and _is_stateful(dataloader) and loop._combined_loader_states_to_load:
                _begin_next_epoch(dataloader, loop._combined_loader_states_to_load.pop(0))
        return dataloader

    def on_train_start(self) -> None:
        """The last hook before the first batch."""
        super().on_train_start()
        content, self._random_state = self._random_state, None
        states, self._loader_states = self._loader_states, ()
        loop = self.lightning_module.trainer.fit_loop
        inside, all_batches = loop.restarted_mid_epoch, loop.epoch_loop._num_ready_batches_reached()
        if loop.restarted_on_epoch_end or (inside and all_batches):
            stateful = [dataloader for dataloader in loop._combined_loader.flattened if _is_stateful(dataloader)]
            for dataloader, state in zip(stateful, states, strict=False):
                _begin_next_epoch(bare(dataloader), state)
        if content is not None and (inside or loop.restarted_on_epoch_end):
            random_state.restore(content)
        if inside and all_batches and loop.epoch_loop.restarted_on_train_batch_end:
            _finish_batch(loop)
            _begin_as_any(loop)
        elif loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
            _begin_as_any(loop)


def _finish_batch(loop: Any) -> None:
    """Do to a loop that was saved at the end of an epoch's last batch what the end of that epoch does.

    Lightning itself has counted the epoch as completed by now, but not the batch.
    """
    batches = loop.epoch_loop
    if batches._should_check_val_fx(loop._data_fetcher):
        loop.trainer.validating = True  # by which `process_dataloader` knows whose loaders these are
        batches.val_loop.setup_data()
        loop.trainer.training = True
        if not batches.val_loop.skip:
            batches.val_loop.reset()  # makes the loaders' iterators
    batches.batch_progress.increment_completed()
    if not batches._should_accumulate():
        batches._batches_that_stepped += 1


def _begin_as_any(loop: Any) -> None:
    """Let a fit loop begin the next epoch as it begins any, and not go on inside of it."""
    loop._restarting = loop._resuming_from_checkpoint = loop.epoch_loop.restarting = False
    loop.reset_restart_stage()
    loop.epoch_loop.reset_restart_stage()


def _is_stateful(dataloader: Any) -> bool:
    return all(callable(getattr(dataloader, name, None)) for name in ("state_dict", "load_state_dict"))


def _set_epoch(dataloader: Any, epoch: int) -> None:
    """As Lightning does before an epoch, but before workers of a resumed epoch have asked for their first indices."""
    batch_sampler = getattr(dataloader, "batch_sampler", None)
    for sampler in (getattr(dataloader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _begin_next_epoch(dataloader: Any, state: Any) -> None:
    """Load a loader's state from the end of an epoch, so that its next iterator is that of the next epoch.

    Some loaders then begin the next epoch by themselves, others first give an iterator that is at its end.
    """
    state, drawn = bare_state(state), random_state.capture()
    dataloader.load_state_dict(state)
    with contextlib.suppress(StopIteration):
        next(iter(dataloader))
        dataloader.load_state_dict(state)  # it has begun the next epoch: take that back
    random_state.restore(drawn)
