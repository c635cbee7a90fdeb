"""Optimizer states of stages as that of one optimizer over the whole model, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.pipeline.layers import WIDTH, specs, tied_specs, words
from zero_strategy.pipeline.building import model_layer, pipeline_layers
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.state import StageGroups, join_states, module_order, part_of_state, whole_groups


class Model(nn.Module):
    """Its blocks are in a container whose members are not next to each other in the order of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Module()
        self.outer.words, self.outer.blocks = nn.Embedding(3, WIDTH), nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.outer.norm = nn.LayerNorm(WIDTH)


def pieces() -> list[Any]:
    model = Model()
    first = model_layer(model, ["outer.words"], lambda modules, x: x)
    return pipeline_layers(model, "outer.blocks", embedding=first, head=["outer.norm", "head"])


def places_of(module: PipelineModule) -> dict[str, tuple[int, ...]]:
    return {name: (module.layer_of(name), n) for n, (name, _) in enumerate(module.named_parameters())}


@pytest.mark.parametrize("make", [specs, tied_specs, pieces])
def test_the_order_is_that_of_the_whole_module(make: Any) -> None:
    whole = PipelineModule(make(), 1, rank=0)
    assert module_order(places_of(whole)) == [name for name, _ in whole.named_parameters()]


def groups_of(module: PipelineModule, left_out: set[str]) -> list[dict[str, Any]]:
    named = [(name, parameter) for name, parameter in module.named_parameters() if name not in left_out]
    return [
        {"params": [pair for pair in named if pair[1].ndim > 1], "weight_decay": 0.1},
        {"params": [pair for pair in named if pair[1].ndim < 2], "weight_decay": 0.0},
    ]


def trained(module: PipelineModule, left_out: set[str]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups_of(module, left_out), lr=0.1)
    for name, parameter in module.named_parameters():
        parameter.grad = torch.full_like(parameter, float(sum(map(ord, name))))
    optimizer.step()
    return optimizer


def test_states_of_stages_are_those_of_one_optimizer() -> None:
    """Made with names, which torch notes."""
    whole = PipelineModule(tied_specs(), 1, rank=0)
    expected = trained(whole, set()).state_dict()
    stages, states = [], []
    for rank in range(2):
        module = PipelineModule(tied_specs(), 2, rank=rank)
        replicas = {name for name, _ in module.named_parameters() if rank and name.startswith("tied_modules.")}
        optimizer = trained(module, replicas)
        stages.append(StageGroups([list(group["param_names"]) for group in optimizer.param_groups], places_of(module)))
        states.append(optimizer.state_dict())
    joined = join_states(stages, states)
    assert joined["param_groups"] == expected["param_groups"]
    assert list(joined["state"]) == list(expected["state"])
    for number, values in expected["state"].items():
        assert all(torch.equal(joined["state"][number][key], value) for key, value in values.items())
    for own, state in zip(stages, states, strict=True):
        part = part_of_state(stages, own, expected)
        assert part["param_groups"] == state["param_groups"] and part["state"].keys() == state["state"].keys()
        for number, values in state["state"].items():
            assert torch.equal(part["state"][number]["exp_avg"], values["exp_avg"])
    assert whole(words()).shape[0] == 3


def test_what_does_not_fit() -> None:
    first = StageGroups([["0.a", "0.b"]], {"0.a": (0, 0), "0.b": (0, 1)})
    second = StageGroups([["1.a"]], {"1.a": (1, 0)})
    with pytest.raises(ValueError, match=r"different numbers of param groups, \[1, 2\]"):
        whole_groups([first, StageGroups([["1.a"], []], {"1.a": (1, 0)})])
    with pytest.raises(ValueError, match="stage 0 has parameters in a param group in another order"):
        whole_groups([StageGroups([["0.b", "0.a"]], first.places), second])
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and the stages together have \[3\]"):
        part_of_state([first, second], first, {"state": {}, "param_groups": [{"params": [0, 1]}]})
