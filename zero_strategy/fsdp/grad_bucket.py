"""The gradients of one bucket: local sums, the reduction, and what `p.grad` shows.

local sums, the reduction, and what `p.grad` shows.

`own` collects this rank's gradients; a reduction turns them into `reduced` (owned elements), the mean over ranks.
Gradients of `own` live only while a backward runs, unless they have to wait: where sums of several micro-batches are
reduced together (`per_step` reduction and `no_sync`), or this rank owns all elements, the whole buffer stays
(`keeps_whole`) and `reduced` is its owned part. Under `per_micro_batch` reduction `reduced` may be in a tier
(`offload.gradients`): an `OffloadedVector`, to which each reduction is added chunk by chunk.

Order of summation (documented, so that a single process can repeat it):
    per_step         g = (sum over ranks r, in order, of (sum over micro-batches a, in order, of g[r, a])) / ranks
    per_micro_batch  g = sum over micro-batches a, in order, of ((sum over ranks r, in order, of g[r, a]) / ranks)

`p.grad` of a parameter that holds a gradient is a *handle*: where whole gradients are kept it is the gradient itself,
else a `GradientProxy` of the parameter's shape, which fetches it when it is read. `zero_grad()` removes or overwrites
the handle, which is how the bucket learns of it, without any hook on the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zero_strategy.fsdp.dtensor import local_values
from zero_strategy.fsdp.grad_accumulation import DeferredScale, LocalSums, PowerSums
from zero_strategy.fsdp.grad_view import GradientProxy, GradientViews
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.reduction_plan import Reduction
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector, VectorSpec, add_scaled
from zero_strategy.ops.library import FLOATS
from zero_strategy.runtime.torch_private import foreach_mul_


class GradientBucket:
    """Gradient buffers of one `ParameterBucket`.

    Args:
        bucket: The parameters.
        dtype: Dtype in which gradients are accumulated.
        reduce_dtype: Dtype in which they are sent and summed over ranks.
        per_step: Local sums may wait for the last micro-batch of a step, see `keep_whole`.
        store: Where reduced gradients are kept; None: on the device.

    Attributes:
        keeps_whole: Whether the buffer of local sums stays, and `reduced` is a part of it.
        live: Indices of parameters that hold a reduced gradient.
        late: Gradients that came after the bucket had left in this backward, by index.
        version: Grows with every change of reduced gradients, those apart that `scale` puts off.
        own: Gradients of this rank that are not reduced yet.
        shown: What `p.grad` of the parameters shows.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        per_step: bool,
        store: ChunkStore | None = None,
    ) -> None:
        assert store is None or not per_step, "whole sums stay on the device"
        self._store, self._vector = store, None if store is None else store.vectors.get(gradients_name(bucket.names[0]))
        self.bucket, self.dtype, self.reduce_dtype = bucket, dtype, reduce_dtype
        owns_all = bucket.owned == slice(0, bucket.layout.numel)
        self.keeps_whole = per_step and owns_all
        self.version = 0
        self.live: set[int] = set()
        self.late: dict[int, Tensor] = {}
        self.own = LocalSums(bucket, dtype)
        self.reduced: Tensor | None = None
        self._earlier: Tensor | None = None
        self._reduction: Reduction | None = None
        self._straight = False  # it writes into the reduced gradients
        self._empty = True  # whatever is in `reduced` is no sum
        self._shows_gradient = owns_all and dtype == bucket.dtype and store is None
        self._powers: PowerSums | None = None  # of what is in a tier, where a norm was asked for
        self._factors = DeferredScale(self._multiply)  # for reduced gradients
        self.shown = GradientViews(self, bucket)

    # ---- accumulation on this rank ----

    def keep_whole(self) -> None:
        """From now on local sums wait for a later backward, in a buffer that stays."""
        if self.keeps_whole:
            return
        self.version += 1
        self.finish()
        self.keeps_whole = True
        (reduced, self.reduced) = (self.reduced, None)
        if not self._empty:
            self._earlier = reduced

    def begin(self) -> None:
        """Prepare for gradients of a new backward: notice `zero_grad`, keep earlier reduced sums apart."""
        self.version += 1
        self.finish()
        self.sync_handles()
        self._factors.carry_out()
        self._set_shadow()

    def resume(self, index: int) -> None:
        """Go on as before `begin`: no gradient of parameter `index` came to be added."""
        if self._reduction is not None:
            self.finish()
        self._restore()
        if index in self.live or index in self.own.live:
            self.show(index)

    def _set_shadow(self) -> None:
        """Save the reduced sum from the buffer that is about to collect new local gradients."""
        if self.keeps_whole and self.reduced is not None:
            if not self._empty and self._earlier is None:
                self._earlier = self.reduced.clone()
                self._show_all()
            self.reduced = None

    def _restore(self) -> None:
        """Undo `_set_aside` where nothing was collected since."""
        if self._earlier is not None and not self.own.live and self._reduction is None:
            self.version += 1
            self.reduced = self.own.zeros()[self.bucket.owned]
            self.reduced.copy_(self._earlier)
            self._earlier = None
            self._show_all()

    def accumulate(self, index: int, gradient: Tensor, *, lent: bool = False) -> None:
        """Add this rank's `gradient` of parameter `index` to the local sum; `lent`: its memory stays the caller's."""
        self.version += 1
        gradient = self.own.plain(index, gradient)
        # A parameter that fires after its bucket has left takes the next one; the buffer may hold reduced ones by now.
        if self._reduction is not None or (self.keeps_whole and self.reduced is not None):
            known = self.late.get(index)
            self.late[index] = gradient.to(self.dtype, copy=True) if known is None else known.add_(gradient)
        else:
            self.own.hands_over = not lent and self._takes_the_mean()
            self.own.add(index, gradient)

    def admit_late(self) -> None:
        """Let gradients that came after the bucket had left into the next reduction."""
        late, self.late = self.late, {}
        if late:
            self._set_shadow()
        for index, gradient in late.items():
            self.accumulate(index, gradient)

    # ---- reduction over ranks ----

    @torch.no_grad()
    def launch(self) -> None:
        """Start the reduction; parameters without a local gradient contribute zeros."""
        assert self._reduction is None
        self.version += 1
        self._set_shadow()
        reduce, names = self.bucket.mesh.reduce, self.bucket.names
        self._straight = self._takes_the_mean()
        factor = self._mean_factor if self._straight or not self._divides_later else 1.0
        into = self._new_sum() if self._straight else None
        divides = not self._divides_later
        if into is not None and (scattered := self.own.scattered()) is not None:
            work = reduce.reduce_scatter_scattered(scattered, into, names, factor)
            self._reduction = Reduction(self.bucket, work, None, into, divides=divides)
            self.own.live.clear()
        else:
            whole = self.own.complete()
            sent = whole if self.reduce_dtype == self.dtype else whole.to(self.reduce_dtype)
            total = sent[self.bucket.slice] if into is None else into
            work = reduce.reduce_scatter(sent, names, factor, into)
            self._reduction = Reduction(self.bucket, work, sent, total, divides=divides)

    def _takes_the_mean(self) -> bool:
        """Whether the reduction's result is all of the reduced gradients, so that it can be written there at once."""
        alone = self._empty and self._store is None and self.bucket.mesh.replicate.size == 1
        return alone and self._divides_later and self.reduce_dtype == self.dtype

    def _new_sum(self) -> Tensor:
        """The reduced gradients, with whatever is in their memory."""
        if self.reduced is None:
            numel = self.bucket.owned.stop - self.bucket.owned.start
            self.reduced = torch.empty(numel, dtype=self.dtype, device=self.bucket.device)
        return self.reduced

    @torch.no_grad()
    def finish_sum(self) -> None:
        """Complete the sum over ranks, if a reduction is under way; see `Reduction`."""
        if self._reduction is not None:
            self._reduction.finish_sum()

    @property
    def _mean_factor(self) -> float:
        """What the sum is multiplied by as it arrives, while it is in a cache; copies of the slices sum it up yet."""
        mesh = self.bucket.mesh
        return 1.0 if mesh.replicate.size > 1 else 1.0 / mesh.world_size

    @property
    def _divides_later(self) -> bool:
        """Whether the sum becomes a mean on its way into the reduced gradients, without a pass over it."""
        return self.bucket.placement.shard_optimizer and not self.keeps_whole

    @torch.no_grad()
    def finish(self, *, keep: bool = True) -> None:
        """Wait for a reduction under way and add its result to what is already reduced, unless nobody wants it."""
        if self._reduction is None:
            return
        self.version += 1
        (done, self._reduction) = (self._reduction, None)
        done.wait()
        if self.keeps_whole:
            self._keep_whole(done.sent)
        else:
            mine = done.total if self.bucket.placement.shard_optimizer else done.sent
            if keep and not self._straight:
                assert mine is not None
                self._add(mine)
            self.own.give_back()
        self._empty = False

    def _keep_whole(self, sent: Tensor | None) -> None:
        """The owned part of the buffer is the sum, with that of earlier ones."""
        whole, owned = self.own.whole, self.bucket.owned
        assert whole is not None and sent is not None
        if sent is not whole:
            whole[owned].copy_(sent[owned])
        self.reduced = whole[owned]
        if self._earlier is not None:
            self.reduced.add_(self._earlier)
            self._earlier = None
            self._show_all()

    def _add(self, values: Tensor) -> None:
        """Add the owned elements of a reduction to the sum of earlier ones; they may be changed."""
        factor = 1.0 / self.bucket.mesh.world_size if self._divides_later else 1.0
        if self._store is not None:
            look = None if self._powers is None else self._powers.begin(self.bucket.pieces)
            self._in_tier(self._store).add_all(values, first=self._empty, look=look, factor=factor)
            return
        add_scaled(self._new_sum(), values, factor, first=self._empty)

    def expect_norm(self, norm_type: float) -> None:
        """From the next reduction on know the norm of what is in a tier without reading it again."""
        if self._store is not None and (self._powers is None or self._powers.norm_type != norm_type):
            self._powers = PowerSums(norm_type) if self.dtype in FLOATS else None

    def _forget_powers(self) -> None:
        if self._powers is not None:
            self._powers = PowerSums(self._powers.norm_type)

    def _in_tier(self, store: ChunkStore) -> OffloadedVector:
        """The vector of reduced gradients, made when the bucket was frozen until now."""
        if self._vector is None:
            numel = self.bucket.owned.stop - self.bucket.owned.start
            spec = VectorSpec(numel, self.dtype, device=self.bucket.device)
            self._vector = store.take(gradients_name(self.bucket.names[0]), spec)
        return self._vector

    @torch.no_grad()
    def clear(self) -> None:
        """Drop every gradient, also one under way."""
        self.finish(keep=False)
        self.live.clear()
        self.own.clear()
        self.late.clear()
        for parameter in self.bucket.parameters:
            parameter.grad = None
        self._factors.clear()
        self._forget_sums()
        if not self.keeps_whole:
            self.own.whole = None

    def _forget_sums(self) -> None:
        """No reduced sum is of use any more."""
        self.version += 1
        self._earlier, self._empty = None, True
        self._forget_powers()
        if self._vector is not None:
            self._vector.blank()
        elif not self.keeps_whole and (self.bucket.placement.shard_parameters or self._shows_gradient):
            # Its memory is the forward's until gradients are reduced again; what somebody has kept of a p.grad is his.
            self.reduced = None

    # ---- what p.grad shows ----

    def show(self, index: int) -> None:
        """Set `p.grad` of a parameter that holds a gradient to its handle."""
        self.bucket.parameters[index].grad = self._handle(index)

    def _show_all(self) -> None:
        """Whether `p.grad` is the gradient itself changed: it is not while a part of the sum is set aside."""
        if self._shows_gradient:
            for index in self.live:
                self.show(index)

    def _handle(self, index: int) -> Tensor:
        if self._shows_gradient and self._earlier is None:
            whole = self.own.whole if self.keeps_whole else self.reduced
            if whole is not None:
                return self.shown.itself(index, whole)
        return self.shown.stand_in(index)

    def sync_removed(self) -> None:
        """Forget gradients if every `p.grad` was removed, as `zero_grad` does it."""
        if self.live and all(self.bucket.parameters[index].grad is None for index in self.live):
            self._forget_sums()
            for index in list(self.live):
                self._forget(index)

    @torch.no_grad()
    def sync_handles(self) -> None:
        """Follow what the user did to `p.grad`: removed, zeroed in place, or replaced."""
        self.sync_removed()
        for index, parameter in enumerate(self.bucket.parameters):
            shown = parameter.grad
            if shown is None:
                if index in self.live or index in self.own.live:
                    self._drop(index)
            elif not self.shown.is_known(index, shown):
                self.replace(index, shown)
            elif self.shown.written(index):
                zeroed = self.shown.zeroed(index)
                if zeroed:
                    self._zero(index)
                self.shown.forget(index)
                self.show(index)
                if not zeroed:
                    self.shown.refuse(index)

    def _drop(self, index: int) -> None:
        self._forget(index)
        if not self.live:
            self._earlier, self._empty = None, True
        self._change(index, Tensor.zero_)

    def _forget(self, index: int) -> None:
        """Hold no gradient of a parameter; its values are the caller's business."""
        self.version += 1
        self.live.discard(index)
        self.own.forget(index)
        self._factors.drop(index)
        if self.shown.written(index):
            self.shown.forget(index)  # zeroed in place, then removed

    def _zero(self, index: int) -> None:
        self._factors.drop(index)
        self.own.zero(index)
        self._change(index, Tensor.zero_)

    def replace(self, index: int, gradient: Tensor) -> None:
        """Use a whole gradient from the user, the same on all ranks, in place of the accumulated one."""
        if isinstance(gradient, GradientProxy):
            self.shown.refuse(index)
        part, parameter = self.bucket.parts[index], self.bucket.parameters[index]
        self.replace_local(index, local_values(part, parameter, gradient.detach()))

    def replace_local(self, index: int, mine: Tensor) -> None:
        """The same for what this rank's model has of it, of which only the rank's own part counts."""
        self.version += 1
        self._drop(index)
        owned = self.bucket.owned
        if self.keeps_whole and self.own.live:  # the buffer is in use: this joins the sums of earlier backwards
            if self._earlier is None:
                self._earlier = torch.zeros_like(self.own.zeros()[owned])
            target: Tensor | OffloadedVector | None = self._earlier
        else:
            if self.reduced is None and self.keeps_whole:
                self.reduced = self.own.zeros()[owned].zero_()
                self._restore()
            elif self.reduced is None and self._store is None:
                numel = owned.stop - owned.start
                self.reduced = torch.zeros(numel, dtype=self.dtype, device=self.bucket.device)
            elif self._empty and self.reduced is not None:
                self.reduced.zero_()  # later sums are added to all of it
            target = self.reduced if self._store is None else self._in_tier(self._store)
            self._empty = False
        piece = self.bucket.piece_of.get(index)
        if piece is not None:
            values = mine.reshape(-1)[piece.start : piece.stop]
            if isinstance(target, OffloadedVector):
                self._forget_powers()
                target.write(piece.offset, values)
            else:
                assert target is not None
                target[piece.offset : piece.offset + piece.numel].copy_(values)
        self.live.add(index)
        self.show(index)

    def local_sum(self, index: int) -> Tensor | None:
        """What `no_sync` keeps back of a gradient on this rank, None if nothing."""
        return self.own.sum_of(index)

    def reduced_part(self, index: int) -> Tensor | None:
        """This rank's part of a reduced gradient, flat; None if it owns none of it. Not to be written to."""
        self._factors.carry_out()
        if self._vector is not None:
            piece = self.bucket.piece_of.get(index)
            if piece is None:
                return None
            return self._vector.read(piece.offset, piece.offset + piece.numel).to(self.bucket.device)
        parts = self._reduced_parts(index)
        return sum(parts[1:], parts[0]) if parts else None

    def _reduced_parts(self, index: int) -> list[Tensor]:
        piece = self.bucket.piece_of.get(index)
        buffers = [buffer for buffer in (self.reduced, self._earlier) if buffer is not None]
        return [] if piece is None else [buffer[piece.offset : piece.offset + piece.numel] for buffer in buffers]

    @torch.no_grad()
    def change(self, index: int, how: Callable[[Tensor], object]) -> None:
        """Change this rank's part of a reduced gradient in place, element by element.

        Args:
            index: Of the parameter.
            how: Takes a few elements, flat.
        """
        self._factors.carry_out()
        self._change(index, how)

    def _change(self, index: int, how: Callable[[Tensor], object]) -> None:
        self.version += 1
        piece = self.bucket.piece_of.get(index)
        if self._vector is not None and piece is not None:
            if not self._empty:
                self._forget_powers()
                self._vector.change(piece.offset, piece.offset + piece.numel, how)
            return
        for values in self._reduced_parts(index):
            how(values)

    @torch.no_grad()
    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply reduced gradients; where `p.grad` does not show them, not before somebody reads them."""
        if not self._shows_gradient:
            for index in indices:
                self._factors.add(index, factor)
            return
        self.version += bool(indices)
        parts = [values for index in indices for values in self._reduced_parts(index)]
        if parts and self.dtype == torch.float32:
            foreach_mul_(parts, factor)
        else:  # on the CPU it rounds the factor to the gradients' dtype, which `mul_` does not
            for values in parts:
                values.mul_(factor)

    def round_scales(self) -> None:
        """Carry out the multiplications that round, as before a look at the result."""
        self._factors.carry_out_those_that_round()

    @torch.no_grad()
    def _multiply(self, index: int, factor: float) -> None:
        self._change(index, lambda values: values.mul_(factor))

    def owned_gradients(self) -> dict[int, Tensor | OffloadedPart]:
        """The owned part of every reduced gradient, flat, by parameter index."""
        self._factors.carry_out()
        return {index: values for index, (values, _) in self.scaled_gradients().items()}

    def scaled_gradients(self) -> dict[int, tuple[Tensor | OffloadedPart, float]]:
        """The same in two factors, so that a reader who multiplies anyway saves a pass over memory."""
        indices = self.owned_indices()
        if not indices:
            return {}
        factor = self._factors.of
        if self._vector is None and self.reduced is not None:
            parts = self.bucket.split_owned(self.reduced)
            return {index: (parts[index], factor(index)) for index in indices}
        return {
            index: (values, factor(index))
            for index in indices
            if (values := self._owned(self.bucket.piece_of[index])) is not None
        }

    def owned_indices(self) -> list[int]:
        """The parameters with a reduced gradient of which this rank owns a part."""
        assert not self.own.live and self._reduction is None
        self._restore()
        return [piece.index for piece in self.bucket.pieces if piece.index in self.live] if self.live else []

    def _owned(self, piece: Piece) -> Tensor | OffloadedPart | None:
        if self._vector is not None:
            part = self._vector.part(piece.offset, (piece.numel,))
            part.powers = None if self._powers is None else self._powers.of(piece.index)
            return part
        return None if self.reduced is None else self.reduced[piece.offset : piece.offset + piece.numel]

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with memory of its own, with its category in the ledger."""
        for own in self.own.held():
            yield "gradients" if self.keeps_whole else "gradient buckets", own
        sent = None if self._reduction is None else self._reduction.sent
        if sent is not None and sent is not self.own.whole:
            yield "gradient buckets", sent
        if self.reduced is not None and not self.keeps_whole:
            yield "gradients", self.reduced
        if self._earlier is not None:
            yield "gradient buckets", self._earlier
        for late in self.late.values():
            yield "gradient buckets", late
        for poison in self.shown.held():
            yield "handles", poison

    def relocate(self, move: Callable[[Tensor], Tensor], *, sums: bool, buffers: bool) -> None:
        """Let reduced gradients (`sums`) and local ones lie where `move` puts them; each may be a part of the other."""
        if sums or (buffers and self.keeps_whole):
            self.reduced = None if self.reduced is None else move(self.reduced)
            self._earlier = None if self._earlier is None else move(self._earlier)
            self.shown.relocate(move)
        if buffers or (sums and self.keeps_whole):
            self.own.relocate(move)
            self.late = {index: move(gradient) for index, gradient in self.late.items()}

    def offloaded(self) -> Iterator[OffloadedVector]:
        """What is in a tier."""
        if self._vector is not None:
            yield self._vector

    def persistent_bytes(self) -> int:
        """Bytes of gradients that stay between backwards, in whatever tier."""
        if self._vector is not None:
            return self._vector.numel * self._vector.dtype.itemsize
        if self.keeps_whole:
            return 0 if self.own.whole is None else self.own.whole.nbytes
        return 0 if self.reduced is None else self.reduced.numel() * self.reduced.element_size()


def gradients_name(first: str) -> str:
    """The vector of a bucket's reduced gradients, by the name of its first parameter."""
    return f"{first}/gradients"
