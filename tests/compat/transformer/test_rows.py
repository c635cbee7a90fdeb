"""Chapter 5.1 of DeepSpeed 0.3's documentation, row by row, under its names."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.compat.transformer.test_layer import SAVING, error, inputs, kept_bytes, layer
from zero_strategy.compat.deepspeed.transformer.config import TransformerConfig
from zero_strategy.compat.deepspeed.transformer.layer import TransformerLayer, draw_states
from zero_strategy.ops.fused_layers import keep_scale, kept

SIZES = {"hidden_size": 16, "heads": 4, "num_hidden_layers": 2}


def built(**options: Any) -> Any:
    return deepspeed.DeepSpeedTransformerLayer(deepspeed.DeepSpeedTransformerConfig(**{**SIZES, **options}))


def x() -> Tensor:
    return inputs(torch.float32)[0]


def test_transformer_config_deepspeed_transformer_config() -> None:
    """Row DeepSpeedTransformerConfig: documented arguments in the documented order, with the documented defaults."""
    documented = {
        "batch_size": -1, "hidden_size": -1, "intermediate_size": -1, "heads": -1, "attn_dropout_ratio": -1,
        "hidden_dropout_ratio": -1, "num_hidden_layers": -1, "initializer_range": -1, "local_rank": -1, "seed": -1,
        "fp16": False, "pre_layer_norm": True, "normalize_invertible": False, "gelu_checkpoint": False,
        "adjust_init_range": True, "attn_dropout_checkpoint": False, "stochastic_mode": False, "huggingface": False,
        "training": True,
    }  # fmt: skip
    found = inspect.signature(deepspeed.DeepSpeedTransformerConfig).parameters
    assert list(found)[: len(documented)] == list(documented)
    assert {name: found[name].default for name in documented} == documented
    config = deepspeed.DeepSpeedTransformerConfig()  # as there, filled in later
    assert {name: getattr(config, name) for name in documented} == documented
    assert deepspeed.DeepSpeedTransformerConfig is TransformerConfig


def test_config_from_a_dict_and_from_json(tmp_path: Path) -> None:
    (tmp_path / "layer.json").write_text(json.dumps({**SIZES, "gelu_checkpoint": True}))
    config = deepspeed.DeepSpeedTransformerConfig.from_json_file(tmp_path / "layer.json")
    assert config == deepspeed.DeepSpeedTransformerConfig.from_dict({**SIZES, "gelu_checkpoint": True})
    assert config.gelu_checkpoint and config.hidden_size == 16


def test_transformer_layer_deepspeed_transformer_layer() -> None:
    """Row DeepSpeedTransformerLayer: a module of DeepSpeed's parameter names."""
    made = built()
    assert deepspeed.DeepSpeedTransformerLayer is TransformerLayer and isinstance(made, nn.Module)
    assert {name: tuple(p.shape) for name, p in made.named_parameters()} == {
        "attn_qkvw": (48, 16), "attn_qkvb": (48,), "attn_ow": (16, 16), "attn_ob": (16,), "attn_nw": (16,),
        "attn_nb": (16,), "inter_w": (64, 16), "inter_b": (64,), "output_w": (16, 64), "output_b": (16,),
        "norm_w": (16,), "norm_b": (16,),
    }  # fmt: skip
    assert made(x(), None).shape == x().shape


def test_transformer_config_batch_size_and_max_seq_length() -> None:
    """Rows TransformerConfig.batch_size, TransformerConfig.max_seq_length: the most that is taken."""
    made = built(batch_size=2, max_seq_length=7)
    made(x())
    with pytest.raises(ValueError, match="batch_size is 2, but hidden_states has 4; accepted: up to 2"):
        made(torch.cat((x(), x())))
    with pytest.raises(ValueError, match="max_seq_length is 7, but hidden_states has 14"):
        made(torch.cat((x(), x()), 1))


