"""The experts of a model that ranks divide: which part of which parameter a rank has, cut from the whole and joined.

A parameter that holds the experts of a layer stays the same object. While experts are divided it has those of this rank
only, along its first dimension; ranks that hold the same ones share its bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from zero_strategy.comm.mesh import Mesh
from zero_strategy.config import ZeroConfig
from zero_strategy.experts.balance import join_balance_losses
from zero_strategy.experts.layers import ExpertLayer, find_layers
from zero_strategy.experts.routing import ExpertGroup
from zero_strategy.fsdp.dtensor import TensorPart, is_dtensor, part_of

if TYPE_CHECKING:
    from zero_strategy.fsdp.param_bucket import ParameterBucket


class NamedExperts(Protocol):
    """A layer of experts: the name of its module, and how many it has."""

    @property
    def name(self) -> str: ...
    @property
    def experts(self) -> int: ...


def setting_of(config: ZeroConfig) -> str:
    """The setting and its origin, such as "mesh.expert is 2 [config.yaml]"."""
    return f"mesh.expert is {config.mesh.expert} [{config.origin_of('mesh.expert')}]"


def check_divisible(
    layers: Sequence[NamedExperts],
    config: ZeroConfig,
    owner: str,
    *,
    by_tensor: Collection[str] = (),
    elsewhere: bool = False,
) -> None:
    """Raise if ranks cannot divide the experts of a model.

    Args:
        layers: Its layers of experts.
        config: Its `mesh.expert` says among how many ranks.
        owner: Name of the model.
        by_tensor: Names of layers whose experts `mesh.tensor` divides.
        elsewhere: Another stage of a pipeline has layers, or may have some: here there need not be any.

    Raises:
        ValueError: If there are no layers, or ranks do not or must not divide them; names the layer and the setting.
    """
    setting = setting_of(config)
    if not layers and not elsewhere:
        raise ValueError(
            f"{setting}, and {owner} has no layer of experts that says so: a Hugging Face model with an "
            "ep_plan, or modules with the three methods of zero_strategy.experts.DivisibleExperts. Leave "
            "mesh.expert at 1"
        )
    if config.units.may_skip:
        raise ValueError(
            f"{setting}, and units.may_skip lets ranks skip layers, whose experts others ask: leave one out"
        )
    for layer in layers:
        if layer.experts % config.mesh.expert:
            raise ValueError(f"{setting}, which does not divide the {layer.experts} experts of {layer.name}")
        if layer.name in by_tensor:
            raise ValueError(f"{setting}, and mesh.tensor divides experts of {layer.name}, too: leave one out")


class DividedExperts:
    """Layers of experts of one module, and what this rank has of them.

    Args:
        module: The module.
        mesh: Its ranks; with one rank that has all experts nothing is divided.

    Attributes:
        layers: The layers; empty where nothing is divided.
    """

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._mesh, self.group = mesh, ExpertGroup(mesh.expert)
        self.layers: list[ExpertLayer] = find_layers(module) if self.group.size > 1 else []
        self._parts: dict[int, TensorPart] = {}
        self._module, self._hooks = module, list[Any]()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """True if ranks hold different experts of it."""
        return id(parameter) in self._parts

    def part_of(self, parameter: nn.Parameter) -> TensorPart:
        """This rank's part of a parameter."""
        return self._parts.get(id(parameter)) or part_of(parameter, self._mesh.tensor.rank)

    def divide(self, config: ZeroConfig) -> None:
        """Let tokens of the layers travel, whose parameters are cut later, or raise where that cannot be.

        Raises:
            ValueError: If there are none, or ranks do not divide them; names the layer and the setting.
        """
        if self.group.size == 1:
            return
        # Of a pipeline's stages some may have none.
        ranks = self._mesh.world_group.control
        counts = [0] if ranks.size == self._mesh.world_size else ranks.all_gather_objects(len(self.layers))
        by_tensor = [layer.name for layer in self.layers if any(map(is_dtensor, layer.parameters))]
        owner = type(self._module).__name__
        check_divisible(self.layers, config, owner, by_tensor=by_tensor, elsewhere=any(counts))
        for layer in self.layers:
            held = self.group.held(layer.experts)
            for parameter in layer.parameters:
                part = TensorPart(
                    tuple(parameter.shape), 0, held.start, len(held), self.group.rank, copy=self._mesh.tensor.rank
                )
                self._parts[id(parameter)] = part
            layer.divide(self.group)
        axes = self._mesh.gather, self._mesh.replicate
        self._hooks = join_balance_losses(self._module, axes, self._mesh.world_size)

    @torch.no_grad()
    def cut_unset(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let parameters on the meta device have this rank's experts only, before they get memory."""
        for parameter in parameters:
            if parameter in self and parameter.is_meta:
                parameter.data = self._parts[id(parameter)].of_whole(parameter.data)

    @torch.no_grad()
    def cut(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let whole parameters have this rank's experts only: the first rank's values. A collective."""
        for parameter in parameters:
            part = self._parts.get(id(parameter))
            if part is None or tuple(parameter.shape) != part.shape:
                continue
            values = parameter.data.contiguous()
            self.group.ranks.broadcast(values, 0)
            parameter.data = part.of_whole(values).clone()

    @torch.no_grad()
    def join(self, bucket: ParameterBucket) -> None:
        """Let the parameters of a bucket that is given back have all experts. A collective."""
        for index, parameter in enumerate(bucket.parameters):
            if parameter in self:
                parameter.data = bucket.whole_of(index, parameter.data)

    @torch.no_grad()
    def join_shapes(self, bucket: ParameterBucket) -> None:
        """Let the parameters of a bucket that is given back have the shapes of all experts, and any values."""
        for parameter in bucket.parameters:
            if parameter in self:
                parameter.data = parameter.data.new_empty(self.part_of(parameter).shape)

    def take_rows(self) -> dict[str, list[int]]:
        """Rows of this group for each expert of each layer since the last call; none on ranks but its first."""
        if self.group.rank:
            return {}
        return {layer.name: layer.take_rows() for layer in self.layers}

    def undivide(self) -> None:
        """Let the layers compute with all experts again."""
        for layer in self.layers:
            layer.undivide()
        for hook in self._hooks:
            hook.remove()
        self._parts.clear()
