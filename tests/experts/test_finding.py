"""The layers of experts that a model says it has."""

from __future__ import annotations

import pytest
from torch import nn

from tests.experts.model import EXPERTS, make
from tests.integrations.huggingface.test_experts import build
from zero_strategy.experts.layers import find_layers


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_layers_of_a_plan_are_found(kind: str) -> None:
    model = build(kind)
    found = find_layers(nn.ModuleDict({"model": model}))
    assert [layer.name for layer in found] == [f"model.model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert all(layer.experts == EXPERTS and all(len(p) == EXPERTS for p in layer.parameters) for layer in found)
    # Without a plan by the interface of transformers' experts.
    model.ep_plan = {}
    assert [layer.name for layer in find_layers(model)] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]


def test_layers_of_one_s_own_are_found() -> None:
    assert [layer.name for layer in find_layers(make())] == ["blocks.0.experts", "blocks.1.experts"]
    assert find_layers(nn.Linear(2, 2)) == []


class Planned(nn.Module):
    """A model with a plan of a style that nobody knows."""

    ep_plan = {"layers.*": "ep_router"}


def test_a_plan_of_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Planned's ep_plan for layers\.\* is 'ep_router'; accepted: ep_dispatch"):
        find_layers(Planned())
