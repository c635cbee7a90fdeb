"""What code for generation asks of a model: its renamed argument, and the state that hybrid (Mamba) models keep."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from zero_strategy.sharding.wrapped_models import get_attr_wrapped_model
from zero_strategy.versions import get_mamba_version

_MAMBA = "M"


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """The context of a call that may still have it under its old name, of which that is warned.

    Args:
        inference_context: What the argument is called now; wins.
        inference_params: What it was called.
    """
    if inference_context is None and inference_params is not None:
        warnings.warn(
            "inference_params is called inference_context now; pass that", DeprecationWarning, stacklevel=3
        )
        return inference_params
    return inference_context


@dataclass(frozen=True)
class MambaInferenceStateConfig:
    """What a hybrid model keeps per request while it generates.

    Attributes:
        layer_type_list: A letter per layer; "M" is a Mamba layer.
        mamba_conv_states_shape: Of one layer's convolution state.
        mamba_ssm_states_shape: Of one layer's state-space state.
    """

    layer_type_list: list[str]
    mamba_conv_states_shape: tuple[int, ...]
    mamba_ssm_states_shape: tuple[int, ...]


def get_mamba_inference_state_config_from_model(model: Any) -> MambaInferenceStateConfig | None:
    """The state of a hybrid model's Mamba layers; None for other models, and where mamba_ssm is not installed.

    Args:
        model: Perhaps wrapped. A hybrid one has a `decoder` with `layer_type_list` and
            `mamba_state_shapes_per_request()`, which gives both shapes.
    """
    if get_mamba_version() is None:
        return None
    try:
        decoder = get_attr_wrapped_model(model, "decoder", allow_none=False)
    except AttributeError:
        return None
    layers = list(getattr(decoder, "layer_type_list", None) or [])
    if _MAMBA not in layers:
        return None
    convolution, state_space = decoder.mamba_state_shapes_per_request()
    return MambaInferenceStateConfig(layers, tuple(convolution), tuple(state_space))
