"""The parameters of one bucket: unsharded, sharded, released, and their fp32 master copy.

Parameters are unsharded, sharded or released; the fp32 master copy is beside them.

`nn.Parameter` objects are never replaced and never change their shape. Their `.data` (of a tensor-parallel one, that of
the tensor it holds) points into the bucket's flat buffer, or, while the bucket is released (stage 3), at a poison: one
NaN expanded to the logical shape, 4 bytes that read as NaN.

What autograd saves for backward are views of the flat buffer, so a release empties the *storage* and a later gather
refills the same storage object; nothing that autograd holds goes stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from threading import Lock
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.mesh import ShardRanks
from zero_strategy.fsdp.arriving import can_wait, show_arrived, show_arriving
from zero_strategy.fsdp.dtensor import TensorPart, held_by, is_dtensor, local_values, part_of, recast, whole_of
from zero_strategy.fsdp.gathered_codes import GatheredCodes
from zero_strategy.fsdp.layout import LOW_PRECISION, BucketLayout, Piece, Placement, build_layout, cuts
from zero_strategy.fsdp.released import EditWatch, release_classes, unshard_classes
from zero_strategy.fsdp.shard_storage import InMemory, ShardStorage, StorageSite
from zero_strategy.fsdp.tracked import SET_DATA, track_classes, untrack_classes
from zero_strategy.fsdp.user_writes import UserWrites
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedVector
from zero_strategy.offload.tier import Landing, streams_of
from zero_strategy.runtime.torch_private import (
    DisableTorchFunctionSubclass,
    holders_of,
    in_transform,
    outside_transforms,
    without_grad,
)

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function `without_grad` and out of inference mode, whose tensors could not be saved for a backward.

    Out of `torch.func`'s transforms as well, which refuse writes to what they did not make.
    """

    here = without_grad(function)
    plainly = outside_transforms(here)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return plainly(*args, **kwargs)
        # Four times per unit and step: calls around calls only where they are needed.
        return plainly(*args, **kwargs) if in_transform() else here(*args, **kwargs)

    return call


