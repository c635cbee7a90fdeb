"""The optimizer state of a rank: values of its pieces, and which parameters have state on whatever rank.

The user's code runs on every rank and asks by parameter, and a rank may hold no element of one. So the book has an
entry for every parameter with state, in the order in which plain torch would have it, and counts the steps of those
that have no piece here. Their other numbers and keys are found out when somebody asks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.ops.dynamic_codes import blocks_of
from zero_strategy.optim.coded_state import SCALES, SIGNED, blocks_within, in_form
from zero_strategy.optim.sharded_value import ShardedValue, ValuePlace

SCALAR_STATES = ("step", "eta", "mu", "mu_product")
"""Per-parameter 0-d states of torch's optimizers."""
STEP = "step"


class PieceOwner(Protocol):
    """An optimizer that is divided, as the book uses it."""

    optimizer: Optimizer
    model: ShardedModel

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def piece(self, parameter: nn.Parameter) -> nn.Parameter | None: ...

    def offloaded_place(self, parameter: nn.Parameter, key: str) -> OffloadedPart | None: ...

    def coded(self, parameter: nn.Parameter) -> bool: ...


@dataclass
class Entry:
    """A parameter that has state.

    Attributes:
        parameter: The module's.
        given: The user has set it, so that it counts even if it is empty.
        elsewhere: Its state where this rank has no piece of it: numbers, and empty tensors in the place of those with
            a value per element.
        steps: That it has taken since `elsewhere` was brought up to date.
    """

    parameter: nn.Parameter
    given: bool = False
    elsewhere: dict[str, Any] | None = None
    steps: int = 0


class Unknown:
    """Stands for a number that only the rank has that holds the piece; or for values that were given up."""

    def __init__(self, why: str, *, lost: bool = False) -> None:
        self.why, self.lost = why, lost


