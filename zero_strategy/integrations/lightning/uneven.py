"""Ranks of a Trainer with different numbers of training batches: an error before the first step, or a weight of 0.

`uneven_batches: error`: ranks compare what Lightning has found of their loaders, once for each loading of them. Where
a loader has no length, they find out when one of them waits for the others (`DesyncError`).

`join`, `join_active`: the training loader gives the last batch again (`JoinedLoader`), and the weight of a batch is
multiplied to the loss after the hooks that see it. So loops, callbacks, schedulers and saves are those of any run. The
weights of batches that were given and not used yet wait beside the loader, since Lightning takes a batch ahead where
there is no length.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch

from zero_strategy.checkpoint import random_state
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.uneven_batches import WAYS_OUT, OwnBatches, joined_pass, length_of

STATE_KEY = "zero_strategy.joined"
"""Beside the loader's own state: batches given in the pass, and whether the rank had run out."""


class LoaderView:
    """Stands for a data loader: what is no attribute of its own is the loader's, to read and to set."""

    own: ClassVar[frozenset[str]]
    """Attributes that are not the loader's."""
    _loader: Any

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask before the attributes are there.
        if name.startswith("__") or name in self.own:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)  # Lightning sets `worker_init_fn`


def has_state(loader: Any) -> bool:
    """True if a loader knows where it is."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class JoinedLoader(LoaderView):
    """Gives a rank's batches, and the last one again while other ranks have more.

    Args:
        loader: The loader.
        length: Batches of a pass, the most that any rank has; None: not known.
        mesh: Finds the ranks, when the first batch is asked for.
        policy: The setting `uneven_batches`.
    """

    own = frozenset({"_loader", "_length", "_mesh", "_policy", "_weights", "_own", "_resumed"})
    _length: int | None
    _own: OwnBatches | None

    def __init__(self, loader: Any, length: int | None, mesh: Callable[[], Mesh], policy: str) -> None:
        self._loader, self._length, self._mesh, self._policy = loader, length, mesh, policy
        self._weights: deque[float] = deque()
        self._own = None
        self._resumed: _Resumed | None = None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the {type(self._loader).__name__} of some rank has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        # A pass that was interrupted leaves weights of batches that nobody used.
        self._weights.clear()
        if resumed is None:
            self._own = OwnBatches(self._loader)
        elif resumed.ended:
            self._own = OwnBatches((), resumed.spare, ended=True)
        else:
            self._own = OwnBatches(self._loader, resumed.spare)
        self._own.given = 0 if resumed is None else resumed.given
        return self._pass(self._own)

    def _pass(self, own: OwnBatches) -> Iterator[Any]:
        for batch, weight in joined_pass(own, self._mesh(), self._policy):
            self._weights.append(weight)
            yield batch

    def weight(self, ahead: int) -> float:
        """Weight of the loss of the batch in use.

        Args:
            ahead: Batches that were taken after it.
        """
        while len(self._weights) > ahead + 1:
            self._weights.popleft()
        return self._weights[0]


class StatefulJoinedLoader(JoinedLoader):
    """A joined loader around one that knows where it is; apart, since Lightning looks for the methods in the class."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's, and where this pass is."""
        own = self._own
        return {**self._loader.state_dict(), STATE_KEY: [own.given, own.ended] if own is not None else [0, False]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; one of the loader alone will do."""
        given, ended = state.get(STATE_KEY, (0, False))
        inner = bare_state(state)
        # A state from right after the last batch does not know yet that there is no more.
        ended = ended or given >= _known_length(self._loader)
        self._resumed = _Resumed(self._loader, inner, given, ended)
        if not ended:
            self._loader.load_state_dict(inner)
        else:
            self._resumed.take_spare()  # now, for it moves the loader


def joined_loader(loader: Any, length: int | None, mesh: Callable[[], Mesh], policy: str) -> JoinedLoader:
    """A `JoinedLoader`, with a state if the loader has one."""
    return (StatefulJoinedLoader if has_state(loader) else JoinedLoader)(loader, length, mesh, policy)


_END = object()


class SameNumber(LoaderView):
    """A data loader without a length, whose ranks look after each batch whether all have one more.

    `same_number` makes one.

    Args:
        loader: The loader.
        ranks: Who looks.
        names: What these are called in the world.
    """

    own = frozenset({"_loader", "_ranks", "_names"})

    def __init__(self, loader: Any, ranks: Communicator, names: Sequence[int]) -> None:
        self._loader, self._ranks, self._names = loader, ranks, list(names)

    def __iter__(self) -> Iterator[Any]:
        batches, number = iter(self._loader), 0
        while True:
            batch = next(batches, _END)
            flags = self._ranks.all_gather_small(torch.tensor([batch is not _END], dtype=torch.int32))
            there = [bool(flag) for flag in flags]
            if not any(there):
                return
            if not all(there):
                short = [rank for rank, has in zip(self._names, there, strict=True) if not has]
                raise ValueError(
                    f"the data loaders of rank(s) {short} end after {number} batches, and others go on; these ranks "
                    "train together and need the same number (limit_train_batches, or data of equal length)"
                )
            yield batch
            number += 1


class StatefulSameNumber(SameNumber):
    """A `SameNumber` around a loader with a state; apart, since Lightning looks for the methods in the class."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the loader go on where a state was taken."""
        self._loader.load_state_dict(state)


def same_number(loader: Any, ranks: Communicator, names: Sequence[int]) -> SameNumber:
    """A `SameNumber`, with a state if the loader has one."""
    return (StatefulSameNumber if has_state(loader) else SameNumber)(loader, ranks, names)


def bare(loader: Any) -> Any:
    """The loader inside of a `JoinedLoader`; any other one itself."""
    return loader._loader if isinstance(loader, JoinedLoader) else loader


def bare_state(state: Any) -> Any:
    """A loader's own state, without what a `JoinedLoader` has put beside it."""
    if not isinstance(state, Mapping) or STATE_KEY not in state:
        return state
    return {key: value for key, value in state.items() if key != STATE_KEY}


class _Resumed:
    """A pass that goes on where a state was taken, perhaps at the end of this rank's batches.

    There may be no batch left to repeat, so one is taken out of the next pass, and that taken back.
    """

    def __init__(self, loader: Any, state: Any, given: int, ended: bool) -> None:
        self._loader, self._state = loader, state
        self.given, self.ended = given, ended
        self._spare: list[Any] = []

    def spare(self) -> Any:
        """A batch of this rank.

        Raises:
            StopIteration: If there is none in a whole pass.
        """
        if not self._spare:
            self.take_spare()
        return self._spare[0]

    def take_spare(self) -> None:
        """Leave the loader so that its next pass is the one after that of the state."""
        # Making an iterator draws, and the run goes on as if nothing had been taken.
        drawn = random_state.capture()
        loader = self._loader
        loader.load_state_dict(self._state)
        # Not a zip with a range, which takes a second batch before it sees that the range has ended.
        self._spare = list(islice(iter(loader), 1))
        if self._spare:  # it has begun the next pass by itself
            loader.load_state_dict(self._state)
        else:  # the rest of the old one
            self._spare = [next(iter(loader))]
            loader.load_state_dict(self._state)
            next(iter(loader), None)
        random_state.restore(drawn)


def _known_length(loader: Any) -> float:
    length = length_of(loader)
    return float("inf") if length is None else length


_BASE_HOOKS = ("lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks")


class TrainingBatches:
    """Numbers of training batches on the ranks of a strategy.

    Args:
        strategy: The Trainer's.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._new_loaders = False

    def joined(self, dataloader: Any) -> Any:
        """A training data loader that is about to be iterated over, or one that goes on longer."""
        trainer = self._strategy.lightning_module.trainer
        policy = self._strategy.config.uneven_batches
        self._new_loaders = True
        own = length_of(dataloader)
        lengths = [length for (length,) in self._everyone([-1 if own is None else own])]
        if policy != "error":
            return joined_loader(dataloader, None if min(lengths) < 0 else max(lengths), self._mesh_of_engine, policy)
        sources = (trainer.lightning_module, trainer.datamodule)
        empty_allowed = any(getattr(s, "allow_zero_length_dataloader_with_multiple_devices", False) for s in sources)
        _check_lengths(lengths, empty_allowed)
        return dataloader

    def _mesh_of_engine(self) -> Mesh:
        if self._strategy.engine is None:
            raise RuntimeError(
                f"uneven_batches is {self._strategy.config.uneven_batches!r}, so ranks tell each other of batches "
                "once the model is sharded; a batch was asked for before (by trainer.estimated_stepping_batches, "
                "perhaps, which has its place in configure_optimizers)"
            )
        mesh: Mesh = self._strategy.engine.mesh
        return mesh

    def _everyone(self, values: list[int]) -> list[list[int]]:
        """Every rank's values."""
        strategy = self._strategy
        if strategy.engine is not None:
            control = strategy.engine.mesh.world_group.control
            return [each.tolist() for each in control.all_gather_small(torch.tensor(values))]
        # A loader may be asked for before set-up, when there is no control group.
        told = strategy.all_gather(torch.tensor(values, device=strategy.root_device))
        found: list[list[int]] = told.view(-1, len(values)).tolist()
        return found

    def weight(self) -> float:
        """Before `training_step`: look at the loaders if they are new, and find the weight of the loss.

        Raises:
            ValueError: On all ranks, if some would run out of batches before others; or if there are several loaders
                to join.
        """
        loop = self._strategy.lightning_module.trainer.fit_loop
        new, self._new_loaders = self._new_loaders, False
        if self._strategy.config.uneven_batches == "error":
            if new:
                self._compare(loop)
            return 1.0
        loaders = loop._combined_loader.flattened
        joins = isinstance(loaders[0], JoinedLoader)
        if new:
            _check_joined(loop, len(loaders))
        return float(loaders[0].weight(len(loop._data_fetcher.batches))) if joins else 1.0

    def _compare(self, loop: Any) -> None:
        trainer = loop.trainer
        mine = [_number(loop.max_batches), _number(trainer.val_check_batch)]
        everyone = self._everyone(mine)
        # Without a length there is nothing to compare.
        if any(batches < 0 for batches, _ in everyone) or all(one == everyone[0] for one in everyone):
            return
        batches, checks = [count for count, _ in everyone], {check for _, check in everyone}
        shortest = min(batches)
        if trainer.enable_validation and len(checks) > 1:  # where they would part first
            shortest = min([shortest, *(check for check in checks if check > 0)])
        done = loop.epoch_loop.batch_progress.current.ready - 1
        counted = loop.max_steps != -1 and trainer.lightning_module.automatic_optimization
        steps_left = loop.max_steps - trainer.global_step if counted else float("inf")
        if not needs_more(shortest, done, trainer.accumulate_grad_batches, steps_left, trainer.enable_validation):
            return
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(batches))
        problem = f"train_dataloader: ranks have different numbers of batches ({shown})"
        if reason := may_end_before(trainer, shortest):
            if trainer.is_global_zero:
                text = f"{problem}, which cannot go on unless {reason} ends the epoch before; {WAYS_OUT}"
                warnings.warn(text, stacklevel=2)
            return
        raise ValueError(f"{problem}; {WAYS_OUT}; Trainer(limit_train_batches={min(batches)}) ends epochs earlier")


