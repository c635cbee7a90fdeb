"""An optimizer's own code on parts of parameters: the bits of whole ones, for every class that may see parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.offload.test_state_in_files import Own
from zero_strategy.optim.fused import FusedLamb, Segment
from zero_strategy.optim.offloaded import rule_for_parts
from zero_strategy.optim.optimizer_checks import ELEMENTWISE, is_elementwise, reason_against
from zero_strategy.optim.own_steps import OwnSteps

NUMEL, PART = 5001, 2048
"""Parts begin at the multiples of bytes at which chunks do."""
CASES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ELEMENTWISE},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_parts_give_the_bits_of_the_whole(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.nn.Parameter(torch.randn(NUMEL, generator=generator))
    theirs = getattr(torch.optim, name)([whole], lr=0.01, **CASES[name])
    called: list[Any] = []
    theirs.register_step_pre_hook(lambda *_: called.append(1))
    rule, group = OwnSteps(theirs), theirs.param_groups[0]
    values, low = whole.detach().clone(), torch.zeros(NUMEL, dtype=torch.bfloat16)
    places = [slice(start, min(start + PART, NUMEL)) for start in range(0, NUMEL, PART)]
    states = [divided(theirs.state.get(whole, {}), place) for place in places]
    for step in range(4):
        gradient = torch.randn(NUMEL, generator=generator)
        whole.grad = gradient * 0.25
        theirs.step()
        for place, state in zip(places, states, strict=True):
            part = values[place]
            rule.update([Segment(group, part, gradient[place], state, like=part, copy=low[place], scale=0.5)], 0.5)
        assert len(called) == step + 1
    assert torch.equal(values, whole) and torch.equal(low, whole.to(torch.bfloat16))
    vectors = rule.vectors(group)
    assert vectors is not None and vectors.keys() == {
        key for key, value in theirs.state[whole].items() if getattr(value, "shape", None) == (NUMEL,)
    }
    for key, (dtype, _) in vectors.items():
        assert torch.equal(torch.cat([state[key] for state in states]), theirs.state[whole][key])
        assert dtype == theirs.state[whole][key].dtype


def divided(state: dict[str, Any], place: slice) -> dict[str, Any]:
    """A part's share of the state that a constructor made, as torch's Adagrad did until 2.13."""
    return {key: value[place].clone() if value.dim() else value.clone() for key, value in state.items()}


class Coupled(torch.optim.SGD):
    """A step that looks at all of a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def test_who_may_see_parts() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    own = Own(parameters)
    assert isinstance(rule_for_parts(own, ["Own"]), OwnSteps)
    assert isinstance(rule_for_parts(own, []), OwnSteps)  # it was tried
    assert rule_for_parts(Coupled(parameters), []) is None
    assert rule_for_parts(torch.optim.LBFGS(parameters), []) is None
    assert not isinstance(rule_for_parts(torch.optim.Adam(parameters, foreach=True), []), OwnSteps)
    assert not is_elementwise(FusedLamb(parameters, lr=0.1)) and "trust ratio" in str(
        reason_against(FusedLamb(parameters, lr=0.1))
    )
    graph = torch.optim.RMSprop(parameters, differentiable=True)
    assert OwnSteps(graph).vectors(graph.param_groups[0]) is None
    with pytest.raises(ValueError, match=r"RMSprop has no state \['square_avg'\]"):
        plain = torch.optim.RMSprop(parameters)
        OwnSteps(plain).check_state(plain.param_groups[0], {"step": torch.tensor(1.0)})
