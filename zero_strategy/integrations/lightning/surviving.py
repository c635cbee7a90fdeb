"""A Trainer's fit that goes on in the same process when other ranks die (`survive`).

Lightning lets a strategy's launcher call the fit. This one forms a world of the processes that are there, calls the
fit, and calls it again when ranks have died or new ones wait: with the same Trainer, module, callbacks and loggers, and
a copy in memory as the checkpoint to resume from. The copy is what a checkpoint of Lightning would be: loops' progress,
states of callbacks and schedulers, and the engine's state. It is taken where such a checkpoint may lie:

    at the end of each step's last batch     before the validation that may follow
    at the end of a validation
    at the end of an epoch
    before the first step                    weights alone, as the module has none when its ranks have gone
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.checkpoint import StateReader
from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning.checkpoint_dict import LIGHTNING_FILE, pack
from zero_strategy.integrations.lightning.formed import FormedEnvironment
from zero_strategy.integrations.lightning.redone_saves import RedoneSaves
from zero_strategy.integrations.takeover import engines_over
from zero_strategy.survive import Run

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.survive.membership import World
else:
    _Base = object

_START, _STOP, _NEXT, _SAVES = "start", "should_stop", "next", "saves"
"""Entries of a copy's state: that it has weights alone; that a callback has asked for the end; what follows; by what
checkpoint callbacks decide."""
_VALIDATION, _EPOCH_END = "validation", "epoch end"

_logger = logging.getLogger(__name__)


class CopiesInMemory(_Base):
    """The callback that copies, after all others, and leaves the fit between steps when new ranks wait.

    Args:
        fit: Whose.
    """

    def __init__(self, fit: SurvivingFit) -> None:
        super().__init__()
        self._fit = fit

    def on_train_batch_start(self, *_: Any) -> None:
        """Leave, if the last copy's end has found others."""
        self._fit.run.check_members()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Copy, if the batch was a step's last."""
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate():
            validates = loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
            follows = _VALIDATION if validates else _EPOCH_END if loop._num_ready_batches_reached() else ""
            # Another copy comes after what follows.
            self._fit.copy(follows, asks=not follows)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        """Let Lightning forget that it was told of a validation that was torn; see `SurvivingFit.go_on_after`."""
        total = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        if total.ready != total.completed:
            total.reset()

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        """Copy what the validation has changed."""
        if not trainer.sanity_checking:
            self._fit.copy(asks=not trainer.fit_loop.epoch_loop._num_ready_batches_reached())

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        """Copy what the epoch's end has changed."""
        self._fit.copy(asks=True)
        # Schedulers of epochs that look at metrics take their step next, also where a fit has gone on just before.
        trainer.fit_loop._restarting = False


class _FitRun(Run):
    """Beginnings of a fit, whose engine is the strategy's, and outlives the fit."""

    fit: SurvivingFit

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Inside is the fit. Nothing ends after it: weights are saved and tested with the same ranks."""
        yield

    def leave(self) -> None:
        """Let go of a world that is no more."""
        self.fit.abandon()
        super().leave()


class SurvivingLauncher:
    """Stands in for Lightning's launcher, where processes were started for a run that survives deaths.

    Args:
        strategy: The Trainer's.
    """

    is_interactive_compatible = False

    def __init__(self, strategy: Any) -> None:
        self._strategy, self._over = strategy, False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **keywords: Any) -> Any:
        """Call a Trainer's function; a first fit again for each change of the ranks.

        Raises:
            RuntimeError: If there is no world yet, and the function is no fit.
            ValueError: If the launcher's variables are missing, or settings do not go together.
        """
        if self._over:
            return function(*args, **keywords)
        if trainer is None or trainer.state.fn != "fit":
            raise RuntimeError(
                "survive: ranks are formed by trainer.fit(), so that it has to come before trainer.validate(), test() "
                "and predict()"
            )
        _check(trainer, self._strategy)
        run, ranks = _FitRun.launched("ZeroStrategy(survive=True)", self._strategy.config.reproducible.slots)
        fit = run.fit = SurvivingFit(self._strategy, trainer, run, inspect.signature(function).bind(*args, **keywords))
        self._strategy.surviving = fit
        try:
            return run.call(lambda _: fit.begin(function), ranks)
        finally:
            self._over, self._strategy.surviving = True, None
            fit.end()
            run.close()

    def kill(self, signum: Any) -> None:
        """Nothing: it has started no process."""

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy of a Trainer."""
        return {"_strategy": self._strategy, "_over": self._over}


