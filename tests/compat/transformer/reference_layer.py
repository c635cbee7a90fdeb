"""The layer in plain torch: what a user would write, in any dtype, with given dropout masks or torch's own."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.ops.fused_layers import keep_scale, kept

States = tuple[Tensor, Tensor, Tensor]


def plain_layer(
    weights: Mapping[str, Tensor | None],
    config: TransformerConfig,
    x: Tensor,
    mask: Tensor | None = None,
    states: States | None = None,
    *,
    drops: bool = True,
) -> Tensor:
    """The layer's output; without `states` torch draws the masks, and keeps them as booleans as it does on a GPU."""
    attention_p, hidden_p = (config.attention_dropout, config.hidden_dropout) if drops else (0.0, 0.0)

    def dropout(values: Tensor, p: float, place: int) -> Tensor:
        if p == 0:
            return values
        if states is None:
            return torch.native_dropout(values, p, True)[0]
        return torch.where(kept(states[place], p, values), values * keep_scale(p), 0.0)

    def norm(values: Tensor, name: str) -> Tensor:
        weight, bias = weights[name + "w"], weights[name + "b"]
        if config.norm == "rms_norm":
            return F.rms_norm(values, (config.hidden_size,), weight, config.norm_eps)
        return F.layer_norm(values, (config.hidden_size,), weight, bias, config.norm_eps)

    def linear(values: Tensor, name: str) -> Tensor:
        weight = weights[name + "w"]
        assert weight is not None
        return F.linear(values, weight, weights[name + "b"])

    def attention(values: Tensor) -> Tensor:
        size, heads, shared = config.head_size, config.heads, config.shared_heads
        q, k, v = linear(values, "attn_qkv").split((heads * size, shared * size, shared * size), -1)
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (q, k, v))
        if config.position == "rotary":
            q, k = turned(q, config.rotary_base), turned(k, config.rotary_base)
        k, v = (part.repeat_interleave(heads // shared, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        if mask is not None:
            seen = mask if mask.dim() == 4 else mask[:, None, None]
            scores = scores.masked_fill(~seen, -torch.inf) if mask.dtype == torch.bool else scores + seen
        if config.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        output = dropout(scores.softmax(-1), attention_p, 0) @ v
        return dropout(linear(output.transpose(1, 2).flatten(2), "attn_o"), hidden_p, 1)

    def feed_forward(values: Tensor) -> Tensor:
        inner = linear(values, "inter_")
        if config.activation == "swiglu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh" if config.activation == "gelu_tanh" else "none")
        return dropout(linear(inner, "output_"), hidden_p, 2)

    if config.pre_layer_norm:
        x = x + attention(norm(x, "norm_"))
        return x + feed_forward(norm(x, "attn_n"))
    x = norm(x + attention(x), "attn_n")
    return norm(x + feed_forward(x), "norm_")


def turned(heads: Tensor, base: float) -> Tensor:
    """Rotary embedding by complex numbers: the pair (i, i + size / 2) is one."""
    length, size = heads.shape[-2:]
    angles = torch.arange(length)[:, None] * base ** (-torch.arange(0, size, 2).double() / size)
    pairs = torch.complex(*heads.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1).to(heads.dtype)


def bytes_kept(forward: torch.nn.Module | object, *arguments: Tensor, parameters: list[Tensor]) -> int:
    """Bytes of all storages that a forward saves for backward, parameters left out, each counted once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            found[place] = tensor  # held, so that no other storage takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(*arguments)  # type: ignore[operator]
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
