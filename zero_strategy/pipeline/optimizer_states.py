"""Optimizer states of stages, put together into that of one optimizer over the whole model, and divided again.

`Optimizer.state_dict()` numbers parameters: group by group, and in a group as they were passed. An optimizer over a
whole model has them in the order of its `named_parameters()`, so that is how they are numbered here, and what comes out
is what one process would have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zero_strategy.pipeline.building import TIED

StateDict = dict[str, Any]


@dataclass(frozen=True)
class StageGroups:
    """What one stage's optimizer has.

    Attributes:
        groups: Names of the parameters of each param group, in order.
        places: Where each comes in the whole model: its layer, and its place in it.
    """

    groups: list[list[str]]
    places: dict[str, tuple[int, ...]]


def whole_groups(stages: Sequence[StageGroups], prefix: str = "") -> list[list[str]]:
    """The param groups of an optimizer over the whole model, by names.

    Args:
        stages: In order.
        prefix: What names of the pipeline's parameters begin with.

    Raises:
        ValueError: If stages have different numbers of groups, or other orders in them than the model has.
    """
    counts = [len(stage.groups) for stage in stages]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the stages' optimizers have different numbers of param groups, {counts}, so that there is no optimizer "
            "over the whole model whose state this would be; let each stage make all groups, also empty ones"
        )
    places = {name: place for stage in stages for name, place in stage.places.items()}
    order = {name: number for number, name in enumerate(module_order(places, prefix))}
    for number, stage in enumerate(stages):
        for group in stage.groups:
            if group != sorted(group, key=order.__getitem__):
                raise ValueError(
                    f"stage {number} has parameters in a param group in another order than its module has, so that the "
                    "whole model's cannot be numbered; pass them in the order of named_parameters()"
                )
    return [
        sorted((name for stage in stages for name in stage.groups[number]), key=order.__getitem__)
        for number in range(counts[0])
    ]


def module_order(places: dict[str, tuple[int, ...]], prefix: str = "") -> list[str]:
    """Names in the order in which a module of all layers lists its parameters: tied modules first, children together.

    Args:
        places: Where each name comes in the layers.
        prefix: What all names of layers begin with.
    """
    tree: dict[str, Any] = {}
    _insert(tree, f"{prefix}{TIED}".split("."))
    for name in sorted(places, key=places.__getitem__):
        _insert(tree, name.split("."))
    return [name for name in _walk(tree, "") if name in places]


def _insert(tree: dict[str, Any], path: Iterable[str]) -> None:
    for part in path:
        tree = tree.setdefault(part, {})


def _walk(tree: dict[str, Any], start: str) -> Iterable[str]:
    for part, below in tree.items():
        yield start + part
        yield from _walk(below, f"{start}{part}.")


def join_states(stages: Sequence[StageGroups], states: Sequence[StateDict], prefix: str = "") -> StateDict:
    """The state of one optimizer over the whole model; hyper-parameters are those of the first stage.

    Args:
        stages: What each stage's optimizer has.
        states: Of each, in the form of `Optimizer.state_dict()`.
        prefix: See `whole_groups`.

    Raises:
        ValueError: See `whole_groups`.
    """
    groups = whole_groups(stages, prefix)
    numbers = _numbers(groups)
    joined = dict(states[0])
    joined["param_groups"] = [
        _group(hyper, group, numbers) for hyper, group in zip(states[0]["param_groups"], groups, strict=True)
    ]
    found = {}
    for stage, state in zip(stages, states, strict=True):
        names = {number: name for name, number in _numbers(stage.groups).items()}
        found.update({numbers[names[number]]: values for number, values in state["state"].items()})
    joined["state"] = {number: found[number] for number in sorted(found)}
    return joined


def part_of_state(stages: Sequence[StageGroups], own: StageGroups, whole: StateDict, prefix: str = "") -> StateDict:
    """What one stage's optimizer takes of the whole model's state.

    Args:
        stages: What each stage's optimizer has.
        own: What this one has.
        whole: In the form of `Optimizer.state_dict()`.
        prefix: See `whole_groups`.

    Raises:
        ValueError: If the state is of another optimizer: other numbers of groups, or of parameters in them.
    """
    groups = whole_groups(stages, prefix)
    wanted, there = [len(group) for group in groups], [len(group["params"]) for group in whole["param_groups"]]
    if wanted != there:
        raise ValueError(
            f"the optimizer state has param groups of {there} parameters, and the stages together have {wanted}; it is "
            "of another model or other groups"
        )
    names = {
        number: name
        for group, saved in zip(groups, whole["param_groups"], strict=True)
        for name, number in zip(group, saved["params"], strict=True)
    }
    numbers = _numbers(own.groups)
    state = {
        numbers[name]: whole["state"][number]
        for number, name in names.items()
        if name in numbers and number in whole["state"]
    }
    return {
        **whole,
        "state": state,
        "param_groups": [
            _group(saved, group, numbers) for saved, group in zip(whole["param_groups"], own.groups, strict=True)
        ],
    }


def _group(hyper: StateDict, names: Sequence[str], numbers: dict[str, int]) -> StateDict:
    """A param group with these parameters; torch notes names, too, of optimizers that were made with them."""
    named = {"param_names": list(names)} if "param_names" in hyper else {}
    return {**hyper, **named, "params": [numbers[name] for name in names]}


def _numbers(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: number for number, name in enumerate(name for group in groups for name in group)}