def _check(trainer: Any, strategy: Any) -> None:
    """Raise unless a fit can go on at any number of ranks.

    Raises:
        ValueError: Naming the setting and the way out.
    """
    config, given = strategy.config, trainer.accumulate_grad_batches
    if not config.reproducible.slots:
        raise ValueError(
            f"survive.enabled is True [{config.origin_of('survive.enabled')}], and reproducible.slots is 0: a fit goes "
            "on at other numbers of ranks where samples belong to slots; add reproducible=12, or another number that "
            "many numbers of ranks divide"
        )
    if config.pipeline.stages > 1 or not strategy.compares_batches:
        raise ValueError(
            f"survive.enabled is True [{config.origin_of('survive.enabled')}], and pipeline.stages is "
            f"{config.pipeline.stages}: a fit goes on where each rank has a whole model. Use ZeroStrategy, or train "
            "the pipeline in a loop of your own, called by zero_strategy.survive.survive"
        )
    if given != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={given}) and survive: that number follows from reproducible.slots and "
            "the ranks that are there; leave it out"
        )


class SurvivingFit:
    """One fit, over all of its beginnings in this process.

    Args:
        strategy: The Trainer's.
        trainer: Whose fit.
        run: The processes, and the copies.
        arguments: Of the fit.

    Attributes:
        run: As above.
        reader: Of the copy that the fit resumes from, if any.
    """

    def __init__(self, strategy: Any, trainer: Any, run: Run, arguments: inspect.BoundArguments) -> None:
        self.run = run
        self.reader: StateReader | None = None
        self._strategy, self._trainer, self._arguments = strategy, trainer, arguments
        self._module = strategy._lightning_module
        self._weights: StateReader | None = None
        self._follows, self._lost, self._logged = "", False, -1
        self._loops = copy.deepcopy(trainer.fit_loop.state_dict())
        self._callback = strategy.copies_class(self)
        self._saves = RedoneSaves(trainer)
        self._decisions: Mapping[str, Any] | None = None

    def begin(self, function: Callable[..., Any]) -> Any:
        """Call the fit, from the newest copy that is whole."""
        trainer, strategy = self._trainer, self._strategy
        strategy.enter(self.run.world)
        _set_loops(trainer.fit_loop, self._loops)
        # Each world has a number of its own.
        trainer.accumulate_grad_batches = 1
        arguments, found = dict(self._arguments.arguments), self.run.find()
        self._saves.begin(self.run.turn, self.run.gather, self.run.rank == 0)
        self.reader, self._weights, self._follows, self._decisions = None, None, "", None
        if found is not None and found.state.get(_START):
            self._weights = found.reader
        elif found is not None:
            self.reader = found.reader
            trainer.should_stop, self._follows = bool(found.state[_STOP]), str(found.state[_NEXT])
            self._decisions = found.state[_SAVES]
            trainer.fit_loop.epoch_loop.val_loop._has_run = self._follows == _EPOCH_END
            arguments["ckpt_path"] = str(found.reader.directory)
        elif self._lost and arguments.get("ckpt_path") is None:
            raise RuntimeError("ranks died before there was a copy of the first weights: start the run again")
        return function(**arguments)

    def set_up(self, engine: ZeroEngine) -> None:
        """Give the engine, once its optimizers are attached, the first weights; or copy them."""
        self.run.watch(engine)
        # Not before: the module's own callbacks come with each beginning.
        self._saves.decide_as(self._decisions)
        if self._weights is not None:
            engine.load(self._weights)
        elif self.reader is None and self._arguments.arguments.get("ckpt_path") is None:
            self.run.copy(engine, {_START: True}, asks=False)

    def begin_training(self) -> None:
        """Take copies at the end of steps from now on."""
        self._trainer.callbacks.append(self._callback)

    def go_on_after(self, checkpoint: dict[str, Any]) -> None:
        """Let what followed the batch of a copy be done, where Lightning's resuming leaves it out.

        A checkpoint that lies before a validation, or before an epoch's end, is one of a batch that goes on. Here it is
        one of a batch that is complete, followed by a validation that was begun.
        """
        if not self._follows:
            return
        fit = checkpoint["loops"]["fit_loop"]
        for counts in (fit["epoch_loop.batch_progress"][name] for name in ("total", "current")):
            counts["completed"] = counts["processed"]
        if self._follows == _EPOCH_END:
            # Lightning counts this step after the hooks that save.
            fit["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
            return
        validation = fit["epoch_loop.val_loop.batch_progress"]
        validation["total"] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
        validation["current"] |= dict.fromkeys(("ready", "started", "processed", "completed"), 0)

    def copy(self, follows: str = "", *, asks: bool) -> None:
        """Copy the training as a checkpoint would have it. A collective.

        Args:
            follows: What comes next and is part of the step.
            asks: See `Run.copy`.
        """
        engine = self._strategy.engine
        rest: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in ("state_dict", "optimizer_states"):
            rest.pop(name, None)
        files = {LIGHTNING_FILE: pack(rest, engine.module)} if self._strategy.is_global_zero else {}
        state = {_START: False, _STOP: bool(self._trainer.should_stop), _NEXT: follows, _SAVES: self._saves.decisions()}
        self.run.copy(engine, state, files, asks=asks)
        self._saves.copied(self.run.turn)

    def saving(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Inside a checkpoint is saved, perhaps in the background."""
        return self._saves.saving(path, self.run.turn, self._strategy.engine.saver.then)

    def logs(self, step: int) -> bool:
        """True if a step is logged for the first time by this process; a step that is computed again was."""
        first, self._logged = step > self._logged, max(step, self._logged)
        return first

    def end(self) -> None:
        """Take no more copies."""
        self._trainer.callbacks = [each for each in self._trainer.callbacks if each is not self._callback]
        self._saves.copied(self.run.turn)

    def abandon(self) -> None:
        """Leave a fit that an exception has ended as one that can be called again."""
        trainer, strategy, module = self._trainer, self._strategy, self._module
        engines = engines_over(module)
        strategy.leave()
        self.end()
        loop = trainer.fit_loop
        if trainer.validating or trainer.sanity_checking:
            loop.epoch_loop.val_loop._module_mode.restore(module)
        trainer.training = True
        for engine in engines:
            # Also if it was torn in its making: there is nobody to have the values from.
            self._lost = True
            engine.abandon("ranks have changed")
        loop.teardown()
        for results in (loop.epoch_loop._results, loop.epoch_loop.val_loop._results):
            results.reset()
        # Handlers of signals are those of before the fit, which sets its own again.
        trainer._signal_connector.teardown()


def _set_loops(loop: Any, state: Mapping[str, Any]) -> None:
    """Set a fit loop to where it was, as one that does not resume."""
    loop.load_state_dict(copy.deepcopy(dict(state)))
    loop.epoch_loop.val_loop._has_run = False
    loops = [loop, loop.epoch_loop, loop.epoch_loop.val_loop]
    loops += [loop.epoch_loop.automatic_optimization, loop.epoch_loop.manual_optimization]
    for one in loops:
        one._restarting = one._loaded_from_state_dict = one._resuming_from_checkpoint = False
        one.reset_restart_stage()


def _devices_of(host: Sequence[torch.device], world: World) -> list[torch.device]:
    """The device of each rank of a world, where each host has these."""
    return [host[replace(world, rank=rank).local_rank % len(host)] for rank in range(world.size)]


class FormedRanks(_Base):
    """Part of a strategy that shows Lightning the ranks of a world that has formed, where `survive` is set."""

    config: ZeroConfig
    cluster_environment: Any
    parallel_devices: Any
    _launcher: Any
    _of_the_host: Sequence[torch.device] = ()

    def _configure_launcher(self) -> None:
        if self.config.survive.enabled:
            self.cluster_environment = FormedEnvironment()
            self._launcher = SurvivingLauncher(self)
        else:
            super()._configure_launcher()

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        if not isinstance(self.cluster_environment, FormedEnvironment):
            found: torch.device = super().root_device
            return found
        devices: Sequence[torch.device] = self.parallel_devices
        return devices[int(self.global_rank) % len(devices)]

    def enter(self, world: World) -> None:
        """Let Lightning see these ranks."""
        environment = self.cluster_environment
        assert isinstance(environment, FormedEnvironment)
        self._of_the_host = self._of_the_host or list(self.parallel_devices)
        environment.world = world
        self.num_nodes = 1  # devices are those of all hosts
        self.parallel_devices = _devices_of(self._of_the_host, world)
        self.set_world_ranks()