class ParameterBucket:
    """Parameters of one unit with the same dtype and trainability, in one flat buffer.

    Args:
        named_parameters: (name, parameter); all of one dtype and device.
        ranks: Those that share the bucket.
        placement: What is divided among them.
        dtype: Dtype that the parameters take (their compute dtype).
        master_weights: Keep an fp32 master copy of owned elements of trainable low-precision parameters.
        blank: The parameters' values are about to be loaded: do not look at the present ones.
        store: Where the master copy is kept; None: in memory.
        shard_store: Where the own slice is kept (sharded parameters); None: in memory.
        whole, turn, block: See `build_layout`.
        part_of: Tells what this rank has of a parameter.

    Attributes:
        parameters: The parameter objects, in bucket order.
        whole: Each lies inside of one rank's slice.
        parts: What this rank has of each: all of it, but for tensor-parallel ones.
        tensors: What holds these values: the parameters themselves, or what lies in those that are `DTensor`s.
        layout: Where each part lies.
        owned: First and one-past-last bucket element whose optimizer state this rank holds.
        pieces: The parts of parameters inside `owned`.
        slice_pieces: The parts of parameters inside `slice`; offsets count from its start.
        piece_of, slice_piece_of: The same by parameter index.
        cuts: How the owned elements are split into `pieces`, see `layout.cuts`.
        flat: The whole bucket, (layout.numel,); its storage is empty while released. Whoever takes it waits for values
            that are on their way.
        shard: This rank's slice, (layout.slice_numel,); part of `flat` unless parameters are sharded.
        weights: The owned elements in the parameters' dtype: `shard`, or all of `flat`.
        master: What the optimizer updates, (owned elements,): an fp32 copy, or `weights` itself.
        average: A running average of `master`, at least float32, (owned elements,); None: none is kept.
        kept: Sharded parameters that are whole, and up to date, stay so until they are let go, whoever uses them.
        kept_again: They will be kept when they have been brought up to date.
        editors: Scopes under way whose rank's writes become the parameters.
        writes: What user code writes to the parameters while they are full.
        watches: Those that look for writes that would be lost.
        codes: What forward and backward may have of it instead of values; None: they have its values.
        generation: Counts changes of values that are none of an optimizer's step.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        ranks: ShardRanks,
        placement: Placement,
        dtype: torch.dtype,
        master_weights: bool = True,
        blank: bool = False,
        store: ChunkStore | None = None,
        shard_store: ChunkStore | None = None,
        whole: bool = False,
        turn: int = 0,
        block: int = 1,
        part_of: Callable[[nn.Parameter], TensorPart] = part_of,
    ) -> None:
        self.ranks, self.placement, self.dtype, self.whole = ranks, placement, dtype, whole
        parts = {name: part_of(parameter) for name, parameter in named_parameters}
        shapes = [(name, part.local_shape) for name, part in parts.items()]
        self.layout: BucketLayout = build_layout(
            shapes, dtype.itemsize, ranks.shard_size, ranks.replicate.size, whole=whole, turn=turn, block=block
        )
        # From here on in the order of the segments, which is another one where parameters stay whole.
        by_name = dict(named_parameters)
        named_parameters = [(segment.name, by_name[segment.name]) for segment in self.layout.segments]
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.device = self.parameters[0].device
        self.trainable = self.parameters[0].requires_grad
        self._keep_master = master_weights and dtype in LOW_PRECISION
        self._shard_site = StorageSite(shard_store, weights_name(self.names[0]))
        self._master_site = StorageSite(store, master_name(self.names[0]))
        self._average_site = StorageSite(store, average_name(self.names[0]))
        self.generation = 0
        self.codes: GatheredCodes | None = None
        self.shard: ShardStorage
        self.weights: ShardStorage
        self.master: ShardStorage
        self.average: ShardStorage | None = None
        self.parts = [parts[name] for name in self.names]
        self.tensors: list[Tensor] = [held_by(parameter) for parameter in self.parameters]
        self.slice = slice(*self.layout.slice_bounds(ranks.shard_rank))
        self.owned = self.slice if placement.shard_optimizer else slice(0, self.layout.numel)
        self.pieces: tuple[Piece, ...] = self.layout.pieces(self.owned.start, self.owned.stop)
        self.slice_pieces: tuple[Piece, ...] = self.layout.pieces(self.slice.start, self.slice.stop)
        self.piece_of = {piece.index: piece for piece in self.pieces}
        self.cuts = cuts(self.pieces, self.owned.stop - self.owned.start)
        self.slice_piece_of = {piece.index: piece for piece in self.slice_pieces}
        self._poison = torch.full((len(self.parameters),), _poison_value(dtype), dtype=dtype, device=self.device)
        self._poison_views = [
            self._poison[index : index + 1].expand(segment.numel).view(segment.shape)
            if segment.numel == 0
            else self._poison[index].expand(segment.shape)
            for index, segment in enumerate(self.layout.segments)
        ]
        self._pending: PendingWork | None = None
        self._arrival: _Arrival | None = None
        self._arriving_lock = Lock()
        self.kept = self.kept_again = False
        self.writes = UserWrites(self)
        self.editors, self.watches = 0, list[EditWatch]()
        self.gathered = True
        self._fill(blank)
        # Writes count from here on: what was written before is in the bucket.
        self.writes.note()

    @property
    def flat(self) -> Tensor:
        """See the class."""
        if self._arrival is not None:
            self.arrive()
        return self._flat

    @flat.setter
    def flat(self, flat: Tensor) -> None:
        self._flat = flat
        self._own: Tensor | None = None

    @property
    def _slice_apart(self) -> bool:
        """True if the slice has a place of its own, and `flat` memory only while it is gathered."""
        return self.placement.shard_parameters and not self.placement.in_place

    def _place_slice(self, *, blank: bool) -> None:
        """Let the slice have its place: in `flat`, or one of its own; with `blank` it is zeros where it is sharded."""
        own = self.flat[self.slice]
        if not self._slice_apart:
            if blank and self.placement.shard_parameters:
                own.zero_()
            self._link_parts()
        else:
            site, numel = self._shard_site, own.numel()
            made = site.zeros(numel, self.dtype, self.device, None) if blank else site.copy_of(own, self.dtype, None)
            self.shard = self.weights = made

    def _link_parts(self) -> None:
        """Let the slice and the owned elements be parts of `flat`."""
        self.shard = InMemory(self.flat[self.slice])
        self.weights = self.shard if self.placement.shard_optimizer else InMemory(self.flat)

    @property
    def keeps_master(self) -> bool:
        """True if there are master weights from the first gradient on."""
        return self._keep_master

    @property
    def has_master(self) -> bool:
        """True if the master weights are a copy of their own."""
        return self.master is not self.weights and self.master.numel > 0

    @without_grad
    def _fill(self, blank: bool) -> None:
        """Take the parameters' present values, rank 0's, into the bucket; drop what they held before.

        With `blank` there are none yet: where parameters are sharded, only the shard's memory is touched.
        """
        if blank:
            # On the CPU pages that nobody writes to take no memory, and at most the slice is written to before the
            # bucket is released.
            make = torch.empty if self.placement.shard_parameters else torch.zeros
            self.flat = make(self.layout.numel, dtype=self.dtype, device=self.device)
            self._place_slice(blank=True)
            self._take_over()
            self.master = self.weights
            if self.trainable:
                self.make_master()
            return
        # In the dtype that the parameters came in: master weights are made of values that were not rounded yet.
        source = torch.empty(self.layout.numel, dtype=self.parameters[0].dtype, device=self.device)
        if self._first or self.ranks.copies.size > 1:  # others are sent all of it
            self._join(source)
        self._share_copies(source)
        self.ranks.gather.broadcast(source, 0, self.names)
        self.ranks.replicate.broadcast(source, 0, self.names)
        self.flat = source.to(self.dtype)
        self._place_slice(blank=False)
        self._take_over()
        self.master = self.weights
        if self.trainable:
            self.make_master(source[self.owned])

    @property
    def _first(self) -> bool:
        """True if this rank's values are taken."""
        return self.ranks.gather.rank == 0 and self.ranks.replicate.rank == 0

    def _join(self, source: Tensor) -> None:
        """Write the parameters' values to their places, and zeros between them."""
        end = 0
        for tensor, segment in zip(self.tensors, self.layout.segments, strict=True):
            source[end : segment.offset].zero_()
            source[segment.offset : segment.stop].copy_(tensor.detach().reshape(-1))
            end = segment.stop
        source[end:].zero_()

    def _share_copies(self, source: Tensor) -> None:
        """Parameters that tensor-parallel ranks do not divide start from the values of the first of these."""
        if self.ranks.copies.size == 1:
            return
        members = zip(self.parts, self.parameters, self.layout.segments, strict=True)
        places = [
            source[segment.offset : segment.stop]
            for part, parameter, segment in members
            if part.dim is None or not is_dtensor(parameter)
        ]
        if places:
            values = torch.cat(places).cpu()
            self.ranks.copies.broadcast(values, 0)
            for place, value in zip(places, values.split([place.numel() for place in places]), strict=True):
                place.copy_(value)

    def _take_over(self) -> None:
        """Give the parameters their dtype and their place in the bucket."""
        for parameter in self.parameters:
            recast(parameter, self.dtype, self.device)
        track_classes(self.parameters)
        # Again: a `DTensor` that was cast or moved holds another tensor now.
        self.tensors = [held_by(parameter) for parameter in self.parameters]
        self.views = [self.segment_view(index) for index in range(len(self.parameters))]
        self._point_at_flat()

    @without_grad
    def make_master(self, values: Tensor | None = None) -> None:
        """Make the fp32 master copy where one is due and missing, from `values` (owned elements) or the parameters."""
        if not self._keep_master or self.has_master:
            return
        if self.kept:  # and was frozen until now
            self.follow_edits()
        source = self.weights.read(0, self.weights.numel) if values is None else values
        self.master = self._master_site.copy_of(source, torch.float32, self.device)

    @without_grad
    def make_average(self, device: torch.device | None) -> None:
        """Keep an average from now on, beginning with the present values; nothing if there is one.

        Args:
            device: Where it lies, if in memory; None: beside the values.

        Raises:
            OSError: If the tier has no room for it.
        """
        if self.average is None:
            source, site = self.master, self._average_site
            dtype = torch.promote_types(source.dtype, torch.float32)
            place = self.device if device is None or not site.in_memory else device
            self.average = site.unset(source.numel, dtype, place)
            for start, stop in source.chunks:
                self.average.write(start, source.read(start, stop))

    def drop_average(self) -> None:
        """Give the average up."""
        if self.average is not None:
            self._average_site.release(self.average)
            self.average = None

    def _follow(self, start: int, stop: int) -> None:
        """Let a master weight whose parameter has changed take its value; others stay as fine as they are."""
        values = self.weights.read(start, stop)
        master = self.master.read(start, stop).to(values.device)  # in a tier it is the host's
        self.master.write(start, torch.where(values == master.to(self.dtype), master, values.float()))

    # ---- gather and release (sharded parameters) ----

    @property
    def pending(self) -> bool:
        """True if a gather is under way."""
        return self._pending is not None

    def start_unshard(self) -> None:
        """Begin to bring the whole bucket in, unless it is there or on its way."""
        if self.gathered or self._pending is not None:
            return
        if self.flat.device != self.device:  # in place, and moved
            raise RuntimeError(f"parameters {self.names} are on the host: call engine.reload_states() first")
        self._pending = self._gather(empty=not self.placement.in_place)

    @outside_inference
    def _gather(self, *, empty: bool) -> PendingWork:
        if empty:
            # On the computing stream, as the collective comes after it: so it comes after what used this memory before.
            self.flat.untyped_storage().resize_(self.layout.numel * self.flat.element_size())
        return self.ranks.gather.all_gather(self.flat, first=self._shard_arrives(), of=self.names)

    @outside_inference
    def gather_for_others(self) -> None:
        """Take part in a gather of ranks that need it. This rank's values stay as they are, gathered or not."""
        if not self.placement.shard_parameters:
            return
        aside = torch.empty(self.layout.numel, dtype=self.flat.dtype, device=self.device)
        first = None
        if self.placement.in_place:
            aside[self.slice].copy_(self.flat[self.slice])
        else:
            first = self.shard.bring_into(aside[self.slice])
        self.ranks.gather.all_gather(aside, first=first, of=self.names).wait()

    def _shard_arrives(self) -> Callable[[], Landing | None] | None:
        """Bring the own slice into the whole bucket: at once, or by what this returns."""
        if self.placement.in_place:
            return None
        if self._own is None:
            self._own = self.flat[self.slice]  # kept: a slice takes as long as the copy of a small one
        return self.shard.bring_into(self._own)

    def finish_unshard(self) -> None:
        """Wait until the whole bucket is in and point the parameters at it."""
        if self._pending is not None:
            self._receive(self._pending)
            self.gathered = True
            self.writes.note()

    @outside_inference
    def _receive(self, gather: PendingWork) -> None:
        # Before the wait, which raises once: after an error a second one must not take for there what never came.
        self._pending = None
        gather.wait()
        self._point_at_flat()

    def release(self) -> None:
        """Free all but the own slice (stage 3). What was written to gathered values counts, as `follow_edits` says."""
        if not self.placement.shard_parameters:
            return
        # A gather that is under way still writes to the memory that is about to go.
        self.finish_unshard()
        if self.gathered:
            self.follow_edits()
            # Not before: with the values goes what was written to them.
            self._point_at_poison()
            self.gathered = False

    @outside_inference
    def _point_at_poison(self) -> None:
        _set_all_data(self.tensors, self._poison_views)
        release_classes(self.parameters)
        if not self.placement.in_place:
            self._empty_flat()

    def _empty_flat(self) -> None:
        """Give the memory back; where a numpy array shares it, that keeps it, and later gathers get other memory."""
        storage = self.flat.untyped_storage()
        if not storage.resizable():
            self.writes.close_aliases()
            self.flat = torch.empty_like(self.flat)
            self.views = [self.segment_view(index) for index in range(len(self.parameters))]
            storage = self.flat.untyped_storage()
        storage.resize_(0)

    def used(self, *, in_codes: bool) -> ParameterBucket | GatheredCodes:
        """The form that a forward or a backward uses: values that are there anyway, or codes where there are such."""
        if self.codes is None or not in_codes or self.gathered or self.pending:
            return self
        return self.codes

    def weight_for_layer(self, index: int, func: Callable[..., Any], asker: FrameType | None) -> Tensor | None:
        """The answer to a layer that asks for its weight as it casts it; None where values are wanted."""
        return None if self.codes is None else self.codes.answer(index, func, asker)

    @without_grad
    def refresh(self) -> None:
        """Bring updated values into a bucket that is held whole. A collective."""
        if self.codes is not None:
            self.codes.refresh()
        if self.placement.shard_parameters and self.gathered:
            for watch in self.watches:
                watch.invalidate_unsharded()
            # Without a resize: the memory is there, and whoever holds the bucket whole has views of it.
            self._gather(empty=False).wait()
            self.kept, self.kept_again = self.kept or self.kept_again, False
            self.writes.note()
            for watch in self.watches:
                watch.renew()

    # ---- after an update ----

    @without_grad
    def write_weights(self, *, copied: bool = False) -> None:
        """Cast updated master values to the owned weights, unless they are `copied` already."""
        if self.has_master and not copied:
            for start, stop in self.master.chunks:
                self.weights.write(start, self.master.read(start, stop))

    @without_grad
    def publish(self, *, copied: bool = False) -> PendingWork:
        """Carry updated master values to the parameters: cast (unless `copied`), all-gather where they are whole."""
        self.write_weights(copied=copied)
        if self.placement.shard_optimizer and not self.placement.shard_parameters:
            return self.ranks.gather.all_gather(self.flat, of=self.names)
        # Stage 0 has updated all of it, stage 3 gathers at the next use.
        return PendingWork([])

    def publish_later(self, pieces: int, *, copied: bool) -> bool:
        """Publish, and wait for the end where the parameters are used; see `arriving`.

        Args:
            pieces: How many tensors of optimizers are views of the owned elements.
            copied: See `publish`.

        Returns:
            False if somebody could use them unseen, or a wait for them holds the host: it has been waited for.
        """
        gathers = self.placement.shard_optimizer and not self.placement.shard_parameters and self.ranks.shard_size > 1
        unseen = not gathers or not can_wait(self.parameters) or self._is_held(pieces)  # before a gather holds it, too
        work = self.publish(copied=copied)
        # Whoever collects an engine that nobody has closed would wait for a thread, which may have ended by then.
        if unseen or work.holds_host:
            work.wait()
            return False
        # Before the classes change: who reads an arriving parameter finds what to wait for.
        self._arrival = _Arrival(work, self.device)
        show_arriving(self.parameters)
        return True

    def _is_held(self, pieces: int) -> bool:
        """True if others than the engine may hold the bucket's memory."""
        holders = holders_of(self._flat)
        own = 2 + 2 * len(self.parameters)  # `flat`, the slice in it, the parameters and their views
        return holders is None or holders > own + pieces + self.writes.aliases

    @property
    def arriving(self) -> bool:
        """True if values are on their way to full parameters."""
        return self._arrival is not None

    def arrive(self) -> None:
        """Wait until the values of the last step are in the parameters."""
        if self._arrival is None:
            return
        with self._arriving_lock:  # whoever comes second waits as long, and then sees them
            arrival = self._arrival
            if arrival is not None:
                arrival.wait()
                show_arrived(self.parameters)
                # Last: whoever finds it None takes the values without the lock.
                self._arrival = None

    @without_grad
    def adopt(self, source: int | None = None) -> None:
        """Take the full values now in `flat` (data-parallel rank `source`'s, if given) as the new parameters."""
        assert self.gathered
        self.generation += 1
        # What was assigned (`p.data = values`) lies elsewhere, and only `flat` is sent and read below.
        self.writes.take_assigned()
        if source is not None:
            row, column = self.ranks.place(source)
            self.ranks.gather.broadcast(self.flat, column, self.names)
            self.ranks.replicate.broadcast(self.flat, row, self.names)
        if self.placement.shard_parameters:
            self.shard.write(0, self.flat[self.slice])
        if self.codes is not None:
            self.codes.invalidate()
            self.codes.refresh()
        if self.has_master:
            for start, stop in self.master.chunks:
                self._follow(start, stop)
        self.writes.note()
        for watch in self.watches:
            watch.renew()

    def whole_of(self, index: int, local: Tensor) -> Tensor:
        """The whole of what every rank has a part of. A collective of the ranks that divide parameter `index`.

        Args:
            index: The parameter.
            local: This rank's part, of `parts[index].local_shape`.
        """
        part, others = self.parts[index], self.ranks.parts
        if part.dim is None or is_dtensor(self.parameters[index]):
            return whole_of(self.parameters[index], local)
        assert part.dim == 0 and part.length * others.size == part.shape[0], "experts are divided evenly"
        flat = local.new_empty(others.size * local.numel())
        flat.view(others.size, -1)[others.rank] = local.detach().reshape(-1)
        others.all_gather(flat, of=self.names[index]).wait()
        return flat.view(part.shape)

    @without_grad
    def set_master(self, index: int, value: Tensor) -> None:
        """Set the owned part of the master copy of parameter `index` from a whole value, or a `DTensor`."""
        piece = self.piece_of.get(index)
        mine = local_values(self.parts[index], self.parameters[index], value.detach())
        if piece is not None:
            self.master.write(piece.offset, mine.reshape(-1)[piece.start : piece.stop])

    # ---- what the user writes ----

    def follow_edits(self) -> None:
        """Let what was written to full parameters since the last look count: in the master copy, and in the own slice.

        Each element takes the value that it has on the rank that owns it. Writes are found by torch's version counters
        (those of `p.data` included) and by addresses; nothing waits for a device.
        """
        if not self.gathered:
            return
        if self.writes.are_there:
            self._carry_edits()

    @outside_inference
    def _carry_edits(self) -> None:
        written = self.writes.take()
        self.generation += bool(written)
        for index in written:
            piece = self.piece_of.get(index)
            if piece is None:
                continue
            start, stop = piece.offset, piece.offset + piece.numel
            # Elsewhere the slice is a part of `flat`, and has them already.
            if self._slice_apart:
                self.weights.write(start, self.flat[self.slice][start:stop])
            if self.has_master:
                self._follow(start, stop)

    @property
    def follows_edits(self) -> bool:
        """True if what all ranks write to full parameters in place becomes the parameters."""
        return not self.placement.shard_parameters or self.kept or self.placement.in_place

    def segment_view(self, index: int) -> Tensor:
        """Parameter `index` as a shaped view of the flat buffer."""
        segment = self.layout.segments[index]
        return self.flat[segment.offset : segment.stop].view(segment.shape)

    @outside_inference
    def give_back(self, *, values: bool = True) -> None:
        """Give each parameter memory of its own with its whole values, which are there; the bucket keeps none.

        One parameter's values are there twice at a time, besides the bucket's.

        Args:
            values: Without, nobody has them all any more: parameters have any.
        """
        if values:
            assert self.gathered
            self.arrive()
            # What was assigned lies in memory of the user's: only what is in the views is copied.
            self.writes.take_assigned()
        else:
            self._pending = self._arrival = None
            show_arrived(self.parameters)
            unshard_classes(self.parameters)
        for index, tensor in enumerate(self.tensors):
            if values:
                SET_DATA(tensor, self.views[index].clone(memory_format=torch.contiguous_format))
            else:
                shape = self.layout.segments[index].shape
                SET_DATA(tensor, torch.empty(shape, dtype=self.dtype, device=self.device))
        untrack_classes(self.parameters)
        self.writes.forget()
        self.drop_average()
        self.flat = self.flat.new_empty(0)
        self.shard = self.weights = self.master = InMemory(self.flat)
        self.views, self._poison_views = [], []
        self.watches.clear()

    def check_dtype(self) -> None:
        """Raise by name if a parameter was moved or cast behind the engine's back."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise RuntimeError(
                    f"parameter {name!r} was moved or cast after it was sharded "
                    f"({self.dtype} on {self.device} -> {parameter.dtype} on {parameter.device}); do it before."
                )

    def offloaded(self) -> Iterator[tuple[str, OffloadedVector]]:
        """The vectors that are in a tier, with their categories in the ledger."""
        for vector in self.shard.offloaded():
            yield "parameters", vector
        if self.has_master:
            for vector in self.master.offloaded():
                yield "master weights", vector
        if self.average is not None:
            for vector in self.average.offloaded():
                yield "averages", vector

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with memory of its own, with its category in the ledger; `flat` may be without memory.

        What is in a tier is in `offloaded`.
        """
        if self._slice_apart:
            for shard in self.shard.held():
                yield "parameters", shard
            yield "gather buffers", self.flat
        else:
            yield "parameters", self.flat
        if self.codes is not None:
            yield from self.codes.held()
        if self.has_master:
            for master in self.master.held():
                yield "master weights", master
        if self.average is not None:
            for average in self.average.held():
                yield "averages", average
        yield "handles", self._poison

    def relocate(self, move: Callable[[Tensor], Tensor], *, masters: bool, parameters: bool) -> None:
        """Let what is kept in memory lie where `move` puts it: the master copy, the parameters and their slice."""
        # Asked now: it compares objects, and both are replaced below.
        has_master = self.has_master
        if masters and has_master:
            self.master = self.master.moved(move)
        if masters and self.average is not None:
            self.average = self.average.moved(move)
        if not parameters:
            return
        if self._slice_apart:
            self.shard = self.weights = self.shard.moved(move)
        else:
            # What `p.data` gave stays in the old memory: later writes to it are none to the parameters.
            self.writes.close_aliases()
            self.flat = move(self.flat)
            self._link_parts()
            self.views = [self.segment_view(index) for index in range(len(self.parameters))]
            if self.gathered:
                self._point_at_flat()
        if not has_master:
            self.master = self.weights

    def persistent_bytes(self) -> int:
        """Bytes of parameters that stay for the whole step in whatever tier, master copy left out."""
        numel = self.layout.slice_numel if self._slice_apart else self.layout.numel
        return numel * self.dtype.itemsize

    def master_bytes(self) -> int:
        """Bytes of the fp32 master copy on this rank, in whatever tier."""
        return self.master.nbytes if self.has_master else 0

    def average_bytes(self) -> int:
        """Bytes of the average on this rank, in whatever tier."""
        return 0 if self.average is None else self.average.nbytes

    def _point_at_flat(self) -> None:
        if self.placement.shard_parameters:
            unshard_classes(self.parameters)
        _set_all_data(self.tensors, self.views)


