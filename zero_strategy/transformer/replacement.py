"""Hugging Face blocks out, `TransformerLayer` in, and back again.

A replaced block is of a class that inherits from `TransformerLayer` and from that of the block it replaces, so that
transformers' own code finds it: hidden states are recorded, `gradient_checkpointing_enable()` works, caches are filled.
Parameters have the layer's names and shapes; `restore_transformer_layers` and `hugging_face_state_dict` give the
original ones. transformers is not imported: blocks are known by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.transformer.block_weights import FAMILIES, Family
from zero_strategy.transformer.layer import TransformerLayer

_OPTIONS = ("normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint", "stochastic_mode", "seed")


class ReplacedBlock(TransformerLayer):
    """What all replaced blocks have in common.

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
        """What is known of the replaced block."""
        return FAMILIES[_original(type(self)).__name__]

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        """As the replaced block's: a tensor."""
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
