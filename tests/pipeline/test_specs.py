"""Description of a layer before it is built."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec, layer_class_name


def test_a_spec_builds_another_module_each_time(caplog: pytest.LogCaptureFixture) -> None:
    spec = LayerSpec(nn.Linear, 3, out_features=2, bias=False)
    first, second = spec.build(), spec.build()
    assert isinstance(first, nn.Linear) and first is not second
    assert (first.in_features, first.out_features, first.bias) == (3, 2, None)
    assert repr(spec) == "Linear(3, out_features=2, bias=False)" and not caplog.records
    with caplog.at_level(logging.INFO):
        spec.build(log=True)
    assert "building Linear(3, out_features=2, bias=False)" in caplog.text


def test_what_is_no_class_of_modules_is_refused() -> None:
    with pytest.raises(TypeError, match="a function can be a layer itself"):
        LayerSpec(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an instance can be a layer itself"):
        LayerSpec(nn.ReLU())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not <class 'dict'>"):
        LayerSpec(dict)  # type: ignore[arg-type]


def test_tied_specs() -> None:
    spec = TiedLayerSpec("embed", nn.Embedding, 5, 2)
    assert (spec.key, spec.forward_fn, spec.tied_weight_attr) == ("embed", None, ["weight"])
    assert isinstance(spec.build(), nn.Embedding) and repr(spec) == "Embedding(5, 2) tied as 'embed'"
    both = TiedLayerSpec("a", nn.Linear, 2, 2, forward_fn=lambda module, x: x, tied_weight_attr=["weight", "bias"])
    assert both.tied_weight_attr == ["weight", "bias"]
    with pytest.raises(ValueError, match=r"the key 'a\.b' must be a word"):
        TiedLayerSpec("a.b", nn.Linear, 2, 2)
    with pytest.raises(TypeError, match="forward_fn 3 cannot be called"):
        TiedLayerSpec("a", nn.Linear, 2, 2, forward_fn=3)  # type: ignore[arg-type]


def test_names_of_classes() -> None:
    def double(x: int) -> int:
        return 2 * x

    assert [layer_class_name(layer) for layer in (LayerSpec(nn.ReLU), nn.Tanh(), double)] == ["ReLU", "Tanh", "double"]
