"""The first failure among ranks that work together, over the process group's key-value store.

A rank that fails says why here before it breaks its connections; the others, whose waits then end, find the cause.
Ranks also say how far they have come, for those that wait for them.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Failure:
    """Why ranks cannot go on.

    Attributes:
        kind: What sort of failure, for whoever makes an exception of it.
        rank: Whose it is, in the world.
        text: In words, with the stage.
        details: Whatever belongs to the kind, as JSON has it.
    """

    kind: str
    rank: int
    text: str
    details: dict[str, Any]


class FailureBoard:
    """Where one failure can be posted; the first one stays.

    Args:
        store: The process group's store, through a connection of its own; None: for one rank.
        key: Keeps boards apart; equal on all ranks.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, f"zero_strategy/failure/{key}"
        self._known: Failure | None = None

    def post(self, failure: Failure) -> Failure:
        """Post a failure, unless there is one.

        Returns:
            The one that is there now.
        """
        if self._known is None:
            self._known = failure
            if self._store is not None:
                with contextlib.suppress(Exception):  # the store is gone: nobody can be told
                    content = json.dumps(asdict(failure))
                    self._known = _read(self._store.compare_set(self._key, "", content)) or failure
        return self._known

    def first(self, seconds: float = 0.0) -> Failure | None:
        """The failure that was posted first, waiting so long for one; None: nobody has failed."""
        end, pause = time.monotonic() + seconds, 0.005
        while self._known is None:
            with contextlib.suppress(Exception):
                if self._store is not None and self._store.check([self._key]):
                    self._known = _read(self._store.get(self._key))
            if self._known is not None or time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self._known

    def come_to(self, rank: int, batch: int) -> None:
        """A rank has come to a batch."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(f"{self._key}/at/{rank}", str(batch))

    def batch_of(self, rank: int) -> int | None:
        """The last batch that a rank has come to; 0: to none; None: that cannot be said."""
        with contextlib.suppress(Exception):
            key = f"{self._key}/at/{rank}"
            if self._store is not None:
                return int(self._store.get(key)) if self._store.check([key]) else 0
        return None


def _read(content: bytes | str) -> Failure | None:
    return Failure(**json.loads(content)) if content else None
