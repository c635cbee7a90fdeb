"""Hugging Face models as layers of a pipeline.

    PipelineModule(pipeline_layers(model), num_stages=2, loss_fn=pipeline_loss(model))

Between layers travels a dict: the hidden states, and of attention mask and position ids what the batch has. The blocks'
own masks and rotary embeddings are calculated from these by each block, with transformers' functions: that is less than
what would have to be sent. Keys and values are not collected. The last layer returns the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.pipeline.building import finished, model_layer
from zero_strategy.pipeline.specs import ModelLayer

_TRAVELLING = ("attention_mask", "position_ids")
_TAKEN = {"input_ids", *_TRAVELLING, "token_type_ids", "labels"}

State = dict[str, Any]


def pipeline_layers(model: nn.Module) -> list[ModelLayer]:
    """The layers of a Hugging Face model: embedding, blocks, head.

    The first takes a batch: a dict with "input_ids" and, where wanted, "attention_mask", "position_ids" and
    "token_type_ids" ("labels" are for the loss, and not looked at), or the input ids alone. The last returns what the
    model calls logits. Parameters keep their names in the model, so that checkpoints are the model's own.

    Args:
        model: One of `RECIPES`: GPT2LMHeadModel, LlamaForCausalLM, BertForMaskedLM, BertForSequenceClassification.

    Raises:
        ValueError: If there is no recipe for it.
    """
    return finished(model, _recipe(model)[0](model))


def pipeline_loss(model: nn.Module) -> Callable[..., Tensor]:
    """The loss that the model itself would calculate: a function of logits and labels.

    Raises:
        ValueError: If there is no recipe for the model.
    """
    return _recipe(model)[1](model)


def _recipe(model: nn.Module) -> tuple[Callable[[Any], list[ModelLayer]], Callable[[Any], Callable[..., Tensor]]]:
    for each in type(model).__mro__:
        if each.__name__ in RECIPES and each.__module__.startswith("transformers."):
            return RECIPES[each.__name__]
    raise ValueError(
        f"there is no pipeline recipe for {type(model).__name__}, only for {', '.join(RECIPES)}; "
        "zero_strategy.pipeline.building.pipeline_layers(model, blocks=..., embedding=..., head=...) takes any model"
    )


# ---- what is the same for all ----


def _batch(inputs: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Input ids, and all of the batch."""
    batch = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        raise TypeError(f"the first layer takes input_ids, or a dict that has them, not {type(inputs).__name__}")
    if unknown := sorted(name for name, value in batch.items() if name not in _TAKEN and value is not None):
        raise ValueError(f"the first layer does not take {unknown}; it takes {sorted(_TAKEN)}")
    return batch["input_ids"], batch


def _start(hidden_states: Tensor, batch: Mapping[str, Any]) -> State:
    travelling = {name: batch[name] for name in _TRAVELLING if batch.get(name) is not None}
    return {"hidden_states": hidden_states, **travelling}


def _positions(state: State) -> Tensor:
    hidden, given = state["hidden_states"], state.get("position_ids")
    if given is not None:
        return given  # type: ignore[no-any-return]
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


def _causal_mask(config: Any, state: State, positions: Tensor | None) -> Any:
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(
        config=config,
        inputs_embeds=state["hidden_states"],
        attention_mask=state.get("attention_mask"),
        past_key_values=None,
        position_ids=positions,
    )


def _names(container: str, module: Any) -> list[str]:
    return [f"{container}.{index}" for index in range(len(module))]


def _causal_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_call_loss, model.loss_function, model.config.vocab_size)


def _call_loss(loss: Callable[..., Tensor], vocab_size: int, logits: Tensor, labels: Any, **kwargs: Any) -> Tensor:
    return loss(logits=logits, labels=_labels(labels), vocab_size=vocab_size, **kwargs)


def _labels(labels: Any) -> Tensor:
    found = labels.get("labels") if isinstance(labels, Mapping) else labels
    if not isinstance(found, Tensor):
        raise TypeError(f"the loss takes labels, or a dict that has them, not {type(labels).__name__}")
    return found


# ---- GPT-2 ----


def _gpt2(model: Any) -> list[ModelLayer]:
    config, base = model.config, "transformer"
    if config.add_cross_attention:
        raise ValueError("the GPT-2 recipe has no cross-attention, which config.add_cross_attention asks for")
    first = [f"{base}.{name}" for name in ("wte", "wpe", "drop")]
    names = _names(f"{base}.h", model.transformer.h)
    blocks = [model_layer(model, name, partial(_gpt2_block, config)) for name in names]
    head = model_layer(model, [f"{base}.ln_f", "lm_head"], _norm_and_head)
    return [model_layer(model, first, _gpt2_embedding), *blocks, head]


