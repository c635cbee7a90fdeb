"""A training function that is called again, in the same process, when ranks have died or new ones wait.

    def train(run):
        model = GPT(...)
        engine = ZeroEngine(model, {"stage": 3, "reproducible": 8, "survive": True})
        optimizer = torch.optim.AdamW(model.parameters())
        engine.attach(optimizer)
        state = run.restore(engine, {"step": 0})
        for step in range(state["step"], 1000):
            ...
            optimizer.step()
            optimizer.zero_grad()
            run.commit(engine, {"step": step + 1})

    survive(train)

A death ends the wait of every rank that is left in an error (`watchdog`). It leaves the function, the groups of the
dead are ended, the lighthouse says who is there, and the function begins anew with the copy of the last step that is
whole. The step that was going on is computed again: nothing else is.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from typing_extensions import Self

from zero_strategy.comm.process_group import DEFAULT_TIMEOUT
from zero_strategy.config import SurviveConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.runtime.torch_private import TCPStore
from zero_strategy.survive.copies import Copy, MemoryCopies
from zero_strategy.survive.explained_errors import ExplainedErrors
from zero_strategy.survive.formation import MembersChangedError, dissolve, form
from zero_strategy.survive.history import History, Left
from zero_strategy.survive.layout import UNKNOWN, Layout, layout_of
from zero_strategy.survive.membership import ADDRESS, LIGHTHOUSE, PLACE, Member, Membership, World
from zero_strategy.survive.waiting import wait_to_fit
from zero_strategy.survive.watched_engines import WatchedEngines

AGENT = "ZERO_STRATEGY_AGENT"
"""Environment variable: the process that removes the run's memory at its end."""
RUN, RANKS, MEMORY = "ZERO_STRATEGY_RUN", "ZERO_STRATEGY_RANKS", "ZERO_STRATEGY_MEMORY"
"""Environment variables: a name of the run, for its memory; how many processes were launched; a memory file system."""
_START_SECONDS = 60.0
"""Longest wait for the processes that were launched."""

_kept: list[TCPStore] = []
"""Stores of runs that are over in this process."""