def needs_more(shortest: int, done: int, accumulation: int, steps_left: float, validates: bool) -> bool:
    """True if a run goes on for more batches of an epoch than some rank has.

    Args:
        shortest: Batches after which ranks part.
        done: Batches of this epoch before it was resumed.
        accumulation: Batches of an optimizer step.
        steps_left: Optimizer steps until the end.
        validates: Whether the rank would validate after its last batch.
    """
    alike = shortest - 1 if validates or shortest % accumulation else shortest  # a last batch ends a step early
    return alike // accumulation - done // accumulation < steps_left


def may_end_before(trainer: Any, shortest: int) -> str:
    """Cause of an end of a run, or an epoch, before a number of batches that cannot be known here; "": none known."""
    module = trainer.lightning_module
    if trainer.max_steps != -1 and not module.automatic_optimization:
        return f"max_steps={trainer.max_steps}, which counts the steps that training_step takes itself,"
    if type(module).on_train_batch_start.__module__ not in _BASE_HOOKS:
        return f"{type(module).__name__}.on_train_batch_start, which may return -1,"
    inside = trainer.val_check_batch is None or trainer.val_check_batch < shortest
    for callback in trainer.callbacks:
        # By name, for classes of either namespace.
        names = {cls.__name__ for cls in type(callback).__mro__}
        stops = trainer.enable_validation and inside and not getattr(callback, "_check_on_train_epoch_end", False)
        if "Timer" in names or ("EarlyStopping" in names and stops):
            return f"the callback {type(callback).__name__}"
    return ""


