"""Weights and optimizer states of a pipeline: layer files as DeepSpeed has them, states of stages joined.

There is one file for each layer, whatever the stages.

    layer_{layer:02d}[-model_{slice:02d}]-model_states.pt     the layer's state dict, under names local to it

Layers that can have no state have no file. Layers of one tie key have one each, with the same content, but for those
that run a function of their own on the tied module: they have none, unless all of their key do, whose first has one.

`Optimizer.state_dict()` numbers parameters: group by group, and in a group as they were passed. An optimizer over a
whole model has them in the order of its `named_parameters()`, so that is how they are numbered here, and what comes out
is what one process would have written.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_strategy.pipeline.building import TIED, BuiltLayer, NamedLayer, TiedLayerSpec
from zero_strategy.pipeline.topology import ProcessTopology
from zero_strategy.runtime.regular_files import open_regular


def layer_path(directory: str | Path, layer: int, topology: ProcessTopology, rank: int) -> str:
    """The file of a layer on a rank."""
    place = topology.get_rank_repr(rank)
    middle = f"-{place}" if place else ""
    return os.path.join(directory, f"layer_{layer:02d}{middle}-model_states.pt")


def layer_paths(directory: str | Path, layer: int) -> list[str]:
    """The files of a layer that there are, one for each slice, in their order."""
    # Escaped: the directory's own name may have brackets, which are patterns to `glob`.
    return sorted(glob.glob(os.path.join(glob.escape(str(directory)), f"layer_{layer:02d}-*model_states.pt")))


def layers_with_files(layers: Sequence[NamedLayer]) -> dict[str, int]:
    """For each tie key, the layer whose file has the tied module for those that have none."""
    chosen: dict[str, int] = {}
    borrowing: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer.given, TiedLayerSpec):
            places = chosen if layer.given.forward_fn is None else borrowing
            places.setdefault(layer.given.key, layer.index)
    # A layer that runs the module itself has a file in any case; one that borrows it only where none does.
    return {**borrowing, **chosen}


def save_layers(
    layers: Sequence[BuiltLayer], paths: Sequence[str], tied_files: dict[str, int], engine: Any, exclude_frozen: bool
) -> None:
    """Write the files of some layers.

    Args:
        layers: The layers.
        paths: Of each.
        tied_files: What `layers_with_files` gave.
        engine: A DeepSpeed checkpoint engine (`makedirs`, `save(state_dict, path)`), or None.
        exclude_frozen: Leave parameters out that are not trained.
    """
    for layer, path in zip(layers, paths):
        state = layer.state(exclude_frozen)
        if state is None or (layer.borrows and tied_files[str(layer.tie_key)] != layer.index):
            continue
        state = {name: tensor.detach().clone() for name, tensor in state.items()}  # a view would bring its storage
        if engine is not None:
            engine.save(state_dict=state, path=path)
            continue
        # Replaced in one step: a reader finds the former file or this one, and no part of it.
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            torch.save(state, temporary)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)  # there is one only if something has failed


def load_layers(
    layers: Sequence[BuiltLayer],
    directory: str | Path,
    tied_files: dict[str, int],
    engine: Any,
    strict: bool,
    slices: tuple[int, int],
) -> None:
    """Read the files of some layers into them.

    Args:
        layers: The layers.
        directory: With the files.
        tied_files: What `layers_with_files` gave.
        engine: A DeepSpeed checkpoint engine (`load(path, map_location)`), or None.
        strict: Refuse missing and unexpected names.
        slices: This rank's slice, and how many there are.

    Raises:
        FileNotFoundError: If a layer's file is missing.
        ValueError: If there are files for another number of slices.
    """
    for layer, path in _files_to_read(layers, directory, tied_files, slices):
        if engine is not None:
            state: dict[str, Tensor] = engine.load(path, map_location="cpu")
        else:
            # A pipe of this name would keep the rank waiting, a pickle could run code, and a GPU may not be here.
            with open(open_regular(path), "rb") as file:
                state = torch.load(file, map_location="cpu", weights_only=True)
        layer.load_state(state, strict)


def _files_to_read(
    layers: Sequence[BuiltLayer], directory: str | Path, tied_files: dict[str, int], slices: tuple[int, int]
) -> Iterator[tuple[BuiltLayer, str]]:
    own, number = slices
    for layer in layers:
        if not layer.modules:
            continue
        index = tied_files[str(layer.tie_key)] if layer.borrows else layer.index
        found = layer_paths(directory, index)
        if not found:
            raise FileNotFoundError(
                f"{directory} has no layer_{index:02d}-*model_states.pt for layer {layer.index} ({layer.class_name}); "
                "was the checkpoint written by a model with the same layers?"
            )
        # Slices are read as they are: nothing here joins or divides them.
        if len(found) != number:
            raise ValueError(
                f"layer {index} in {directory} has {len(found)} files, one for each tensor-parallel slice, but "
                f"{number} slices are loading; load it with as many"
            )
        yield layer, found[own]


StateDict = dict[str, Any]


@dataclass(frozen=True)
class StageGroups:
    """State of one stage's optimizer.

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
    # First, as `PipelineModule` registers it before any layer.
    _insert(tree, f"{prefix}{TIED}".split("."))
    for name in sorted(places, key=places.__getitem__):
        _insert(tree, name.split("."))
    return [name for name in _walk(tree, "") if name in places]


def _insert(tree: dict[str, Any], path: Iterable[str]) -> None:
    for part in path:
        tree = tree.setdefault(part, {})  # dicts keep the order of insertion, as modules do


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
    # In the order of numbers, in which one process's first step makes states.
    joined["state"] = {number: found[number] for number in sorted(found)}
    return joined


def part_of_state(stages: Sequence[StageGroups], own: StageGroups, whole: StateDict, prefix: str = "") -> StateDict:
    """Part of the whole model's state that one stage's optimizer takes.

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
        if name in numbers and number in whole["state"]  # no state: it has taken no step
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
