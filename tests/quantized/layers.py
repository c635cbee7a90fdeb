"""Small models of bitsandbytes' and torchao's layers, and of a quantised Llama with an adapter."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torchao.prototype._nf4tensor_api import NF4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.integrations.huggingface.adapters import adapted
from zero_strategy.integrations.transformers import from_pretrained
from zero_strategy.quantized.wrapped import inner_tensors, is_wrapped

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": NF4,
    "nf4-double": {**NF4, "bnb_4bit_use_double_quant": True},
    "nf4-in-bf16": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
    "fp4-double": {**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
KINDS = list(SETTINGS)
WRAPPED: dict[str, Any] = {"torchao-int8": Int8WeightOnlyConfig, "torchao-nf4": NF4WeightOnlyConfig}
"""Of torchao, whose weights hold tensors."""


class Adapted(nn.Module):
    """A frozen quantised layer and a trained low-rank path beside it."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, 4, bias=False)
        self.up = nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def layer(kind: str, inputs: int, outputs: int) -> nn.Module:
    """One quantised layer with values of its own."""
    plain = nn.Linear(inputs, outputs, bias=False)
    made: nn.Module
    if kind in WRAPPED:
        quantize_(plain, WRAPPED[kind]())
        return plain
    if kind == "int8":
        made = bitsandbytes.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(
            inputs,
            outputs,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics="double" in kind,
            quant_type=kind[:3],
            quant_storage=torch.bfloat16 if "bf16" in kind else torch.uint8,
        )
    made.load_state_dict(plain.state_dict())
    return made.to("cpu")


class Net(nn.Module):
    """Two units of quantised layers between plain ones."""

    def __init__(self, kind: str, width: int = 96) -> None:
        super().__init__()
        width = 128 if kind in WRAPPED else width  # NF4's scales are quantised by 256
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Adapted(layer(kind, width, width), width, width) for _ in range(2))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        result: Tensor = self.last(x)
        return result


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: packed values in a floating-point dtype may be NaNs, which equal nothing."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride


def apart(state: dict[str, Any]) -> dict[str, Tensor]:
    """A plain module's state with torchao's weights in parts, under the names that these have as parameters."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = inner_tensors(value) if is_wrapped(value) else {}
        found |= {f"{name}.{key}": part for key, part in parts.items()} or {name: value}
    return found


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that differ, or that one side lacks."""
    common = one.keys() & other.keys()
    return sorted(one.keys() ^ other.keys()) + [
        n for n in sorted(common) if not torch.equal(bits(one[n]), bits(other[n]))
    ]


def quantisation(how: str) -> Any:
    """transformers' settings, by a key of `SETTINGS` or `WRAPPED`."""
    return TorchAoConfig(WRAPPED[how]()) if how in WRAPPED else BitsAndBytesConfig(**SETTINGS[how])


def exact_evaluation(model: Any) -> Any:
    """A model whose 4-bit layers evaluate as they train.

    On CPUs with AVX512_BF16 bitsandbytes' own would put the weight in another order and compute in bf16, which also
    fails for a layer that is narrower than a block of a scale.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def quantised(kind: str, path: str, how: str, *, ours: bool) -> Any:
    """A quantised model from files with an adapter, by transformers' own `from_pretrained` or by this package's.

    Args:
        kind: Of the model.
        path: Files that are quantised already if `how` is "".
        how: A key of `SETTINGS`.
        ours: By this package's.
    """
    options: dict[str, Any] = {"quantization_config": quantisation(how)} if how else {}
    read = from_pretrained if ours else (lambda cls, *rest, **more: cls.from_pretrained(*rest, **more))
    base = read(AutoModelForCausalLM, path, dtype=torch.float32, **options)
    base = base if ours else exact_evaluation(base)
    # As PEFT's own preparation does: 16-bit parameters aside, nothing is cast.
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    return adapted(kind, base, target_modules="all-linear", init_lora_weights=False)
