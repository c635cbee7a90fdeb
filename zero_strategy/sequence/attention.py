"""Attention over sequences that ranks divide, in the place of `scaled_dot_product_attention`.

Ulysses (Jacobs et al., arXiv 2309.14509): an all-to-all gives each rank all tokens of some heads, and another one takes
the output back. Ring (Liu et al., arXiv 2310.01889): queries stay, keys and values go round, and outputs of parts are
merged by the log-sum-exp of their scores; the next keys and values travel while a part is computed. A `SequenceGroup`
has the one, the other, or Ulysses within the members of a ring.

Messages of a rank, with T tokens of the whole sequence in all its heads and n ranks: Ulysses (n - 1) / n x T / n for
each of q, k, v and the output, per pass; ring (n - 1) / n of all keys and values forward, twice that and their own
gradients once more backward.

A fused kernel computes all scores of a rectangle, or those of a square on and below its diagonal. Padding, packed
samples and sliding windows (`Visible`) are cut into such pieces, so that no mask has a memory of its own; a square of
which the scores on and above the diagonal count is one below it with rows and columns in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.runtime.torch_private import attention_backward, attention_forward
from zero_strategy.sequence.group import SequenceGroup

Span = tuple[int, int]
"""Tokens from the first number up to the second, of a whole sequence."""


class Shape(Enum):
    """Scores of a piece that count."""

    FULL = auto()
    CAUSAL = auto()  # of a square: on and below the diagonal
    REVERSED = auto()  # of a square: on and above it


class Piece(NamedTuple):
    """Scores for one call of a kernel.

    Attributes:
        sample: Sample of the batch; None: all of them.
        rows: Queries, as places among those here.
        columns: Keys, likewise.
        shape: Scores that count.
    """

    sample: int | None
    rows: slice
    columns: slice
    shape: Shape

    @property
    def batch(self) -> slice:
        """The samples."""
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


@dataclass(frozen=True)
class Visible:
    """Queries and the keys they may see, beside what a causal mask and a window say.

    Attributes:
        samples: Of each sample: pairs of a span of queries and one of keys. One entry only: of all samples.
    """

    samples: tuple[tuple[tuple[Span, Span], ...], ...]

    @classmethod
    def documents(cls, numbers: Tensor) -> Visible | None:
        """Tokens see those of their own document.

        Args:
            numbers: (batch, tokens) integers; a document begins wherever the number changes.

        Returns:
            None: each sample is one document.
        """
        return _of([tuple((span, span) for span in _runs(row)) for row in numbers.cpu()], numbers.shape[1])

    @classmethod
    def positions(cls, places: Tensor) -> Visible | None:
        """Tokens see those of their own document; one begins wherever places do not go on by one.

        Args:
            places: (batch, tokens) integers, as `position_ids` of packed samples.
        """
        begins = torch.ones_like(places, dtype=torch.bool)
        begins[:, 1:] = places.diff(dim=1) != 1
        return cls.documents(begins.cumsum(dim=1))

    @classmethod
    def padding(cls, mask: Tensor) -> Visible | None:
        """Tokens see those that the mask has.

        Args:
            mask: (batch, tokens); nonzero: a token to be seen.
        """
        tokens = mask.shape[1]
        rows = [tuple(((0, tokens), span) for span in _runs(row) if row[span[0]]) for row in (mask != 0).cpu()]
        return _of(rows, tokens)


def _runs(values: Tensor) -> list[Span]:
    """Spans of equal neighbours."""
    edges = [0, *((values.diff() != 0).nonzero().flatten() + 1).tolist(), len(values)]
    return list(pairwise(edges))


def _of(samples: list[tuple[tuple[Span, Span], ...]], tokens: int) -> Visible | None:
    if len(set(samples)) == 1:
        samples = samples[:1]
    return None if samples == [(((0, tokens), (0, tokens)),)] else Visible(tuple(samples))


def pieces(
    rows: Sequence[Span], columns: Sequence[Span], visible: Visible | None, causal: bool, window: int | None
) -> list[Piece]:
    """The scores to compute between some queries and some keys.

    Args:
        rows: Spans of the queries here, in their order.
        columns: Of the keys.
        visible: Who may see whom; None: everybody.
        causal: A token sees those before it, and itself.
        window: Of these the last so many, with itself; None: all. For causal attention.
    """
    last = max(stop for _, stop in (*rows, *columns))
    samples = ((((0, last), (0, last)),),) if visible is None else visible.samples
    found = []
    for number, pairs in enumerate(samples):
        for seeing, seen in pairs:
            for row, row_start in _within(rows, seeing):
                for column, column_start in _within(columns, seen):
                    for r, c, shape in _cover(row, column, causal, window):
                        found.append(
                            Piece(
                                None if len(samples) == 1 else number,
                                slice(r[0] - row_start, r[1] - row_start),
                                slice(c[0] - column_start, c[1] - column_start),
                                shape,
                            )
                        )
    return found


def _within(spans: Sequence[Span], bounds: Span) -> Iterator[tuple[Span, int]]:
    """Parts of spans within bounds, each with what turns a place in the sequence into one among the spans' tokens."""
    before = 0
    for start, stop in spans:
        inside = max(start, bounds[0]), min(stop, bounds[1])
        if inside[0] < inside[1]:
            yield inside, start - before
        before += stop - start


