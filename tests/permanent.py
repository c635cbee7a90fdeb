"""Objects that the garbage collector never looks at: the libraries' objects, which cost it a good part of a second."""

from __future__ import annotations

import gc
import weakref


class _Ring:
    """Garbage, which a collection takes away unless it is among what the collector does not look at."""

    def __init__(self) -> None:
        self.itself = self


class PermanentObjects:
    """All objects that are alive when this is made, and those of later calls of `add_all`."""

    def __init__(self) -> None:
        self.add_all()

    def add_all(self) -> None:
        """All that is alive now, too."""
        enabled = gc.isenabled()
        gc.disable()
        # What a thread held during the last collection may be garbage by now, and would stay: engines, groups, threads.
        gc.collect()
        # `gc.get_freeze_count` would tell whether all this was undone, but it counts: 0.05 s for what torch loads.
        self._ring = weakref.ref(_Ring())
        gc.freeze()
        if enabled:
            gc.enable()

    def restore(self) -> None:
        """After `gc.unfreeze` and a collection by whomever: once more. Else there is nothing to do, in no time."""
        if self._ring() is None:
            self.add_all()