def _gpt2_embedding(wte: Any, wpe: Any, drop: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    hidden = wte(input_ids)
    positions = _positions({"hidden_states": hidden, "position_ids": batch.get("position_ids")})
    hidden = hidden + wpe(positions)
    if batch.get("token_type_ids") is not None:
        hidden = hidden + wte(batch["token_type_ids"])
    return _start(drop(hidden), batch)


def _gpt2_block(config: Any, block: Any, state: State) -> State:
    positions = _positions(state)
    mask = _causal_mask(config, state, positions)
    hidden = block(state["hidden_states"], None, mask, None, use_cache=False, position_ids=positions)
    return {**state, "hidden_states": hidden}


def _norm_and_head(norm: Any, head: Any, state: State) -> Tensor:
    logits: Tensor = head(norm(state["hidden_states"]))
    return logits


# ---- Llama ----


def _llama(model: Any) -> list[ModelLayer]:
    config, rotary = model.config, "model.rotary_emb"
    names = _names("model.layers", model.model.layers)
    blocks = [model_layer(model, [name, rotary], partial(_llama_block, config), name=name) for name in names]
    head = model_layer(model, ["model.norm", "lm_head"], _norm_and_head)
    return [model_layer(model, "model.embed_tokens", _llama_embedding), *blocks, head]


def _llama_embedding(embed_tokens: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    return _start(embed_tokens(input_ids), batch)


def _llama_block(config: Any, block: Any, rotary: Any, state: State) -> State:
    hidden, positions = state["hidden_states"], _positions(state)
    hidden = block(
        hidden,
        attention_mask=_causal_mask(config, state, positions),
        position_embeddings=rotary(hidden, position_ids=positions),
        position_ids=positions,
        past_key_values=None,
        use_cache=False,
    )
    return {**state, "hidden_states": hidden}


# ---- BERT ----


def _bert(model: Any) -> list[ModelLayer]:
    config = model.config
    if config.add_cross_attention:
        raise ValueError("the BERT recipe has no cross-attention, which config.add_cross_attention asks for")
    names = _names("bert.encoder.layer", model.bert.encoder.layer)
    blocks = [model_layer(model, name, partial(_bert_block, config)) for name in names]
    return [model_layer(model, "bert.embeddings", _bert_embedding), *blocks]


def _bert_masked_lm(model: Any) -> list[ModelLayer]:
    return [*_bert(model), model_layer(model, "cls", _on_hidden_states)]


def _bert_classification(model: Any) -> list[ModelLayer]:
    return [*_bert(model), model_layer(model, ["bert.pooler", "dropout", "classifier"], _bert_classify)]


def _bert_embedding(embeddings: Any, inputs: Any) -> State:
    input_ids, batch = _batch(inputs)
    positions, types = batch.get("position_ids"), batch.get("token_type_ids")
    return _start(embeddings(input_ids=input_ids, position_ids=positions, token_type_ids=types), batch)


def _bert_block(config: Any, block: Any, state: State) -> State:
    from transformers.masking_utils import create_bidirectional_mask

    hidden = state["hidden_states"]
    if config.is_decoder:
        mask = _causal_mask(config, state, None)
    else:
        mask = create_bidirectional_mask(
            config=config, inputs_embeds=hidden, attention_mask=state.get("attention_mask")
        )
    return {**state, "hidden_states": block(hidden, mask, None, position_ids=state.get("position_ids"))}


def _on_hidden_states(head: Any, state: State) -> Tensor:
    logits: Tensor = head(state["hidden_states"])
    return logits


def _bert_classify(pooler: Any, dropout: Any, classifier: Any, state: State) -> Tensor:
    logits: Tensor = classifier(dropout(pooler(state["hidden_states"])))
    return logits


def _masked_lm_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_flat_cross_entropy, model.config.vocab_size)


def _flat_cross_entropy(classes: int, logits: Tensor, labels: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.view(-1, classes), _labels(labels).view(-1))


def _classification_loss(model: Any) -> Callable[..., Tensor]:
    return partial(_classify_loss, model.config.problem_type, model.num_labels)


def _classify_loss(problem: str | None, classes: int, logits: Tensor, labels: Any) -> Tensor:
    targets = _labels(labels)
    if problem is None:
        whole = targets.dtype in (torch.long, torch.int)
        problem = "regression" if classes == 1 else ("single_label" if whole else "multi_label") + "_classification"
    if problem == "regression":
        if classes == 1:
            logits, targets = logits.squeeze(), targets.squeeze()
        return nn.functional.mse_loss(logits, targets)
    if problem == "single_label_classification":
        return _flat_cross_entropy(classes, logits, targets)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


RECIPES: Mapping[str, tuple[Callable[[Any], list[ModelLayer]], Callable[[Any], Callable[..., Tensor]]]] = {
    "GPT2LMHeadModel": (_gpt2, _causal_loss),
    "LlamaForCausalLM": (_llama, _causal_loss),
    "BertForMaskedLM": (_bert_masked_lm, _masked_lm_loss),
    "BertForSequenceClassification": (_bert_classification, _classification_loss),
}
"""Class name -> what makes its layers, and what makes its loss."""
