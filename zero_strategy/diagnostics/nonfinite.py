"""The first value that is not finite, by name: step, rank, micro-batch, module, forward or backward.

    watch = NonFiniteWatch(engine)           # or raises=True: NonFiniteError on all ranks, before the step
    ...
    engine.clip_grad_norm_(1.0)              # the norm's flag is what is looked at: no pass of its own
    watch.found                              # the last that was found

Only once a norm's flag says so, the forwards of the step are run again with hooks on all modules, on all ranks alike.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from zero_strategy.activation.seeds import kept_random_state
from zero_strategy.diagnostics.nonfinite_calls import CallRecorder
from zero_strategy.diagnostics.nonfinite_search import Origin, Replay
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.norm import GradientStats

_log = logging.getLogger(__name__)
KEEP_BYTES = 64 << 20


@dataclass(frozen=True)
class NonFinite:
    """What was found in a step; the same on all ranks.

    Attributes:
        step: Counted from 0.
        parameters: Whose gradients hold values that are not finite, and how many.
        rank: Where it arose first, None if that was not found.
        origin: Where there; None likewise.
    """

    step: int
    parameters: dict[str, int]
    rank: int | None = None
    origin: Origin | None = None

    def __str__(self) -> str:
        names = ", ".join(list(self.parameters)[:4]) + (", ..." if len(self.parameters) > 4 else "")
        text = f"step {self.step}: gradients are not finite ({names})"
        if self.origin is None:
            return f"{text}; running the step again showed no module from which that comes"
        origin = self.origin
        module = origin.module or "the model itself"
        return (
            f"{text}; first {origin.kind}: rank {self.rank}, micro-batch {origin.micro_batch}, {origin.direction} of "
            f"{module}, {origin.what}"
        )


class NonFiniteError(RuntimeError):
    """Gradients are not finite; `found` says where that came from."""

    def __init__(self, found: NonFinite) -> None:
        self.found = found
        super().__init__(str(found))


class NonFiniteWatch:
    """Looks at the flag of every norm of gradients that an engine takes. All ranks make one.

    Args:
        engine: The engine. What is called is its module, or children of it.
        raises: Raise instead of logging.
        keep_bytes: Gradients of outputs that are kept per step, by reference, for running the backward again; with
            larger ones it is run with ones.

    Attributes:
        found: What was found last.
    """

    def __init__(self, engine: ZeroEngine, *, raises: bool = False, keep_bytes: int = KEEP_BYTES) -> None:
        self.engine, self.raises = engine, raises
        self.found: NonFinite | None = None
        self._recorder = CallRecorder(engine.module, keep_bytes, step=lambda: engine.steps.taken)
        engine.gradient_watchers.append(self._look)

    def close(self) -> None:
        """Look no more."""
        self.engine.gradient_watchers.remove(self._look)
        self._recorder.close()

    def _look(self, stats: GradientStats) -> None:
        if stats.norm.finite or any(sharded.skip_next for sharded in self.engine.optimizers):
            return  # an overflow of scaled fp16 gradients is no error
        counts = stats.nonfinite.tolist()
        mine = {name: count for name, count in zip(stats.names, counts, strict=True) if count}
        everyone = self.engine.mesh.control.gather_objects(mine)
        parameters: dict[str, int] = {}
        for name, _ in self.engine.model.names():
            total = sum(part.get(name, 0) for part in everyone)
            if total:
                parameters[name] = total
        rank, origin = self._search()
        self.found = NonFinite(self.engine.steps.taken, parameters, rank, origin)
        if self.raises:
            raise NonFiniteError(self.found)
        if self.engine.mesh.rank == 0:
            _log.error("%s", self.found)

    # ---- the search ----

    def _search(self) -> tuple[int | None, Origin | None]:
        """Run the step's forwards again, then its backwards, each on all ranks, up to what is found first."""
        calls, control = self._recorder.calls, self.engine.mesh.control
        shapes = control.gather_objects([(call.name, call.micro_batch) for call in calls])
        if any(shape != shapes[0] for shape in shapes):  # ranks would wait for each other in gathers
            return None, None
        replay = Replay(self.engine.module)
        with kept_random_state(), self._recorder.paused(), self.engine.model.reducer.paused():
            for look in (replay.forward, replay.loss, replay.backward):  # all ranks run the same, and meet after each
                for call in calls:
                    origin = None
                    with suppress(Exception):  # what cannot be run again tells nothing; what was found is still told
                        with self.engine.forward_scope():
                            origin = look(call)
                    found = control.gather_objects(origin)
                    for rank, each in enumerate(found):
                        if each is not None:
                            return rank, each
        return None, None

