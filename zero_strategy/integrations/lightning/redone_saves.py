"""Checkpoints of a fit that goes on after deaths: each is there once, also where its step is computed again.

A step may be torn when its checkpoint is saved already, and is then saved again. Two things are in its way:

    ModelCheckpoint decides by attributes that are not in its state    a process that is new would save, the others not
    the name is taken                                                 Lightning would give the second one another
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_strategy.checkpoint.storage import is_remote

_PRIVATE = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of ModelCheckpoint."""
_ASIDE = ".before"
"""Suffix of a checkpoint whose step is computed again, until it is saved again."""

_logger = logging.getLogger(__name__)


class RedoneSaves:
    """Checkpoints that one process saves, with the others, during a fit.

    Args:
        trainer: The fit's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first = self.decisions()
        self._begun: dict[str, int] = {}
        self._unfinished: set[str] = set()
        self._aside: dict[str, str] = {}

    def decisions(self) -> dict[str, dict[str, Any]]:
        """Attributes by which each checkpoint callback decides, JSON-able; they belong to a copy."""
        return {
            callback.state_key: {name: vars(callback)[name] for name in _PRIVATE if name in vars(callback)}
            for callback in self._trainer.checkpoint_callbacks
        }

    def decide_as(self, decisions: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Give the callbacks a copy's attributes, or those of before the fit."""
        found = self._first if decisions is None else decisions
        for callback in self._trainer.checkpoint_callbacks:
            vars(callback).update(found.get(callback.state_key, {}))

    @contextlib.contextmanager
    def saving(self, path: str, turn: int, then: Callable[[Callable[[], object]], object]) -> Iterator[None]:
        """Inside a checkpoint is saved, perhaps in the background.

        Args:
            path: Its path.
            turn: Number of the last copy.
            then: Calls a function as soon as it is there.
        """
        self._begun[path] = turn
        self._unfinished.add(path)
        yield
        then(lambda: self._unfinished.discard(path))

    def copied(self, turn: int) -> None:
        """There is one more copy: remove what has been saved again.

        Args:
            turn: Its number. One before may be that from which the fit goes on.
        """
        self._begun = {path: of for path, of in self._begun.items() if of >= turn - 2}
        for path, aside in list(self._aside.items()):
            if _is_saved(path):
                _remove(aside)
                del self._aside[path]

    def begin(self, turn: int, gather: Callable[[Any], list[Any]], first: bool) -> None:
        """Put away the checkpoints of steps that are computed again. A collective.

        Args:
            turn: Number of the copy from which the fit goes on.
            gather: Gives the objects of all ranks.
            first: This is rank 0.
        """
        everyone: list[tuple[dict[str, int], set[str]]] = gather((self._begun, self._unfinished))
        self._begun, self._unfinished = {}, set()
        if not first:
            self._aside = {}
            return
        begun = {path: of for paths, _ in everyone for path, of in paths.items() if not is_remote(path)}
        for path, of in begun.items():
            # An empty directory keeps the name of one that was being written.
            with contextlib.suppress(OSError):
                os.rmdir(path)
            if of >= turn and os.path.lexists(path):
                self._aside[path] = path + _ASIDE
                _remove(self._aside[path])
                os.replace(path, self._aside[path])
        for path in sorted(set().union(*(unfinished for _, unfinished in everyone))):
            if begun.get(path, -1) < turn and not _is_saved(path):
                _logger.warning("a rank has died while %s was being written: it is not there", path)


def _is_saved(path: str) -> bool:
    return os.path.isfile(path) or (os.path.isdir(path) and bool(os.listdir(path)))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.remove(path)
