"""The reduced gradients of one bucket, as far as this rank owns them: the sum of reductions so far, wherever it lies.

Their norm in files is taken on their way there (`PowerSums`): reading them again costs as much as the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import InMemory, Powers, ShardStorage, StorageSite
from zero_strategy.offload.chunk_store import ChunkStore
from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.ops.library import FLOATS


class ReducedSums:
    """The sum of one bucket's reductions.

    Args:
        bucket: The parameters.
        dtype: Of the sum.
        store: Where it is kept; None: on the device.

    Attributes:
        sum: Its place, (owned elements,); None: there is none. Where whole gradients are kept it is a part of the
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
        """Its place, with whatever is there; made when the bucket was frozen until now, or has let go of it."""
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
        """The same, and no use for the memory, unless it is to be kept."""
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
        piece = self._bucket.piece_of.get(index)
        if piece is not None and (self.in_memory or not self.empty):
            self._forget_powers()
            for place in self._places:
                place.change(piece.offset, piece.offset + piece.numel, how)

    def write(self, place: ShardStorage, piece: Piece, values: Tensor) -> None:
        """Replace a part of what is in `place`: the sum, or what is set aside."""
        self._forget_powers()
        place.write(piece.offset, values)

    def split(self) -> Mapping[int, Tensor | OffloadedPart]:
        """The parts of all parameters, by index; nothing if there is no sum."""
        return {} if self.sum is None else self.sum.split(self._bucket.cuts, self._known)

    def _known(self, index: int) -> Powers | None:
        return None if self._powers is None else self._powers.of(index)

    def expect_norm(self, norm_type: float) -> None:
        """From the next reduction on know the norm of what is in a tier without reading it again."""
        if not self.in_memory and (self._powers is None or self._powers.norm_type != norm_type):
            self._powers = PowerSums(norm_type) if self._dtype in FLOATS else None

    def _forget_powers(self) -> None:
        if self._powers is not None:
            self._powers = PowerSums(self._powers.norm_type)

    def relocate(self, move: Callable[[Tensor], Tensor]) -> None:
        """Let what is in memory lie where `move` puts it."""
        self.sum = None if self.sum is None else self.sum.moved(move)
        self.earlier = None if self.earlier is None else self.earlier.moved(move)


class PowerSums:
    """Sums over the parts of parameters in one bucket, taken while they pass by chunk by chunk."""

    def __init__(self, norm_type: float) -> None:
        self.norm_type = norm_type
        self._pieces: Sequence[Piece] = ()
        self._found: dict[int, tuple[float, int]] = {}

    def begin(self, pieces: Sequence[Piece]) -> Callable[[int, Tensor], None]:
        """A function that takes the chunks of a new pass."""
        self._pieces, self._found = pieces, {piece.index: (0.0, 0) for piece in pieces}
        return self._take

    def _take(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        here = [piece for piece in self._pieces if piece.offset < stop and piece.offset + piece.numel > start]
        cut = [values[max(piece.offset - start, 0) : piece.offset + piece.numel - start] for piece in here]
        if not here:
            return
        sums, bad = ops.grad_stats(cut, self.norm_type)
        for piece, value, count in zip(here, sums.tolist(), bad.tolist(), strict=True):
            before, known = self._found[piece.index]
            total = max(before, value) if math.isinf(self.norm_type) else before + value
            self._found[piece.index] = total, known + int(count)

    def of(self, index: int) -> Powers | None:
        """p, the sum, and how many values are not finite; None if nothing is known."""
        return None if index not in self._found else (self.norm_type, *self._found[index])


def gradients_name(first: str) -> str:
    """The vector of a bucket's reduced gradients, by the name of its first parameter."""
    return f"{first}/gradients"
