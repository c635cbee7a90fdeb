"""Weights that several ranks of a pipeline hold: who, under which names, and how they stay equal.

Tied are the module of a key of `TiedLayerSpec`s, and any parameter that layers on different ranks share, such as a head
that uses the embedding's weight. On one rank it is one parameter; each further rank has a copy. The rank of the first
stage that uses it owns it: copies start from the owner's values, and gradients are added up over the holders, in rank
order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.distributed.collectives import Communicator
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.groups import own_group
from zero_strategy.pipeline.building import TIED, NamedLayer
from zero_strategy.pipeline.grid import PipelineParallelGrid
from zero_strategy.pipeline.specs import ModelLayer, TiedLayerSpec
from zero_strategy.sharding.dtensors import held_by, like, local_gradient


@dataclass(frozen=True)
class TiePlan:
    """A tie of the whole model, as every rank knows it.

    Attributes:
        key: A `TiedLayerSpec`'s, or the parameter's first name.
        layers: The layers that use it.
        names: All names of the parameter, the first one first; empty for a `TiedLayerSpec`, whose module has the names.
        wanted: `tied_weight_attr` of a `TiedLayerSpec`.
    """

    key: str
    layers: tuple[int, ...]
    names: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


@dataclass
class Tie:
    """A tie that this rank takes part in.

    Attributes:
        key: A `TiedLayerSpec`'s, or the parameter's first name.
        stages: The global stages that use it.
        owner_stage: The first of them.
        ranks: Ranks of this rank's pipeline that hold it.
        owner_rank: The rank of the first stage.
        weights: The parameters here, by the name that is the same on all holders, and in checkpoints.
        local_names: {that name: the first name here}.
        is_owner: Whether this rank is the owner.
        reduce: The holders; None without process groups.
        control: The same on the host.
    """

    key: str
    stages: tuple[int, ...]
    owner_stage: int
    ranks: tuple[int, ...]
    owner_rank: int
    is_owner: bool
    weights: dict[str, nn.Parameter] = field(default_factory=dict)
    local_names: dict[str, str] = field(default_factory=dict)
    reduce: Communicator | None = None
    control: Communicator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tie:
        weights = copy.deepcopy(self.weights, memo)  # those of the copied module
        return replace(self, weights=weights, local_names=dict(self.local_names))

    def broadcast(self) -> None:
        """Give all holders the owner's values, where they have values already. A collective over the holders."""
        if self.reduce is not None:
            for weight in self.weights.values():
                if _has_values(weight):
                    held = held_by(weight).detach()
                    values = held.contiguous()
                    self.reduce.broadcast(values, sorted(self.ranks).index(self.owner_rank))
                    held.copy_(values)

    def reduce_gradients(self) -> None:
        """Add the holders' gradients up, in rank order; each has the sum then. A collective over the holders.

        Where no holder has a gradient there is none afterwards; who has none counts as zeros else.

        Raises:
            ValueError: If there are no process groups.
        """
        if self.reduce is None or self.control is None:
            raise ValueError(
                f"tied weights {self.key!r} are held by ranks {list(self.ranks)}, and there is no process group to add "
                "up their gradients; start it before the PipelineModule is made"
            )
        weights = list(self.weights.values())
        flags = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
        present = torch.stack(self.control.exchange_small(flags)).sum(0).tolist()
        for weight, holders in zip(weights, present):
            if holders:
                _sum_gradient(weight, self.reduce)


def plan_ties(layers: Sequence[NamedLayer]) -> list[TiePlan]:
    """All ties of a model, in an order that is the same on all ranks."""
    keys: dict[str, list[int]] = {}
    wanted: dict[str, tuple[str, ...]] = {}
    uses: dict[int, list[tuple[int, str]]] = {}
    for layer in layers:
        if isinstance(layer.given, TiedLayerSpec):
            _check_same_class(layer, layers, keys.setdefault(layer.given.key, []))
            keys[layer.given.key].append(layer.index)
            wanted.setdefault(layer.given.key, tuple(layer.given.tied_weight_attr))
        for name, parameter in _given_parameters(layer):
            uses.setdefault(id(parameter), []).append((layer.index, name))
    plans = [TiePlan(key, tuple(found), wanted=wanted[key]) for key, found in keys.items()]
    for found_uses in uses.values():
        indices = tuple(dict.fromkeys(index for index, _ in found_uses))
        names = tuple(dict.fromkeys(name for _, name in found_uses))
        plans.append(TiePlan(names[0], indices, names))
    return sorted((plan for plan in plans if len(plan.layers) > 1), key=lambda plan: (plan.layers, plan.key))


