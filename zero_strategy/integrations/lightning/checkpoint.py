"""Saving and loading of the Trainer's strategy.

By default a checkpoint is a directory that all ranks write at once (see `zero_strategy.checkpoint`). It is one whole
file in Lightning's own format, gathered and written by rank 0, where

- the user passed a `CheckpointIO` plugin, whose business files are;
- `checkpoint.format` is `file`; or
- a user's hook changed the weights or the optimizer state in the checkpoint dict: what it made is what is saved.

Both kinds load at any stage and world size, and so do checkpoints of plain DDP.

A run goes on exactly where a checkpoint was saved. Lightning restores its loops from rank 0's checkpoint dict and
leaves random states alone. Here every rank gets back its own state of stateful data loaders, and its own random state
twice: with the rest of the training state, and again right before the first batch if the checkpoint lies inside an
epoch, since loaders and hooks draw random numbers when a run begins, which the uninterrupted run did earlier.

Where Lightning goes on differently from the uninterrupted run, this makes up for it:

- saved at the end of an epoch: Lightning drops the states of loaders, which would shuffle as in their first epoch;
- saved there in a run that `max_steps` bounds: Lightning takes a batch more in the epoch that is over;
- saved after the last batch of an epoch, before its end: Lightning goes on inside of the next epoch, with the loader's
  old iterator, which is at its end. It leaves out the validation in between, whose loaders draw a random number each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.checkpoint import StateReader, random_state
from zero_strategy.checkpoint.load import open_together
from zero_strategy.checkpoint.piece_reader import check_one_save
from zero_strategy.checkpoint.save_job import remove_remote
from zero_strategy.checkpoint.storage import is_remote
from zero_strategy.comm.store import together
from zero_strategy.convert.lightning import with_grad_scaler
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning.callbacks import check_timers, restore_param_groups
from zero_strategy.integrations.lightning.checkpoint_dict import (
    LIGHTNING_FILE,
    LoadsFromDirectory,
    StateOnDemand,
    StoredWeights,
    check_options,
    checkpoint_of,
    describe,
    is_directory_checkpoint,
    load_own,
    own_file,
    pack,
    read_checkpoint,
    take_part,
    untouched,
    whole,
    write_file,
)
from zero_strategy.integrations.lightning.slots import progress_here
from zero_strategy.integrations.lightning.uneven import bare, bare_state

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.integrations.lightning.surviving import SurvivingFit
else:
    _Base = object


_WHAT = "stateful data loaders"


class TrainerCheckpoints(_Base):
    """The saving, loading and resuming half of `TrainerStrategy`."""

    engine: ZeroEngine | None
    load_weights_only: bool | None
    surviving: SurvivingFit | None
    _whole_files: bool
    _told = False
    _in_work: str | None = None
    _random_state: bytes | None = None
    _loader_states: Sequence[Any] = ()

    def _alone(self) -> bool:
        raise NotImplementedError

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are read into shards, and shards exist after `setup`."""
        return True

    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes checkpoints that are one file, and removes checkpoints of either kind."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io, self._whole_files = io, io is not None

    # ---- saving ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state dict, made when it is looked into; all ranks must then look."""
        module, engine = self.lightning_module, self.engine
        assert module is not None
        # Before set-up it may be the engine of an earlier module.
        if engine is None or engine.module is not module:
            state: dict[str, Any] = module.state_dict()
            return state
        if type(module).state_dict is not nn.Module.state_dict:  # leaves out, adds or renames what it likes
            own = module.state_dict()
            return {key: v.detach().cpu() if isinstance(v, Tensor) else v for key, v in own.items()}
        return StateOnDemand(  # type: ignore[return-value]
            engine.full_state_dict, take_part=partial(engine.full_state_dict, keep=False)
        )

    def _optimizer_state(self, optimizer: Optimizer) -> Any:
        engine = self.engine
        if engine is None or not any(sharded.optimizer is optimizer for sharded in engine.optimizers):
            return optimizer.state_dict()
        make = partial(engine.optimizer_state_dict, optimizer)
        return StateOnDemand(make, nested=True, take_part=partial(make, keep=False))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save; all ranks call it.

        Raises:
            ValueError: For `storage_options` without a `CheckpointIO` to use them.
        """
        if self._alone():
            _warn(f"no checkpoint was saved to {filepath}: this rank failed, but not all ranks did")
            return
        if self.engine is not None:  # names the ranks that do not come, where a broadcast would wait for them
            self.engine.mesh.barrier.wait_for_all("Trainer.save_checkpoint()")
        # Names that ranks have made may differ, and they write into one directory.
        path = str(self.broadcast(os.fspath(filepath)))
        with contextlib.nullcontext() if self.surviving is None else self.surviving.saving(path):
            self._save_either(checkpoint, filepath, path, storage_options)

    def _save_either(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], path: str, storage_options: Any
    ) -> None:
        """Save as a directory, or as one whole file."""
        if self.saves_whole_files(checkpoint):
            if not self._asks_for_whole_files:
                _warn(
                    f"{path}: a hook, or a state_dict() of the module's own, changed what is to be saved, so all is "
                    "gathered on rank 0 and saved as one whole file (to leave frozen weights out of sharded "
                    "checkpoints: checkpoint.frozen=reference)"
                )
            self._save_whole(checkpoint, filepath, storage_options)
            return
        rest = dict(checkpoint)
        del rest["state_dict"]
        states = rest.pop("optimizer_states", None)
        check_options(path, storage_options)
        assert self.engine is not None
        background = self._in_background(path)
        # A save in the background gives the directory its name only at its end.
        named = background and self.is_global_zero and self._reserve_name(path)
        self._in_work = path if background else None
        try:
            self._save(path, rest, states is not None, background)
        except BaseException:
            # Also where a signal ends the run, by a SystemExit.
            if named:
                _free_name(path)
            raise
        # A name without a checkpoint would stay taken.
        if named:
            self.engine.saver.then(lambda: _free_name(path), failed=True)

    def saves_whole_files(self, checkpoint: Mapping[str, Any]) -> bool:
        """True if a checkpoint dict is saved as one whole file, as far as is known before all hooks have seen it."""
        states = [checkpoint.get("state_dict"), *checkpoint.get("optimizer_states", ())]
        engine_writes = self.engine is not None and all(state is None or untouched(state) for state in states)
        return self._asks_for_whole_files or not engine_writes

    @property
    def _asks_for_whole_files(self) -> bool:
        return self._whole_files or self.config.checkpoint.format == "file"

    def _save_whole(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any) -> None:
        """One file, with all in the host memory of rank 0; the others hold a unit at a time."""
        if not self._whole_files:
            check_options(os.fspath(path), storage_options)
        content: dict[str, Any] = {}
        if self.is_global_zero:
            content = with_grad_scaler(whole(checkpoint))
        else:
            take_part(checkpoint)
        write: Callable[[], object] = partial(super().save_checkpoint, content, path, storage_options)
        if self.is_global_zero and not self._whole_files and not is_remote(path):
            write = partial(write_file, content, path)  # at once: Lightning's makes a second copy in memory first
        if self.engine is None:
            write()
        else:
            # An error of one rank is raised on all, or the others would wait for it later.
            together(self.engine.mesh.world_group.control, write)

    def _reserve_name(self, path: str) -> bool:
        """An empty directory now: ModelCheckpoint asks the file system which names are taken."""
        if is_remote(path) or os.path.lexists(path):
            return False
        os.makedirs(path)
        return True

    def _save(self, path: str, rest: dict[str, Any], optimizers: bool, background: bool) -> None:
        assert self.engine is not None
        self._tell_how_to_load(path)
        self.engine.save(
            path,
            user=describe(rest),
            extra_files={LIGHTNING_FILE: pack(rest, self.engine.module)} if self.is_global_zero else {},
            own_files=self._own_files(rest),
            optimizers=optimizers,
            update_latest=False,  # ModelCheckpoint has its own `last`
            asynchronous=background,
        )

    def _tell_how_to_load(self, path: str) -> None:
        """Once, where Lightning's own loading would end in an IsADirectoryError: name the call."""
        kind = type(self.lightning_module)
        if self._told or os.path.basename(path).startswith("."):  # such as the learning rate finder's
            return
        if self.is_global_zero and not issubclass(kind, LoadsFromDirectory):
            logging.getLogger(_namespace(self.lightning_module.trainer)).info(
                f"{path} is a directory. To load it without a Trainer: zero_strategy.load_from_checkpoint("
                f"{kind.__name__}, path), or let {kind.__name__} inherit zero_strategy.LoadsFromDirectory; for single "
                'files: ZeroStrategy(checkpoint={"format": "file"})'
            )
        self._told = True

    def _own_files(self, rest: dict[str, Any]) -> dict[str, bytes]:
        assert self.engine is not None
        return own_files(rest, self.engine)

    def _in_background(self, path: str) -> bool:
        """True if a save may go on while training does: one of a checkpoint callback, in the middle of a fit.

        What user code saves itself, elsewhere than into a callback's folder, it may read at once. A link named `last`
        must not lead nowhere for a while.
        """
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if not self.config.checkpoint.asynchronous or trainer is None or trainer.state.fn != "fit" or self._interrupted:
            return False
        folder = os.path.dirname(os.path.abspath(path))
        return trainer.state.status == "running" and any(
            os.path.abspath(callback.dirpath) == folder and getattr(callback, "save_last", None) != "link"
            for callback in trainer.checkpoint_callbacks
            if getattr(callback, "dirpath", None)
        )

    def forget_save(self) -> None:
        """Leave nothing of a save in the background whose ranks are no more, not even the name that one has taken."""
        if self._in_work is not None:
            _free_name(self._in_work)
        self._in_work = None

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint of either kind, but not before the one that is being saved is there."""
        engine = self.engine
        if self._alone():  # nor was anything saved that could take its place
            return
        if engine is None:
            super().remove_checkpoint(filepath)
        elif engine.saver.places.removes(filepath, engine.mesh.world_group.rank):
            remove: Callable[[Any], object] = self.checkpoint_io.remove_checkpoint
            if is_remote(filepath) and is_directory_checkpoint(filepath):
                remove = remove_remote
            engine.saver.then(lambda: remove(filepath))

    def finish_saves(self) -> None:
        """Return when the last checkpoint is there.

        Raises:
            OSError, ValueError, RuntimeError: Why it could not be saved, on this rank or on another.
        """
        if self.engine is not None:
            self.engine.saver.finish()

    # ---- loading ----

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint dict; weights and optimizer states of a directory are read later, in parts."""
        # The checkpoint to load may be the one that is being written.
        self.finish_saves()
        if weights_only is None:
            weights_only = self.load_weights_only
        if self.surviving is not None and (copied := self.surviving.reader) is not None:
            assert self.engine is not None
            check_one_save(self.engine, copied)  # it brings what only other hosts have
            # Nobody else has written it: it may hold any object.
            found = self._together(lambda: self._resumed(checkpoint_of(copied, False, resumes=True), copied, False))
            self.surviving.go_on_after(found)
            return found
        if is_directory_checkpoint(checkpoint_path):
            return self._together(lambda: self._read_directory(checkpoint_path, weights_only))
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def _read_directory(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        fits = self.engine is not None and self.lightning_module.trainer.state.fn == "fit"
        found = read_checkpoint(path, weights_only, verify=self.config.checkpoint.verify, resumes=fits)
        if self.engine is not None and fits:
            self._resumed(found, found["state_dict"].source.reader, weights_only)
        return found

    def _resumed(self, found: dict[str, Any], reader: StateReader, weights_only: bool | None) -> dict[str, Any]:
        """A checkpoint dict for this rank, and this number of ranks."""
        assert self.engine is not None
        give_own_states(found, reader, self.engine, weights_only)
        if self.engine.slots.slots:
            progress_here(found, reader.manifest.counters, self.engine.slots)
        return found

    def _together(self, opened: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return opened() if self.engine is None else open_together(self.engine, opened)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the live shards."""
        weights = checkpoint["state_dict"]
        if untouched(weights) and isinstance(weights.source, StoredWeights) and self.engine is not None:
            weights.source.load_into(self.engine, strict)
            return
        assert self.lightning_module is not None
        self.lightning_module.load_state_dict(whole(weights), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states into the live shards.

        Raises:
            ValueError: If there are not as many as optimizers.
        """
        states, engine = checkpoint["optimizer_states"], self.engine
        assert engine is not None
        # First, as states that follow are those of these groups, too.
        restore_param_groups(self.lightning_module.trainer, self.lightning_module)
        check_timers(self.lightning_module.trainer)
        if len(states) != len(self.optimizers):
            names = [type(optimizer).__name__ for optimizer in self.optimizers]
            raise ValueError(
                f"the checkpoint holds the state of {len(states)} optimizer(s), and this run has {len(names)} "
                f"({', '.join(names) or 'none'}): let configure_optimizers() return those that the checkpoint was "
                'saved with, in their order, or take only its weights: torch.load it, and load its "state_dict"'
            )
        readers = [getattr(state, "source", None) for state in states]
        if readers and isinstance(readers[0], StateReader):
            engine.load_optimizers(readers[0])
            self.resume_random_state(readers[0])
            weights = checkpoint.get("state_dict")
            if not untouched(weights):  # master weights came along: those of the user's hook are the ones to keep
                self.load_model_state_dict(checkpoint)
        for optimizer, state in zip(self.optimizers, states, strict=False):
            if not untouched(state) and any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                engine.load_optimizer_state_dict(optimizer, whole(state))

    # ---- going on where a checkpoint was saved ----

    def resume_random_state(self, reader: StateReader) -> None:
        """Give, with the training state, this rank its random state, and keep it for the first batch."""
        engine = self.engine
        assert engine is not None
        engine.steps.load_counters(reader.manifest.counters)
        self._random_state = None
        # A copy, for Lightning's list gives its entries away.
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
        # After the random state is back, from which the validation that was left out has drawn.
        if inside and all_batches and loop.epoch_loop.restarted_on_train_batch_end:
            _finish_batch(loop)
            _begin_as_any(loop)
        elif loop.restarted_on_epoch_end:
            loop.epoch_progress.increment_completed()
            _begin_as_any(loop)


def _namespace(trainer: Any) -> str:
    """Owner of the logger that the Trainer's user sees."""
    return str(type(trainer).__module__.partition(".trainer")[0])


def _free_name(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)  # no more than an empty one goes


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


def own_files(checkpoint: Mapping[str, Any], engine: ZeroEngine) -> dict[str, bytes]:
    """This rank's states of the training data loaders, from the checkpoint dict that Lightning made on it."""
    states = _fit_state(checkpoint).get("combined_loader")
    return own_file({"combined_loader": states} if states else {}, engine.mesh)


def give_own_states(
    checkpoint: Mapping[str, Any], reader: StateReader, engine: ZeroEngine, weights_only: bool | None
) -> None:
    """Put this rank's states of the training data loaders in place of rank 0's."""
    own = load_own(reader, engine.mesh, weights_only, _WHAT)
    if own is not None:
        _fit_state(checkpoint)["combined_loader"] = own["combined_loader"]


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


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
    # Lightning counts this step only after the hooks that save.
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
    """Set the epoch as Lightning does, but before workers of a resumed epoch have asked for their first indices."""
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
