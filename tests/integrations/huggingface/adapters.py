"""Models of the tests with a PEFT adapter on frozen weights."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from tests.integrations.huggingface.training import build

TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


def adapted(kind: str, base: PreTrainedModel | None = None, **options: Any) -> PeftModel:
    """LoRA on a tiny model, with the same values wherever it is made."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[kind], "task_type": "CAUSAL_LM"}
    base = build(kind) if base is None else base
    torch.manual_seed(1)
    model: PeftModel = get_peft_model(base, LoraConfig(**{**settings, "fan_in_fan_out": kind == "gpt2", **options}))
    return model