def own_ties(
    plans: Iterable[TiePlan],
    module: nn.Module,
    grid: PipelineParallelGrid,
    stage_of_layer: Mapping[int, int],
    rank_of_stage: Mapping[int, int],
) -> list[Tie]:
    """Make this rank's ties and their process groups. A collective over all ranks.

    Args:
        plans: All ties of the model.
        module: This rank's part of it, with names of the whole.
        grid: This rank's place.
        stage_of_layer: Global stages.
        rank_of_stage: Their places on the axis "pipe".
    """
    counters = CommunicationCounters()
    groups: dict[tuple[int, ...], tuple[Communicator, Communicator]] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    makes, ties = grid.pp_proc_group is not None, []
    for plan in plans:
        stages = tuple(dict.fromkeys(stage_of_layer[layer] for layer in plan.layers))
        holders = tuple(sorted({rank_of_stage[stage] for stage in stages}))
        if len(holders) == 1:
            continue
        if makes and holders not in groups:
            lists = [[pipe[holder] for holder in holders] for pipe in grid.pipe_groups]
            reduce, control = own_group(lists), own_group(lists, backend="gloo")
            groups[holders] = Communicator(reduce, counters), Communicator(control, counters)
        if grid.stage_id not in holders:
            continue
        owner = rank_of_stage[stages[0]]
        tie = Tie(
            plan.key,
            stages,
            stages[0],
            tuple(grid.pp_group[holder] for holder in holders),
            grid.pp_group[owner],
            grid.stage_id == owner,
            *_held(plan, parameters),
        )
        if makes:
            tie.reduce, tie.control = groups[holders]
        ties.append(tie)
    return ties


def _held(plan: TiePlan, parameters: Mapping[str, nn.Parameter]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """A tie's parameters on this rank, and their names here, by the common names."""
    if plan.names:
        here = next(name for name in plan.names if name in parameters)
        return {plan.names[0]: parameters[here]}, {plan.names[0]: here}
    start = f"{TIED}.{plan.key}."
    weights = {name: weight for name, weight in parameters.items() if name.startswith(start)}
    return weights, {name: name for name in weights}


def _check_same_class(layer: NamedLayer, layers: Sequence[NamedLayer], before: Sequence[int]) -> None:
    for index in before[:1]:
        if layers[index].given.typename is not layer.given.typename:
            raise ValueError(
                f"layers {index} and {layer.index} are tied as {layer.given.key!r}, but one is a "
                f"{layers[index].class_name} and the other a {layer.class_name}; they are one module"
            )


def _given_parameters(layer: NamedLayer) -> list[tuple[str, nn.Parameter]]:
    """Names in the whole model and objects of the parameters that a layer brought along."""
    modules: Mapping[str, nn.Module] = {}
    if isinstance(layer.given, ModelLayer):
        modules = layer.given.modules
    elif isinstance(layer.given, nn.Module):
        modules = {layer.name: layer.given}
    return [
        (f"{name}.{local}", parameter)
        for name, module in modules.items()
        for local, parameter in module.named_parameters(remove_duplicate=False)
    ]


def _has_values(weight: nn.Parameter) -> bool:
    """Not so on the meta device, nor where one element stands for all until values are read."""
    return not weight.is_meta and (any(weight.stride()) or weight.numel() <= 1)


def _sum_gradient(weight: nn.Parameter, group: Communicator) -> None:
    held, grad = held_by(weight), weight.grad
    flat = torch.zeros(-(-held.numel() // group.size) * group.size, dtype=_dtype(weight), device=weight.device)
    if grad is not None:
        flat[: held.numel()] = local_gradient(weight, grad).reshape(-1)
    group.all_reduce(flat)
    total: Tensor = flat[: held.numel()].view(held.shape)
    if grad is None:
        weight.grad = like(weight, total.clone())
    else:
        held_by(grad).copy_(total)


def _dtype(weight: nn.Parameter) -> torch.dtype:
    return weight.dtype if weight.grad is None else weight.grad.dtype