def test_transformer_config_sizes() -> None:
    """Rows TransformerConfig.hidden_size, TransformerConfig.intermediate_size, TransformerConfig.heads."""
    assert built(intermediate_size=20).inter_w.shape == (20, 16) and built().inter_w.shape == (64, 16)
    weights = [torch.equal(built_with(heads), built_with(2)) for heads in (2, 4)]
    assert weights == [True, False]
    with pytest.raises(ValueError, match=r"heads is 3, which does not divide hidden_size, 16; accepted: 1, 2, 4, 8"):
        built(heads=3)
    with pytest.raises(ValueError, match="hidden_size is not given"):
        TransformerLayer(TransformerConfig(heads=4, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"hidden_states has shape \(2, 7, 16\); accepted: \(batch, length, 8\)"):
        built(hidden_size=8)(x())


def built_with(heads: int) -> Tensor:
    torch.manual_seed(0)
    output: Tensor = built(heads=heads, initializer_range=0.3)(x()).detach()
    return output


def test_transformer_config_dropout_ratios() -> None:
    """Rows TransformerConfig.attn_dropout_ratio, TransformerConfig.hidden_dropout_ratio."""
    made = layer(attn_dropout_ratio=1.0)
    with torch.no_grad():  # no attention at all: what is left of it is its bias
        made.attn_ow.copy_(torch.eye(16))
        made.inter_w.zero_(), made.inter_b.zero_(), made.output_b.zero_()
        assert torch.allclose(made(x()), x() + made.attn_ob)
        made = layer(hidden_dropout_ratio=0.4)
        made.attn_ow.zero_(), made.output_w.zero_(), made.output_b.zero_(), made.attn_ob.fill_(1.0)
        torch.manual_seed(3)
        states = draw_states(-1)
        torch.manual_seed(3)
        expected = x() + kept(states[1], 0.4, x()) * keep_scale(0.4)
        assert torch.equal(made(x()), expected)
        assert torch.equal(layer(hidden_dropout_ratio=1.0)(x()), x())


def test_transformer_config_initial_values() -> None:
    """Rows TransformerConfig.num_hidden_layers, TransformerConfig.initializer_range,
    TransformerConfig.adjust_init_range: output_std = initializer_range / sqrt(2 num_layers)."""
    torch.manual_seed(0)
    for adjust, factor in ((True, 1 / math.sqrt(2.0 * 8)), (False, 1.0)):
        made = built(hidden_size=128, num_hidden_layers=8, initializer_range=0.05, adjust_init_range=adjust)
        for name, std in (("attn_qkvw", 1), ("inter_w", 1), ("attn_ow", factor), ("output_w", factor)):
            assert float(getattr(made, name).detach().std()) == pytest.approx(0.05 * std, rel=0.03)
        assert all(not p.any() for name, p in made.named_parameters() if name.endswith("b"))
        assert all((p == 1).all() for name, p in made.named_parameters() if name in ("attn_nw", "norm_w"))
    assert TransformerConfig(initializer_range=0.0).weight_std == 0 and TransformerConfig().weight_std == 0.02
    with pytest.raises(ValueError, match="num_hidden_layers is not given, and adjust_init_range=True divides by it"):
        built(num_hidden_layers=-1)
    built(num_hidden_layers=-1, adjust_init_range=False)


def test_transformer_config_local_rank() -> None:
    """Row TransformerConfig.local_rank: the device; without CUDA it says nothing."""
    made = built(local_rank=0)
    assert made.attn_ow.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        assert built(local_rank=0).attn_ow.is_meta


def test_transformer_config_seed() -> None:
    """Row TransformerConfig.seed: the key of the masks."""
    results = []
    for seed in (1, 1, 2):
        made = layer(hidden_dropout_ratio=0.5, seed=seed)
        torch.manual_seed(0)
        results.append(made(x()).detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_transformer_config_fp16() -> None:
    """Row TransformerConfig.fp16."""
    output = layer(fp16=True)(x())
    assert output.dtype == torch.float32
    half = layer().half()(x().half()).float()
    assert error(output.detach(), half.detach().double()) < 2e-3


def test_transformer_config_pre_layer_norm() -> None:
    """Row TransformerConfig.pre_layer_norm: post-norm outputs are normal, pre-norm ones are not."""
    made = {pre: built(pre_layer_norm=pre)(x()).detach() for pre in (True, False)}
    assert torch.allclose(made[False].std(-1, correction=0), torch.ones(2, 7), atol=1e-5)
    assert not torch.allclose(made[True].std(-1, correction=0), torch.ones(2, 7), atol=1e-2)


@pytest.mark.parametrize("option", SAVING)
def test_transformer_config_options_that_save_memory(option: str) -> None:
    """Rows TransformerConfig.normalize_invertible, TransformerConfig.gelu_checkpoint,
    TransformerConfig.attn_dropout_checkpoint; how much each saves is in test_layer.py."""
    without, _ = kept_bytes()
    assert kept_bytes(**{option: True})[0] < without


def test_transformer_config_stochastic_mode() -> None:
    """Row TransformerConfig.stochastic_mode: what may differ from run to run.

    Attention's mask is torch's own, another one than in deterministic mode; nothing else changes."""
    made = []
    for stochastic in (True, False):
        each = layer(stochastic_mode=stochastic, attn_dropout_ratio=0.5)
        torch.manual_seed(0)
        made.append(each(x()).detach())
        assert torch.equal(each.eval()(x()), layer().eval()(x()))  # where nothing is dropped it changes nothing
    assert not torch.equal(*made)


def test_transformer_config_huggingface() -> None:
    """Row TransformerConfig.huggingface: a tuple."""
    (output,) = built(huggingface=True)(x())
    assert output.shape == x().shape and isinstance(built()(x()), Tensor)


def test_transformer_config_training() -> None:
    """Row TransformerConfig.training."""
    made = layer(training=False, hidden_dropout_ratio=0.5)
    assert not made.training and torch.equal(made.train()(x()), layer()(x()))


def test_transformer_layer_initial_weights_and_initial_biases() -> None:
    """Row TransformerLayer(initial_weights, initial_biases)."""
    source = layer()
    q, k, v = source.attn_qkvw.chunk(3)
    weights = [q, k, v, source.attn_ow, source.attn_nw, source.inter_w, source.output_w, source.norm_w]
    q, k, v = source.attn_qkvb.chunk(3)
    biases = [q, k, v, source.attn_ob, source.attn_nb, source.inter_b, source.output_b, source.norm_b]
    made = deepspeed.DeepSpeedTransformerLayer(source.config, weights, biases)
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in made.state_dict().items())
    assert made.attn_ow is not source.attn_ow and torch.equal(made(x()), source(x()))
    with pytest.raises(ValueError, match="initial_weights: 7 tensors; accepted: 8 tensors, of query, key"):
        TransformerLayer(source.config, weights[:7], biases)
    with pytest.raises(ValueError, match="initial_biases: missing; accepted: 8 tensors"):
        TransformerLayer(source.config, weights)
    with pytest.raises(ValueError, match=r"initial_weights\[3:4\] have shape \(16,\) together; accepted: \(16, 16\)"):
        TransformerLayer(source.config, [*weights[:3], biases[3], *weights[4:]], biases)


def test_transformer_layer_layer_id() -> None:
    """Row TransformerLayer.layer_id: 0 to 23 in a model of 24 layers."""
    start = deepspeed.DeepSpeedTransformerLayer.layer_id
    layers = [built() for _ in range(3)]
    assert [each.layer_id - start for each in layers] == [0, 1, 2]
    assert deepspeed.DeepSpeedTransformerLayer.layer_id == start + 3


WRONG = {
    "heads": (0, "at least 1"), "hidden_size": (2.5, "at least 1"), "attn_dropout_ratio": (1.5, "0 to 1"),
    "hidden_dropout_ratio": ("x", "0 to 1|-1"), "initializer_range": (-2.0, "0 and above"), "seed": (0.5, "integers"),
    "fp16": (1, "True, False"), "local_rank": (-2, "at least 0"), "norm": ("batch", "'layer_norm', 'rms_norm'"),
    "activation": ("relu", "'gelu', 'gelu_tanh', 'swiglu'"), "position": ("learned", "'none', 'rotary'"),
    "norm_eps": (0.0, "positive"), "key_value_heads": (3, "divisors of heads, 4"),
    "stochastic_mode": (None, "True, False"),
}  # fmt: skip


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_value_names_the_option_and_what_is_accepted(option: str) -> None:
    value, accepted = WRONG[option]
    with pytest.raises(ValueError, match=rf"{option} is .*accepted: .*({accepted})"):
        TransformerConfig(**{**SIZES, option: value})


def test_wrong_combinations_and_names() -> None:
    with pytest.raises(ValueError, match="unknown option 'layers' of a transformer layer; there are batch_size"):
        TransformerConfig.from_dict({"layers": 3})
    with pytest.raises(ValueError, match="fp16 and bf16 are both True"):
        TransformerConfig(fp16=True, bf16=True)
    with pytest.raises(ValueError, match="a head's size, 3, is odd"):
        TransformerConfig(hidden_size=6, heads=2, position="rotary")
    made = built()
    with pytest.raises(ValueError, match="argument 2 of a transformer layer has no effect here"):
        made(x(), None, torch.ones(4))
    assert torch.equal(made(x(), None, None, None, output_attentions=False), made(x()))
    with pytest.raises(TypeError, match=r"attention_mask is torch\.int64; accepted: torch\.bool"):
        made(x(), torch.ones(2, 7, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 7, 7\)"):
        made(x(), torch.ones(2, 7, 7, dtype=torch.bool))
