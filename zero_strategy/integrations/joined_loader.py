"""A Trainer's training data loader under `uneven_batches: join` or `join_active`: as many batches on all ranks.

It gives batches only; the weights of those that were given and not used yet wait beside it, since Lightning takes a
batch ahead where there is no length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_strategy.checkpoint import random_state
from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.uneven_batches import OwnBatches, joined_pass, length_of

STATE_KEY = "zero_strategy.joined"
"""Beside the loader's own state: batches given in the pass, and whether the rank had run out."""

_OWN = frozenset({"_loader", "_length", "_mesh", "_policy", "_weights", "_own", "_resumed"})


class JoinedLoader:
    """Gives a rank's batches, and the last one again while other ranks have more.

    All other attributes are the loader's, to read and to set.

    Args:
        loader: The loader.
        length: Batches of a pass, the most that any rank has; None: not known.
        mesh: Finds the ranks, when the first batch is asked for.
        policy: The setting `uneven_batches`.
    """

    _loader: Any
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
        """Of the loss of the batch in use.

        Args:
            ahead: Batches that were taken after it.
        """
        while len(self._weights) > ahead + 1:
            self._weights.popleft()
        return self._weights[0]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)  # while being unpickled
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)  # Lightning sets `worker_init_fn`


class StatefulJoinedLoader(JoinedLoader):
    """The same around a loader that knows where it is; apart, since Lightning looks for the methods in the class."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's, and where this pass is."""
        own = self._own
        return {**self._loader.state_dict(), STATE_KEY: [own.given, own.ended] if own is not None else [0, False]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken; one of the loader alone will do."""
        given, ended = state.get(STATE_KEY, (0, False))
        inner = bare_state(state)
        ended = ended or given >= _known_length(self._loader)
        self._resumed = _Resumed(self._loader, inner, given, ended)
        if not ended:
            self._loader.load_state_dict(inner)
        else:
            self._resumed.take_spare()  # now, for it moves the loader


def joined_loader(loader: Any, length: int | None, mesh: Callable[[], Mesh], policy: str) -> JoinedLoader:
    """A `JoinedLoader`, with a state if the loader has one."""
    stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return (StatefulJoinedLoader if stateful else JoinedLoader)(loader, length, mesh, policy)


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
        drawn = random_state.capture()
        loader = self._loader
        loader.load_state_dict(self._state)
        self._spare = [batch for batch, _ in zip(iter(loader), range(1), strict=False)]
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
