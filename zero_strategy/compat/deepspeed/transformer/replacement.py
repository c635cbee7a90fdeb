"""Hugging Face blocks replaced by `TransformerLayer` and back, by a table of families.

A layer that is replaced gives its options as a `TransformerConfig`, and the places of its parameters.

A replaced block is of a class that inherits from `TransformerLayer` and from that of the block it replaces, so that
transformers' own code finds it: hidden states are recorded, `gradient_checkpointing_enable()` works, caches are filled.
Parameters have the layer's names and shapes; `restore_transformer_layers` and `hugging_face_state_dict` give the
original ones. transformers is not imported: blocks are known by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer

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
    """The two values of weights and biases."""
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

_OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode", "seed")


class ReplacedBlock(TransformerLayer):
    """Settings that all replaced blocks have in common.

    Args:
        block: What is replaced; its parameters' values are copied.
        options: Of `TransformerConfig`, from `_OPTIONS`.

    Attributes:
        settings: The model's config.
        place: Index of the block in its model.
    """

    def __init__(self, block: nn.Module, options: Mapping[str, Any]) -> None:
        family = self.family
        settings = family.settings(block)
        first = next(block.parameters())
        with torch.device("meta"):
            TransformerLayer.__init__(self, family.config(settings, options))
        self.to_empty(device=first.device).to(first.dtype)
        self.settings, self.place = settings, family.place(block)
        values = dict(block.state_dict())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(family.taken(name, values))
        frozen = {name for name, parameter in block.named_parameters() if not parameter.requires_grad}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not frozen.issuperset(family.sources[name]))
        self.train(block.training)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no name in any module: it is made again where the block is unpickled.
        return _empty, (_original(type(self)),), self.__dict__

    @property
    def family(self) -> Family:
        """Facts about the replaced block."""
        return FAMILIES[_original(type(self)).__name__]

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        """Returns a tensor, as the replaced block does."""
        given = dict(zip(self.family.positional, arguments, strict=False)) | named
        if given.get("encoder_hidden_states") is not None:
            raise ValueError("encoder_hidden_states: a replaced block has no cross-attention; accepted: None")
        cache = given.get("past_key_values")
        extend = None if cache is None else partial(self._extend, cache)
        self._check_input(hidden_states)
        return self.run(hidden_states, given.get("attention_mask"), given.get("position_embeddings"), extend)

    def _extend(self, cache: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cache = getattr(cache, "self_attention_cache", cache)
        key, value = cache.update(key, value, self.place)
        return key, value

    def _limited(self, mask: Tensor | None) -> bool:
        # Their masks of all queries have the causal limit in them, and may be of a cache with room behind its end.
        return self.config.causal and (mask is None or mask.shape[2] == 1)

    def original_state(self) -> dict[str, Tensor]:
        """Values of the replaced block's parameters, by its names."""
        return self.family.given_back({name: value.detach() for name, value in self.named_parameters()})

    def original(self) -> nn.Module:
        """A block like the replaced one, with this one's values."""
        original = _original(type(self))
        first = next(self.parameters())
        with torch.device("meta"):
            block = original(self.settings, layer_idx=self.place)
        block = block.to_empty(device=first.device).to(first.dtype)
        block.load_state_dict(self.original_state())
        sources = self.family.sources
        trained = {source for name, p in self.named_parameters() if p.requires_grad for source in sources[name]}
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(name in trained)
        return block.train(self.training)


@lru_cache
def _class_for(original: Any) -> type[ReplacedBlock]:
    """One for all blocks of a class, so that they are alike to whoever looks for units."""
    return type(f"Replaced{original.__name__}", (ReplacedBlock, original), {})


def _empty(original: Any) -> ReplacedBlock:
    cls = _class_for(original)
    return cls.__new__(cls)


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    return next(base for base in cls.__bases__ if base is not ReplacedBlock)


def replace_transformer_layers(model: nn.Module, **options: Any) -> nn.Module:
    """Replace the blocks of a Hugging Face BERT, GPT-2 or Llama model.

    Args:
        model: Changed in place, before it is sharded. Its outputs stay what they are, within rounding. Attention
            weights are no output any more.
        **options: normalize_invertible, gelu_checkpoint, attn_dropout_checkpoint, stochastic_mode, seed of
            `TransformerConfig`; the rest is what the model's config says.

    Returns:
        The model.

    Raises:
        ValueError: If there is no such block in it, it does what these layers do not, or an option is unknown.
    """
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"unknown option {name!r}; accepted: {', '.join(_OPTIONS)}")
    found = [
        (parent, key, child, FAMILIES[type(child).__name__])
        for parent in model.modules()
        for key, child in parent.named_children()
        if type(child).__name__ in FAMILIES and type(child).__module__.startswith("transformers.")
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no block that can be replaced: {', '.join(FAMILIES)}")
    for _, _, child, family in found:
        family.check(child)
    for parent, key, child, _ in found:
        kind: Any = type(child)
        setattr(parent, key, _class_for(kind)(child, options))
    return model


def restore_transformer_layers(model: nn.Module) -> nn.Module:
    """Undo `replace_transformer_layers`: the model's own blocks, with the values that the replaced ones have now.

    Raises:
        ValueError: If nothing is replaced.
    """
    found = [(parent, key, child) for parent in model.modules() for key, child in parent.named_children()
             if isinstance(child, ReplacedBlock)]  # fmt: skip
    if not found:
        raise ValueError(f"{type(model).__name__} has no replaced block")
    for parent, key, child in found:
        setattr(parent, key, child.original())
    return model


def hugging_face_state_dict(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state dict that the model had without replaced blocks: names, shapes and order of dimensions.

    Args:
        model: With replaced blocks, for their places.
        state: A state dict of such a model, which a checkpoint may have; default: the model's own.
    """
    state = model.state_dict() if state is None else state
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, ReplacedBlock)}
    result: dict[str, Tensor] = {}
    done: set[str] = set()
    for name, value in state.items():
        prefix, _, _ = name.rpartition(".")
        if prefix not in blocks:
            result[name] = value
        elif prefix not in done:
            done.add(prefix)
            own = {key: state[f"{prefix}.{key}"] for key, _ in blocks[prefix].named_parameters()}
            result |= {f"{prefix}.{key}": part for key, part in blocks[prefix].family.given_back(own).items()}
    return result