def _cover(row: Span, column: Span, causal: bool, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Pieces of a rectangle that count."""
    if not causal:
        yield row, column, Shape.FULL
        return
    first, last = max(row[0], column[0]), min(row[1], column[1])  # a square on the diagonal, if first < last
    if column[0] < row[0]:
        yield from _earlier(row, (column[0], min(column[1], row[0])), window)
    if first < last:
        yield from _square((first, last), window)
        if last < row[1]:
            yield from _earlier((last, row[1]), (first, last), window)


def _square(both: Span, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Causal attention of tokens to themselves."""
    start, stop = both
    if window is None or stop - start <= window:
        yield both, both, Shape.CAUSAL
        return
    for first in range(start, stop, window):
        tile = first, min(first + window, stop)
        yield tile, tile, Shape.CAUSAL
        if first > start:
            yield from _earlier(tile, (max(start, first - window + 1), first), window)


def _earlier(row: Span, column: Span, window: int | None) -> Iterator[tuple[Span, Span, Shape]]:
    """Keys that all are before the queries."""
    if row[0] >= row[1] or column[0] >= column[1]:
        return
    if window is None:
        yield row, column, Shape.FULL
        return
    near = min(row[1], column[0] + window)  # queries before it see all of these keys
    if row[0] < near:
        yield (row[0], near), column, Shape.FULL
    first, last = max(row[0], column[0] + window), min(row[1], column[1] + window - 1)
    if first >= last:
        return
    edge = last - window + 1
    yield (first, last), (first - window + 1, edge), Shape.REVERSED
    if edge < column[1]:
        yield (first, last), (edge, column[1]), Shape.FULL


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: SequenceGroup,
    *,
    causal: bool = False,
    scale: float | None = None,
    visible: Visible | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of this rank's tokens to those of all ranks. A collective of the group, forward and backward.

    Args:
        q: (batch, heads, tokens here, width).
        k: (batch, key heads, tokens here, width); key heads divide heads.
        v: Likewise; of another width, if need be.
        group: The ranks; their tokens are those that `SequenceGroup.positions` says.
        causal: A token sees those before it, and itself.
        scale: Factor of the scores; None: 1 / sqrt(width).
        visible: Padding or packed samples, of whole sequences: `Visible.padding`, `.positions`, `.documents`.
        window: Sliding window: a token sees the last so many, with itself; for causal attention.

    A token that sees none has zeros.

    Returns:
        (batch, heads, tokens here, width of v).

    Raises:
        ValueError: If heads cannot be divided as asked for; names the numbers.
    """
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} heads of queries are no multiple of the {key_heads} heads of keys")
    if not heads_divide(heads, key_heads, group.ulysses):
        raise ValueError(
            f"ulysses {group.ulysses} does not divide {heads} heads ({key_heads} of keys and values): take a divisor "
            "of them, and a ring for the other ranks"
        )
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window}: at least 1 token, and only with causal=True")
    if visible is not None and len(visible.samples) not in (1, q.shape[0]):
        raise ValueError(f"visible is of {len(visible.samples)} samples, and the batch has {q.shape[0]}")
    group.used = True
    if torch.is_autocast_enabled(q.device.type):  # as for torch's attention
        q, k, v = (each.to(torch.get_autocast_dtype(q.device.type)) for each in (q, k, v))
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; accepted: one dtype")
    factor, width = q.shape[-1] ** -0.5 if scale is None else scale, v.shape[-1]
    if width != q.shape[-1]:  # kernels and messages have one width
        wide = max(width, q.shape[-1])
        q, k, v = (torch.nn.functional.pad(each, (0, wide - each.shape[-1])) for each in (q, k, v))
    if group.ulysses > 1:
        q, k, v = (_to_heads(each, group) for each in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    out: Tensor = _Ring.apply(q, k, v, group, causal, factor, repeat, visible, window)
    out = _to_tokens(out, group) if group.ulysses > 1 else out
    return out[..., :width]


def heads_divide(heads: int, key_heads: int, ulysses: int) -> bool:
    """True if so many ranks can divide the heads; several may have the same one of keys and values."""
    return heads % ulysses == 0 and (key_heads % ulysses == 0 or ulysses % key_heads == 0)


def _heads_of(group: SequenceGroup, heads: int) -> list[slice]:
    """Heads of each peer; of fewer heads than peers several have the same."""
    if heads >= group.ulysses:
        each = heads // group.ulysses
        return [slice(n * each, (n + 1) * each) for n in range(group.ulysses)]
    return [slice(n * heads // group.ulysses, n * heads // group.ulysses + 1) for n in range(group.ulysses)]


def _exchange(group: SequenceGroup, parts: Sequence[Tensor], shape: torch.Size, of: str) -> list[Tensor]:
    """Each peer's part for this rank; all are of one shape."""
    nothing = parts[0].new_empty(0)
    outgoing, incoming = [nothing] * group.size, [nothing] * group.size
    mine = group.rank - group.peers.start
    for number, rank in enumerate(group.peers):
        outgoing[rank] = parts[number].reshape(-1)
        incoming[rank] = nothing.new_empty(shape.numel()) if number != mine else outgoing[rank]
    group.ranks.all_to_all(outgoing, incoming, shape.numel(), of).wait()
    return [incoming[rank].view(shape) for rank in group.peers]


def _tokens_to_heads(x: Tensor, group: SequenceGroup) -> Tensor:
    slices = _heads_of(group, x.shape[1])
    parts = [x[:, each].contiguous() for each in slices]
    return torch.cat(_exchange(group, parts, parts[0].shape, "tokens for heads"), dim=2)


def _heads_to_tokens(x: Tensor, group: SequenceGroup, heads: int) -> Tensor:
    """The inverse; where peers have the same heads, the sum of theirs."""
    parts = [part.contiguous() for part in x.chunk(group.ulysses, dim=2)]
    found = _exchange(group, parts, parts[0].shape, "heads for tokens")
    batch, _, tokens, width = parts[0].shape
    whole = _by_tokens(x, (batch, heads, tokens, width), x.dtype)
    for each, part in zip(_heads_of(group, heads), found, strict=True):
        whole[:, each] += part
    return whole


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group, ctx.heads = group, x.shape[1]
        return _tokens_to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _heads_to_tokens(grads[0], ctx.group, ctx.heads), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _heads_to_tokens(x, group, x.shape[1] * group.ulysses)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _tokens_to_heads(grads[0], ctx.group), None


def _to_heads(x: Tensor, group: SequenceGroup) -> Tensor:
    found: Tensor = _ToHeads.apply(x, group)
    return found


def _to_tokens(x: Tensor, group: SequenceGroup) -> Tensor:
    found: Tensor = _ToTokens.apply(x, group)
    return found


def _pass_on(group: SequenceGroup, values: Tensor) -> tuple[Tensor, PendingWork]:
    """Send to the next member, and receive the same from the one before."""
    nothing = values.new_empty(0)
    outgoing, incoming = [nothing] * group.size, [nothing] * group.size
    arriving = torch.empty_like(values)
    outgoing[group.neighbour(1)], incoming[group.neighbour(-1)] = values.reshape(-1), arriving.view(-1)
    return arriving, group.ranks.all_to_all(outgoing, incoming, values.numel(), "keys and values")


def _pieces(
    step: int, group: SequenceGroup, tokens: int, causal: bool, visible: Visible | None, window: int | None
) -> list[Piece]:
    """Scores that a step computes; `tokens` are those of a member of the ring."""
    source = (group.member - step) % group.ring
    if visible is not None or window is not None:
        return pieces(group.spans(group.member, tokens), group.spans(source, tokens), visible, causal, window)
    # All columns of an earlier member's first chunk are before all rows here, and all columns of a later member are
    # before the rows of the last chunk; of both members' chunks together the diagonal is one.
    everything, half = slice(0, tokens), tokens // 2
    if not causal:
        return [Piece(None, everything, everything, Shape.FULL)]
    if source == group.member:
        return [Piece(None, everything, everything, Shape.CAUSAL)]
    if source < group.member:
        return [Piece(None, everything, slice(0, half), Shape.FULL)]
    return [Piece(None, slice(half, tokens), everything, Shape.FULL)]


def _by_tokens(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of (batch, heads, tokens, width), with the heads of a token side by side, so that nobody copies it."""
    batch, heads, tokens, width = shape
    return like.new_zeros((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    """Dtype of sums over the ring."""
    return torch.promote_types(x.dtype, torch.float32)


def _expanded(x: Tensor, repeat: int) -> Tensor:
    return x.repeat_interleave(repeat, dim=1) if repeat > 1 else x


def _folded(x: Tensor, repeat: int) -> Tensor:
    return x.unflatten(1, (-1, repeat)).sum(dim=2) if repeat > 1 else x


def _cut(x: Tensor, piece: Piece, where: slice) -> Tensor:
    """A piece's part of queries, keys, values or what goes with them, in the order that the kernel needs."""
    part = x[piece.batch, :, where]
    return part.flip(2) if piece.shape is Shape.REVERSED else part


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: SequenceGroup, causal: bool, scale: float, repeat: int,
        visible: Visible | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        held, tokens = torch.stack([k, v]), q.shape[2]
        steps = [_pieces(step, group, tokens, causal, visible, window) for step in range(group.ring)]
        alone = _is_alone(steps, tokens)
        out = lse = None if alone else _by_tokens(q, q.shape, _wide(q))
        if out is not None:
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=_wide(q))
        rest: list[list[Any]] = []
        for step, todo in enumerate(steps):
            begun = _pass_on(group, held) if step + 1 < group.ring else None
            rest.append([])
            for piece in todo:
                keys, values = (_expanded(_cut(each, piece, piece.columns), repeat) for each in held)
                masked = piece.shape is not Shape.FULL
                found, sums, more = attention_forward(_cut(q, piece, piece.rows), keys, values, masked, scale)
                rest[step].append(more)
                if out is None or lse is None:
                    out, lse = found, sums
                    break
                if piece.shape is Shape.REVERSED:
                    found, sums = found.flip(2), sums.flip(2)
                _merge(out[piece.batch, :, piece.rows], lse[piece.batch, :, piece.rows], found, sums)
            if begun is not None:
                begun[1].wait()
                held = begun[0]
        assert out is not None and lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = group, scale, repeat, steps, rest, alone
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, scale, repeat, steps, rest, alone = ctx.options
        grad, held = grads[0].contiguous(), torch.stack([k, v])
        sums = held.dtype if alone else _wide(q)
        grad_q = None if alone else torch.zeros_like(q, dtype=sums)
        travelling: tuple[Tensor, PendingWork] | None = None  # gradients of the keys and values that are here
        for step, todo in enumerate(steps):
            begun = _pass_on(group, held) if step + 1 < group.ring else None
            found = torch.zeros_like(held, dtype=sums)
            for piece, more in zip(todo, rest[step], strict=True):
                keys, values = (_expanded(_cut(each, piece, piece.columns), repeat) for each in held)
                of_rows = [_cut(each, piece, piece.rows) for each in (grad, q, out)]
                parts = attention_backward(
                    of_rows[0], of_rows[1], keys, values, of_rows[2], _cut(lse, piece, piece.rows).contiguous(),
                    piece.shape is not Shape.FULL, scale, more,
                )  # fmt: skip
                if piece.shape is Shape.REVERSED:
                    parts = parts[0].flip(2), parts[1].flip(2), parts[2].flip(2)
                both = torch.stack([_folded(part.to(sums), repeat) for part in parts[1:]])
                if grad_q is None:
                    return parts[0], both[0], both[1], *[None] * 6
                found[:, piece.batch, :, piece.columns] += both
                grad_q[piece.batch, :, piece.rows] += parts[0]
            if group.ring == 1:
                held = found
                break
            if travelling is not None:
                travelling[1].wait()
                found += travelling[0]
            travelling = _pass_on(group, found)
            if begun is not None:
                begun[1].wait()
                held = begun[0]
        if travelling is not None:
            held = travelling[0]
            travelling[1].wait()
        assert grad_q is not None
        return grad_q.to(q.dtype), held[0].to(k.dtype), held[1].to(v.dtype), *[None] * 6


def _is_alone(steps: list[list[Piece]], tokens: int) -> bool:
    """True if one call of a kernel computes everything, so that there is nothing to merge."""
    if len(steps) > 1 or len(steps[0]) != 1:
        return False
    piece = steps[0][0]
    everything = slice(0, tokens)
    return piece.sample is None and piece.rows == everything == piece.columns and piece.shape is not Shape.REVERSED


def _merge(out: Tensor, lse: Tensor, found: Tensor, sums: Tensor) -> None:
    """Let `out` and `lse` be those of more columns, in place."""
    whole = torch.logaddexp(lse, sums)
    out.mul_((lse - whole).exp().unsqueeze(-1)).add_(found * (sums - whole).exp().unsqueeze(-1))
    lse.copy_(whole)
