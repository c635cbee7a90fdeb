"""Kinds of DeepSpeed JSON files that public repositories have: taken as they are, taken with a word, or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from zero_strategy.config import load_config

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False}}
WARN = "keys without effect here"

TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "numbers that are done as they stand": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "fp16": {"enabled": True, "initial_scale_power": 16},
            "zero_optimization": {"stage": 3},
        },
        "",
    ),
    "an Adam of BERT": ({"train_batch_size": 24, "fp16": {"enabled": True}, "optimizer": ADAM}, ""),
    "a Lamb of BERT": ({"train_batch_size": 64, "optimizer": {**ADAM, "type": "Lamb"}}, ""),
    "auto everywhere, buckets": ({**AUTO, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1e6}}, WARN),
    "a comment": ({**AUTO, "_comment": "for these models only"}, "comment"),
    "keys that nothing reads": ({**AUTO, "comms_config": {"verbose": False}, "monitor_config": {}}, "reads it nowhere"),
    "a device list": ({**AUTO, "cuda_visible_devices": "0"}, "reads it nowhere"),
    "autocast": ({**AUTO, "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, ""),
    "a compile section": ({**AUTO, "compile": {"disable": False, "backend": "inductor"}}, "compile"),
    "auto for bounds of memory": (
        {
            "train_batch_size": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": "auto",
                "offload_param": {"device": "cpu", "buffer_size": "auto"},
            },
        },
        "staging_bytes",
    ),
    "consecutive hysteresis": (
        {"train_batch_size": 2, "fp16": {"enabled": True, "consecutive_hysteresis": True}},
        "",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "1-bit optimizers": ({**AUTO, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}, "1-bit optimizers"),
    "compression": (
        {**AUTO, "compression_training": {"layer_reduction": {"enabled": True}}},
        "not compressed in training",
    ),
    "data efficiency": ({**AUTO, "data_efficiency": {"enabled": True}}, "the data loader is yours"),
    "autotuning": ({**AUTO, "autotuning": {"enabled": True}}, "no settings are searched for"),
    "ZenFlow": ({**AUTO, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
    "layer drop": ({**AUTO, "progressive_layer_drop": {"enabled": True}}, "dropped by the model"),
    "sparse attention": ({**AUTO, "sparse_attention": {"mode": "fixed"}}, "scaled_dot_product_attention"),
    "quantised training": ({**AUTO, "quantize_training": {"enabled": True}}, "not quantised in training"),
    "a compiler of DeepSpeed's": ({**AUTO, "compile": {"deepcompile": True}}, "compilation is the caller's"),
    "options of Apex in fp16": (
        {**AUTO, "fp16": {"enabled": True, "opt_level": "O2"}},
        r"unknown key 'fp16\.opt_level'",
    ),
    "auto that nobody decides": ({**AUTO, "zero_optimization": {"stage": "auto"}}, "no framework decides it"),
}


@pytest.mark.parametrize("kind", list(TAKEN))
def test_a_kind_that_is_taken(kind: str, tmp_path: Path) -> None:
    config, told = TAKEN[kind]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(path)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == bool(told) and all(told in text for text in texts), texts


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_kind_that_is_refused_with_its_reason(kind: str, tmp_path: Path) -> None:
    config, reason = REFUSED[kind]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=reason):
        load_config(path)
