"""A transformer layer of native ops, and the loss over a vocabulary.

    layer = TransformerLayer(TransformerConfig(hidden_size=1024, heads=16, num_hidden_layers=24))
    y = layer(x)
    loss = linear_cross_entropy(y, embedding.weight, target)

`replace_transformer_layers` puts such layers into a Hugging Face BERT, GPT-2 or Llama model.
"""

from __future__ import annotations

from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer
from zero_strategy.compat.deepspeed.transformer.replacement import (
    hugging_face_state_dict,
    replace_transformer_layers,
    restore_transformer_layers,
)
from zero_strategy.sequence.tiling import linear_cross_entropy

__all__ = [
    "TransformerConfig",
    "TransformerLayer",
    "hugging_face_state_dict",
    "linear_cross_entropy",
    "replace_transformer_layers",
    "restore_transformer_layers",
]