def _number(value: Any) -> int:
    return -1 if value is None or value == float("inf") else int(value)


def _check_lengths(lengths: Sequence[int], empty_allowed: bool) -> None:
    """Raise, on all ranks, for what Lightning would see on some of them only."""
    without = [rank for rank, length in enumerate(lengths) if length < 0]
    if without and len(without) < len(lengths):
        raise ValueError(
            f"train_dataloader: the loaders of rank(s) {without} have no length and those of others have, which "
            "Lightning compares; give all or none a length, or set uneven_batches: join or join_active"
        )
    empty = [rank for rank, length in enumerate(lengths) if length == 0]
    if empty and len(empty) < len(lengths) and not empty_allowed:
        raise ValueError(f"train_dataloader: rank(s) {empty} have no batches, and others have; give every rank some")


def _check_joined(loop: Any, loaders: int) -> None:
    if loaders > 1:
        raise ValueError(
            f"uneven_batches joins one training loader, and there are {loaders}, of which the weight of a step would "
            "not be defined: join them in one data set, or give all ranks as many batches and leave the setting out"
        )
    if type(loop._data_fetcher).__name__ == "_DataLoaderIterDataFetcher":
        raise ValueError(
            "uneven_batches needs to know which batch a loss is of, and training_step(dataloader_iter) takes batches "
            "by itself: let training_step take a batch, or leave the setting out"
        )
