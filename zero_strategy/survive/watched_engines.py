"""Engines of a world: if this rank leaves the training function, every wait of the others for it ends, and of it."""

from __future__ import annotations

import weakref

from zero_strategy.comm.process_group import default_group
from zero_strategy.comm.transport import break_group
from zero_strategy.engine import ZeroEngine
from zero_strategy.survive.explained_errors import LEFT
from zero_strategy.watchdog.diagnosis import Failure


class WatchedEngines:
    """The engines of one beginning that have a watchdog."""

    def __init__(self) -> None:
        self._engines: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()

    def add(self, engine: ZeroEngine) -> bool:
        """Watch an engine; False: it is watched already."""
        if engine in self._engines:
            return False
        self._engines.add(engine)
        if engine.mesh.watchdog is not None:
            engine.mesh.watchdog.connect()
            engine.mesh.watchdog.add_break(self._break_default_group)
        return True

    def _break_default_group(self) -> None:
        """End waits in torch's own collectives, which are a framework's, and of which a watchdog has no record."""
        if (group := default_group()) is not None:
            for device in ("cpu", "cuda"):
                break_group(group, device)

    def leave(self, rank: int, why: str) -> None:
        """Let those who wait for this rank know that it has left: its process is there, and nothing else would end."""
        failure = Failure(LEFT, rank, f"rank {rank} has left: {why}", {})
        for engine in list(self._engines):
            watchdog = None if engine.ended else engine.mesh.watchdog
            if watchdog is not None and watchdog.failure is None:
                watchdog.fail(failure)
        self._engines.clear()
