"""What is known of each family of Hugging Face blocks: its options as a `TransformerConfig`, its parameters' places."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.transformer.config import TransformerConfig

_ACTIVATIONS = MappingProxyType(
    {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}
)


@dataclass(frozen=True)
class Family:
    """Blocks of one class.

    Attributes:
        options: From the model's config to the options of `TransformerConfig`.
        sources: By the layer's parameter: the block's parameters whose rows it is made of, one after the other.
        transposed: The block's matrices are (input, output).
        positional: Names of the forward's arguments after `hidden_states`.
        attention: Name of the module in the block that has the model's config and the block's index.
        refused: Settings of the model's config that these layers cannot do: name to the only value accepted.
    """

    options: Callable[[Any], dict[str, Any]]
    sources: Mapping[str, tuple[str, ...]]
    transposed: bool
    positional: tuple[str, ...]
    attention: str
    refused: Mapping[str, Any]

    def settings(self, block: nn.Module) -> Any:
        """The model's config."""
        return block.get_submodule(self.attention).config

    def place(self, block: nn.Module) -> int:
        """Index of the block in its model."""
        return int(block.get_submodule(self.attention).layer_idx)  # type: ignore[arg-type]

    def check(self, block: nn.Module) -> None:
        """Nothing is asked for that a layer does not do.

        Raises:
            ValueError: Naming the setting and what is accepted.
        """
        settings, kind = self.settings(block), type(block).__name__
        for name, accepted in self.refused.items():
            if getattr(settings, name, accepted) != accepted:
                raise ValueError(
                    f"{name} of the {kind}'s config is {getattr(settings, name)!r}; accepted: {accepted!r} only"
                )
        head = getattr(settings, "head_dim", None)
        if head is not None and head * settings.num_attention_heads != settings.hidden_size:
            accepted = settings.hidden_size // settings.num_attention_heads
            raise ValueError(f"head_dim of the {kind}'s config is {head}; accepted: {accepted} only")
        if len({parameter.dtype for parameter in block.parameters()}) != 1:
            raise ValueError(f"parameters of a {kind} have several dtypes; accepted: one for all")
        names = {name for name, _ in block.named_parameters()}
        known = {name for sources in self.sources.values() for name in sources}
        if not names <= known:
            raise ValueError(f"a {kind} has parameters {sorted(names - known)}, for which a layer has no place")
        self.config(settings, {})

    def config(self, settings: Any, options: Mapping[str, Any]) -> TransformerConfig:
        """The layer's options.

        Args:
            settings: The model's config.
            options: What the user asks for.

        Raises:
            ValueError: Naming what is not done.
        """
        own = self.options(settings)
        return TransformerConfig(
            hidden_size=settings.hidden_size, heads=settings.num_attention_heads,
            num_hidden_layers=settings.num_hidden_layers, initializer_range=settings.initializer_range,
            **{**own, **options},
        )  # fmt: skip

    def taken(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """The layer's parameter from the block's state."""
        parts = [values[source] for source in self.sources[name]]
        if self.transposed:
            parts = [part.t() if part.dim() == 2 else part for part in parts]
        return torch.cat(parts)

    def given_back(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The block's state from the layer's parameters, contiguous copies."""
        result = {}
        for name, value in values.items():
            sources = self.sources[name]
            for source, part in zip(sources, value.split(self._rows(name, len(sources), values)), strict=True):
                part = part.t() if self.transposed and part.dim() == 2 else part
                result[source] = part.contiguous().clone()
        return result

    def _rows(self, name: str, parts: int, values: Mapping[str, Tensor]) -> list[int]:
        rows = len(values[name])
        if name.startswith("attn_qkv") and parts == 3:
            width = values["attn_ow"].shape[0]
            return [width, (rows - width) // 2, (rows - width) // 2]
        return [rows // parts] * parts


def _activation(name: str, accepted: Mapping[str, str]) -> str:
    if name not in accepted:
        raise ValueError(f"the model's activation is {name!r}; accepted: {', '.join(map(repr, accepted))}")
    return accepted[name]


def _bert(settings: Any) -> dict[str, Any]:
    return {
        "intermediate_size": settings.intermediate_size,
        "attn_dropout_ratio": settings.attention_probs_dropout_prob,
        "hidden_dropout_ratio": settings.hidden_dropout_prob,
        "pre_layer_norm": False,
        "norm_eps": settings.layer_norm_eps,
        "activation": _activation(settings.hidden_act, _ACTIVATIONS),
        "causal": settings.is_decoder,
    }


def _gpt2(settings: Any) -> dict[str, Any]:
    return {
        "intermediate_size": -1 if settings.n_inner is None else settings.n_inner,
        "attn_dropout_ratio": settings.attn_pdrop,
        "hidden_dropout_ratio": settings.resid_pdrop,
        "norm_eps": settings.layer_norm_epsilon,
        "activation": _activation(settings.activation_function, _ACTIVATIONS),
        "causal": True,
    }


def _llama(settings: Any) -> dict[str, Any]:
    return {
        "intermediate_size": settings.intermediate_size,
        "attn_dropout_ratio": settings.attention_dropout,
        "hidden_dropout_ratio": 0.0,
        "norm": "rms_norm",
        "norm_eps": settings.rms_norm_eps,
        "activation": _activation(settings.hidden_act, {"silu": "swiglu"}),
        "position": "rotary",
        "key_value_heads": settings.num_key_value_heads,
        "causal": True,
        "bias": False,
    }


def _both(sources: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Of weights and biases."""
    return {
        key + letter: tuple(f"{name}.{kind}" for name in names)
        for key, names in sources.items()
        for letter, kind in (("w", "weight"), ("b", "bias"))
    }


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "BertLayer": Family(
            _bert,
            _both(
                {
                    "attn_qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
                    "attn_o": ("attention.output.dense",),
                    "attn_n": ("attention.output.LayerNorm",),
                    "inter_": ("intermediate.dense",),
                    "output_": ("output.dense",),
                    "norm_": ("output.LayerNorm",),
                }
            ),
            transposed=False,
            positional=("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
            attention="attention.self",
            refused=MappingProxyType({"add_cross_attention": False}),
        ),
        "GPT2Block": Family(
            _gpt2,
            _both(
                {
                    "attn_qkv": ("attn.c_attn",),
                    "attn_o": ("attn.c_proj",),
                    "attn_n": ("ln_2",),
                    "inter_": ("mlp.c_fc",),
                    "output_": ("mlp.c_proj",),
                    "norm_": ("ln_1",),
                }
            ),
            transposed=True,
            positional=("past_key_values", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"),
            attention="attn",
            refused=MappingProxyType(
                {
                    "add_cross_attention": False,
                    "scale_attn_weights": True,
                    "scale_attn_by_inverse_layer_idx": False,
                    "reorder_and_upcast_attn": False,
                }
            ),
        ),
        "LlamaDecoderLayer": Family(
            _llama,
            {
                "attn_qkvw": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                "attn_ow": ("self_attn.o_proj.weight",),
                "attn_nw": ("post_attention_layernorm.weight",),
                "inter_w": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
                "output_w": ("mlp.down_proj.weight",),
                "norm_w": ("input_layernorm.weight",),
            },
            transposed=False,
            positional=("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"),
            attention="self_attn",
            refused=MappingProxyType({"attention_bias": False, "mlp_bias": False}),
        ),
    }
)
"""By the name of the block's class."""
