"""A bound on the speed of writing."""

from __future__ import annotations

import time


class Pace:
    """Keeps the average speed under a bound.

    Args:
        bytes_per_second: The bound; None for none.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._speed = bytes_per_second
        self._due = 0.0

    def wait(self, nbytes: int) -> None:
        """Returns when the next `nbytes` may be written."""
        if self._speed is None:
            return
        now = time.monotonic()
        if self._due > now:
            time.sleep(self._due - now)
        self._due = max(self._due, now) + nbytes / self._speed
