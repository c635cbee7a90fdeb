"""A transformer layer of native ops: norms, attention with rotary embedding, feed-forward, dropout masks.

A mask is a function of a key, an offset and an element's index (`ops/fused_layers.py`). The key is the config's `seed`;
the
offset is drawn from torch's default generator of the CPU, one for each of a layer's three dropouts in every forward. So
`torch.manual_seed` makes a run repeatable whatever the device, a recomputation that restores the generator
(`torch.utils.checkpoint`) meets the same masks, masks do not depend on how many layers a process has built, and nothing
waits for the device. A captured CUDA graph would replay one draw. Inductor draws numbers of its own in compiled code,
as it does for torch's dropout; with its `fallback_random` they are those of eager runs.

The feed-forward part is a matrix, activation(x + bias), and the second matrix:

    gelu, gelu_tanh    a = gelu(x + bias)
    swiglu             a = silu(gate) * up,   (gate, up) = the halves of x + bias

With `recompute` only x is kept for the backward, and a is made again from it.

Norms, bias-gelu, bias-dropout-residual and softmax-dropout are one pass each.

    pre_layer_norm      x = x + dropout(attention(norm(x)))         y = x + dropout(feed_forward(attn_norm(x)))
    post                x = attn_norm(x + dropout(attention(x)))    y = norm(x + dropout(feed_forward(x)))

Parameters have DeepSpeed's names, so that its layers' checkpoints fit:

| name | shape | |
| --- | --- | --- |
| attn_qkvw, attn_qkvb | ((heads + 2 key_value_heads) * head size, hidden) | query, key and value, one after the other |
| attn_ow, attn_ob | (hidden, hidden) | output of the attention |
| attn_nw, attn_nb | (hidden,) | norm behind the attention's residual sum |
| inter_w, inter_b | (intermediate, hidden); swiglu: twice as many rows, gate and up | input of the feed-forward part |
| output_w, output_b | (hidden, intermediate) | its output |
| norm_w, norm_b | (hidden,) | norm of the layer's input (pre), or of its output (post) |

Attention takes one of four ways:

| dropout | options | way | kept for the backward |
| --- | --- | --- | --- |
| none | | `scaled_dot_product_attention` (flash where the device has it) | q, k, v, output, a number per row |
| yes | `stochastic_mode` | the same, with the kernel's own dropout | the same on a GPU |
| yes | | scores, `masked_softmax_dropout`, product | q, k, v, probabilities before and after dropout |
| yes | `attn_dropout_checkpoint` | the same, computed again in the backward | q, k, v |

Rotary embedding turns element i of a head's first half together with element i of its second half:

    angle(t, i) = t / base^(2 i / size),    (a, b) -> (a cos - b sin, b cos + a sin)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy import ops
from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig

_LARGEST = 2**63 - 1


def draw_states(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """States of the dropouts of attention probabilities, attention output and layer output, in this order.

    Args:
        seed: The key, 64 bits with sign.

    Returns:
        Three int64 tensors of shape (2,) on the CPU, as `ops.random_state` makes them.
    """
    offsets = torch.randint(-_LARGEST, _LARGEST, (3, 1), device="cpu")
    states = torch.cat((torch.full_like(offsets, seed), offsets), 1)
    return states[0], states[1], states[2]


def no_states() -> tuple[Tensor, Tensor, Tensor]:
    """States where nothing is dropped; no number is drawn."""
    state = torch.zeros(2, dtype=torch.int64, device="cpu")
    return state, state, state


def activated_linear(
    input: Tensor, bias: Tensor | None, weight: Tensor, activation: str, *, recompute: bool = False
) -> Tensor:
    """activation(input + bias) weight^T.

    Args:
        input: (..., inner), or (..., 2 * inner) for "swiglu".
        bias: One value per element of the last dimension, or None.
        weight: (output, inner), of the input's dtype.
        activation: "gelu", "gelu_tanh" or "swiglu".
        recompute: Keep no activation's output for the backward.

    Returns:
        (..., output).
    """
    if activation == "swiglu" and bias is not None:
        input, bias = input + bias, None
    if recompute:
        output: Tensor = _Recomputed.apply(input, bias, weight, activation)
        return output
    if activation == "swiglu":
        gate, up = input.chunk(2, -1)
        return F.linear(F.silu(gate) * up, weight)
    return F.linear(ops.bias_gelu(input, bias, approximate=_form(activation)), weight)


def _form(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


class _Recomputed(torch.autograd.Function):
    """The activation's output lives inside the forward, and again inside the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(input, bias, weight)
        ctx.activation = activation
        return F.linear(_activated(input, bias, activation), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, bias, weight = ctx.saved_tensors
        dinput = dbias = dweight = None
        if ctx.needs_input_grad[2]:
            rows = gradient.flatten(0, -2)
            dweight = rows.t() @ _activated(input, bias, ctx.activation).flatten(0, -2)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            through = torch.matmul(gradient, weight)
            if ctx.activation == "swiglu":
                dinput = _swiglu_backward(through, input)
            else:
                dinput, dbias = torch.ops.zero_strategy.bias_gelu_backward(
                    through, input, bias, ctx.activation == "gelu_tanh"
                )
        return dinput, None if bias is None else dbias, dweight, None


def _activated(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, up = input.chunk(2, -1)
        return F.silu(gate) * up
    output: Tensor = torch.ops.zero_strategy.bias_gelu(input, bias, activation == "gelu_tanh")
    return output


def _swiglu_backward(gradient: Tensor, input: Tensor) -> Tensor:
    gate, up = input.chunk(2, -1)
    dgate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((dgate, gradient * F.silu(gate)), -1)


Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts new keys and values behind those of a cache."""
_INITIAL = (("attn_qkv", 3), ("attn_o", 1), ("attn_n", 1), ("inter_", 1), ("output_", 1), ("norm_", 1))
"""Parameters in the order of `initial_weights`, and how many entries each takes."""


class TransformerLayer(nn.Module):
    """Self-attention and a feed-forward part.

    Args:
        config: Its options; the layer keeps a copy.
        initial_weights: Weights in the order query, key, value, attention output, attention norm, intermediate, output,
            norm; default: random ones.
        initial_biases: Their biases, in the same order; needed with `initial_weights` if the config has biases (entries
            of a norm without one are not looked at).

    Attributes:
        layer_id: Of the class: how many layers have been built. Of a layer: how many there were before it.

    Raises:
        ValueError: If the config lacks something, or the initial values do not fit.
    """

    layer_id = 0
    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter | None
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter | None
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter | None
    inter_w: nn.Parameter
    inter_b: nn.Parameter | None
    output_w: nn.Parameter
    output_b: nn.Parameter | None
    norm_w: nn.Parameter
    norm_b: nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        # Not super(): `replacement.py` makes classes of which other modules are a base, too.
        nn.Module.__init__(self)
        config.check(complete=True)
        self.config = dataclasses.replace(config)
        self._add_parameters(_device(config))
        if initial_weights is None and initial_biases is None:
            self.reset_parameters()
        else:
            self._take(initial_weights, initial_biases)
        self.layer_id = TransformerLayer.layer_id
        TransformerLayer.layer_id += 1
        ops.ensure(self.attn_qkvw.device.type)  # builds the kernels, if need be, now and not in a step
        if not config.training:
            self.eval()

    def _add_parameters(self, device: torch.device | None) -> None:
        config = self.config
        width, inner = config.hidden_size, config.inner_size
        qkv = (config.heads + 2 * config.shared_heads) * config.head_size
        rows = 2 * inner if config.activation == "swiglu" else inner
        shapes = {"attn_qkv": (qkv, width), "attn_o": (width, width), "inter_": (rows, width)}
        shapes["output_"] = (width, inner)
        for name, _ in _INITIAL:
            shape = shapes.get(name, (width,))
            has_bias = config.bias if name in shapes else config.norm == "layer_norm"
            setattr(self, name + "w", nn.Parameter(torch.empty(shape, device=device)))
            bias = nn.Parameter(torch.empty(shape[:1], device=device)) if has_bias else None
            self.register_parameter(name + "b", bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of the config's standard deviations, zero biases, norms of one."""
        config = self.config
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("b"):
                parameter.zero_()
            elif name in ("attn_nw", "norm_w"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, config.output_std if name in ("attn_ow", "output_w") else config.weight_std)

    @torch.no_grad()
    def _take(self, weights: Sequence[Tensor] | None, biases: Sequence[Tensor] | None) -> None:
        expected = sum(count for _, count in _INITIAL)
        for name, given in (("initial_weights", weights), ("initial_biases", biases)):
            needed = name == "initial_weights" or any(key.endswith("b") for key, _ in self.named_parameters())
            if needed and (given is None or len(given) != expected):
                found = "missing" if given is None else f"{len(given)} tensors"
                raise ValueError(
                    f"{name}: {found}; accepted: {expected} tensors, of query, key, value, attention output, attention "
                    "norm, intermediate, output, norm"
                )
        for suffix, name, given in (("w", "initial_weights", weights), ("b", "initial_biases", biases)):
            start = 0
            for prefix, count in _INITIAL:
                parameter = getattr(self, prefix + suffix)
                if parameter is not None:
                    assert given is not None
                    value = torch.cat([part.detach() for part in given[start : start + count]])
                    if value.shape != parameter.shape:
                        raise ValueError(
                            f"{name}[{start}:{start + count}] have shape {tuple(value.shape)} together; accepted: "
                            f"{tuple(parameter.shape)}, of {prefix}{suffix}"
                        )
                    parameter.copy_(value)
                start += count

    # ---------------------------------------------------------------------------------------------------- forward

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *unused: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **unused_by_name: Any,
    ) -> Any:
        """The layer's output.

        Args:
            hidden_states: (batch, length, hidden).
            attention_mask: Boolean, True where a key is seen, or a float that is added to the scores; (batch, length),
                or what broadcasts to (batch, heads, length, length).
            *unused: Arguments of other layers (a head mask, an encoder's states); None or False.
            position_embeddings: Cosines and sines, (batch or 1, length, head size), with position="rotary"; default: of
                places 0 to length - 1.
            **unused_by_name: As `unused`.

        Returns:
            A tensor like `hidden_states`; with `huggingface` a tuple of it.

        Raises:
            TypeError, ValueError: Naming the argument.
        """
        given = {f"argument {place}": value for place, value in enumerate(unused, 2)} | unused_by_name
        for name, value in given.items():
            if value is not None and value is not False:
                raise ValueError(f"{name} of a transformer layer has no effect here; leave it out")
        self._check_input(hidden_states)
        output = self.run(hidden_states, attention_mask, position_embeddings)
        return (output,) if self.config.huggingface else output

    def _check_input(self, hidden_states: Tensor) -> None:
        config = self.config
        if hidden_states.dim() != 3 or hidden_states.shape[2] != config.hidden_size:
            raise ValueError(
                f"hidden_states has shape {tuple(hidden_states.shape)}; accepted: (batch, length, {config.hidden_size})"
            )
        for name, found in (("batch_size", hidden_states.shape[0]), ("max_seq_length", hidden_states.shape[1])):
            most = getattr(config, name)
            if most != -1 and found > most:
                raise ValueError(f"{name} is {most}, but hidden_states has {found}; accepted: up to {most}")

    def run(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        tables: tuple[Tensor, Tensor] | None = None,
        extend: Extend | None = None,
    ) -> Tensor:
        """The layer's output.

        Args:
            hidden_states: (batch, length, hidden).
            mask: As in `forward`.
            tables: As `position_embeddings` there.
            extend: Puts the new keys and values into a cache, and returns the whole of both.
        """
        device = hidden_states.device.type
        if not torch.compiler.is_compiling():
            ops.ensure(device)
        dtype = self.config.compute_dtype
        if dtype is None:
            mixed = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if mixed else hidden_states.dtype
        with torch.autocast(device, enabled=False):  # every dtype below is chosen here
            output = self._blocks(hidden_states.to(dtype), prepared_mask(mask, dtype), tables, extend)
        return output.to(hidden_states.dtype)

    def _blocks(
        self, x: Tensor, mask: Tensor | None, tables: tuple[Tensor, Tensor] | None, extend: Extend | None
    ) -> Tensor:
        config = self.config
        drops = self.training and config.training
        hidden_p = config.hidden_dropout if drops else 0.0
        attention_p = config.attention_dropout if drops else 0.0
        states = draw_states(config.seed) if hidden_p or attention_p else no_states()
        first = self._norm(x, self.norm_w, self.norm_b) if config.pre_layer_norm else x
        attended = self._attention(first, mask, tables, extend, attention_p, states[0])
        x = ops.bias_dropout_residual(self._linear(attended, self.attn_ow), self.attn_ob, x, hidden_p, states[1])
        second = self._norm(x, self.attn_nw, self.attn_nb)
        x = x if config.pre_layer_norm else second
        inner = self._linear(second, self.inter_w)
        inner = activated_linear(
            inner, self.inter_b, self.output_w.to(x.dtype), config.activation, recompute=config.gelu_checkpoint
        )
        x = ops.bias_dropout_residual(inner, self.output_b, x, hidden_p, states[2])
        return x if config.pre_layer_norm else self._norm(x, self.norm_w, self.norm_b)

    def _attention(
        self,
        x: Tensor,
        mask: Tensor | None,
        tables: tuple[Tensor, Tensor] | None,
        extend: Extend | None,
        p: float,
        state: Tensor,
    ) -> Tensor:
        config = self.config
        heads, shared = config.heads, config.shared_heads
        bias = None if self.attn_qkvb is None else self.attn_qkvb.to(x.dtype)
        qkv = F.linear(x, self.attn_qkvw.to(x.dtype), bias).unflatten(-1, (-1, config.head_size))
        if config.position == "rotary":
            cos, sin = tables or rotary_tables(x.shape[1], config.head_size, config.rotary_base, x.device)
            turned = rotate(qkv[:, :, : heads + shared], cos, sin)
            qkv = torch.cat((turned, qkv[:, :, heads + shared :]), 2)  # one tensor, so that only one is kept
        query, key, value = qkv.transpose(1, 2).split((heads, shared, shared), 1)
        if extend is not None:
            key, value = extend(key, value)
        return attend(
            query,
            key,
            value,
            mask,
            causal=self._limited(mask),
            p=p,
            state=state,
            own_dropout=config.stochastic_mode,
            recompute=config.attn_dropout_checkpoint,
        )

    def _limited(self, mask: Tensor | None) -> bool:
        """True if the causal limit comes on top of the mask, which is as `prepared_mask` returns it."""
        return self.config.causal

    @staticmethod
    def _linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight.to(x.dtype))

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        config = self.config
        width, eps, invertible = config.hidden_size, config.norm_eps, config.normalize_invertible
        if config.norm == "rms_norm":
            return ops.rms_norm(x, width, weight, eps, invertible=invertible)
        return ops.layer_norm(x, width, weight, bias, eps, invertible=invertible)

    def extra_repr(self) -> str:
        """Settings of the config that differ from the defaults."""
        default = {field.name: field.default for field in dataclasses.fields(self.config)}
        told = {name: getattr(self.config, name) for name in default if getattr(self.config, name) != default[name]}
        return ", ".join(f"{name}={value}" for name, value in told.items())


def _device(config: TransformerConfig) -> torch.device | None:
    """Device that `local_rank` asks for, unless somebody builds the model elsewhere (on the meta device, say)."""
    if config.local_rank == -1 or not torch.cuda.is_available() or torch.get_default_device().type != "cpu":
        return None
    if config.local_rank >= torch.cuda.device_count():
        raise ValueError(f"local_rank is {config.local_rank}; accepted: 0 to {torch.cuda.device_count() - 1}, or -1")
    return torch.device("cuda", config.local_rank)


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
            output = _RecomputedAttention.apply(query, key, value, additive, state, causal, p)
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


class _RecomputedAttention(torch.autograd.Function):
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
