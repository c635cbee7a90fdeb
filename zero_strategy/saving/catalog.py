"""What all tensors of a model are, also where every rank has only the layers of one pipeline stage.

A checkpoint is of the whole model: its files, their order and their header depend on the names, dtypes and shapes of
all tensors. Where ranks hold different parts, they tell each other; tensors then come in the order that the whole model
gives them, so that a checkpoint is the same whatever the model was divided into.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zero_strategy.checkpoint import TensorSpec
from zero_strategy.distributed.together import together
from zero_strategy.saving.contents import state_dict_entries

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

Position = tuple[int, ...]
"""Where a tensor comes in the whole model's order."""


@dataclass(frozen=True)
class Catalog:
    """All tensors of a model.

    Attributes:
        weights: Parameters and persistent buffers, in the order of the whole model's state dict.
        aliases: Further names of tied tensors: {alias: first name}.
        frozen: Names of parameters that need no gradient.
    """

    weights: Sequence[TensorSpec]
    aliases: Mapping[str, str]
    frozen: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """First names, in order."""
        return [spec.name for spec in self.weights]

    def without(self, names: Collection[str]) -> Catalog:
        """The same, some tensors left out."""
        if not names:
            return self
        weights = [spec for spec in self.weights if spec.name not in names]
        aliases = {alias: name for alias, name in self.aliases.items() if name not in names}
        return Catalog(weights, aliases, self.frozen.difference(names))


def catalog_of(engine: TrainState) -> Catalog:
    """All tensors of the model that an engine trains, or trains a part of. A collective of the team if it is a part.

    Raises:
        TypeError: If a tensor's dtype cannot be stored.
        ValueError: If parts hold different tensors under one name.
    """
    if not engine.is_part:
        return _merged([_own(engine)], sort=engine.order is not None)
    control = engine.mesh.team.control
    return _merged(control.gather_objects(together(control, lambda: _own(engine))), sort=True)


_Part = tuple[list[tuple[Position, TensorSpec]], dict[str, str], set[str]]


def _own(engine: TrainState) -> _Part:
    order = engine.order or (lambda name: ())
    entries = [(order(name), TensorSpec.of(name, tensor)) for name, tensor in state_dict_entries(engine.module)]
    frozen = {name for name, parameter in engine.model.names() if not parameter.requires_grad}
    return entries, dict(engine.aliases), frozen


def _merged(parts: Sequence[_Part], *, sort: bool) -> Catalog:
    found: dict[str, tuple[Position, TensorSpec]] = {}
    aliases, frozen = dict[str, str](), set[str]()
    for entries, others, still in parts:
        aliases |= others
        frozen |= still
        for position, spec in entries:
            known = found.setdefault(spec.name, (position, spec))[1]
            if known != spec:
                raise ValueError(f"parts of the model hold different tensors {spec.name!r}: {known} and {spec}")
    order = sorted(found.values(), key=lambda item: item[0]) if sort else list(found.values())
    return Catalog([spec for _, spec in order], aliases, frozenset(frozen))


def union_of_groups(engine: TrainState, groups: list[dict[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """The param groups of an optimizer over all parts of a model. A collective of the team if there are several.

    Args:
        engine: Of this part.
        groups: This part's, with "params" as names.
        order: All names of the model.

    Raises:
        ValueError: If the parts' optimizers have other numbers of groups, or other hyper-parameters.
    """
    if not engine.is_part:
        return groups
    everyone = engine.mesh.team.control.gather_objects(groups)
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in part] for part in everyone
    ]
    for rank, theirs in enumerate(settings):
        if theirs != settings[0]:
            raise ValueError(
                f"the optimizers of pipeline stages must have the same param groups but for the parameters: rank 0 has "
                f"{settings[0]}, rank {rank} has {theirs}"
            )
    places = {name: place for place, name in enumerate(order)}
    members = [{name for part in everyone for name in part[number]["params"]} for number in range(len(groups))]
    return [
        {**group, "params": sorted(names, key=lambda name: places[name])} for group, names in zip(groups, members)
    ]