def _set_all_data(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Let tensors have other values; without torch's look for `__torch_function__` at each subclass."""
    with DisableTorchFunctionSubclass():
        for tensor, each in zip(tensors, values):
            SET_DATA(tensor, each)


class _Arrival:
    """A gather after a step.

    Args:
        work: The gather.
        device: Where it is.
    """

    def __init__(self, work: PendingWork, device: torch.device) -> None:
        self._work, self._streams = work, streams_of(device)
        self._stream = None if self._streams is None else self._streams.current()
        self._failure: Exception | None = None

    def wait(self) -> None:
        """Until it is over; on a GPU for the stream of the step, as if it had waited itself, and for the reader's.

        Raises:
            DesyncError: As `PendingWork.wait`, every time.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._wait()
        except Exception as failure:
            # The work raises once: a second reader would take old values for new ones.
            self._failure = failure
            raise

    def _wait(self) -> None:
        if self._streams is None:
            self._work.wait()
            return
        reader = self._streams.current()
        with self._streams.within(self._stream):
            self._work.wait()
        if reader != self._stream:
            reader.wait_stream(self._stream)


def weights_name(first: str) -> str:
    """The vector of a bucket's slice, by the name of its first parameter."""
    return f"{first}/weights"


def master_name(first: str) -> str:
    """The vector of a bucket's master weights, by the name of its first parameter."""
    return f"{first}/master"


def average_name(first: str) -> str:
    """The vector of a bucket's average, by the name of its first parameter."""
    return f"{first}/average"


def _poison_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
