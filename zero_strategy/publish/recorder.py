"""Changes of this rank's slices of the weights, coded while the optimizer's steps make them.

A step tells the recorder of each bucket before and after it changes its values, so that former values of one bucket are
kept at a time: in the published dtype, of this rank's slice. A thread codes the differences beside the rest of the
step. What changes otherwise (a load, writes in `GatheredParameters`, averages swapped in) shows in the buckets'
`generation`, and such a bucket's values are published as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.agreement import state_dict_entries, whole_shape
from zero_strategy.comm.delta import Words, changed_of, dense, encode, words_of
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.publish.folder import Digest
from zero_strategy.publish.host_copies import SliceCopies, SliceCopy
from zero_strategy.runtime.worker import BackgroundWorker
from zero_strategy.train_state import TrainState

_RANGE = 1 << 20
"""Elements that are coded as one; a bound of what coding needs besides."""
_MOST_WAITING = 2
"""Buckets whose differences may wait for the thread."""


@dataclass(frozen=True)
class _Range:
    """Consecutive elements of a parameter in this rank's slice; `offset` counts from the slice's start."""

    key: str
    offset: int
    numel: int


@dataclass
class _Log:
    """Facts about a bucket's changes since the last version.

    Attributes:
        ranges: Of this rank's slice.
        most: Bytes of its values, beyond which changes are dropped.
        seen: The bucket's generation up to which all changes are known; None: within a step.
        payloads: Coded changes by key, one after the other; None: these are unknown, or more than the values.
        former: Values before the step that is under way.
        copy: The same, of a device, on their way to the host.
        last: The copy of the values after the last step, on a device.
        coding: A job of the thread.
    """

    ranges: list[_Range]
    most: int
    seen: int | None = None
    payloads: dict[str, bytes] | None = field(default_factory=dict)
    former: list[Words] = field(default_factory=list)
    copy: SliceCopy | None = None
    last: SliceCopy | None = None
    coding: Future[None] | None = None


class ChangeRecorder:
    """Records the changes of this rank's slices; the first rank's buffers are compared with a copy.

    Args:
        engine: Whose.
        dtype: In which floating-point values are published; None: their own.
    """

    def __init__(self, engine: TrainState, dtype: torch.dtype | None) -> None:
        self._engine, self._dtype = engine, dtype
        # Kept apart: a publisher may be closed when the engine has given its model back.
        self._recorders = engine.model.recorders
        self._logs: dict[int, _Log] = {}
        self._buffers: dict[str, Words] = {}
        self._thread = BackgroundWorker("zero-publish")
        self._coding: list[_Log] = []
        self._errors: list[BaseException] = []
        self._copies = SliceCopies(engine.model.device)

    # ---- told by the optimizers' steps ----

    def before(self, buckets: Sequence[ParameterBucket]) -> None:
        """See `ValueRecorder`."""
        for bucket in buckets:
            log = self._logs.get(id(bucket))
            if log is None:
                continue
            # Before the count is compared: what was assigned to a parameter is a change that no step makes.
            bucket.follow_edits()
            # The thread reads values as the last step left them, and this step changes them.
            self._await(log)
            if log.seen != bucket.generation:
                log.payloads = None
            # Until `after`: a step that fails in between leaves changes that nobody has coded.
            log.seen = None
            # Each of these keeps former values in memory.
            while len(self._coding) >= _MOST_WAITING:
                self._await(self._coding.pop(0))
            self._drop_copy(log)  # of a step that failed
            if log.last is not None:
                log.last.let_change()
            if log.payloads is None:
                continue
            if self._goes_beside(bucket, log):
                log.copy = self._copy(bucket, log)
                log.copy.let_change()
            else:
                log.former = [words_of(self._values(bucket, each, copy=True)) for each in log.ranges]

    def after(self, buckets: Sequence[ParameterBucket]) -> None:
        """See `ValueRecorder`."""
        for bucket in buckets:
            log = self._logs.get(id(bucket))
            if log is None:
                continue
            former, log.former, log.seen = log.former, [], bucket.generation
            if log.payloads is None:
                self._drop_copy(log)
                continue
            if log.copy is not None:
                old, log.copy = log.copy, None
                log.last = self._copy(bucket, log)
                log.coding = self._thread.submit(partial(self._code_copies, log, old, log.last))
                self._coding.append(log)
                continue
            now: Iterable[Words] = self._now(bucket, log)
            if bucket.shard.vector is not None:  # a tier's files are this thread's
                self._code(log, former, now)
                continue
            # Host memory is read where it is coded.
            log.coding = self._thread.submit(partial(self._code, log, former, now))
            self._coding.append(log)

    def _now(self, bucket: ParameterBucket, log: _Log) -> Iterator[Words]:
        return (words_of(self._values(bucket, each)) for each in log.ranges)

    def _goes_beside(self, bucket: ParameterBucket, log: _Log) -> bool:
        """True if values come from a device by copies that nobody waits for here."""
        return bool(log.ranges) and bucket.shard.vector is None and not self._copies.at_once

    def _copy(self, bucket: ParameterBucket, log: _Log) -> SliceCopy:
        """Begin one copy of all ranges, with what lies between them."""
        first, last = log.ranges[0].offset, log.ranges[-1].offset + log.ranges[-1].numel
        values = bucket.shard.read(first, last).detach()
        return self._copies.begin(values, first, self._converted(values.dtype))

    def _drop_copy(self, log: _Log) -> None:
        if log.copy is not None:
            self._copies.give_back(log.copy)
            log.copy = None

    def _code_copies(self, log: _Log, former: SliceCopy, new: SliceCopy) -> None:
        """Code changes, in the thread, when values are there."""
        try:
            former.wait()
            new.wait()
            self._code(log, former.words(log.ranges), new.words(log.ranges))
        finally:
            self._copies.give_back(former)
            self._copies.give_back(new)

    def _await(self, log: _Log) -> None:
        """Wait for its coding; after an error there, which `take` raises, its changes are unknown."""
        job, log.coding = log.coding, None
        # Kept for `take`: an exception here would leave the step half done, on this rank alone.
        if job is not None and (error := job.exception()) is not None:
            log.payloads = None
            self._errors.append(error)

    @staticmethod
    def _code(log: _Log, former: Iterable[Words], now: Iterable[Words]) -> None:
        """Code changes, in the thread; the bucket's next `before` waits for it: values are those after this step."""
        assert log.payloads is not None
        held = sum(map(len, log.payloads.values()))
        for each, words, new in zip(log.ranges, former, now, strict=True):
            payload = encode(words, new)
            held += len(payload)
            # At once, not in `take`: many steps may come before it, and each adds its changes.
            if held > log.most:
                log.payloads = None
                return
            if payload:
                log.payloads[each.key] = log.payloads.get(each.key, b"") + payload

    # ---- asked by the publisher ----

    def begin(self) -> None:
        """Forget changes: the present values are known to readers."""
        self._wait()
        self._logs = {id(bucket): self._new_log(bucket) for bucket in self._engine.model.buckets}
        # Before values count as known: edits that wait are part of them.
        self._engine.model.follow_edits()
        self._know_all()
        self._buffers = {key: words_of(values).copy() for key, values in self._present_buffers()}
        # Last: a step may call as soon as it is there.
        self._recorders.add(self)

    def end(self) -> None:
        """Record nothing any more."""
        self._recorders.discard(self)
        # Until it is over the thread reads values, which may go once this returns; errors have nobody to hear of them.
        for log in self._coding:
            self._await(log)
        for log in self._logs.values():
            if log.copy is not None:  # of a step that failed; its memory must not go under it
                log.copy.wait()
        self._logs, self._buffers, self._coding, self._errors = {}, {}, [], []
        self._copies.close()

    def _new_log(self, bucket: ParameterBucket) -> _Log:
        ranges = list(_ranges(bucket))
        return _Log(ranges, sum(each.numel for each in ranges) * self._converted(bucket.dtype).itemsize)

    def _know_all(self) -> None:
        for bucket in self._engine.model.buckets:
            log = self._logs[id(bucket)]
            log.seen, log.payloads, log.former = bucket.generation, {}, []

    def take(self) -> tuple[dict[str, bytes], int]:
        """Payloads of what has changed since the last version, and how many elements; from now on readers know it."""
        # First: payloads are the thread's until it has ended.
        self._wait()
        self._engine.model.follow_edits()
        found: dict[str, bytes] = {}
        for bucket in self._engine.model.buckets:
            log = self._logs[id(bucket)]
            known = log.payloads if log.seen == bucket.generation else None
            if known is None:
                known = {each.key: dense(words_of(self._values(bucket, each))) for each in log.ranges}
            found |= known
        for key, values in self._present_buffers():
            words = words_of(values)
            if payload := encode(self._buffers[key], words):
                found[key] = payload
                self._buffers[key] = words.copy()
        self._know_all()
        return found, sum(map(changed_of, found.values()))

    def _wait(self) -> None:
        waiting, self._coding = self._coding, []
        for log in waiting:
            self._await(log)
        # All at once: they are of one step, or follow from it, and the next version begins anew.
        errors, self._errors = self._errors, []
        for error in errors[:1]:
            raise error

    def places(self) -> list[list[object]]:
        """[name, first element, elements] of all that this rank publishes."""
        sizes = {each.key: each.numel for log in self._logs.values() for each in log.ranges}
        sizes |= {key: len(words) for key, words in self._buffers.items()}
        return [[key.rpartition("@")[0], int(key.rpartition("@")[2]), numel] for key, numel in sizes.items()]

    def digest(self) -> str:
        """The digest of the present values; see `Digest`."""
        places = {each.key: (bucket, each) for bucket in self._engine.model.buckets for each in _ranges(bucket)}
        digest = Digest()
        # The order of keys, in which a reader adds its values, too.
        for key in sorted(places.keys() | self._buffers.keys()):
            digest.add(key, words_of(self._values(*places[key])) if key in places else self._buffers[key])
        return digest.text()

    def sizes(self) -> tuple[int, int]:
        """Elements of the model, and bytes of all values, published as they are."""
        tensors = [tensor for _, tensor in state_dict_entries(self._engine.module)]
        sizes = [math.prod(whole_shape(self._engine, tensor)) for tensor in tensors]
        nbytes = sum(size * self._converted(tensor.dtype).itemsize for size, tensor in zip(sizes, tensors, strict=True))
        return sum(sizes), nbytes

    def _converted(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype

    def _values(self, bucket: ParameterBucket, each: _Range, *, copy: bool = False) -> Tensor:
        """Values on the host, flat; a view where that serves."""
        return self._host(bucket.shard.read(each.offset, each.offset + each.numel).detach(), copy=copy)

    def _present_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(name@0, flat values on the host) of buffers, on the first rank."""
        for name, tensor in state_dict_entries(self._engine.module) if self._engine.mesh.world_group.rank == 0 else ():
            if not isinstance(tensor, nn.Parameter) and tensor.numel():
                yield f"{name}@0", self._host(tensor.detach().reshape(-1))

    def _host(self, values: Tensor, *, copy: bool = False) -> Tensor:
        return values.to(device="cpu", dtype=self._converted(values.dtype), copy=copy).contiguous()


def _ranges(bucket: ParameterBucket) -> Iterator[_Range]:
    for piece in bucket.slice_pieces:
        # Experts of this rank are one range of all of them.
        begin = bucket.parts[piece.index].offset + piece.start
        for start in range(0, piece.numel, _RANGE):
            key = f"{bucket.names[piece.index]}@{begin + start}"
            yield _Range(key, piece.offset + start, min(_RANGE, piece.numel - start))
