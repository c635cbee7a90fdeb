"""The optimizer's step ahead of time: while backward goes on, buckets whose gradients are reduced are updated aside.

    backward       | bucket 3 reduced | bucket 2 reduced | bucket 1 reduced |        norm, clipping, step()
    early step     |                  | update 3 aside   | update 2 aside   | update 1 aside | adopt 3, 2, 1

What a step will be is a guess: that one follows this backward, with the hyper-parameters of now, with gradients that
nobody changes any more, multiplied by what they were multiplied by when nothing was clipped. `step()` compares the
guess with what is asked for. Where it was right, second places become first ones; else they are left alone, and the
step is carried out as always: old values were never touched.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.distributed.background import BackgroundWorker
from zero_strategy.memory.vectors import OffloadedPart, OffloadedVector
from zero_strategy.optim.streamed import ChunkKey, Numbers, StreamedStep, Update, Work, can_go_aside
from zero_strategy.optim.update_rules import UpdateRule
from zero_strategy.sharding.gradients import GradientBucket
from zero_strategy.sharding.layout import Piece
from zero_strategy.sharding.model import ShardedModel

MOST_PATIENCE = 64
"""Steps in a row that must have been guessed right, at most, before the next attempt."""


@dataclass
class EarlyStepCounts:
    """What became of early steps so far.

    Attributes:
        committed: Optimizer steps of which a part was adopted.
        redone: Optimizer steps of which a part had been carried out for nothing.
    """

    committed: int = 0
    redone: int = 0


class Patience:
    """When to try: clipping that takes effect every now and then would have most of the work done twice.

    After an attempt that was wrong, as many steps in a row must have been guessed right as were asked for last time,
    times two (1 at first, at most `MOST_PATIENCE`), before the next. Every right attempt takes one off that number.
    """

    def __init__(self) -> None:
        self.tries, self._asked, self._right = True, 1, 0

    def learn(self, right: bool) -> None:
        """What the last guess, tried or not, turned out to be."""
        if not self.tries:
            self._right = self._right + 1 if right else 0
            self.tries = self._right >= self._asked
        elif right:
            self._asked = max(1, self._asked - 1)
        else:
            self.tries, self._right, self._asked = False, 0, min(2 * self._asked, MOST_PATIENCE)


@dataclass
class _Row:
    """What the last step did to a parameter, as far as the next will do it again."""

    group: dict[str, Any]
    parameter: nn.Parameter
    piece: nn.Parameter
    cut: Piece
    factor: float


@dataclass(eq=False)
class _Attempt:
    """The guess for one bucket.

    Attributes:
        gradients: Its gradients.
        rule, scale, updates: The guess; hyper-parameters and numbers are copies.
        chunks: What can be updated aside.
        versions: What must not change: the gradients, vectors, weights on the device.
        sent: Whether it is carried out.
        ready: On a GPU: when gradients are what they are now.
        numbers: What it has found out about states.
        cancelled: Nobody wants it any more.
        done: It was carried out.
        error: Why it was not.
    """

    gradients: GradientBucket
    rule: UpdateRule
    scale: float
    updates: list[Update]
    chunks: list[Work]
    versions: list[tuple[object, int]]
    sent: bool
    ready: Any = None
    numbers: Numbers = field(default_factory=dict)
    cancelled: bool = False
    done: bool = False
    error: BaseException | None = None

    @property
    def stale(self) -> bool:
        """Whether it cannot be right any more; may be asked while gradients change."""
        return self.cancelled or self.gradients.version != self.versions[0][1]


class _Unwanted(Exception):
    """Nobody wants what is left of a pass."""


class _Thread:
    """What outlives an `EarlyStep` that nobody holds: until its thread is idle, memory and files must stay."""

    def __init__(self) -> None:
        self.last: Future[None] | None = None
        self.ending, self.process = False, os.getpid()

    def wait(self) -> None:
        """Returns when nothing is being carried out."""
        if self.last is not None and os.getpid() == self.process:
            try:
                self.last.result()
            except Exception:
                self.last = None
                raise
            self.last = None

    def end(self) -> None:
        """Let nothing more be begun, and wait."""
        self.ending = True
        self.wait()


class EarlyStep:
    """Guesses and carries out the steps of one optimizer.

    Args:
        model: The sharded model.
        step: What carries steps out.
        vectors: By the id of a bucket: those of the optimizer's state, and where new weights wait.
        state_of: The optimizer's state of a piece.
        foreign: Ids of buckets that another optimizer updates, too.

    Attributes:
        counts: What became of the guesses.
    """

    def __init__(
        self,
        model: ShardedModel,
        step: StreamedStep,
        vectors: dict[int, dict[str, OffloadedVector]],
        state_of: Callable[[nn.Parameter], dict[str, Any]],
        foreign: Callable[[], set[int]],
    ) -> None:
        self._model, self._step, self._vectors = model, step, vectors
        self._state_of, self._foreign = state_of, foreign
        self.counts, self.patience = EarlyStepCounts(), Patience()
        self._rows: dict[int, list[_Row]] = {}
        self._rule: UpdateRule | None = None
        self._scale, self._backwards, self._usual = 1.0, 0, -1
        self._factors: dict[int, float] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._waiting: list[_Attempt] = []
        self._lock = threading.Lock()
        self._worker, self._thread = BackgroundWorker("zero-early-step"), _Thread()
        self._streams: dict[torch.device, Any] = {}
        # After the tiers', so that at exit the thread rests before its files and its memory go.
        self._finalizer = weakref.finalize(self, self._thread.end)
        model.reducer.watchers.append(self)

    # ---- during backward ----

    def backward_begins(self) -> None:
        """See `ReductionWatcher`."""
        self._backwards += 1

    def reduced(self, gradients: GradientBucket) -> None:
        """See `ReductionWatcher`: guess what the step does to this bucket, and begin."""
        identity = id(gradients.bucket)
        if identity not in self._rows or self._backwards != self._usual or self._thread.process != os.getpid():
            return
        known = self._attempts.get(identity)
        if known is not None:
            if not known.stale:
                return
            known.cancelled = True
        attempt = self._guess(gradients, self._rows[identity])
        if attempt is None:
            return
        self._attempts[identity] = attempt
        if attempt.sent:
            with self._lock:
                self._waiting.append(attempt)
            self._thread.last = self._worker.submit(self._carry_out)

    def _guess(self, gradients: GradientBucket, rows: Sequence[_Row]) -> _Attempt | None:
        assert self._rule is not None
        bucket, updates, groups = gradients.bucket, list[Update](), dict[int, dict[str, Any]]()
        for row in rows:
            values = gradients.reduced_early(row.cut.index)
            if values is None:
                return None
            group = groups.setdefault(id(row.group), _copied(row.group))
            state = _copied(self._state_of(row.piece))
            updates.append(Update(group, row.parameter, row.piece, bucket, row.cut, values, row.factor, state))
        chunks = [chunk for chunk in self._step.chunks(updates, self._vectors, aside=True) if can_go_aside(chunk)]
        if not chunks:
            return None
        ready = None
        if bucket.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(bucket.device))
        versions = _versions(gradients, chunks)
        return _Attempt(gradients, self._rule, self._scale, updates, chunks, versions, self.patience.tries, ready)

    # ---- in the thread ----

    def _carry_out(self) -> None:
        with self._lock:
            taken, self._waiting = self._waiting, []
        taken = [attempt for attempt in taken if not attempt.stale and not self._thread.ending]
        if not taken:
            return
        owners = {id(chunk): attempt for attempt in taken for chunk in attempt.chunks}

        def look(chunk: Work) -> Numbers | None:
            if self._thread.ending or all(attempt.stale for attempt in taken):
                raise _Unwanted
            attempt = owners[id(chunk)]
            return None if attempt.stale else attempt.numbers

        try:
            with self._on_own_stream(taken):
                chunks = [chunk for attempt in taken for chunk in attempt.chunks]
                self._step.run_aside(taken[0].rule, chunks, taken[0].scale, look)
        except _Unwanted:
            return
        except BaseException as error:  # told where the step is asked for
            for attempt in taken:
                attempt.error = error
        else:
            for attempt in taken:
                attempt.done = True

    def _on_own_stream(self, attempts: Sequence[_Attempt]) -> AbstractContextManager[Any]:
        """On a GPU: copies from it wait for the gradients, and neither for the rest of backward nor the other way."""
        waits = [attempt for attempt in attempts if attempt.ready is not None]
        if not waits:
            return nullcontext()
        device = waits[0].gradients.bucket.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        for attempt in waits:
            self._streams[device].wait_event(attempt.ready)
        on_stream: AbstractContextManager[Any] = torch.cuda.stream(self._streams[device])
        return on_stream

    # ---- at the step ----

    def take(
        self, rule: UpdateRule, updates: Sequence[Update], scale: float
    ) -> tuple[dict[ChunkKey, Work], Numbers]:
        """What was carried out of the step that is asked for. The thread is idle then.

        Returns:
            Chunks to be adopted, and the numbers of their parameters.

        Raises:
            OSError, RuntimeError: Why it could not be carried out; nothing has changed.
        """
        attempts, self._attempts = list(self._attempts.values()), {}
        self._usual, self._backwards = self._backwards, 0
        self._rows = {}
        asked: dict[int, list[Update]] = {}
        for update in updates:
            asked.setdefault(id(update.bucket), []).append(update)
        guessed = [a for a in attempts if _is_right(a, rule, asked.get(id(a.gradients.bucket), []), scale)]
        for attempt in attempts:
            attempt.cancelled = attempt not in guessed
        self._thread.wait()
        right = [attempt for attempt in guessed if all(map(_same_weights, attempt.chunks))]
        for attempt in right:
            if attempt.error is not None:
                raise attempt.error
        made = [attempt for attempt in right if attempt.done]
        self._judge(attempts, right, made)
        chunks = {chunk.key: chunk for attempt in made for chunk in attempt.chunks}
        return chunks, {identity: numbers for attempt in made for identity, numbers in attempt.numbers.items()}

    def _judge(self, attempts: Sequence[_Attempt], right: Sequence[_Attempt], made: Sequence[_Attempt]) -> None:
        self.counts.committed += bool(made)
        self.counts.redone += any(attempt.sent and attempt not in made for attempt in attempts)
        if attempts:
            self.patience.learn(2 * len(right) >= len(attempts))

    def learn(self, rule: UpdateRule, updates: Iterable[Update], scale: float) -> None:
        """After a step: the next one is guessed to be like it."""
        foreign = self._foreign()
        self._rule, self._scale = rule, scale
        for update in updates:
            if id(update.bucket) not in foreign:
                factor = self._unclipped(update)
                row = _Row(update.group, update.parameter, update.piece, update.cut, factor)
                self._rows.setdefault(id(update.bucket), []).append(row)

    def _unclipped(self, update: Update) -> float:
        """What a gradient is multiplied by if nothing is clipped: what undoes a loss scale is a power of two."""
        known = self._factors.get(id(update.parameter), 1.0)
        if abs(math.frexp(update.factor)[0]) == 0.5:
            self._factors[id(update.parameter)] = known = update.factor
        return known

    def skip(self) -> None:
        """The step that was asked for is not taken."""
        attempts, self._attempts = list(self._attempts.values()), {}
        self._usual, self._backwards = self._backwards, 0
        for attempt in attempts:
            attempt.cancelled = True
        self._judge(attempts, [], [])

    def reset(self) -> None:
        """Drop all that was guessed, and return when the thread is idle."""
        for attempt in self._attempts.values():
            attempt.cancelled = True
        self._attempts.clear()
        self._backwards = 0
        self._thread.wait()

    def close(self) -> None:
        """Guess nothing more."""
        self.reset()
        if self in self._model.reducer.watchers:
            self._model.reducer.watchers.remove(self)
        self._rows.clear()


def _versions(gradients: GradientBucket, chunks: Sequence[Work]) -> list[tuple[object, int]]:
    """What tells whether anything changes that an update depends on: whose version, and the version now."""
    vectors = {id(vector): vector for chunk in chunks for vector in chunk.vectors.values()}
    found: list[tuple[object, int]] = [(gradients, gradients.version)]
    found += [(vector, vector.version) for vector in vectors.values()]
    bucket = gradients.bucket
    if bucket.shard_vector is None:
        found.append((bucket.owned_values, bucket.owned_values._version))
    if not bucket.placement.shard_parameters or bucket.placement.in_place:
        found += [(tensor, tensor._version) for tensor in (*bucket.parameters, *bucket.tensors)]
    return found


def _version_of(whose: object) -> int:
    return int(whose._version) if isinstance(whose, Tensor) else int(getattr(whose, "version"))  # noqa: B009


def _is_right(attempt: _Attempt, rule: UpdateRule, updates: Sequence[Update], scale: float) -> bool:
    """Whether the step that is asked for is what was guessed."""
    return (
        type(rule) is type(attempt.rule)
        and scale == attempt.scale
        and all(_version_of(whose) == version for whose, version in attempt.versions)
        and len(updates) == len(attempt.updates)
        and all(map(_same, updates, attempt.updates))
    )


def _same_weights(chunk: Work) -> bool:
    """Whether weights on the device are those that were updated; a write may come without a version (`p.data`)."""
    return chunk.checksum is None or chunk.checksum == chunk.present_checksum()


def _same(one: Update, other: Update) -> bool:
    return (
        one.parameter is other.parameter
        and one.piece is other.piece
        and one.cut == other.cut
        and one.factor == other.factor
        and _same_values(_copied(one.group), other.group)
        # What has no elements is not updated early.
        and (one.cut.numel == 0 or (_same_place(one.gradient, other.gradient) and _same_values(one.state, other.state)))
    )


def _same_place(one: Tensor | OffloadedPart, other: Tensor | OffloadedPart) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, OffloadedPart) and isinstance(other, OffloadedPart):
        return one.vector is other.vector and one.start == other.start and one.shape == other.shape
    return False


def _same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, OffloadedPart) or isinstance(other, OffloadedPart):
        return _same_place(one, other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    same = type(one) is type(other) and one == other
    return same is True


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters, or states of a parameter, as they are now."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for key, value in values.items()
        if key != "params"
    }
