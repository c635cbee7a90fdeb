"""Sums of one bucket's gradients: local ones before they are reduced, and the reduced ones that this rank owns.

On the CPU new memory is paid for page by page when it is first written to: a tenth of a step of a small model. Nothing
is kept between backwards, and never more than what the last bucket gave back.

Small gradients wait for each other, to be copied in one call: many a unit has more vectors than matrices.

As long as each parameter has had one gradient and the transport takes parts from where they lie, they stay what
autograd made (`handed`): nothing is copied. A second one, or another dtype, calls for the whole buffer.

`ReducedSums` is the sum of reductions so far, in memory or offloaded.

Their norm in files is taken on their way there (`PowerSums`): reading them again costs as much as the step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero_strategy.comm.shared_memory import Scattered
from zero_strategy.fsdp.dtensor import local_gradient
from zero_strategy.fsdp.layout import BucketLayout, Piece
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.power_sums import PowerSums
from zero_strategy.fsdp.shard_storage import InMemory, ShardStorage, StorageSite
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart, Powers
from zero_strategy.ops.library import FLOATS
from zero_strategy.runtime.torch_private import foreach_copy_, foreach_zero_, sparse_parts, without_grad

MOST_WAITING = 1 << 20
"""Bytes of gradients of a bucket that wait for each other, at most."""


def most_waiting(nbytes: int) -> int:
    """Bytes of gradients that may wait to be copied together into a bucket of so many."""
    # They are held beside the bucket's own buffer: an eighth more memory at most.
    return min(MOST_WAITING, nbytes // 8)


class FlatGradients:
    """A buffer for the full gradients of a bucket, and views of it.

    Args:
        layout: Of the bucket.
        flat: The buffer, of `BucketLayout.numel` elements.

    Attributes:
        flat: As above.
        shaped: The place of each parameter, in its shape.
        gaps: What lies between them, where there is anything.
    """

    def __init__(self, layout: BucketLayout, flat: Tensor) -> None:
        self.flat, self._places = flat, layout.places
        self.shaped, self.gaps = layout.views(flat)

    def serves(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> bool:
        """True if the views are those of another bucket, too."""
        flat = self.flat
        alike = flat.numel() == layout.numel and flat.dtype == dtype and flat.device == device
        return alike and (self._places is layout.places or self._places == layout.places)


class BufferReuse:
    """Buffers that buckets gave back; they are of use only while a backward runs."""

    def __init__(self) -> None:
        self._free: list[FlatGradients] = []
        self._open = False

    def open(self) -> None:
        """A backward begins."""
        self._open = True

    def close(self) -> None:
        """A backward has ended: memory goes."""
        self._open = False
        self._free.clear()

    def take(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> FlatGradients | None:
        """A buffer with whatever is in it; None if there is none of this kind."""
        if self._free and self._free[-1].serves(layout, dtype, device):
            return self._free.pop()
        # What does not serve goes at once, or memory would grow with the kinds of buckets.
        self._free.clear()
        return None

    def give(self, buffer: FlatGradients) -> None:
        """Nobody uses a buffer any more."""
        if self._open:
            self._free.append(buffer)


class DeferredScale:
    """One factor per parameter; two are joined only where their product rounds as one after the other does.

    Args:
        multiply: Carries a factor out on some parameters' values.
    """

    def __init__(self, multiply: Callable[[Sequence[int], float], object]) -> None:
        self._multiply = multiply
        self._factors: dict[int, float] = {}

    def of(self, index: int) -> float:
        """That of a parameter; 1 if none waits."""
        return self._factors.get(index, 1.0)

    def add(self, index: int, factor: float) -> None:
        """One more."""
        waiting = self.of(index)
        if not (_is_power_of_two(waiting) or _is_power_of_two(factor)):
            self.carry_out()
            waiting = 1.0
        self._factors[index] = waiting * factor

    def drop(self, index: int) -> None:
        """The values are of no use any more: nan times zero is no zero."""
        self._factors.pop(index, None)

    def clear(self) -> None:
        """Drop the factors of all parameters."""
        self._factors.clear()

    def carry_out(self) -> None:
        """Multiply now."""
        factors, self._factors = self._factors, {}
        # Equal factors together: neighbours are then multiplied in one pass.
        alike: dict[float, list[int]] = {}
        for index, factor in factors.items():
            if factor != 1.0:
                alike.setdefault(factor, []).append(index)
        for factor, indices in alike.items():
            self._multiply(indices, factor)

    def carry_out_those_that_round(self) -> None:
        """Carry out all multiplications, if some factor rounds, as before a look at the result."""
        if not all(map(_is_power_of_two, self._factors.values())):
            self.carry_out()


def _is_power_of_two(factor: float) -> bool:
    return abs(math.frexp(factor)[0]) == 0.5  # it changes exponents alone


def made_dense(name: str, gradient: Tensor) -> str:
    """The warning for a sparse gradient, with the bytes of both forms."""
    indices, values = sparse_parts(gradient)
    sparse = indices.nbytes + values.nbytes
    return (
        f"the gradient of parameter {name!r} is sparse ({sparse} bytes for {len(values)} rows) and "
        f"becomes dense here, {gradient.numel() * gradient.element_size()} bytes, as it is summed and reduced with its "
        "bucket: sparse=True of the embedding saves neither memory nor traffic. Values are those of sparse=False. "
        "This is said once per parameter."
    )


class LocalSums:
    """Sums over backwards on this rank.

    Args:
        bucket: The parameters.
        dtype: In which they are summed.
        reuse: Where memory comes from and goes to that lives in a backward only.
        shown: Whether others see the buffer's values at any time, so that none may wait.

    Attributes:
        live: Indices of parameters with a gradient.
        buffer: Of all of them; None: there is none yet.
        handed: Gradients that are autograd's own tensors, by index; only without a buffer.
        hands_over: Whether there may be such: what the caller sends may be in parts, and the result needs no memory.
    """

    def __init__(
        self, bucket: ParameterBucket, dtype: torch.dtype, reuse: BufferReuse | None = None, *, shown: bool = False
    ) -> None:
        self.bucket, self.dtype, self._reuse = bucket, dtype, reuse
        self._waiting: dict[int, Tensor] = {}
        self._waiting_bytes = 0
        # -1: none waits, not even one without elements.
        self._most_waiting = -1 if shown else most_waiting(bucket.layout.numel * dtype.itemsize)
        self.live: set[int] = set()
        self._told_dense: set[int] = set()
        self.buffer: FlatGradients | None = None
        self.handed: dict[int, Tensor] = {}
        self.hands_over = False

    @property
    def whole(self) -> Tensor | None:
        """The buffer of all of them."""
        return None if self.buffer is None else self.buffer.flat

    def plain(self, index: int, gradient: Tensor) -> Tensor:
        """This rank's own, dense values of a gradient of parameter `index` that is no plain tensor."""
        gradient = local_gradient(self.bucket.parameters[index], gradient)
        if not gradient.is_sparse:
            return gradient
        if index not in self._told_dense and self.bucket.ranks.warns:
            self._told_dense.add(index)
            warnings.warn(made_dense(self.bucket.names[index], gradient), stacklevel=2)
        return gradient.to_dense()

    def add(self, index: int, gradient: Tensor, *, lent: bool = False) -> None:
        """Add a gradient (see `plain`); unless it is `lent` the caller lets go of it."""
        buffer = self.buffer
        if buffer is None or self.handed:
            if buffer is None and self._is_handed_over(index, gradient):
                self.handed[index] = gradient.detach().reshape(-1)  # it may have a graph (create_graph)
                self.live.add(index)
                return
            buffer = self._collected()
        if index in self.live:
            # The first one may be waiting: its copy would overwrite the sum.
            self.copy_waiting()
            buffer.shaped[index].add_(gradient)
            return
        self.live.add(index)
        nbytes, most = gradient.nbytes, self._most_waiting
        # Lent memory changes when the caller goes on; a part of a larger tensor would keep all of it.
        if lent or nbytes > most or gradient.untyped_storage().nbytes() > nbytes:
            buffer.shaped[index].copy_(gradient)
            return
        if self._waiting_bytes + nbytes > most:
            self.copy_waiting()
        self._waiting[index] = gradient
        self._waiting_bytes += nbytes

    @without_grad  # a gradient may have one of its own, and be read from outside of a backward
    def copy_waiting(self) -> None:
        """Bring into the buffer what waits."""
        if self._waiting:
            assert self.buffer is not None
            shaped = self.buffer.shaped
            foreach_copy_([shaped[index] for index in self._waiting], list(self._waiting.values()))
        self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _is_handed_over(self, index: int, gradient: Tensor) -> bool:
        if not self.hands_over or index in self.live:
            return False
        alone = gradient.untyped_storage().nbytes() == gradient.nbytes  # else it would keep more than itself
        alike = gradient.dtype == self.dtype and gradient.is_contiguous() and alone
        return alike and self.bucket.ranks.reduce.takes_scattered(self.bucket.layout.numel, self.dtype)

    def view(self, index: int) -> Tensor:
        """The gradient's place in the buffer of all, which is made if need be, in the parameter's shape."""
        return self._settled().shaped[index]

    def sum_of(self, index: int) -> Tensor | None:
        """The sum of a parameter's gradients, in its shape; None: it has none."""
        if index not in self.live:
            return None
        if index in self.handed:
            return self.handed[index].view(self.bucket.layout.segments[index].shape)
        return self.view(index)

    def zero(self, index: int) -> None:
        """A gradient becomes zero, if there is one."""
        if index in self.live:
            self.view(index).zero_()

    def forget(self, index: int) -> None:
        """There is none of this parameter any more."""
        self.live.discard(index)
        self.handed.pop(index, None)
        self._waiting.pop(index, None)

    def clear(self) -> None:
        """There is none of any; the buffer stays."""
        self.live.clear()
        self.handed.clear()
        self._forget_waiting()

    def zeros(self) -> Tensor:
        """The buffer, of zeros if it is new."""
        if self.buffer is None:
            self.buffer = FlatGradients(self.bucket.layout, self._new(torch.zeros))
        self.copy_waiting()
        return self.buffer.flat

    def scattered(self) -> Scattered | None:
        """All of them as they lie, where none had to be copied; what has none is zero."""
        if not self.handed:
            return None
        segments = self.bucket.layout.segments
        # Sorted: gradients come in autograd's order, and parts have to be in that of the buffer.
        parts = [(segments[index].offset, self.handed[index]) for index in sorted(self.handed)]
        return Scattered(self.bucket.layout.numel, parts, parts[0][1])

    def complete(self) -> Tensor:
        """All of them in the buffer; what has none is zero. They are the caller's from now on."""
        if self.buffer is None and not self.handed:
            self.zeros()
        else:
            shaped = self._settled().shaped
            # Places without a gradient may have values of another bucket, or of an earlier backward.
            if len(self.live) < len(shaped):
                for index, view in enumerate(shaped):
                    if index not in self.live:
                        view.zero_()
        self.live.clear()
        assert self.buffer is not None
        return self.buffer.flat

    def give_back(self) -> None:
        """The buffer's values are of no use any more, nor are those of the tensors."""
        if self.buffer is not None and self._reuse is not None:
            self._reuse.give(self.buffer)
        self.drop()
        self.handed.clear()

    def drop(self) -> None:
        """Let go of the buffer."""
        self.buffer = None
        self._forget_waiting()

    def _collected(self) -> FlatGradients:
        """The buffer, with all that was handed over."""
        if self.buffer is None:
            self.buffer = self._empty()
        if self.handed:
            handed, self.handed = self.handed, {}
            for index, values in handed.items():
                view = self.buffer.shaped[index]
                view.copy_(values.view(view.shape))
        return self.buffer

    def _settled(self) -> FlatGradients:
        """Local sums, with what waited added to them."""
        buffer = self._collected()
        self.copy_waiting()
        return buffer

    def _empty(self) -> FlatGradients:
        """A buffer for full gradients, of which all is written before it is sent."""
        layout = self.bucket.layout
        if self._reuse is None:
            return FlatGradients(layout, self._new(torch.zeros))
        # Not zeroed: first gradients are copied, not added, and `complete` fills the rest.
        buffer = self._reuse.take(layout, self.dtype, self.bucket.device)
        if buffer is None:
            buffer = FlatGradients(layout, self._new(torch.empty))
            if buffer.gaps:  # and no sum over ranks makes anything else of them
                foreach_zero_(buffer.gaps)
        return buffer

    def _new(self, make: Callable[..., Tensor]) -> Tensor:
        return make(self.bucket.layout.numel, dtype=self.dtype, device=self.bucket.device)

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let them lie where `move` puts them."""
        if self.buffer is not None:
            self.copy_waiting()
            self.buffer = FlatGradients(self.bucket.layout, move(self.buffer.flat))
        self.handed = {index: move(values) for index, values in self.handed.items()}

    def held(self) -> Iterator[Tensor]:
        """Every tensor with memory of its own."""
        if self.whole is not None:
            yield self.whole
        yield from self.handed.values()
        yield from self._waiting.values()


class ReducedSums:
    """The sum of one bucket's reductions.

    Args:
        bucket: The parameters.
        dtype: Of the sum.
        store: Where it is kept; None: on the device.

    Attributes:
        sum: Its place, (owned elements,); None: there is none. Where full gradients are kept it is a part of the
            buffer of local sums.
        earlier: The sum so far, while that buffer collects local gradients again.
        empty: Whatever is in `sum` is no sum.
        in_memory: Whether it is kept in one tensor, which a reduction may fill and `p.grad` may show.
    """

    def __init__(self, bucket: ParameterBucket, dtype: torch.dtype, store: ChunkStore | None) -> None:
        self._bucket, self._dtype = bucket, dtype
        self._numel = bucket.owned.stop - bucket.owned.start
        self._site = StorageSite(store, gradients_name(bucket.names[0]))
        self.sum: ShardStorage | None = self._site.reserved()
        self.earlier: ShardStorage | None = None
        self.empty, self.in_memory = True, self._site.in_memory
        self._powers: PowerSums | None = None  # where a norm was asked for

    # ---- the sum and its memory ----

    @property
    def tensor(self) -> Tensor | None:
        """The memory of the sum, if it is in memory."""
        return None if self.sum is None else self.sum.tensor

    def room(self) -> ShardStorage:
        """The place of the sum, with whatever is there; it is made if the bucket was frozen or has let go of it."""
        if self.sum is None:
            self.sum = self._site.unset(self._numel, self._dtype, self._bucket.device)
        return self.sum

    def add(self, values: Tensor, factor: float) -> None:
        """Add the owned elements of a reduction, which may be changed, times a factor, or begin with them."""
        look = None if self._powers is None else self._powers.begin(self._bucket.pieces)
        self.room().add_all(values, first=self.empty, look=look, factor=factor)

    def clean(self) -> None:
        """Have zeros where there is no sum: later ones are added to all of it."""
        if self.sum is None:
            device = self._bucket.device
            self.sum = self._site.zeros(self._numel, self._dtype, device, device)
        elif self.empty:
            self.sum.zero()

    def mark_empty(self) -> None:
        """There is no sum any more; its memory stays as it is."""
        self.earlier, self.empty = None, True

    def forget(self, *, keep: bool) -> None:
        """Drop all sums, and their memory unless it is to be kept."""
        self.mark_empty()
        self._forget_powers()
        if self.sum is not None:
            self.sum = self.sum.invalidate_unsharded(keep=keep)

    # ---- where it is a part of the buffer of local sums ----

    def set_aside(self, *, copy: bool) -> bool:
        """Keep the sum, if there is one, apart from its memory, which is another's from now on unless it is a `copy`.

        Returns:
            Whether the sum was set aside now.
        """
        found, self.sum = self.sum, None
        # Only a sum is worth keeping, and what is set aside already is not to be overwritten.
        if found is None or self.empty or self.earlier is not None:
            return False
        self.earlier = InMemory(found.values.clone()) if copy else found
        return True

    def apart(self, part: Tensor) -> ShardStorage:
        """The sum that is set aside, or zeros for it, like `part` of the buffer."""
        if self.earlier is None:
            self.earlier = InMemory(torch.zeros_like(part))
        return self.earlier

    def restore(self, part: Tensor) -> None:
        """Put what was set aside into its part of the buffer again."""
        assert self.earlier is not None
        self.sum = InMemory(part)
        self.earlier.bring_into(part)
        self.earlier = None

    def join(self, part: Tensor) -> bool:
        """Take a part of the buffer, with a new sum in it, for the sum; add what was set aside.

        Returns:
            Whether anything was.
        """
        self.sum, earlier, self.earlier = InMemory(part), self.earlier, None
        if earlier is not None:
            part.add_(earlier.values)
        return earlier is not None

    # ---- parts of parameters ----

    def parts(self, index: int) -> list[Tensor]:
        """Sums that add up to this rank's part of a parameter's gradient, flat; none if it owns none."""
        piece = self._bucket.piece_of.get(index)
        return [] if piece is None else [place.read(piece.offset, piece.offset + piece.numel) for place in self._places]

    @property
    def _places(self) -> list[ShardStorage]:
        return [place for place in (self.sum, self.earlier) if place is not None]

    def change(self, index: int, how: Callable[[Tensor], object]) -> None:
        """Change this rank's part of a parameter's gradient in place.

        What somebody has kept of a `p.grad` is changed too if there is no sum; in a tier that is nobody's.
        """
        self.change_all([index], how)

    def change_all(self, indices: Sequence[int], how: Callable[[Tensor], object]) -> None:
        """Change several parameters' parts in place; neighbours at once, with the padding between them."""
        wanted = set(indices)
        runs: list[tuple[int, int]] = []
        joins = False
        for piece in self._bucket.pieces if self.in_memory or not self.empty else ():
            if piece.index in wanted:
                start = runs.pop()[0] if joins else piece.offset
                runs.append((start, piece.offset + piece.numel))
            joins = piece.index in wanted
        if runs:
            self._forget_powers()
        for start, stop in runs:
            for place in self._places:
                place.change(start, stop, how)

    def write(self, place: ShardStorage, piece: Piece, values: Tensor) -> None:
        """Replace a part of what is in `place`: the sum, or what is set aside."""
        self._forget_powers()
        place.write(piece.offset, values)

    def split(self) -> Mapping[int, Tensor | OffloadedPart]:
        """The parts of all parameters, by index; nothing if there is no sum."""
        if self.sum is not None and self._powers is not None:
            for vector in self.sum.offloaded():
                # Sums are taken while chunks pass by: all have to be over before they are read.
                vector.let_copies_end()
            self._powers.add_up()
        return {} if self.sum is None else self.sum.split(self._bucket.cuts, self._known)

    def _known(self, index: int) -> Powers | None:
        return None if self._powers is None else self._powers.of(index)

    def expect_norm(self, norm_type: float, *, exact: bool) -> None:
        """Let reductions add up the norm of what is in a tier, so that it need not be read again."""
        # The ops that add powers up have kernels for these dtypes alone.
        if self.in_memory or self._dtype not in FLOATS:
            return
        wanted = PowerSums(norm_type, exact=exact)
        if self._powers is None or not self._powers.serves(wanted):
            self._powers = wanted

    def _forget_powers(self) -> None:
        if self._powers is not None:
            # A norm of values to come is still wanted.
            self._powers = self._powers.anew()

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let what is in memory lie where `move` puts it."""
        self.sum = None if self.sum is None else self.sum.moved(move)
        self.earlier = None if self.earlier is None else self.earlier.moved(move)


def gradients_name(first: str) -> str:
    """The vector of a bucket's reduced gradients, by the name of its first parameter."""
    return f"{first}/gradients"
