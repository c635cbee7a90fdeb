"""Tied weights across stages: one rank owns each, the other holders have replicas.

Tied are the module of a key of `TiedLayerSpec`s, and any parameter that layers on different ranks share, such as a head
that uses the embedding's weight. On one rank it is one parameter; each further rank has a copy. The rank of the first
stage that uses it owns it: copies start from the owner's values, and gradients are added up over the holders, in rank
order.

One rank owns each tied weight; the other holders have replicas that stay equal.

    owner         a parameter of its engine: sharded, clipped, updated, saved; takes the replicas' gradients as those of
                  one more micro-batch
    other holder  a plain tensor in the parameter's place, which no engine and no optimizer sees; it collects its
                  gradient, and gets the owner's new values after each step; before a batch it follows what was done to
                  the owner in between: values written in place, frozen or not

So a tied weight has one set of optimizer state, and counts once in norms and checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import own_group
from zero_strategy.fsdp.dtensor import held_by, like, local_gradient
from zero_strategy.pipeline.building import TIED, ModelLayer, NamedLayer, TiedLayerSpec
from zero_strategy.pipeline.topology import PipelineParallelGrid
from zero_strategy.runtime.torch_private import parameters_of, version_of
from zero_strategy.watchdog.watchdog import Watchdog


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
                    # Collectives take contiguous memory; of any other tensor this is a copy, which goes back below.
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
        # No rank knows whether the others have a gradient: in a sum that only some of them begin these would wait.
        flags = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32)
        present = torch.stack(self.control.all_gather_small(flags)).sum(0).tolist()
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
            uses.setdefault(id(parameter), []).append((layer.index, name))  # `layers` keeps it, so no id comes twice
    plans = [TiePlan(key, tuple(found), wanted=wanted[key]) for key, found in keys.items()]
    for found_uses in uses.values():
        indices = tuple(dict.fromkeys(index for index, _ in found_uses))  # a layer may have it under several names
        names = tuple(dict.fromkeys(name for _, name in found_uses))
        plans.append(TiePlan(names[0], indices, names))
    # All ranks go through the ties in this order, when they make groups and in every exchange.
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
    parameters = dict(module.named_parameters(remove_duplicate=False))  # a tie may know it by any of its names
    makes, ties = grid.pp_proc_group is not None, []
    for plan in plans:
        stages = tuple(dict.fromkeys(stage_of_layer[layer] for layer in plan.layers))
        holders = tuple(sorted({rank_of_stage[stage] for stage in stages}))
        # On one rank it is one parameter, whatever the number of stages; all ranks leave out the same ties.
        if len(holders) == 1:
            continue
        # Before ranks that do not hold it go on: every rank takes part in making a group.
        if makes and holders not in groups:
            lists = [[pipe[holder] for holder in holders] for pipe in grid.pipe_groups]
            reduce, control = own_group(lists), own_group(lists, backend="gloo")  # flags stay on the host
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
    # Padded, as `all_reduce` divides it among the ranks; who has no gradient adds zeros.
    flat = torch.zeros(-(-held.numel() // group.size) * group.size, dtype=_dtype(weight), device=weight.device)
    if grad is not None:
        flat[: held.numel()] = local_gradient(weight, grad).reshape(-1)
    group.all_reduce(flat).wait()
    total: Tensor = flat[: held.numel()].view(held.shape)
    if grad is None:
        weight.grad = like(weight, total.clone())  # a view would keep the padded sum
    else:
        held_by(grad).copy_(total)  # in place, for whoever holds the gradient


def _dtype(weight: nn.Parameter) -> torch.dtype:
    return weight.dtype if weight.grad is None else weight.grad.dtype


Gathered = Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]


@dataclass
class Replica:
    """A copy of a weight that another rank owns.

    Attributes:
        name: In checkpoints.
        local_name: The first one here.
        tensor: What stands in the parameter's place: a leaf that takes gradients as it did.
        total: Sum of its gradients since the last exchange (of a `DTensor`, of this rank's part), float32 or its own
            wider dtype; None: there was none.
    """

    name: str
    local_name: str
    tensor: Tensor
    total: Tensor | None = None

    @torch.no_grad()
    def collect(self, tensor: Tensor) -> None:
        """After a backward added to it: take its gradient over."""
        assert tensor.grad is not None
        # Taken away from the tensor, whose next backward would add to it and have it counted twice.
        gradient, self.tensor.grad = local_gradient(self.tensor, tensor.grad), None
        if self.total is None:
            # As the engine's own sums over micro-batches: in low precision small gradients would be lost.
            self.total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            self.total.add_(gradient)


class TiedWeights:
    """The ties of one rank's part of a model, from before its engine is made.

    Args:
        module: The part; parameters that another rank owns leave it.
        ties: What it takes part in, in an order that all holders share.
        dtype: What floating-point parameters are computed in; None: their own.
        device: Where.
        prefix: What names begin with for the engine, whose module may have this one below it.
    """

    def __init__(
        self,
        module: nn.Module,
        ties: Sequence[Tie],
        dtype: torch.dtype | None,
        device: torch.device,
        prefix: str = "",
    ) -> None:
        self._ties, self._prefix = list(ties), prefix
        self.replicas: dict[int, list[Replica]] = {}
        self._owned: dict[int, list[nn.Parameter]] = {}
        self._versions: dict[int, list[int]] = {}
        """Of owned weights, when their values were published."""
        for number, tie in enumerate(self._ties):
            if tie.is_owner:
                self._owned[number] = list(tie.weights.values())
            else:
                self.replicas[number] = [
                    _replace(module, name, tie.local_names[name], weight, dtype, device)
                    for name, weight in tie.weights.items()
                ]

    def aliases(self) -> dict[str, str]:
        """Names that replicas have here, and those of the weights: {local name: name}, where they differ."""
        return {
            self._prefix + replica.local_name: self._prefix + replica.name
            for replicas in self.replicas.values()
            for replica in replicas
            if replica.local_name != replica.name
        }

    def values(self) -> dict[str, Tensor]:
        """The replicas here, by their local names."""
        return {self._prefix + each.local_name: each.tensor for found in self.replicas.values() for each in found}

    def removed(self) -> list[Tensor]:
        """The parameters that are replicas now."""
        return [weight for tie in self._ties if not tie.is_owner for weight in tie.weights.values()]

    def guarded(self, watchdog: Watchdog) -> None:
        """Let a watchdog watch what the holders send each other."""
        for number, tie in enumerate(self._ties):
            for what, communicator in (("reduce", tie.reduce), ("control", tie.control)):
                if communicator is not None:
                    communicator.guarded(watchdog, f"tie {number} {what}")

    def unguarded(self) -> None:
        """The watchdog ends; the groups stay with the module."""
        for tie in self._ties:
            for communicator in (tie.reduce, tie.control):
                if communicator is not None:
                    communicator.unguarded()

    def exchange_gradients(self, agree: Callable[[Tensor], list[Tensor]]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Bring the replicas' gradients to the owners. A collective over the holders of each tie, in order.

        Args:
            agree: Exchanges small tensors over this rank's data-parallel group.

        Yields:
            A weight that this rank owns, and what its replicas add: where a replica of any copy had a gradient, so that
            all owners of a data-parallel group are given the same weights.
        """
        for number, tie in enumerate(self._ties):
            mine = self.replicas.get(number, [])
            weights: list[Tensor] = [*self._owned.get(number, ()), *(replica.tensor for replica in mine)]
            # An owner has nothing to add here: its own gradients are in the buckets of its engine.
            totals = [replica.total for replica in mine] or [None] * len(weights)
            control, reduce = tie.control, tie.reduce
            assert control is not None and reduce is not None, "an engine has process groups"
            # Whoever has none takes part in a sum all the same, and one that nobody has anything for is left out.
            there = control.all_gather_small(torch.tensor([total is not None for total in totals], dtype=torch.int32))
            present = torch.stack(there).sum(0)
            # Reductions are collectives of the owner's data-parallel group: all of its ranks get the same weights.
            # Where one copy's replica got no gradient, its owner adds zeros, or reductions would go different ways.
            anywhere = torch.stack(agree(present)).sum(0) if tie.is_owner else present
            for weight, total, holders, copies in zip(weights, totals, present.tolist(), anywhere.tolist()):
                summed = _sum(weight, total, reduce) if holders else None
                if tie.is_owner and copies:
                    assert isinstance(weight, nn.Parameter)
                    yield weight, like(weight, _zeros(weight) if summed is None else summed)
            for replica in mine:
                replica.total = None

    def publish(self, gathered: Gathered) -> None:
        """Give the replicas the owners' values. A collective over holders, and over owners' data-parallel groups.

        Args:
            gathered: Makes parameters of the engine whole inside of a block.
        """
        for number in range(len(self._ties)):
            self._publish(number, gathered)

    def follow(self, gathered: Gathered, agree: Callable[[Tensor], list[Tensor]]) -> None:
        """Let replicas be what their owners have become since the last step. A collective as `publish`.

        Args:
            gathered: See `publish`.
            agree: Exchanges small tensors over this rank's data-parallel group.
        """
        for number, tie in enumerate(self._ties):
            assert tie.control is not None
            flags = [0] * (1 + len(tie.weights))
            if tie.is_owner:
                owned = self._owned[number]
                # An edit in one copy counts for all: publishing gathers over the owner's data-parallel group.
                edited = torch.tensor([_versions(owned) != self._versions.get(number)], dtype=torch.int32)
                flags = [int(max(map(int, agree(edited)))), *(int(weight.requires_grad) for weight in owned)]
            there = tie.control.all_gather_small(torch.tensor(flags, dtype=torch.int32))
            edited_there, *trained = there[_source(tie)].tolist()
            for replica, wants in zip(self.replicas.get(number, ()), trained):
                replica.tensor.requires_grad_(bool(wants))
            if edited_there:
                self._publish(number, gathered)

    @torch.no_grad()
    def _publish(self, number: int, gathered: Gathered) -> None:
        tie = self._ties[number]
        assert tie.reduce is not None
        if tie.is_owner:
            owned = self._owned[number]
            with gathered(owned):
                for weight in owned:
                    tie.reduce.broadcast(held_by(weight).detach().contiguous(), _source(tie))
            self._versions[number] = _versions(owned)  # what is written from here on is an edit
        else:
            for replica in self.replicas[number]:
                held = held_by(replica.tensor)
                values = torch.empty_like(held, memory_format=torch.contiguous_format)
                tie.reduce.broadcast(values, _source(tie))
                held.copy_(values)  # gradients and hooks stay with the tensor

    def forget_gradients(self) -> None:
        """Drop what replicas have collected."""
        for replicas in self.replicas.values():
            for replica in replicas:
                replica.total = replica.tensor.grad = None


def _replace(
    module: nn.Module, name: str, local_name: str, weight: nn.Parameter, dtype: torch.dtype | None, device: torch.device
) -> Replica:
    """Put a plain tensor in the place of a parameter, wherever the module has it."""
    # The dtype that the owner computes in: its full parameter is sent as it is.
    wanted = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
    held = held_by(weight)
    values = torch.empty(held.shape, dtype=wanted, device=device)
    if not weight.is_meta:
        values.copy_(held.detach())
    tensor = like(weight, values)
    replica = Replica(name, local_name, tensor)
    if tensor.is_floating_point():  # what is frozen now may be trained later
        tensor.requires_grad_().register_post_accumulate_grad_hook(replica.collect)
    tensor.requires_grad_(weight.requires_grad)  # torch hooks only what requires a gradient; now as it was
    for child in module.modules():
        for key in [key for key, parameter in parameters_of(child).items() if parameter is weight]:
            del parameters_of(child)[key]  # a module refuses a plain tensor in a parameter's place
            setattr(child, key, tensor)
    return replica


def _source(tie: Tie) -> int:
    """The owner's place among the holders."""
    return sorted(tie.ranks).index(tie.owner_rank)  # torch numbers a group's ranks in ascending order


def _versions(weights: Sequence[nn.Parameter]) -> list[int]:
    """Differ when somebody has written to the weights in place."""
    return [version_of(weight) for weight in weights]


def _zeros(weight: Tensor) -> Tensor:
    held = held_by(weight)
    return torch.zeros(held.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)


def _sum(weight: Tensor, total: Tensor | None, group: Communicator) -> Tensor:
    """The sum of the holders' gradients, in rank order; the owner's own are not in it."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    held = held_by(weight)
    flat = torch.zeros(-(-held.numel() // group.size) * group.size, dtype=dtype, device=weight.device)
    if total is not None:
        flat[: held.numel()] = total.reshape(-1)
    group.all_reduce(flat).wait()
    return flat[: held.numel()].view(held.shape)