class StateBook:
    """State by parameter.

    Args:
        owner: The optimizer that it is of.
        form: Gives the state that a step makes for an element or two, with the options of a param group.

    Attributes:
        by_piece: What this rank holds.
        entries: By the id of the parameter, in order of first steps.
    """

    def __init__(self, owner: PieceOwner, form: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._owner, self._form = owner, form
        self._names: dict[int, str] = {}
        self.by_piece: dict[Tensor, dict[str, Any]] = {}
        self.entries: dict[int, Entry] = {}

    # ---- what has state ----

    def begin(self, parameter: Tensor) -> Entry:
        """The parameter's entry, which it has from now on."""
        return self.entries.setdefault(id(parameter), Entry(cast(nn.Parameter, parameter)))

    def is_foreign(self, key: Tensor) -> bool:
        """True if it is no parameter of the model."""
        return self._owner.model.place(cast(nn.Parameter, key)) is None

    def holds(self, parameter: Tensor) -> bool:
        """True if the parameter has state, or the user has set it."""
        entry = self.entries.get(id(parameter))
        return entry is not None and (entry.given or bool(self.values_of(entry.parameter)))

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that have state, in the order in which they got it."""
        return [entry.parameter for entry in self.entries.values() if self.holds(entry.parameter)]

    def any(self) -> bool:
        """True if there is state, on whatever rank."""
        known = any(self.values_of(entry.parameter) for entry in list(self.entries.values()))
        return known or any(values for values in self.by_piece.values())

    def pieces(self) -> Iterator[dict[str, Any]]:
        """State of each piece on this rank."""
        return (values for key, values in self.by_piece.items() if isinstance(key, Tensor))

    def name_of(self, parameter: Tensor) -> str:
        """The parameter's name in the model."""
        if id(parameter) not in self._names:
            self._names = {id(each): name for name, each in self._owner.model.names()}
        return self._names.get(id(parameter), f"shape {tuple(parameter.shape)}")

    def values_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The state of the parameter's piece here, or what stands for that of another rank; the live dict."""
        piece, entry = self._owner.piece(parameter), self.begin(parameter)
        if piece is not None:
            return self.by_piece.setdefault(piece, {})
        return self._up_to_date(entry)

    def _up_to_date(self, entry: Entry) -> dict[str, Any]:
        """The state that other ranks hold, with the steps counted on."""
        if entry.elsewhere is None:
            entry.elsewhere = {}
        values, steps, entry.steps = entry.elsewhere, entry.steps, 0
        if steps and not values:
            values.update(self._first_values(entry.parameter, steps))
        elif steps:
            for key, value in values.items():
                if key == STEP and isinstance(value, Tensor):
                    value.add_(steps)
                elif key == STEP:
                    values[key] = value + steps
                elif not isinstance(value, Tensor) or value.dim() == 0:
                    # Only of the step's number is it known how steps change it.
                    values[key] = Unknown("another rank holds it")
        return values

    def _first_values(self, parameter: nn.Parameter, steps: int) -> dict[str, Any]:
        """Empty state as steps on this parameter have left it on another rank."""
        group = next(
            group for group in self._owner.optimizer.param_groups if any(p is parameter for p in group["params"])
        )
        found: dict[str, Any] = {}
        form = self._form(group)
        if self._owner.coded(parameter):  # a trial's few elements have states of 32 bits
            form = in_form(form, SIGNED, coded=True)
        for key, value in form.items():
            if isinstance(value, Tensor) and value.dim():
                found[key] = torch.empty(0, dtype=value.dtype, device=parameter.device)
            elif key == STEP:
                found[key] = torch.full_like(value, steps) if isinstance(value, Tensor) else type(value)(steps)
            else:
                found[key] = Unknown("another rank holds it") if isinstance(value, (Tensor, int, float)) else value
        return found

    # ---- changes ----

    def clear(self) -> None:
        """Let nothing have state."""
        self.by_piece.clear()
        self.entries.clear()

    def drop(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Take a parameter's state away; values in a tier are given up."""
        values = self.values_of(parameter)
        del self.entries[id(parameter)]
        if (piece := self._owner.piece(parameter)) is not None:
            del self.by_piece[piece]
        return values

    def put(self, parameter: nn.Parameter, values: dict[str, Any]) -> None:
        """Replace the state of the parameter's piece, or what stands for that of another rank."""
        piece, entry = self._owner.piece(parameter), self.begin(parameter)
        if piece is not None:
            self.by_piece[piece] = values
        else:
            entry.elsewhere, entry.steps = values, 0

    def put_in_order(self, parameters: Sequence[Tensor]) -> None:
        """Let these, which are all that have state, come in this order."""
        self.entries = {id(parameter): self.begin(parameter) for parameter in parameters}

    def place_of(self, parameter: nn.Parameter) -> ValuePlace:
        """The elements of a parameter that this rank holds."""
        found = self._owner.model.place(parameter)
        assert found is not None
        bucket, index = found
        cut = bucket.piece_of.get(index)
        start, stop = (0, 0) if cut is None else (cut.start, cut.stop)
        return ValuePlace(parameter, self.name_of(parameter), bucket.parts[index], start, stop)

    def is_whole(self, parameter: nn.Parameter) -> bool:
        """True if every rank holds all elements of the parameter's state."""
        found, model = self._owner.model.place(parameter), self._owner.model
        assert found is not None
        divided = model.placement.shard_optimizer and found[0].ranks.shard_size > 1
        return not divided and found[0].parts[found[1]].dim is None

    def is_per_element(self, parameter: nn.Parameter, value: Tensor | OffloadedPart) -> bool:
        """True if a value that this rank holds has an entry per element of the parameter's piece."""
        piece = self._owner.piece(parameter)
        shape = torch.Size([0]) if piece is None else piece.shape
        return len(shape) > 0 and value.shape == shape

    def keeps_master(self, parameter: nn.Parameter) -> bool:
        """True if the engine keeps its master weights."""
        found = self._owner.model.place(parameter)
        return found is not None and found[0].has_master

    def part_of(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        """This rank's part of a whole value, in memory of its own or in a tier; low precision becomes the piece's.

        Values without an entry per element are kept: a tensor copied, anything else as it is.
        """
        piece, place = self._owner.piece(parameter), self.place_of(parameter)
        if key in SCALES and isinstance(value, Tensor) and value.numel() == blocks_of(parameter.numel()):
            blocks = slice(*blocks_within(place.start, place.stop))
            return value.reshape(-1)[blocks].to(parameter.device if piece is None else piece.device, copy=True)
        if isinstance(value, ShardedValue):
            part = value.local_values()
        elif any(is_elementwise_state(key, value, shape) for shape in (parameter.shape, place.part.shape)):
            part = place.of(value)
        else:
            return value.clone() if isinstance(value, Tensor) else value
        found = self._owner.model.place(parameter)
        assert found is not None
        dtype = found[0].master.dtype if value.dtype == parameter.dtype else value.dtype
        if piece is None:
            return torch.empty(0, dtype=dtype, device=parameter.device)
        if (offloaded := self._owner.offloaded_place(parameter, key)) is not None:
            offloaded.write(part)
            return offloaded
        return torch.empty(part.shape, dtype=dtype, device=piece.device).copy_(part).view(piece.shape)

    def keep_whole(self, parameter: nn.Parameter, values: Mapping[str, Any]) -> None:
        """Keep this rank's part of a parameter's whole state."""
        own = {key: value if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in values.items()}
        own = in_form(own, SIGNED, coded=self._owner.coded(parameter))
        self.put(parameter, {key: self.part_of(parameter, key, value) for key, value in own.items()})


def is_elementwise_state(key: str, value: Any, shape: Sequence[int]) -> bool:
    """True if a state value has an entry per element of a parameter of `shape` (a 0-d one is told by its key)."""
    return isinstance(value, Tensor) and value.shape == shape and (len(shape) > 0 or key not in SCALAR_STATES)
