"""The gradients of one bucket: local sums, the reduction, and what `p.grad` shows.

`own` collects this rank's gradients; a reduction turns them into `reduced` (owned elements), the mean over ranks.
Gradients of `own` live only while a backward runs, unless they have to wait: where sums of several micro-batches are
reduced together (`per_step` reduction and `no_sync`), or this rank owns all elements, the whole buffer stays
(`keeps_whole`) and `reduced` is its owned part. Under `per_micro_batch` reduction `reduced` may be in a tier
(`offload.gradients`), where each reduction is added to it chunk by chunk.

Order of summation (documented, so that a single process can repeat it):
    per_step         g = (sum over ranks r, in order, of (sum over micro-batches a, in order, of g[r, a])) / ranks
    per_micro_batch  g = sum over micro-batches a, in order, of ((sum over ranks r, in order, of g[r, a]) / ranks)

`p.grad` of a parameter that holds a gradient is a *handle*: where full gradients are kept it is the gradient itself,
else a `GradientProxy` of the parameter's shape, which fetches it when it is read. `zero_grad()` removes or overwrites
the handle, which is how the bucket learns of it, without any hook on the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import is_not

import torch
from torch import Tensor

from zero_strategy.fsdp.dtensor import local_values
from zero_strategy.fsdp.grad_accumulation import BufferReuse, DeferredScale, LocalSums, ReducedSums
from zero_strategy.fsdp.grad_view import GradientProxy, GradientViews
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.reduction_plan import Reduction, SideStream
from zero_strategy.fsdp.shard_storage import InMemory, ShardStorage
from zero_strategy.fsdp.slot_sums import SlotExchange, SlotSums
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, OffloadedVector
from zero_strategy.reproducible.slots import SlotCount
from zero_strategy.runtime.torch_private import grads_of, without_grad


class GradientBucket:
    """Gradient buffers of one `ParameterBucket`.

    Args:
        bucket: The parameters.
        dtype: Dtype in which gradients are accumulated.
        reduce_dtype: Dtype in which they are sent and summed over ranks.
        per_step: Local sums may wait for the last micro-batch of a step, see `keep_whole`.
        store: Where reduced gradients are kept; None: on the device.
        reuse: Where memory comes from and goes to that lives in a backward only.
        side: Where collectives wait for one another; all buckets of a model share it.
        slots: The slot at hand, where gradients are summed over slots in a fixed order; None: in that of ranks.

    Attributes:
        keeps_whole: Whether the buffer of local sums stays, and `reduced` is a part of it.
        live: Indices of parameters that hold a reduced gradient.
        late: Gradients that came after the bucket had left in this backward, by index.
        filled: Indices of parameters whose `p.grad` may have something in it, in a backward that has begun.
        version: Grows with every change of reduced gradients, those apart that `scale` puts off.
        own: Gradients of this rank that are not reduced yet.
        slots: Partial sums over slots; None: gradients are summed in the order of ranks.
        reduced: The sum of reductions, of what this rank owns.
        shown: What `p.grad` of the parameters shows.
    """

    def __init__(
        self,
        bucket: ParameterBucket,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        per_step: bool,
        store: ChunkStore | None = None,
        reuse: BufferReuse | None = None,
        side: SideStream | None = None,
        slots: SlotCount | None = None,
    ) -> None:
        assert store is None or not per_step, "whole sums stay on the device"
        self.bucket, self.dtype, self.reduce_dtype = bucket, dtype, reduce_dtype
        owns_all = bucket.owned == slice(0, bucket.layout.numel)
        assert slots is None or dtype == reduce_dtype, "gradients travel as they are summed"
        self.slots = None if slots is None else SlotSums(bucket, slots, dtype)
        self.keeps_whole = per_step and owns_all and slots is None
        self.version = 0
        self.live: set[int] = set()
        self.late: dict[int, Tensor] = {}
        self.filled: set[int] = set()
        self.reduced = ReducedSums(bucket, dtype, store)
        self._reduction: Reduction | SlotExchange | None = None
        self._side = side or SideStream()
        self._straight = False  # it writes into the reduced gradients
        # Torch takes a `p.grad` of the parameter's dtype only, and it has to have memory. Norms of some experts'
        # gradients are those of all, which takes a handle.
        shown = owns_all and dtype == bucket.dtype and self.reduced.in_memory
        self._shows_gradient = shown and bucket.ranks.neighbours == 1
        self.own = LocalSums(bucket, dtype, reuse, shown=self._shows_gradient)
        self._factors = DeferredScale(self._multiply)  # for reduced gradients
        self.shown = GradientViews(self, bucket)

    # ---- accumulation on this rank ----

    def keep_whole(self) -> None:
        """Let local sums wait for a later backward, in a buffer that stays."""
        # Those of slots wait apart from each other.
        if self.keeps_whole or self.slots is not None:
            return
        self.version += 1
        # Before the switch, on which it depends how a reduction ends.
        self.finish()
        self.keeps_whole = True
        self._fill_all()
        # The sum so far has memory of its own; from here on its place is in the buffer.
        self.reduced.set_aside(copy=False)

    def begin(self) -> None:
        """Prepare for gradients of a new backward: notice `zero_grad`, keep earlier reduced sums apart."""
        self.version += 1
        self.finish()
        # Before factors are carried out, since those of removed gradients go with them.
        self.filled = self.sync_handles()
        if self.keeps_whole or self._shows_gradient:
            self._fill_all()  # what is shown changes with each reduction
        # New gradients are added to the sum: a factor that waits is not for them.
        self._factors.carry_out()
        self._set_shadow()

    def _fill_all(self) -> None:
        self.filled = set(range(len(self.bucket.parameters)))

    def resume(self, index: int) -> None:
        """Go on as before `begin`: no gradient of parameter `index` came to be added."""
        if self._reduction is not None:
            self.finish()
        self._restore()
        if index in self.live or index in self.own.live:
            # `p.grad` was emptied for the gradient that did not come.
            self.show(index)

    def _set_shadow(self) -> None:
        """Save the reduced sum from the buffer that is about to collect new local gradients."""
        if self.keeps_whole and self.reduced.set_aside(copy=True):
            self._show_all()

    def _restore(self) -> None:
        """Undo `_set_shadow` where nothing was collected since."""
        if self.reduced.earlier is not None and not self.own.live and self._reduction is None:
            self.version += 1
            self.reduced.restore(self.own.zeros()[self.bucket.owned])
            self._show_all()

    def accumulate(self, index: int, gradient: Tensor, *, lent: bool = False) -> None:
        """Add this rank's `gradient` of parameter `index` to the local sum; `lent`: its memory stays the caller's."""
        self.version += 1
        # Nearly all gradients but the first of a bucket: this runs for each of them in every backward.
        if self._reduction is None and not self.keeps_whole and self.own.buffer is not None:
            if type(gradient) is Tensor and gradient.layout is torch.strided and not torch.is_grad_enabled():
                self.own.add(index, gradient, lent=lent)
                return
        self._accumulate(index, gradient, lent)

    @without_grad
    def _accumulate(self, index: int, gradient: Tensor, lent: bool) -> None:
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            gradient = self.own.plain(index, gradient)
        # A parameter that fires after its bucket has left takes the next one; the buffer may hold reduced ones by now.
        if self._reduction is not None or (self.keeps_whole and self.reduced.sum is not None):
            known = self.late.get(index)
            # A copy: a hook of the user's may hold autograd's tensor, and the next one is added in place.
            self.late[index] = gradient.to(self.dtype, copy=True) if known is None else known.add_(gradient)
        else:
            if self.own.whole is None:
                # Lent memory may change before it is reduced.
                self.own.hands_over = not lent and self._sends_at_once()
            self.own.add(index, gradient, lent=lent)

    def admit_late(self) -> None:
        """Let gradients that came after the bucket had left into the next reduction."""
        late, self.late = self.late, {}
        if late:
            # A buffer that stays has the reduced sum, which would count as gradients of this rank.
            self._set_shadow()
        for index, gradient in late.items():
            self.accumulate(index, gradient)

    # ---- reduction over ranks ----

    @property
    def unreduced(self) -> set[int]:
        """Indices of parameters with gradients of this rank that have not left it."""
        return self.own.live if self.slots is None else self.own.live | self.slots.waiting

    @without_grad
    def wait_for_slots(self) -> None:
        """Let the gradients of this backward's slot wait for those of later ones."""
        if self.slots is not None and self.own.live:
            indices = set(self.own.live)
            self.live |= indices
            if self.slots.keep(self.own.complete(), indices):
                self.own.give_back()  # the next bucket may take it
            else:
                self.own.drop()  # the buffer is the slot's now

    @without_grad
    def launch(self) -> None:
        """Start the reduction; parameters without a local gradient contribute zeros."""
        assert self._reduction is None
        self.version += 1
        if self.slots is not None:
            self._launch_slots(self.slots)
            return
        # A second reduction may find none late here, and fills the buffer, which holds the sum, with zeros.
        self._set_shadow()
        reduce, names = self.bucket.ranks.reduce, self.bucket.names
        self._straight = self._takes_the_mean()
        factor = self._mean_factor if self._straight or not self._divides_later else 1.0
        into = self.reduced.room().values if self._straight else None
        divides = not self._divides_later
        if into is not None and (scattered := self.own.scattered()) is not None:
            work = reduce.reduce_scatter_scattered(scattered, into, names, factor)
            sent, total, everywhere = None, into, False
            self.own.live.clear()
        else:
            whole = self.own.complete()
            sent = whole if self.reduce_dtype == self.dtype else whole.to(self.reduce_dtype)
            total = sent[self.bucket.slice] if into is None else into
            # With replicas the sum is one along the row and one along the column, as at other stages.
            everywhere = not (self.bucket.placement.shard_optimizer or self.bucket.ranks.replicate.size > 1)
            if everywhere:
                work = reduce.all_reduce(sent, names, factor)
            else:
                work = reduce.reduce_scatter(sent, names, factor, into)
        self._reduction = Reduction(self.bucket, work, sent, total, self._side, divides=divides, everywhere=everywhere)

    def _launch_slots(self, slots: SlotSums) -> None:
        reduce, names = self.bucket.ranks.reduce, self.bucket.names
        self._straight = self._takes_the_mean() and slots.goes_straight
        orders = slots.count.exchanges()
        # Of one slot there may be parts that have waited for others of it, of a rank's other layers.
        if slots.count.places.per_step and (slots.count.places.count > 1 or slots.waiting):
            self.wait_for_slots()
            sent = slots.take_waiting()
        elif (scattered := self.own.scattered()) is not None:
            self.own.live.clear()
            into = self.reduced.room().values if self._straight else slots.room(orders[0])
            factor = slots.factor if self._straight else 1.0
            work = reduce.reduce_scatter_scattered(scattered, into, names, factor, orders[0])
            self._reduction = SlotExchange([work], orders, [into], [])
            return
        else:
            sent = [self.own.complete()]
        results, works = [], []
        for order, whole in zip(orders, sent, strict=True):
            results.append(self.reduced.room().values if self._straight else slots.room(order))
            factor = slots.factor if self._straight else 1.0
            works.append(reduce.reduce_scatter(whole, names, factor, results[-1], order))
        self._reduction = SlotExchange(works, orders, results, sent)

    @without_grad
    def end_slot(self) -> None:
        """Ranks have agreed that a backward is over; after the last of a step this has the mean over all slots."""
        slots = self.slots
        if slots is None:
            return
        slots.end_backward()
        if not slots.count.is_last or slots.empty:
            return
        self.version += 1
        total = slots.total()
        if total is None:
            return
        if not self.bucket.placement.shard_optimizer:
            whole = total.new_empty(self.bucket.layout.numel)
            whole[self.bucket.slice].copy_(total)
            self.bucket.ranks.gather.all_gather(whole, of=self.bucket.names).wait()
            total = whole
        self.reduced.add(total, slots.factor)
        self.reduced.empty = False
        self._show_all()

    def _sends_at_once(self) -> bool:
        """True if gradients may be sent from where autograd has put them."""
        if self.slots is None:
            return self._takes_the_mean()
        places = self.slots.count.places
        return places.count == 1 or not places.per_step

    def _takes_the_mean(self) -> bool:
        """True if the reduction's result is all of the reduced gradients, so that it can be written there at once."""
        alone = self.reduced.empty and self.reduced.in_memory and self.bucket.ranks.replicate.size == 1
        return alone and self._divides_later and self.reduce_dtype == self.dtype

    @property
    def _mean_factor(self) -> float:
        """The factor of a sum as it arrives, while it is in a cache; replicas sum it up yet."""
        ranks = self.bucket.ranks
        return 1.0 if ranks.replicate.size > 1 else 1.0 / ranks.world_size

    @property
    def _divides_later(self) -> bool:
        """True if the sum becomes a mean on its way into the reduced gradients, without a pass over it."""
        return self.bucket.placement.shard_optimizer and not self.keeps_whole

    @without_grad
    def finish(self, *, keep: bool = True) -> None:
        """Wait for a reduction under way and add its result to what is already reduced, unless nobody wants it."""
        if self._reduction is None:
            return
        self.version += 1
        # Before the wait: a reduction that failed is not to be waited for again by `clear`.
        (done, self._reduction) = (self._reduction, None)
        if isinstance(done, SlotExchange):
            assert self.slots is not None
            if self._straight:
                done.wait()
                self.reduced.empty = False
            else:
                done.arrive(self.slots)
            self.own.give_back()
            return
        done.wait()
        if self.keeps_whole:
            self._keep_whole(done.sent)
        else:
            mine = done.total if self.bucket.placement.shard_optimizer else done.sent
            if keep and not self._straight:
                assert mine is not None
                self.reduced.add(mine, 1.0 / self.bucket.ranks.world_size if self._divides_later else 1.0)
            # Not earlier: what is sent is read until the reduction is over.
            self.own.give_back()
        self.reduced.empty = False

    def _keep_whole(self, sent: Tensor | None) -> None:
        """The owned part of the buffer is the sum, with that of earlier ones."""
        whole, owned = self.own.whole, self.bucket.owned
        assert whole is not None and sent is not None
        if sent is not whole:
            whole[owned].copy_(sent[owned])
        if self.reduced.join(whole[owned]):
            self._show_all()

    def expect_norm(self, norm_type: float, *, exact: bool = False) -> None:
        """Let reductions add up the norm of what is in a tier, so that it need not be read again."""
        self.reduced.expect_norm(norm_type, exact=exact)

    @without_grad
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
            self.own.drop()

    def give_back(self, *, finish: bool = True) -> None:
        """Drop every gradient and all memory: the parameters are nobody's now.

        Args:
            finish: Wait for a reduction under way; else its ranks are gone.
        """
        if not finish:
            self._reduction = None
        self.clear()
        self.keeps_whole = False
        self.reduced.forget(keep=False)
        self.own.drop()
        self.shown = GradientViews(self, self.bucket)

    def _forget_sums(self) -> None:
        """No reduced sum is of use any more."""
        self.version += 1
        if self.slots is not None:
            self.slots.clear()
        # Its memory is the forward's until gradients are reduced again; what somebody has kept of a p.grad is his.
        unused = self.bucket.placement.shard_parameters or self._shows_gradient
        self.reduced.forget(keep=self.keeps_whole or not unused)

    # ---- what p.grad shows ----

    def hold(self, indices: set[int], shown: set[int]) -> None:
        """Have reduced gradients of some parameters; of those in `shown` `p.grad` was set in this backward."""
        self.live |= indices
        # Stand-ins stay right; one that stood for an incomplete sum makes room for the gradient itself.
        for index in indices if self._shows_gradient else indices - shown:
            self.show(index)

    def show(self, index: int) -> None:
        """Set `p.grad` of a parameter that holds a gradient to its handle."""
        self.bucket.parameters[index].grad = self.handle(index)
        self.filled.add(index)

    def _show_all(self) -> None:
        """Set `p.grad` anew where it may be the gradient itself: while a part of the sum is set aside it is not."""
        if self._shows_gradient:
            for index in self.live:
                self.show(index)

    def handle(self, index: int) -> Tensor:
        """The `p.grad` of a parameter that holds a gradient."""
        # While a part of the sum is set aside no memory holds all of it.
        complete = self.slots is None or not self.reduced.empty
        if self._shows_gradient and complete and self.reduced.earlier is None:
            whole = self.own.whole if self.keeps_whole else self.reduced.tensor
            if whole is not None:
                return self.shown.itself(index, whole)
        return self.shown.stand_in(index)

    def sync_removed(self) -> None:
        """Forget gradients if every `p.grad` was removed, as `zero_grad` does it."""
        if self.live:
            parameters = self.bucket.parameters
            self._notice_removed(grads_of([parameters[index] for index in self.live]))

    def _notice_removed(self, shown: Iterable[Tensor | None]) -> None:
        """Forget all gradients if no `p.grad` is left of those parameters that hold one.

        Args:
            shown: The `p.grad` of each of `live`.
        """
        if self.live and not any(map(is_not, shown, repeat(None))):
            self._forget_sums()
            if self.unreduced or self.shown.any_written():
                for index in list(self.live):
                    self._forget(index)
            else:  # as in most steps, and in a few calls
                self.live.clear()
                self._factors.clear()

    @without_grad
    def sync_handles(self) -> set[int]:
        """Follow what the user did to `p.grad`: removed, zeroed in place, or replaced.

        Returns:
            Indices of parameters with something in it.
        """
        grads = grads_of(self.bucket.parameters)
        filled = {index for index, shown in enumerate(grads) if shown is not None}
        # All at once first, as `zero_grad` removes them: nothing has to be zeroed, and memory can go.
        self._notice_removed([grads[index] for index in self.live])
        # Where nothing is shown and nothing held there is nothing to look at; else nearly always all is as it was.
        if not filled and not self.live and not self.own.live:
            return filled
        if self.shown.are_untouched(grads, filled, self.live | self.own.live):
            return filled
        for index, shown in enumerate(grads):
            known = shown is not None and self.shown.is_known(index, shown)
            if shown is not None and not known:  # the user's own, or another one was replaced, and all have new handles
                shown = self.bucket.parameters[index].grad
                known = shown is not None and self.shown.is_known(index, shown)
            if shown is None:
                if index in self.live or index in self.own.live:
                    self._drop(index)
            elif not known:
                self.replace(index, shown)
            elif self.shown.written(index):
                zeroed = self.shown.zeroed(index)
                if zeroed:
                    self._zero(index)
                self.shown.forget(index)
                # Before the error: after it the user may go on, and it is not to be raised at every look.
                self.show(index)
                if not zeroed:
                    self.shown.refuse(index)
        return filled

    def _drop(self, index: int) -> None:
        self._forget(index)
        if self.slots is not None:
            self.slots.zero(index)
        if not self.live:
            self.reduced.mark_empty()
        # The sum of the others stays, and what is added to it later has to find zeros here.
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
        if self.slots is not None:
            self.slots.zero(index)
        self.own.zero(index)
        self._change(index, Tensor.zero_)

    def replace(self, index: int, gradient: Tensor) -> None:
        """Use a full gradient from the user, the same on all ranks, in place of the accumulated one."""
        if isinstance(gradient, GradientProxy):
            self.shown.refuse(index)
        part, parameter = self.bucket.parts[index], self.bucket.parameters[index]
        self.replace_local(index, local_values(part, parameter, gradient.detach()))

    def replace_local(self, index: int, mine: Tensor) -> None:
        """Use a gradient of what this rank's model has of the parameter; only the rank's own part counts."""
        self.version += 1
        self._drop(index)
        place, piece = self._replaced(), self.bucket.piece_of.get(index)
        if piece is not None:
            self.reduced.write(place, piece, mine.reshape(-1)[piece.start : piece.stop])
        self.live.add(index)
        self.show(index)

    def _replaced(self) -> ShardStorage:
        """Put a gradient from the user in the place of a reduced one."""
        owned = self.bucket.owned
        if self.keeps_whole and self.own.live:  # the buffer is in use: this joins the sums of earlier backwards
            return self.reduced.apart(self.own.zeros()[owned])
        if self.reduced.sum is None and self.keeps_whole:
            self.reduced.sum = InMemory(self.own.zeros()[owned].zero_())
            self._restore()
        else:
            self.reduced.clean()
        self.reduced.empty = False
        return self.reduced.room()

    def local_sum(self, index: int) -> Tensor | None:
        """The part of a gradient that `no_sync` keeps back on this rank, None if nothing."""
        return self.own.sum_of(index)

    def reduced_part(self, index: int) -> Tensor | None:
        """This rank's part of a reduced gradient, flat; None if it owns none of it. Not to be written to."""
        self._check_slots(index, "read")
        self._factors.carry_out()
        parts = [part.to(self.bucket.device) for part in self.reduced.parts(index)]
        return sum(parts[1:], parts[0]) if parts else None

    @torch.no_grad()
    def change(self, index: int, how: Callable[[Tensor], object]) -> None:
        """Change this rank's part of a reduced gradient in place, element by element.

        Args:
            index: Of the parameter.
            how: Takes a few elements, flat.
        """
        self._check_slots(index, "changed")
        self._factors.carry_out()
        self._change(index, how)

    def _check_slots(self, index: int, what: str) -> None:
        if self.slots is not None and not self.slots.empty:
            done, wanted = self.slots.count.micro, self.slots.count.places.count
            raise RuntimeError(
                f"the gradient of parameter {self.bucket.names[index]!r} is {what} after {done} of {wanted} "
                "micro-batches: with reproducible.slots it is whole after the last one of a step"
            )

    def _change(self, index: int, how: Callable[[Tensor], object]) -> None:
        self.version += 1
        self.reduced.change(index, how)

    @without_grad
    def scale(self, indices: Sequence[int], factor: float) -> None:
        """Multiply reduced gradients; where `p.grad` does not show them, not before somebody reads them."""
        if not self._shows_gradient:
            for index in indices:
                self._factors.add(index, factor)
            return
        if indices:
            self._multiply(indices, factor)

    def round_scales(self) -> None:
        """Carry out the multiplications that round, as before a look at the result."""
        self._factors.carry_out_those_that_round()

    @torch.no_grad()
    def _multiply(self, indices: Sequence[int], factor: float) -> None:
        self.version += 1
        self.reduced.change_all(indices, lambda values: values.mul_(factor))

    def owned_gradients(self) -> dict[int, Tensor | OffloadedPart]:
        """The owned part of every reduced gradient, flat, by parameter index."""
        self._factors.carry_out()
        return {index: values for index, (values, _) in self.scaled_gradients().items()}

    def scaled_gradients(self) -> dict[int, tuple[Tensor | OffloadedPart, float]]:
        """The owned gradients in two factors: a reader who multiplies anyway saves a pass over memory."""
        indices = self.owned_indices()
        if not indices:
            return {}
        factor, parts = self._factors.of, self.reduced.split()
        return {index: (parts[index], factor(index)) for index in indices} if parts else {}

    def owned_indices(self) -> list[int]:
        """The parameters with a reduced gradient of which this rank owns a part."""
        assert not self.own.live and self._reduction is None
        self._restore()
        return [piece.index for piece in self.bucket.pieces if piece.index in self.live] if self.live else []

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with memory of its own, with its category in the ledger."""
        for own in self.own.held():
            yield "gradients" if self.keeps_whole else "gradient buckets", own
        for sent in () if self._reduction is None else self._reduction.reads:
            if sent is not self.own.whole:
                yield "gradient buckets", sent
        for partial_sum in () if self.slots is None else self.slots.held():
            yield "gradient buckets", partial_sum
        if self.reduced.sum is not None and not self.keeps_whole:
            for values in self.reduced.sum.held():
                yield "gradients", values
        if self.reduced.earlier is not None:
            for values in self.reduced.earlier.held():
                yield "gradient buckets", values
        for late in self.late.values():
            yield "gradient buckets", late
        for poison in self.shown.held():
            yield "handles", poison

    def relocate(self, move: Callable[[Tensor], Tensor], *, sums: bool, buffers: bool) -> None:
        """Let reduced gradients (`sums`) and local ones lie where `move` puts them; each may be a part of the other."""
        if sums or (buffers and self.keeps_whole):
            self.reduced.relocate(move)
            self.shown.relocate(move)
        if buffers or (sums and self.keeps_whole):
            self.own.relocate(move)
            self.late = {index: move(gradient) for index, gradient in self.late.items()}

    def offloaded(self) -> Iterator[OffloadedVector]:
        """The vectors that are in a tier."""
        if self.reduced.sum is not None:
            yield from self.reduced.sum.offloaded()

    def persistent_bytes(self) -> int:
        """Bytes of gradients that stay between backwards, in whatever tier."""
        if self.keeps_whole:
            return 0 if self.own.whole is None else self.own.whole.nbytes
        return 0 if self.reduced.sum is None else self.reduced.sum.nbytes
