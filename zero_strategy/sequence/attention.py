"""Attention over sequences that ranks divide, in the place of `scaled_dot_product_attention`.

Ulysses (Jacobs et al., arXiv 2309.14509): an all-to-all gives each rank all tokens of some heads, and another one takes
the output back. Ring (Liu et al., arXiv 2310.01889): queries stay, keys and values go round, and outputs of parts are
merged by the log-sum-exp of their scores; the next keys and values travel while a part is computed. A `SequenceGroup`
has the one, the other, or Ulysses within the members of a ring.

Messages of a rank, with T tokens of the whole sequence in all its heads and n ranks: Ulysses (n - 1) / n x T / n for
each of q, k, v and the output, per pass; ring (n - 1) / n of all keys and values forward, twice that and their own
gradients once more backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.runtime.torch_private import attention_backward, attention_forward
from zero_strategy.sequence.group import SequenceGroup


def attention(
    q: Tensor, k: Tensor, v: Tensor, group: SequenceGroup, *, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention of this rank's tokens to those of all ranks. A collective of the group, forward and backward.

    Args:
        q: (batch, heads, tokens here, width).
        k: (batch, key heads, tokens here, width); key heads divide heads.
        v: Likewise.
        group: The ranks; their tokens are those that `SequenceGroup.positions` says.
        causal: A token sees those before it, and itself.
        scale: Factor of the scores; None: 1 / sqrt(width).

    Returns:
        (batch, heads, tokens here, width).

    Raises:
        ValueError: If heads cannot be divided as asked for; names the numbers.
    """
    heads, key_heads = q.shape[1], k.shape[1]
    if heads % key_heads:
        raise ValueError(f"{heads} heads of queries are no multiple of the {key_heads} heads of keys")
    if heads % group.ulysses or (key_heads % group.ulysses and group.ulysses % key_heads):
        raise ValueError(
            f"ulysses {group.ulysses} does not divide {heads} heads ({key_heads} of keys and values): take a divisor "
            "of them, and a ring for the other ranks"
        )
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if group.ulysses > 1:
        q, k, v = (_to_heads(each, group) for each in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    out: Tensor = _Ring.apply(q, k, v, group, causal, factor, repeat)
    return _to_tokens(out, group) if group.ulysses > 1 else out


# ---- Ulysses: tokens for heads ----


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
    whole = x.new_zeros(batch, heads, tokens, width)
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


# ---- ring: keys and values go round ----


def _pass_on(group: SequenceGroup, values: Tensor) -> tuple[Tensor, PendingWork]:
    """Send to the next member, and receive the same from the one before."""
    nothing = values.new_empty(0)
    outgoing, incoming = [nothing] * group.size, [nothing] * group.size
    arriving = torch.empty_like(values)
    outgoing[group.neighbour(1)], incoming[group.neighbour(-1)] = values.reshape(-1), arriving.view(-1)
    return arriving, group.ranks.all_to_all(outgoing, incoming, values.numel(), "keys and values")


def _part(step: int, group: SequenceGroup, causal: bool, tokens: int) -> tuple[slice, slice, bool]:
    """Rows and columns that a step computes, and whether the mask is causal there.

    Under a causal mask all columns of an earlier member's first chunk are before all rows here, and all columns of a
    later member are before the rows of the last chunk.
    """
    everything, half = slice(0, tokens), tokens // 2
    source = (group.member - step) % group.ring
    if not causal:
        return everything, everything, False
    if source == group.member:
        return everything, everything, True
    if source < group.member:
        return everything, slice(0, half), False
    return slice(half, tokens), everything, False


def _wide(x: Tensor) -> torch.dtype:
    """Dtype of sums over the ring."""
    return torch.promote_types(x.dtype, torch.float32)


def _expanded(x: Tensor, repeat: int) -> Tensor:
    return x.repeat_interleave(repeat, dim=1) if repeat > 1 else x


def _folded(x: Tensor, repeat: int) -> Tensor:
    return x.unflatten(1, (-1, repeat)).sum(dim=2) if repeat > 1 else x


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: SequenceGroup, causal: bool, scale: float, repeat: int
    ) -> Tensor:
        held = torch.stack([k, v])
        tokens = q.shape[2]
        out = lse = None
        rest: list[Any] = []
        for step in range(group.ring):
            begun = _pass_on(group, held) if step + 1 < group.ring else None
            rows, columns, masked = _part(step, group, causal, tokens)
            keys, values = (_expanded(each[:, :, columns], repeat) for each in held)
            found, sums, more = attention_forward(q[:, :, rows], keys, values, masked, scale)
            rest.append(more)
            if out is None or lse is None:
                out, lse = found if group.ring == 1 else found.to(_wide(q)), sums
            else:
                _merge(out[:, :, rows], lse[:, :, rows], found, sums)
            if begun is not None:
                begun[1].wait()
                held = begun[0]
        assert out is not None and lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = group, causal, scale, repeat, rest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        group, causal, scale, repeat, rest = ctx.options
        grad, tokens = grads[0].contiguous(), q.shape[2]
        held = torch.stack([k, v])
        grad_q = torch.zeros_like(q, dtype=_wide(q)) if group.ring > 1 else None
        travelling: tuple[Tensor, PendingWork] | None = None  # gradients of the keys and values that are here
        for step in range(group.ring):
            begun = _pass_on(group, held) if step + 1 < group.ring else None
            rows, columns, masked = _part(step, group, causal, tokens)
            keys, values = (_expanded(each[:, :, columns], repeat) for each in held)
            parts = attention_backward(
                grad[:, :, rows], q[:, :, rows], keys, values, out[:, :, rows], lse[:, :, rows].contiguous(), masked,
                scale, rest[step],
            )  # fmt: skip
            found = torch.zeros_like(held, dtype=_wide(q) if group.ring > 1 else held.dtype)
            found[:, :, :, columns] = torch.stack([_folded(part.to(found.dtype), repeat) for part in parts[1:]])
            if grad_q is None:
                return parts[0], found[0], found[1], None, None, None, None
            grad_q[:, :, rows] += parts[0]
            if travelling is not None:
                travelling[1].wait()
                found += travelling[0]
            travelling = _pass_on(group, found)
            if begun is not None:
                begun[1].wait()
                held = begun[0]
        assert travelling is not None and grad_q is not None
        home, work = travelling
        work.wait()
        return grad_q.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype), None, None, None, None


def _merge(out: Tensor, lse: Tensor, found: Tensor, sums: Tensor) -> None:
    """Let `out` and `lse` be those of more columns, in place."""
    whole = torch.logaddexp(lse, sums)
    out.mul_((lse - whole).exp().unsqueeze(-1)).add_(found * (sums - whole).exp().unsqueeze(-1))
    lse.copy_(whole)