P = ParamSpec("P")
T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Run:
    """One run of a training function, over all of its beginnings in this process.

    Args:
        membership: This process's.
        copies: Of the state, on this host.

    Attributes:
        world: The ranks of this beginning.
        beginnings: How often the function was called.
        history: Beginnings of the run, those before this process included.
    """

    def __init__(self, membership: Membership, copies: MemoryCopies) -> None:
        self._membership, self._copies = membership, copies
        self.world: World = World(0, 0, [])
        self.beginnings, self._step, self._layout = 0, 0, UNKNOWN
        self._wait_seconds = SurviveConfig().wait_seconds
        self._known: World | None = None
        self._asked: Future[World] | None = None
        self._engines: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()
        self._watched, self._errors = WatchedEngines(), ExplainedErrors()
        self._everyone: Sequence[Member] = []
        self.history = History()
        self._left = Left("", torn=False)

    @classmethod
    def launched(cls, owner: str, slots: int = 0) -> tuple[Self, int]:
        """The run that this process was launched for, and how many processes were.

        Args:
            owner: Who asks, for the message.
            slots: Micro-batches of a step, which the ranks must divide; 0: `copy` finds it out.

        Raises:
            ImportError: If torchft is not installed.
            ValueError: If the launcher's variables are missing; names them.
        """
        values = {name: os.environ.get(name, "") for name in (LIGHTHOUSE, PLACE, RANKS, RUN)}
        if missing := [name for name, value in values.items() if not value]:
            raise ValueError(
                f"{owner} needs {' and '.join(missing)} in the environment: start the script with `zero-strategy run "
                "--nproc-per-node N script.py`"
            )
        address = os.environ.get(ADDRESS, "127.0.0.1")
        folder = run_folder(values[RUN])
        membership = Membership(values[LIGHTHOUSE], int(values[PLACE]), address, str(folder))
        run = cls(membership, MemoryCopies(folder))
        run._layout = Layout(slots)
        return run, int(values[RANKS])

    @property
    def rank(self) -> int:
        """This process's."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def restore(self, engine: ZeroEngine, state: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Load the newest copy that is whole, where there is one. A collective, once the optimizers are attached.

        Args:
            engine: The training.
            state: To begin with.

        Returns:
            What `commit` was given, or `state`.
        """
        self._engines.add(engine)
        self.watch(engine)
        found = self._copies.restore(engine, self._go_back)
        self._step = engine.steps.taken
        return dict(state or {}) if found is None else found

    def commit(self, engine: ZeroEngine, state: Mapping[str, Any]) -> None:
        """Copy the state at the end of a step, and look who is there. A collective.

        Args:
            engine: The training.
            state: What the function needs to go on from here, JSON-able.

        Raises:
            MembersChangedError: If others are; it must leave the function, which then begins anew.
            OSError: If a host has no memory left for the copy.
        """
        self.copy(engine, state)
        self.check_members()

    @property
    def turn(self) -> int:
        """Number of the last copy."""
        return self._copies.turn

    def gather(self, own: Any) -> list[Any]:
        """The objects of all ranks. A collective of the default process group."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, own)
        return found

    def find(self) -> Copy | None:
        """The newest copy that is whole, which the caller loads. A collective of the default process group."""

        copies = self._copies.find(self.gather)
        if not copies:
            return None
        self._copies.turn = copies[0].turn
        self._go_back(copies[0])
        return copies[0]

    def _go_back(self, copy: Copy) -> None:
        """Note that this beginning goes on from a copy."""
        self.history = self.history.following(copy.history)
        self.history.went_back(copy.step)

    def copy(
        self,
        engine: ZeroEngine,
        state: Mapping[str, Any],
        extra_files: Mapping[str, bytes] | None = None,
        *,
        asks: bool = True,
    ) -> None:
        """Copy the state; `check_members` tells later who is there. A collective.

        Args:
            engine: The training.
            state: What the function needs to go on from here, JSON-able.
            extra_files: Small files beside it, given on rank 0.
            asks: Ask who is there; False where nobody would look for a while, as new ones wait for those who know: the
                step has more to come, and another copy.

        Raises:
            OSError: If a host has no memory left for the copy.
        """
        self.watch(engine)
        self._errors.step_taken()
        self._step = engine.steps.taken
        # The lighthouse answers when all have asked: meanwhile this rank copies.
        if asks:
            self._ask()
        history = self.history.kept(self._step, time.time(), complete=asks)
        self._copies.take(engine, self.world, state, extra_files, history)
        told = self.history.copied(self._step, time.time(), complete=asks)
        engine.observed.mark("copied", (told, self.history))
        if asks:
            self._known = self._answer()

    def check_members(self) -> None:
        """Raise if others are there than those of this world.

        Raises:
            MembersChangedError: Then; it must leave the function, which then begins anew.
        """
        found, self._known = self._known, None
        if found is not None and found.fitting().names != self.world.names:
            before, now = set(self.world.names), set(found.fitting().names)
            text = f"after step {self._step} {len(now - before)} came and {len(before - now)} went"
            raise MembersChangedError(text, found)

    def _ask(self) -> Future[World]:
        """Ask who is there, unless the answer to an earlier question is still to come.

        Each rank asks once for each answer that all wait for: of one that asked twice the first question would be
        answered, too, and the others would form without waiting for the second.
        """
        if self._asked is None:
            self._asked = self._membership.ask(self._step, self._layout)
        return self._asked

    def _answer(self) -> World:
        asked, world = self._ask(), None
        try:
            world = self._membership.answer(asked)
            self._everyone = world.members
        finally:
            if asked.done():  # not after a Ctrl-C, or while the lighthouse is out of reach
                self._asked = None
        return world

    def call(self, train: Callable[Concatenate[Run, P], T], ranks: int, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function until it returns.

        Args:
            train: The function.
            ranks: How many begin.
        """
        world = self._membership.first_quorum(ranks, _START_SECONDS, self._layout)
        self._everyone = world.members
        while True:
            world = wait_to_fit(world, self._answer, ranks, self.world.members, self._wait_seconds)
            self.world, self.beginnings, self._known = world, self.beginnings + 1, None
            try:
                self._form()
                with self.ended():
                    return train(self, *args, **kwargs)
            except Exception as error:
                self._errors.check_explained(error, self.world)
                why = str(error).partition("\n")[0]  # then come torch's frames
                _logger.warning("%s: this process goes on", why)
                if not self._left.why:  # what then keeps ranks from forming follows from it
                    self._left = Left(why or type(error).__name__, torn=not isinstance(error, MembersChangedError))
                self._watched.leave(self.rank, why)
                # Those who came know that answer of the lighthouse, and form by it.
                known = error.world if isinstance(error, MembersChangedError) else None
                # Its frames have the model and the engine.
                traceback.clear_frames(error.__traceback__)
            self.leave()
            # If one has died before anybody knew the training, as many as at first.
            world = self._membership.first_quorum(ranks, _START_SECONDS, self._layout, known or self._answer())

    def _form(self) -> None:
        """Form the ranks of this world, who agree on what the run was until now."""
        names = [each.name for each in self._everyone]

        def agree(told: Sequence[str]) -> str:
            return History.agreed(told, time.time(), self.world_size, names).text()

        told = self.history.told(self._left)
        self.history = History.from_text(form(self._membership, self.world, DEFAULT_TIMEOUT, told, agree))
        self._left = Left("", torn=False)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Inside is the function; the groups of a run that is over end together."""
        yield
        for engine in list(self._engines):
            engine.close()

    def watch(self, engine: ZeroEngine) -> None:
        """Know the training's layout, and let this engine's other ranks be told if this one leaves."""
        if self._watched.add(engine):
            self._layout = layout_of(engine, self.world_size)
            self._wait_seconds = engine.config.config.survive.wait_seconds

    def leave(self) -> None:
        """Let go of the engines and groups of a world that is no more."""
        for engine in list(self._engines):
            engine.abandon("ranks have changed")
        self._engines.clear()
        self._copies.leave()
        dissolve()
        gc.collect()

    def close(self) -> None:
        """The run is over for this process."""
        # The agent removes the copies; without one, whoever ends when no other process of this host waits for its turn.
        waiting = [each for each in self._everyone if each.name not in self.world.names and not each.is_gone]
        own = {each.host for each in self.world.members if each.name == self._membership.name}
        if os.environ.get(AGENT) != str(os.getppid()) and not any(each.host in own for each in waiting):
            self._copies.remove()
        # Engines may go on with the last world's groups, which have met in some member's store.
        _kept.append(self._membership.store)
        self._membership.close()


def survive(train: Callable[Concatenate[Run, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a training function, and call it again when ranks have died or new ones wait.

    The launcher gives each process a place and the address of a lighthouse: `zero-strategy run`, or torchft's own
    `torchft_lighthouse` and the variables TORCHFT_LIGHTHOUSE, ZERO_STRATEGY_PLACE, ZERO_STRATEGY_RANKS and
    ZERO_STRATEGY_RUN.

    Args:
        train: Gets a `Run` and the other arguments. It makes model and engine, loads (`Run.restore`), and tells of the
            end of each step (`Run.commit`).
        args, kwargs: Further arguments.

    Returns:
        The function's result.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the launcher's variables are missing; names them.
    """
    run, ranks = Run.launched("survive()")
    try:
        return run.call(train, ranks, *args, **kwargs)
    finally:
        run.close()


def run_folder(run: str) -> Path:
    """Folder of a run's copies, in a memory file system of this host, where they outlive processes."""
    memory = os.environ.get(MEMORY) or ("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    return Path(memory) / f"zero_strategy.{run}"
