"""Initial weights, and the needs of generation from a model."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from zero_strategy.compat.megatron.models import (
    deprecate_inference_params,
    init_method_normal,
    scaled_init_method_normal,
)


def test_weights_are_normal_with_the_documented_deviations() -> None:
    for method, sigma in (
        (init_method_normal(0.02), 0.02),
        (scaled_init_method_normal(0.02, 12), 0.02 / math.sqrt(24)),
        (scaled_init_method_normal(0.02, 12, multiplier=3.0), 0.02 / 6),
    ):
        torch.manual_seed(1)
        found = torch.empty(64, 64)
        assert method(found) is found
        torch.manual_seed(1)
        assert torch.equal(found, torch.empty(64, 64).normal_(0.0, sigma))
    assert not init_method_normal(0.0)(torch.ones(3)).any()
    with pytest.raises(ValueError, match=r"sigma must not be negative, not -0\.1"):
        init_method_normal(-0.1)
    with pytest.raises(ValueError, match=r"num_layers 0 and multiplier 2\.0 must be positive"):
        scaled_init_method_normal(0.02, 0)


def test_an_argument_s_old_name_is_warned_of() -> None:
    new, old = object(), object()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert deprecate_inference_params(new, None) is new and deprecate_inference_params(new, old) is new
        assert deprecate_inference_params(None, None) is None
    with pytest.warns(DeprecationWarning, match="inference_params is called inference_context now"):
        assert deprecate_inference_params(None, old) is old
