"""The optimizer step on the host, chunk by chunk, with copies from and to the device one chunk ahead.

    to the host     gradients of chunk i+1 (and weights, where there is no master copy)
    on the host     chunk i is updated
    to the device   new weights of chunk i-1

Memory is that of two chunks each way, page-locked where there is a GPU.

States are read ahead and written behind, chunk by chunk.

Memory is that of a few chunks (`offload.chunks`), whatever the size of the model. New weights go straight into the
parameters. Chunks in host memory are updated where they lie, and those whose state is kept on the device
(`offload.optimizer_ratio`), there. Every update rule that works element by element gives the same bits as with all of
its state on the device.

What changes goes on being written when a step returns, beside the next forward. While the next backward runs, the first
chunks of the next step are read, as many as there are slots; neither depends on what gradients are multiplied by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import Chunk, ChunkSlots, OffloadedPart, OffloadedVector
from zero_strategy.offload.stores import SLOTS
from zero_strategy.offload.tier import DeviceCopies, HostMemory, Landing
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.optim.coded_state import SCALES, blocks_within
from zero_strategy.optim.fused import Segment, UpdateRule
from zero_strategy.optim.pieces import Row
from zero_strategy.runtime.host_threads import share_of_cores

# Bytes: each tensor of a room begins at a cache line, and so at a multiple of its elements' size.
_ALIGNMENT = 64
# One chunk is used while the next one arrives, or leaves.
_ROOMS = 2


@dataclass
class _Room:
    """Host memory for the tensors of one chunk, and the copies that use it."""

    memory: HostMemory | None = None
    landings: list[Landing] = field(default_factory=list)

    def tensors(self, like: Sequence[Tensor], pinned: bool) -> list[Tensor]:
        """Room for tensors like these, once no copy uses it any more."""
        for landing in self.landings:
            landing.on_host()
        self.landings = []
        begins, end = [], 0
        for tensor in like:
            begins.append(end)
            end += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        if end and (self.memory is None or self.memory.nbytes < end):
            self.memory = HostMemory(end, pinned=pinned)
        return [
            torch.empty(0, dtype=tensor.dtype)
            if self.memory is None or not tensor.numel()
            else self.memory.bytes[begin : begin + tensor.numel() * tensor.itemsize].view(tensor.dtype)
            for begin, tensor in zip(begins, like, strict=True)
        ]


class StepCopies:
    """The copies of one optimizer's steps.

    Args:
        copies: Makes them.
        pinned: Page-lock memory for them.
    """

    def __init__(self, copies: DeviceCopies, pinned: bool) -> None:
        self._copies, self._pinned = copies, pinned
        self._down, self._up = [[_Room() for _ in range(_ROOMS)] for _ in range(2)]
        self._wanted: list[Sequence[Tensor]] = []
        self._arriving: list[list[Tensor]] = []
        self._taken = self._given = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that have been taken."""
        return sum(room.memory.nbytes for room in (*self._down, *self._up) if room.memory is not None)

    def begin(self, wanted: Sequence[Sequence[Tensor]]) -> None:
        """Before a step: flat tensors of the device that its chunks will ask for, chunk by chunk, in this order."""
        self._wanted, self._arriving, self._taken = list(wanted), [], 0
        # The first chunk comes down while its state may still be on its way from the tier.
        self._fetch_until(1)

    def take(self) -> list[Tensor]:
        """Requests of the next chunk, in host memory; they stay until the chunk after it is taken."""
        number, self._taken = self._taken, self._taken + 1
        for landing in self._down[number % _ROOMS].landings:
            landing.on_host()
        # The next one takes the room of the chunk before, which has been updated by now, and comes down beside this
        # one's update.
        self._fetch_until(number + 2)
        return self._arriving[number]

    def _fetch_until(self, stop: int) -> None:
        for number in range(len(self._arriving), min(stop, len(self._wanted))):
            room = self._down[number % _ROOMS]
            self._arriving.append(room.tensors(self._wanted[number], self._pinned))
            pairs = zip(self._wanted[number], self._arriving[number], strict=True)
            room.landings = [self._copies.down(source, target) for source, target in pairs]

    def new_weights(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Host memory for a chunk's new weights, to be given with `give`."""
        # The rooms take turns: `tensors` waits for what was given two chunks ago, and not for the last one.
        self._given += 1
        return self._up[self._given % _ROOMS].tensors(like, self._pinned)

    def give(self, weights: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Begin to bring them to the device."""
        room = self._up[self._given % _ROOMS]
        room.landings = [self._copies.up(source, target) for source, target in zip(weights, targets, strict=True)]

    def end(self) -> None:
        """After a step: let the device wait for what was given, and want nothing more."""
        self._wanted, self._arriving = [], []
        for room in self._up:
            for landing in room.landings:
                landing.on_device()  # The host goes on: it waits only when a room is used again


MASTER, WEIGHTS, GRADIENT = "master weights", "weights", "gradient"
"""Keys of a chunk's vectors beside those of the optimizer's state."""
ChunkKey = tuple[int, int]
"""The id of a bucket, and the number of a chunk of its vectors."""
Numbers = dict[int, dict[str, Any]]
"""By the id of a parameter: its state after a step."""
_HOST = torch.device("cpu")


@dataclass
class Update:
    """Update of this rank's part of one parameter in a step.

    Attributes:
        group: Its param group.
        row: The parameter and where it lies.
        piece: What the optimizer sees of it.
        cut: Its part of the bucket's owned elements.
        gradient: Flat; where gradients are in a tier, what stands for it.
        factor: What the gradient is multiplied by first.
        state: Numbers, and `OffloadedPart` in the place of tensors; empty before the first step.
    """

    group: dict[str, Any]
    row: Row
    piece: nn.Parameter
    cut: Piece
    gradient: Tensor | OffloadedPart
    factor: float
    state: dict[str, Any]

    @property
    def parameter(self) -> nn.Parameter:
        """The module's parameter."""
        return self.row.parameter

    @property
    def bucket(self) -> ParameterBucket:
        """The bucket that it lies in."""
        return self.row.bucket

    @property
    def coded(self) -> bool:
        """True if its states have 8 bits."""
        return self.row.is_coded(self.group)


@dataclass
class Work(Chunk):
    """Tensors that are updated in a chunk; with the state of one `on_device`, where the bucket is.

    Attributes:
        on_device: Its state is kept there.
        weights: Weights are updated, too.
        updates: Of all parameters that have elements in it.
    """

    on_device: bool = False
    weights: bool = True
    updates: list[Update] = field(default_factory=list)


@dataclass
class _Brought:
    """Data from a device for the update of a part of a parameter on the host, and where new weights go.

    Attributes:
        gradient: In host memory; None: it is in a tier.
        weights: Host memory for new ones, with the present ones where there is no master copy; None: in a tier.
        target: Where they go.
    """

    gradient: Tensor | None = None
    weights: Tensor | None = None
    target: Tensor | None = None


def _given(brought: Iterable[_Brought]) -> tuple[list[Tensor], list[Tensor]]:
    """New weights on the host, and where they go."""
    pairs = [(each.weights, each.target) for each in brought if each.weights is not None and each.target is not None]
    return [weights for weights, _ in pairs], [target for _, target in pairs]


class StreamedStep:
    """Carries steps out for one optimizer.

    Args:
        store: Where its state is.
        copies: Treat every bucket as on a device whose memory the host cannot use, and copy by these; default: those
            that are on one.
    """

    def __init__(self, store: ChunkStore, copies: DeviceCopies | None = None) -> None:
        self._store, self._slots, self._forced = store, ChunkSlots(SLOTS), copies is not None
        self._copies = None if copies is None else StepCopies(copies, pinned=False)
        self._last: list[Chunk] = []
        # Whoever settles the store, as a load does, waits for the reads and writes of steps, too.
        store.passes.append(self._slots)

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that steps have taken."""
        return self._slots.nbytes + (0 if self._copies is None else self._copies.nbytes)

    @torch.no_grad()
    def run(
        self,
        rule: UpdateRule,
        updates: Sequence[Update],
        vectors: dict[int, dict[str, OffloadedVector]],
        scale: float,
        weights: bool = True,
    ) -> None:
        """Take one step.

        Args:
            rule: An elementwise one.
            updates: All that it changes.
            vectors: By the id of a bucket: those of the optimizer's state, by key.
            scale: What gradients are multiplied by first.
            weights: Whether it changes weights; if not, nothing of them is read, and the rule gets gradients instead.

        Raises:
            OSError: If the tier fails. Some chunks have then taken the step and others have not: state in files is
            refused until a checkpoint is loaded.
        """
        # A read ahead that failed in a backward is raised here, before anything changes.
        self._slots.tell_failure()
        chunks = self.chunks(updates, vectors, weights)
        for store in {vector.store for chunk in chunks for vector in chunk.vectors.values()}:
            store.flush()  # weights may be in another tier than what updates them
        # After the flush, which may have moved records that were read ahead.
        self._slots.check_ahead(chunks)
        for chunk in chunks:
            # After that check: it compares versions, and would find nothing that still serves.
            for key, vector in chunk.vectors.items():
                vector.version += key not in chunk.unchanged
        steps: Numbers = {}
        copies = self._begin_copies(chunks)

        def work(chunk: Chunk, held: dict[str, Tensor]) -> None:
            assert isinstance(chunk, Work)
            self._update(rule, chunk, held, scale, steps, copies)

        try:
            with share_of_cores():  # Under torchrun a rank has one thread, and this is work of the host
                self._slots.run(chunks, work, wait=False)  # Writes end beside the next forward
        finally:
            if copies is not None:
                # Also after an error: what the device does next must not overtake weights that are on their way to it.
                copies.end()
        self._last = list(map(_bare, chunks))
        for update in updates:
            if update.cut.numel == 0:
                steps[id(update.parameter)] = _count_only(rule, update, scale)
            # Not before the last chunk: all chunks of a parameter begin with the numbers from before the step.
            update.state.update(steps[id(update.parameter)])

    def _begin_copies(self, chunks: Sequence[Work]) -> StepCopies | None:
        """Begin to bring what a step over these chunks needs of the device; None: nothing is there."""
        devices = [update.bucket.device for chunk in chunks for update in chunk.updates if self._is_away(chunk, update)]
        if not devices:
            return None
        if self._copies is None:
            self._copies = StepCopies(DeviceCopies(devices[0]), pinned=True)
        self._copies.begin([self._wanted(chunk) for chunk in chunks])
        return self._copies

    def _is_away(self, chunk: Work, update: Update) -> bool:
        """True if the bucket is on a device, and the chunk is updated on the host."""
        return not chunk.on_device and (self._forced or update.bucket.device != _HOST)

    def _wanted(self, chunk: Work) -> list[Tensor]:
        """Data from the device for an update of the chunk on the host, in the order in which `_brought` takes it."""
        found = []
        for update in chunk.updates if not chunk.on_device else ():
            if self._is_away(chunk, update):
                low, high = _overlap(update, chunk)
                if isinstance(update.gradient, Tensor):
                    found.append(update.gradient[low - update.cut.offset : high - update.cut.offset])
                if chunk.weights and not chunk.vectors.keys() & {WEIGHTS, MASTER}:
                    found.append(update.bucket.weights.values[low:high])
        return found

    def _brought(self, chunk: Work, copies: StepCopies) -> dict[int, _Brought]:
        """Data of a chunk on the device, by the position of the update, with room for new weights."""
        away = [number for number, update in enumerate(chunk.updates) if self._is_away(chunk, update)]
        arrived, found = iter(copies.take()), {number: _Brought() for number in away}
        if chunk.weights and WEIGHTS not in chunk.vectors:
            places = {number: _overlap(chunk.updates[number], chunk) for number in away}
            targets = [chunk.updates[number].bucket.weights.values[slice(*places[number])] for number in away]
            for number, target, room in zip(away, targets, copies.new_weights(targets), strict=True):
                found[number].target, found[number].weights = target, room
        for number, each in found.items():
            if isinstance(chunk.updates[number].gradient, Tensor):
                each.gradient = next(arrived)
            if each.weights is not None and MASTER not in chunk.vectors:
                each.weights.copy_(next(arrived))
        return found

    def read_ahead(self) -> None:
        """Begin to read what the next step begins with, if it is like the last one; what fails, that step raises."""
        try:
            for store in {vector.store for chunk in self._last for vector in chunk.vectors.values()}:
                # Reads are of records, which have not got yet what was changed in the cache.
                store.write_changes()
            self._slots.read_ahead(self._last)
        except OSError as error:
            self._slots.failure = error
        except RuntimeError:  # an inconsistent record, which the step will meet, too
            self._last = []

    def forget(self) -> None:
        """Return when nothing of steps is read or written any more; errors are nobody's."""
        self._last, self._slots.failure = [], None
        self._slots.forget_ahead()
        with contextlib.suppress(OSError):
            self._slots.settle()

    def close(self) -> None:
        """Take no more steps."""
        self.forget()
        self._store.passes.remove(self._slots)

    def chunks(
        self, updates: Sequence[Update], vectors: dict[int, dict[str, OffloadedVector]], weights: bool = True
    ) -> list[Work]:
        """Chunks that hold something to update, in the order of buckets and elements; see `run`."""
        found: dict[ChunkKey, Work] = {}
        held_by: dict[ChunkKey, dict[str, OffloadedVector]] = {}
        for update in updates:
            bucket, cut = update.bucket, update.cut
            cuts = self._store.cuts(bucket.owned.stop - bucket.owned.start)
            for number, *_ in cuts.overlapping(cut.offset, cut.offset + cut.numel) if cut.numel else ():
                key = (id(bucket), number)
                if key not in found:
                    held = held_by[key] = dict(vectors.get(id(bucket), {}))
                    if weights and bucket.has_master and bucket.master.vector is not None:
                        held[MASTER] = bucket.master.vector
                    if weights and bucket.weights.vector is not None:
                        held[WEIGHTS] = bucket.weights.vector
                    place, on_device = cuts.chunks[number], number < cuts.heads
                    unchanged = frozenset([GRADIENT])
                    found[key] = Work(number, *place, held, unchanged=unchanged, on_device=on_device, weights=weights)
                if isinstance(update.gradient, OffloadedPart):  # not those of all: Muon's may have come to memory
                    held_by[key][GRADIENT] = update.gradient.vector
                found[key].updates.append(update)
        if not any(update.coded for update in updates):
            return list(found.values())
        # Parameters of one unit lie by turns in two buckets, of 8 bits and of 32: bucket by bucket, as planned.
        order = {identity: place for place, identity in enumerate(dict.fromkeys(identity for identity, _ in found))}
        return [found[key] for key in sorted(found, key=lambda key: (order[key[0]], key[1]))]

    def _update(
        self,
        rule: UpdateRule,
        chunk: Work,
        held: dict[str, Tensor],
        scale: float,
        steps: Numbers,
        copies: StepCopies | None,
    ) -> None:
        segments: list[Segment] = []
        back: list[tuple[Tensor, Tensor]] = []
        brought = {} if copies is None else self._brought(chunk, copies)
        for number, update in enumerate(chunk.updates):
            low, high = _overlap(update, chunk)
            here = slice(low - chunk.start, high - chunk.start)
            home = update.bucket.device if chunk.on_device else _HOST
            weights: Tensor | None = None
            if chunk.weights:
                weights = held[WEIGHTS][here] if WEIGHTS in held else update.bucket.weights.values[low:high]
            if weights is None:
                pass
            elif (here_too := brought.get(number)) is not None:
                weights = weights if here_too.weights is None else here_too.weights
            elif weights.device != home or (self._forced and chunk.on_device and WEIGHTS in held):
                # Weights and state lie on different devices: a copy is updated where the state is, and brought back
                # below.
                away, weights = weights, weights.to(home, copy=True)
                back.append((away, weights))
            parts = {key: values[here] for key, values in held.items()}
            gradient = brought[number].gradient if number in brought else None
            segments.append(_segment(update, low, high, weights, parts, home, gradient))
        rule.update(segments, scale)
        for away, weights in back:
            away.copy_(weights)
        if copies is not None:
            copies.give(*_given(brought.values()))
        for update, segment in zip(chunk.updates, segments, strict=True):
            low, _ = _overlap(update, chunk)
            numbers: dict[str, Any] = {}
            for key, value in segment.state.items():
                if key in SCALES:
                    numbers[key] = _with_scales(update, steps, key, low, value)
                    continue
                if key not in chunk.vectors:
                    numbers[key] = value
                    continue
                place = held[key][low - chunk.start :][: value.numel()]
                if value.data_ptr() != place.data_ptr():  # made in this step
                    place.copy_(value)
                numbers[key] = chunk.vectors[key].part(update.cut.offset, update.piece.shape)
            steps[id(update.parameter)] = numbers


def _with_scales(update: Update, steps: Numbers, key: str, low: int, values: Tensor) -> Tensor:
    """The scales of a piece, with those of the part of it that begins at the owned element `low`."""
    known = steps.get(id(update.parameter), update.state).get(key)
    scales: Tensor = torch.zeros(blocks_of(update.cut.numel)) if known is None else known
    scales[blocks_of(low - update.cut.offset) :][: values.numel()].copy_(values)
    return scales


def _bare(chunk: Work) -> Chunk:
    """The chunk alone, which keeps no gradient alive."""
    return Chunk(chunk.number, chunk.start, chunk.stop, chunk.vectors, chunk.unread, chunk.unchanged)


def _overlap(update: Update, chunk: Work) -> tuple[int, int]:
    """The owned elements of an update that lie in a chunk."""
    return max(chunk.start, update.cut.offset), min(chunk.stop, update.cut.offset + update.cut.numel)


def _segment(
    update: Update,
    low: int,
    high: int,
    weights: Tensor | None,
    held: dict[str, Tensor],
    home: torch.device,
    gradient: Tensor | None = None,
) -> Segment:
    """Elements [low, high) of the owned ones as the rule takes them, on the device `home`, maybe with the gradient."""
    state: dict[str, Any] = {
        # Numbers are copied: the rule counts on in each chunk of a parameter, from the same one.
        key: held[key] if isinstance(value, OffloadedPart) else value.clone() if isinstance(value, Tensor) else value
        for key, value in update.state.items()
    }
    blocks = slice(*blocks_within(low - update.cut.offset, high - update.cut.offset))
    state.update({key: value[blocks] for key, value in state.items() if key in SCALES})
    if gradient is not None:
        assert gradient.numel() == high - low
    elif isinstance(update.gradient, Tensor):
        gradient = update.gradient[low - update.cut.offset : high - update.cut.offset].to(home)
    else:
        gradient = held[GRADIENT].to(home)
    if weights is None:
        param, copy = gradient, None
    else:
        param, copy = (held[MASTER], weights) if MASTER in held else (weights, None)
    own = update.group, param, gradient, state, param, copy, update.factor, update.parameter
    return Segment(*own, coded=update.coded)


def _count_only(rule: UpdateRule, update: Update, scale: float) -> dict[str, Any]:
    """The step of a piece without elements: its numbers move on as those of others do."""
    state = {
        key: torch.empty(0, dtype=value.dtype) if isinstance(value, OffloadedPart) else value
        for key, value in update.state.items()
    }
    empty = torch.empty(0)
    rule.update([Segment(update.group, empty, empty, state, like=empty, owner=update.parameter)], scale)
    return {
        key: value.view(update.piece.shape) if isinstance(value, Tensor) and value.numel() == 0 else value
        for key, value in state.items()
    }
