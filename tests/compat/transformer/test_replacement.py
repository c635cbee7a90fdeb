"""Hugging Face models with replaced blocks compute what they did, train, generate, and are given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer
from zero_strategy.compat.deepspeed.transformer.replacement import (
    hugging_face_state_dict,
    replace_transformer_layers,
    restore_transformer_layers,
)
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

TOKENS, LENGTH = 50, 9


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    return BertForMaskedLM(BertConfig(vocab_size=TOKENS, initializer_range=0.2, **{**sizes, **options}))


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, initializer_range=0.2, **{**sizes, **options}))


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, initializer_range=0.2, **{**sizes, **options}))


BUILD: dict[str, Callable[..., Any]] = {"bert": bert, "gpt2": gpt2, "llama": llama}


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """A model, and the same with replaced blocks; norms and biases are not what they begin with."""
    torch.manual_seed(0)
    model = BUILD[name](**options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model, replace_transformer_layers(copy.deepcopy(model))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 6:] = 0
    return tokens, mask


def near(a: Tensor, b: Tensor, error: float = 1e-5) -> bool:
    return float((a - b).detach().abs().max() / b.detach().abs().max()) <= error


@pytest.mark.parametrize("name", BUILD)
def test_outputs_and_gradients_are_equal_within_rounding(name: str) -> None:
    for attention in ("sdpa", "eager"):
        model, replaced = pair(name, attn_implementation=attention)
        assert sum(isinstance(module, TransformerLayer) for module in replaced.modules()) == 2
        tokens, mask = batch()
        for given in (None, mask):
            outputs = [each(tokens, attention_mask=given, output_hidden_states=True) for each in (model, replaced)]
            weight = 1.0 if given is None else given[..., None]  # what padding shows is nobody's business
            assert near(outputs[1].logits * weight, outputs[0].logits * weight)
            assert len(outputs[0].hidden_states) == len(outputs[1].hidden_states) == 3
            for output in outputs:
                (output.logits * weight).square().sum().backward()
        theirs = {key: value.grad for key, value in model.named_parameters()}
        ours = hugging_face_state_dict(replaced, {key: p.grad for key, p in replaced.named_parameters()})
        assert set(theirs) == set(ours)
        # The keys' bias has no effect: its gradient is nothing but rounding.
        assert all(near(ours[key], theirs[key], 2e-5) for key in theirs if "key.bias" not in key)


@pytest.mark.parametrize("name", BUILD)
def test_the_way_back(name: str, tmp_path: Path) -> None:
    model, replaced = pair(name)
    expected = model.state_dict()
    found = hugging_face_state_dict(replaced)
    assert list(found) and set(found) == set(expected) and all(torch.equal(found[key], expected[key]) for key in found)
    replaced.save_pretrained(tmp_path, state_dict=found)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
    with torch.no_grad():
        for parameter in replaced.parameters():
            parameter *= 1.5
    restored = restore_transformer_layers(replaced)
    assert not any(isinstance(module, TransformerLayer) for module in restored.modules())
    assert {key: type(module) for key, module in restored.named_modules()} == {
        key: type(module) for key, module in model.named_modules()
    }
    assert all(torch.equal(value, 1.5 * expected[key]) for key, value in restored.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5
        assert torch.equal(restored(batch()[0]).logits, model(batch()[0]).logits)
    with pytest.raises(ValueError, match="no replaced block"):
        restore_transformer_layers(restored)


@pytest.mark.parametrize("name", BUILD)
def test_a_sharded_model_s_weights_go_back(name: str) -> None:
    model, replaced = pair(name)
    engine = ZeroEngine(replaced, load_config(stage=3, units={"min_numel": 0}))
    found = hugging_face_state_dict(replaced, engine.full_state_dict())
    expected = model.state_dict()
    assert found and all(torch.equal(value, expected[key]) for key, value in found.items())
    assert len([unit for unit in engine.model.units if unit.name]) == 2  # the blocks
    with torch.no_grad():
        assert near(replaced(batch()[0]).logits, model(batch()[0]).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_uses_the_cache(name: str) -> None:
    model, replaced = pair(name)
    tokens, mask = batch()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for extra in ({}, {"attention_mask": mask.flip(1)}, {"cache_implementation": "static"}):
        expected, found = (each.generate(tokens, **settings, **extra) for each in (model, replaced))
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("name", BUILD)
def test_training_drops_and_recomputes(name: str) -> None:
    """Gradient checkpointing of transformers restores the generator, and with it the masks."""
    dropout = {"bert": "hidden_dropout_prob", "gpt2": "resid_pdrop", "llama": "attention_dropout"}[name]
    _, replaced = pair(name, **{dropout: 0.3})
    replaced = replace_options(replaced)
    tokens, mask = batch()
    losses, gradients = [], []
    extra = {} if name == "bert" else {"use_cache": False}
    for checkpointing in (False, True):
        if checkpointing:
            replaced.gradient_checkpointing_enable()
        replaced.train().zero_grad()
        torch.manual_seed(5)
        loss = replaced(tokens, attention_mask=mask, labels=tokens, **extra).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in replaced.parameters()])
    assert torch.equal(*losses) and all(torch.equal(*both) for both in zip(*gradients, strict=True))
    replaced.eval()
    assert not torch.equal(losses[0], replaced(tokens, attention_mask=mask, labels=tokens).loss)


def replace_options(model: Any) -> Any:
    """The same model with the options that save memory."""
    options = {"normalize_invertible": True, "gelu_checkpoint": True, "attn_dropout_checkpoint": True, "seed": 7}
    return replace_transformer_layers(restore_transformer_layers(model), **options)


def test_dtype_frozen_weights_and_mode_are_carried_over() -> None:
    model = gpt2().to(torch.bfloat16).eval()
    for parameter in model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    replace_transformer_layers(model)
    first, second = model.transformer.h
    assert type(first) is type(second) and not first.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in first.parameters()) and all(p.requires_grad for p in second.parameters())
    restore_transformer_layers(model)
    assert not any(p.requires_grad for p in model.transformer.h[0].parameters())


def test_replaced_models_are_copied_and_pickled() -> None:
    _, replaced = pair("gpt2")
    for other in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):
        assert type(other.transformer.h[0]) is type(replaced.transformer.h[1])
        assert torch.equal(other(batch()[0]).logits, replaced(batch()[0]).logits)
        restore_transformer_layers(other)


def test_what_these_layers_do_not_do_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Linear has no block that can be replaced: BertLayer"):
        replace_transformer_layers(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="unknown option 'heads'; accepted: normalize_invertible"):
        replace_transformer_layers(gpt2(), heads=2)
    with pytest.raises(ValueError, match="activation is 'relu'; accepted: 'gelu'"):
        replace_transformer_layers(bert(hidden_act="relu"))
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx of the GPT2Block's config is True"):
        replace_transformer_layers(gpt2(scale_attn_by_inverse_layer_idx=True))
    with pytest.raises(ValueError, match="mlp_bias of the LlamaDecoderLayer's config is True"):
        replace_transformer_layers(llama(mlp_bias=True))
    with pytest.raises(ValueError, match="head_dim of the LlamaDecoderLayer's config is 16; accepted: 8 only"):
        replace_transformer_layers(llama(head_dim=16))
