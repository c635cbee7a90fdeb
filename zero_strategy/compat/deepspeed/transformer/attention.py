"""Attention of the 0.3 transformer layer, and rotary position embedding.

| dropout | options | way | kept for the backward |
| --- | --- | --- | --- |
| none | | `scaled_dot_product_attention` (flash where the device has it) | q, k, v, output, a number per row |
| yes | `stochastic_mode` | the same, with the kernel's own dropout | the same on a GPU |
| yes | | scores, `masked_softmax_dropout`, product | q, k, v, probabilities before and after dropout |
| yes | `attn_dropout_checkpoint` | the same, computed again in the backward | q, k, v |

element i of a head's first half and element i of its second half turn together.

angle(t, i) = t / base^(2 i / size),    (a, b) -> (a cos - b sin, b cos + a sin)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zero_strategy import ops


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    p: float = 0.0,
    state: Tensor | None = None,
    own_dropout: bool = False,
    recompute: bool = False,
) -> Tensor:
    """dropout(softmax(query key^T / sqrt(size) + mask)) value.

    Args:
        query: (batch, heads, queries, size).
        key: (batch, heads or a divisor, keys, size).
        value: Like `key`.
        mask: What `prepared_mask` returns.
        causal: Query i sees keys 0 to i. A single query, whose earlier keys come from a cache, sees all.
        p: Probability of dropping a probability.
        state: Of the dropout's mask; needed if p > 0, unless `own_dropout`.
        own_dropout: Let torch's kernel draw the mask.
        recompute: Keep no probabilities for the backward.

    Returns:
        (batch, queries, heads * size).
    """
    causal = causal and query.shape[2] > 1
    if p == 0 or own_dropout:
        output = _fused(query, key, value, mask, causal, p)
    else:
        assert state is not None, "dropout needs a state"
        additive = _additive(mask, query.dtype)
        if recompute:
            output = _Recomputed.apply(query, key, value, additive, state, causal, p)
        else:
            groups = query.shape[1] // key.shape[1]
            scores = _scores(query, _for_all(key, groups))
            dropped = ops.masked_softmax_dropout(scores, additive, causal=causal, p=p, state=state)
            output = torch.matmul(dropped, _for_all(value, groups))
    return output.transpose(1, 2).flatten(2)


def prepared_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as `attend` takes it: (batch or 1, heads or 1, queries or 1, keys), boolean or of the given dtype.

    Args:
        mask: Boolean, True where a key is seen, or a float that is added to the scores; so, or (batch, keys).
        dtype: Of the computation.

    Raises:
        TypeError: If it is neither boolean nor float.
        ValueError: If its shape has another number of dimensions.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        found = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(
            f"attention_mask is {found}; accepted: torch.bool, True where a key is seen (mask.bool()), or a float "
            "that is added to the scores"
        )
    if mask.dim() not in (2, 4):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; accepted: (batch, keys), or what broadcasts to "
            "(batch, heads, queries, keys)"
        )
    mask = mask[:, None, None, :] if mask.dim() == 2 else mask
    return mask if mask.dtype == torch.bool else mask.to(dtype)


def _with_causal(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask with the causal limit in it."""
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, p: float) -> Tensor:
    if causal and mask is not None:
        mask, causal = _with_causal(mask, query, key), False
    shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, p, causal, enable_gqa=shared)


def _for_all(heads: Tensor, groups: int) -> Tensor:
    """Heads of keys or values, once for every head of queries."""
    return heads if groups == 1 else heads.repeat_interleave(groups, 1)


def _for_few(gradient: Tensor, groups: int) -> Tensor:
    """The gradient of what `_for_all` was given."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """query key^T / sqrt(size), scaled before it is rounded."""
    batch = query.shape[:2]
    scale = 1 / math.sqrt(query.shape[-1])
    rows, columns = query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(query.new_zeros(1, 1, 1), rows, columns, beta=0, alpha=scale)
    return scores.view(*batch, *scores.shape[1:])


class _Recomputed(torch.autograd.Function):
    """Attention with dropout that keeps nothing with a row per query and a column per key."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, state: Tensor, causal: bool, p: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask, state)
        ctx.options = (causal, p)
        groups = query.shape[1] // key.shape[1]
        dropped, _ = _probabilities(query, _for_all(key, groups), mask, state, causal, p)
        return torch.matmul(dropped, _for_all(value, groups))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, state = ctx.saved_tensors
        causal, p = ctx.options
        groups = query.shape[1] // key.shape[1]
        key, value = _for_all(key, groups), _for_all(value, groups)
        dropped, kept = _probabilities(query, key, mask, state, causal, p)
        dvalue = torch.matmul(dropped.transpose(-1, -2), gradient)
        through = torch.matmul(gradient, value.transpose(-1, -2))
        dscores = torch.ops.zero_strategy.masked_softmax_dropout_backward(through, kept, state, p)
        dmask = None
        if ctx.needs_input_grad[3]:
            dmask = dscores.to(torch.float32).sum_to_size(mask.shape).to(mask.dtype)
        dscores = dscores * (1 / math.sqrt(query.shape[-1]))
        dkey = torch.matmul(dscores.transpose(-1, -2), query)
        return (
            torch.matmul(dscores, key), _for_few(dkey, groups), _for_few(dvalue, groups), dmask, None, None, None,
        )  # fmt: skip


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, state: Tensor, causal: bool, p: float
) -> tuple[Tensor, Tensor]:
    """After dropout, and before."""
    scores = _scores(query, key)
    mask = None if mask is None else mask.contiguous()
    dropped, kept = torch.ops.zero_strategy.masked_softmax_dropout(scores, mask, state, causal, p)
    return dropped, kept


def rotary_tables(length: int, size: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of places 0 to length - 1.

    Args:
        length: Number of places.
        size: Width of a head, even.
        base: Of the frequencies.
        device: Of the results.

    Returns:
        Two float32 tensors of shape (1, length, size), whose halves are equal.
    """
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    places = torch.arange(length, dtype=torch.float32, device=device)
    angles = places[:, None] * (1.0 / base**steps)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads by their places.

    Args:
        heads: (batch, length, heads, size).
        cos: (batch or 1, length, size).
        sin: Likewise.

    Returns:
        A tensor like `heads`. For the backward only the tables are kept.
    """
    first, second = heads.chunk(2, -1)
    turned = heads * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
    return turned.to(heads.dtype)
