"""Options of a transformer layer: those of DeepSpeed 0.3, and what today's models are made of.

-1 means "not given", as there: `intermediate_size` is then four times the hidden size, a dropout ratio 0,
`initializer_range` 0.02; `hidden_size` and `heads` must be given, and `num_hidden_layers` where `adjust_init_range`
divides by it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from zero_strategy.runtime import bounded_json
from zero_strategy.runtime.regular_files import read_text

NORMS = ("layer_norm", "rms_norm")
ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
POSITIONS = ("none", "rotary")
_CHOICES = MappingProxyType({"norm": NORMS, "activation": ACTIVATIONS, "position": POSITIONS})


@dataclass
class TransformerConfig:
    """Settings of a `TransformerLayer`.

    Attributes:
        batch_size: The most sequences of a call; a larger batch is refused. Nothing is allocated for it.
        hidden_size: Width of the layer's input and output.
        intermediate_size: Width of the feed-forward part.
        heads: Attention heads; they divide `hidden_size`.
        attn_dropout_ratio: Probability of dropping an attention probability.
        hidden_dropout_ratio: Probability of dropping an element of the attention's and the feed-forward part's output.
        num_hidden_layers: Layers of the model.
        initializer_range: Standard deviation of initial weights.
        local_rank: Index of the CUDA device that the layer is built on; -1 and without CUDA: the default device.
        seed: Key of the dropout masks, a part of them beside torch's generator (see `dropout_masks.py`).
        fp16: Compute in float16, whatever the dtypes of input and weights; the output has the input's dtype.
        pre_layer_norm: Norms before attention and feed-forward part, instead of after the residual sums.
        normalize_invertible: A norm keeps its output for the backward, and not its input.
        gelu_checkpoint: The activation's output is computed again in the backward (GELU and SwiGLU alike).
        adjust_init_range: The two output weights begin with std `initializer_range / sqrt(2 * num_hidden_layers)`.
        attn_dropout_checkpoint: Attention probabilities, dropped or not, are computed again in the backward.
        stochastic_mode: Attention with dropout goes through torch's `scaled_dot_product_attention`, whose flash kernel
            draws the mask itself: faster on a GPU, but the mask is not a function of `seed`, differs between devices
            and torch versions, and sums of its backward may be added up in another order in every run.
        huggingface: The layer returns a tuple.
        training: False: the layer is built for inference, in evaluation mode, and never drops anything.
        max_seq_length: The longest sequence of a call; a longer one is refused.
        bf16: As `fp16`, in bfloat16.
        norm: "layer_norm" or "rms_norm" (which has no bias).
        norm_eps: Added to a norm's variance.
        activation: "gelu", "gelu_tanh", or "swiglu" (a gated unit with two input matrices).
        position: "none" or "rotary" (queries and keys are rotated by their place).
        rotary_base: Base of the rotary frequencies.
        causal: A token sees itself and what is before it.
        key_value_heads: Heads of keys and values; they divide `heads`. -1: `heads`.
        bias: Linear maps have biases.

    Raises:
        ValueError: Naming the option, its value and what is accepted.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    huggingface: bool = False
    training: bool = True
    _: KW_ONLY
    max_seq_length: int = -1
    bf16: bool = False
    norm: str = "layer_norm"
    norm_eps: float = 1e-12
    activation: str = "gelu"
    position: str = "none"
    rotary_base: float = 10000.0
    causal: bool = False
    key_value_heads: int = -1
    bias: bool = True

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> TransformerConfig:
        """A config from options by name.

        Raises:
            ValueError: If there is no such option, or its value is wrong.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r} of a transformer layer; there are {', '.join(known)}")
        return cls(**options)

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> TransformerConfig:
        """A config from a JSON object of options."""
        return cls.from_dict(bounded_json.parse(read_text(json_file), str(json_file)))

    def check(self, *, complete: bool = False) -> None:
        """Look at what is given.

        Args:
            complete: A layer is to be built: what it needs must be given.

        Raises:
            ValueError: Naming the option, its value and what is accepted.
        """
        self._check_kinds()
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(map(repr, accepted))}")
        if self.fp16 and self.bf16:
            raise ValueError("fp16 and bf16 are both True; accepted: one of them, or none")
        if complete:
            for name in ("hidden_size", "heads"):
                if getattr(self, name) == -1:
                    raise ValueError(f"{name} is not given; accepted: a positive number")
            if self.adjust_init_range and self.num_hidden_layers == -1:
                raise ValueError(
                    "num_hidden_layers is not given, and adjust_init_range=True divides by it; accepted: a positive "
                    "number, or adjust_init_range=False"
                )
        self._check_heads()

    def _check_kinds(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} is {value!r}; accepted: True, False")
            elif name in _COUNTS:
                least = 0 if name == "local_rank" else 1
                if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value >= least):
                    raise ValueError(f"{name} is {value!r}; accepted: a number of at least {least}, or -1 (not given)")
            elif name == "seed":
                if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
                    raise ValueError(f"seed is {value!r}; accepted: integers of 64 bits")
            elif name not in _CHOICES:
                self._check_number(name, value)

    def _check_number(self, name: str, value: Any) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if not number or not (value == -1 or 0 <= value <= 1):
                raise ValueError(f"{name} is {value!r}; accepted: 0 to 1, or -1 (not given, 0)")
        elif name == "initializer_range":
            if not number or not (value == -1 or value >= 0):
                raise ValueError(f"{name} is {value!r}; accepted: 0 and above, or -1 (not given, 0.02)")
        elif not number or value <= 0:
            raise ValueError(f"{name} is {value!r}; accepted: a positive number")

    def _check_heads(self) -> None:
        if self.heads == -1:
            return
        if self.hidden_size != -1:
            if self.hidden_size % self.heads:
                divisors = ", ".join(str(n) for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0)
                raise ValueError(
                    f"heads is {self.heads}, which does not divide hidden_size, {self.hidden_size}; accepted: "
                    f"{divisors}"
                )
            if self.position == "rotary" and self.head_size % 2:
                raise ValueError(
                    f"heads is {self.heads} of hidden_size {self.hidden_size}: position='rotary' turns pairs, and a "
                    f"head's size, {self.head_size}, is odd; accepted: heads of even size, or position='none'"
                )
        if self.key_value_heads != -1 and self.heads % self.key_value_heads:
            raise ValueError(
                f"key_value_heads is {self.key_value_heads}; accepted: divisors of heads, {self.heads}, or -1 (heads)"
            )

    # ------------------------------------------------------------------------------- what is not given, filled in

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.heads

    @property
    def shared_heads(self) -> int:
        """Heads of keys, and of values."""
        return self.heads if self.key_value_heads == -1 else self.key_value_heads

    @property
    def inner_size(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.hidden_size if self.intermediate_size == -1 else self.intermediate_size

    @property
    def attention_dropout(self) -> float:
        """Probability of dropping an attention probability."""
        return max(0.0, float(self.attn_dropout_ratio))

    @property
    def hidden_dropout(self) -> float:
        """Probability of dropping an output's element."""
        return max(0.0, float(self.hidden_dropout_ratio))

    @property
    def weight_std(self) -> float:
        """Standard deviation of initial weights."""
        return 0.02 if self.initializer_range == -1 else float(self.initializer_range)

    @property
    def output_std(self) -> float:
        """That of the weights of the attention's and of the layer's output."""
        return self.weight_std / math.sqrt(2.0 * self.num_hidden_layers) if self.adjust_init_range else self.weight_std

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of computations; None: as the input and autocast say."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None


_COUNTS = (
    "batch_size", "hidden_size", "intermediate_size", "heads", "num_hidden_layers", "local_rank", "max_seq_length",
    "key_value_heads",
)  # fmt: skip
