"""Layers that some ranks skip and others use (LayerDrop): all ranks gather them, in one order (`units.may_skip`).

A gather takes all ranks, so a rank that skips a layer takes part in its gather all the same, and then lets it go. No
message is needed for that, since the order is known. It is that of the list:

    forward of the module that holds the list     layer 0, 1, 2, ...     at its end those that are left
    backward of that forward                      ..., 2, 1, 0           before any other unit, or at the end of all

Before a layer is used, those that were passed over are gathered and released. Gradients are reduced where backward
passes on from a layer to the one before it, so gathers and reductions interleave alike on all ranks. What happens is
decided by calls that are the same on all ranks, never by what this rank has used:

- layers are released after each use, and fetched ahead in the order of the list;
- a forward that no gradient reaches, since what this rank used of it needs none, has its turn all the same: autograd
  goes through forwards from the last to the first, so it comes before the next one that was earlier, or at the end;
- if the module ran several times, gradients are reduced in the last of its backwards.

A layer that is called out of order, or twice in one forward, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.unshard import InertHook, Unit, Unsharder, tensors_in
from zero_strategy.runtime.torch_private import in_backward, uncompiled

_PASSES = 64
"""Forwards of a list that are remembered, for a backward that comes late or twice."""


class LayerList:
    """Units that are the members of one `ModuleList`.

    Args:
        name: Name of the list.
        units: In the order of the list.
    """

    def __init__(self, name: str, units: Sequence[Unit]) -> None:
        self.name, self.units = name, list(units)
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.passes: list[Pass] = []

    @property
    def trains(self) -> bool:
        """True if any parameter requires a gradient, as it does on all ranks or none."""
        return any(p.requires_grad for unit in self.units for bucket in unit.buckets for p in bucket.parameters)

    def pass_of(self, call: int) -> Pass | None:
        """The forward that a call of a member belongs to; None: it was called by other code."""
        return next((one for one in reversed(self.passes) if one.first < call < one.last), None)


class Pass:
    """One forward of a list, or its backward.

    Args:
        layers: The list.
        first: Calls of members have a higher number.
        place: Of the list in the module that holds it.

    Attributes:
        last: They have a lower number.
        turn: Those with a higher one come later in forward, and earlier in backward.
        position: In forward the members before it have been gathered; in backward those from it on.
        begun: Its backward has begun, or was taken up at the end of another.
        together: The passes of one forward of the module, over all of its lists.
    """

    def __init__(self, layers: LayerList, first: int, place: int) -> None:
        self.layers, self.first, self.last = layers, first, first
        self.turn = first, place
        self.position = 0
        self.begun = False
        self.together: list[Pass] = []


class SkippedLayers:
    """Passes over the layers of all lists of a model.

    Args:
        unsharder: Of the model. Its units are looked through for such lists.

    Raises:
        ValueError: If there is no list.
    """

    def __init__(self, unsharder: Unsharder) -> None:
        self._unsharder = unsharder
        owners = layer_lists(unsharder.units)
        if not owners:
            raise ValueError(
                "units.may_skip: the model has no ModuleList with two units or more that hold no other units; name its "
                "layers in units.classes or units.patterns, or leave it out"
            )
        self._owners = {owner: name for owner, name, _ in owners}
        self._list_of = {unit: layers for _, _, lists in owners for layers in lists for unit in layers.units}
        self._owner_of = {layers: name for _, name, lists in owners for layers in lists}
        self._open: list[tuple[nn.Module, list[Pass]]] = []
        """Forwards under way of modules that hold lists, the innermost last."""
        self._current: Pass | None = None
        """The backward that goes on."""
        self._seen: set[Pass] = set()
        """Those that have begun in the present backward."""
        for owner, _, lists in owners:
            owner.register_forward_pre_hook(_OwnerHook(self, lists, enter=True), prepend=True)
            owner.register_forward_hook(_OwnerHook(self, lists, enter=False))

    # ---- forward ----

    def owner_begins(self, owner: nn.Module, lists: Sequence[LayerList]) -> None:
        """The forward of a module that holds lists begins."""
        if in_backward():  # computed again: its layers are whole in their turn, or refused
            return
        places = [place for place, (other, _) in enumerate(self._open) if other is owner]
        del self._open[min(places, default=len(self._open)) :]  # left by an exception
        first = self._unsharder.new_call()
        self._open.append((owner, [Pass(layers, first, place) for place, layers in enumerate(lists)]))

    def owner_ends(self, owner: nn.Module, output: Any) -> None:
        """It has ended with this result."""
        if in_backward() or not self._open or self._open[-1][0] is not owner:
            return
        passes = self._open[-1][1]
        for one in passes:
            self._complete(one)
        self._open.pop()
        if not torch.is_grad_enabled():
            return
        last = self._unsharder.new_call()
        for one in passes:
            one.last, one.together = last, passes
            one.layers.passes.append(one)
            del one.layers.passes[:-_PASSES]
        begin = _Begins(self, passes[-1])
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)

    def before_forward(self, unit: Unit) -> None:
        """A unit is about to be gathered for a forward: gather those that this rank passed over.

        Raises:
            RuntimeError: If it is not its turn.
        """
        layers = self._list_of.get(unit)
        if layers is None:
            self.before_other(unit)
        elif in_backward():
            one, number = self._current, layers.numbers[unit]
            if not unit.under_way and (one is None or one.layers is not layers or one.position != number):
                raise RuntimeError(
                    f"unit {unit.name!r} is computed again in backward before its turn: under units.may_skip a "
                    f"checkpoint may hold one layer of {layers.name!r}, not the module around them"
                )
        elif self._open and (one := next((one for one in self._open[-1][1] if one.layers is layers), None)) is not None:
            for earlier in self._open[-1][1]:
                if earlier is one:
                    break
                self._complete(earlier)
            number = layers.numbers[unit]
            if number < one.position:
                raise self._out_of_turn(unit, layers.units[one.position - 1])
            self._advance(one, number)
            self._fetch(one, number, ahead=1)
            one.position = number + 1

    def before_other(self, unit: Unit, call: int | None = None) -> None:
        """Another unit is about to be gathered than one in its turn: what is left of the list comes before it."""
        if unit.under_way:
            return
        if in_backward():
            self._close(None if call is None else (call, 0))
        elif self._open:
            for one in self._open[-1][1]:
                if one.position:
                    self._complete(one)

    def _complete(self, one: Pass) -> None:
        self._advance(one, len(one.layers.units))

    def _advance(self, one: Pass, number: int) -> None:
        while one.position < number:
            unit = self._fetch(one, one.position, ahead=1)
            one.position += 1
            unit.release()

    def _fetch(self, one: Pass, number: int, ahead: int) -> Unit:
        """Gather a layer and start on those that follow it."""
        units = one.layers.units
        self._unsharder.use(units[number])
        further = range(number + ahead, number + ahead * (self._unsharder.prefetch + 1), ahead)
        self._unsharder.fetch_ahead([units[place] for place in further if 0 <= place < len(units)])
        return units[number]

    # ---- backward ----

    def begin(self, one: Pass) -> None:
        """A gradient of what this forward gave has arrived."""
        if one not in self._seen:
            self._seen.add(one)
            self._close(one.turn)
            self._start(one)

    def before_backward(self, unit: Unit, call: int) -> None:
        """The gradient of a layer's output has arrived: gather those that this rank passed over.

        Raises:
            RuntimeError: If it is not its turn, or second derivatives will be taken.
        """
        layers = self._list_of.get(unit)
        one = None if layers is None else layers.pass_of(call)
        if layers is None or one is None:
            self.before_other(unit, call)
            return
        if torch.is_grad_enabled():
            raise RuntimeError("units.may_skip knows no backward(create_graph=True): layers are released in between")
        self.begin(one)
        number = layers.numbers[unit]
        if one is not self._current or number > one.position:
            raise self._out_of_turn(unit, layers.units[min(one.position, len(layers.units) - 1)])
        while one.position > number:
            self._pass_on(one)
            if one.position > number:
                layers.units[one.position].release()

    def ends(self, unit: Unit, call: int) -> bool:
        """True if the end of this call's backward is decided here, and not by the gradients of its inputs."""
        layers = self._list_of.get(unit)
        return layers is not None and layers.pass_of(call) is not None

    def _start(self, one: Pass) -> None:
        one.begun, one.position, self._current = True, len(one.layers.units), one
        self._seen.add(one)

    def _pass_on(self, one: Pass) -> None:
        """From a layer whose backward is over to the one before it."""
        done = self._done(one)
        if done is not None:
            self._unsharder.reduce_unit(done)
        one.position -= 1
        self._fetch(one, one.position, ahead=-1)

    def _done(self, one: Pass) -> Unit | None:
        """Let go of the layer at the position; gives it if its gradients are complete."""
        if one.position == len(one.layers.units):
            return None
        unit = one.layers.units[one.position]
        self._unsharder.backward_of_layer_over(unit, one.first, one.last)
        return unit if all(other.begun for other in one.layers.passes) else None

    def _close(self, turn: tuple[int, int] | None) -> None:
        """Another unit, or the backward of an earlier forward, has its turn: end those of later ones."""
        for unit in self._rest() if turn is None else self._rest_of_all(turn):
            self._unsharder.reduce_unit(unit)

    def _rest(self) -> Iterator[Unit]:
        """Gather what the present backward has not come to; gives units whose gradients are to be reduced."""
        one = self._current
        if one is None:
            return
        while True:
            done = self._done(one)
            if done is not None:
                yield done
            if one.position == 0:
                break
            one.position -= 1
            self._fetch(one, one.position, ahead=-1).release()
        self._current = None

    def finish(self) -> Iterator[Unit]:
        """Backward is over: gather what it has not come to, and give units to reduce before the next gather."""
        yield from self._rest_of_all((0, 0))
        self._seen.clear()

    def _rest_of_all(self, turn: tuple[int, int]) -> Iterator[Unit]:
        """The same of the present backward, and of all later forwards than `turn` whose backward has not begun."""
        yield from self._rest()
        left = [one for layers in self._owner_of if layers.trains for one in layers.passes if self._is_due(one, turn)]
        for one in sorted(left, key=lambda one: one.turn, reverse=True):
            self._start(one)
            yield from self._rest()

    def _is_due(self, one: Pass, turn: tuple[int, int]) -> bool:
        if one.turn <= turn or one in self._seen:
            return False
        return not one.begun or any(other in self._seen for other in one.together)

    def reset(self) -> None:
        """Forget a forward or a backward that an exception tore apart."""
        self._open.clear()
        self._seen.clear()
        self._current = None
        for layers in self._list_of.values():
            layers.passes.clear()

    def _out_of_turn(self, unit: Unit, other: Unit) -> RuntimeError:
        layers = self._list_of[unit]
        owner = self._owner_of[layers] or "the model"
        return RuntimeError(
            f"unit {unit.name!r} is used after {other.name!r} in one pass of {owner!r}, and units.may_skip takes "
            "layers that are called in the order of their list, at most once each; leave it out for this model"
        )


class _Begins:
    """Hook on the results of a module that holds lists."""

    def __init__(self, skipped: SkippedLayers, one: Pass) -> None:
        self._skipped, self._pass = ref(skipped), one

    def __call__(self, gradient: Tensor) -> None:
        if (skipped := self._skipped()) is not None:  # a graph may outlive the engine
            skipped.begin(self._pass)


class _OwnerHook:
    """Forward pre-hook (`enter`) or post-hook of a module that holds lists; inert in a copy of the module."""

    def __init__(self, skipped: SkippedLayers, lists: Sequence[LayerList], *, enter: bool) -> None:
        self._skipped, self._lists, self._is_enter = skipped, lists, enter

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        if self._is_enter:
            self._skipped.owner_begins(module, self._lists)
        else:
            self._skipped.owner_ends(module, output[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()


def layer_lists(units: Sequence[Unit]) -> list[tuple[nn.Module, str, list[LayerList]]]:
    """Modules that hold lists of units, their names and the lists.

    Args:
        units: Of a model, the root first.

    Returns:
        The module is the nearest one around a list that has a forward. Lists in whose members there are other units
        are left out.
    """
    root = units[0].module
    members: dict[str, list[Unit]] = {}
    for unit in units[1:]:
        parent = unit.name.rpartition(".")[0]
        if unit.buckets and isinstance(root.get_submodule(parent), nn.ModuleList):
            members.setdefault(parent, []).append(unit)
    found: dict[str, list[LayerList]] = {}
    for name, inside in members.items():
        if len(inside) < 2 or any(other.name.startswith(f"{unit.name}.") for unit in inside for other in units):
            continue
        owner = name.rpartition(".")[0]
        while isinstance(root.get_submodule(owner), (nn.ModuleList, nn.ModuleDict)):
            owner = owner.rpartition(".")[0]
        found.setdefault(owner, []).append(LayerList(name, inside))
    return [(root.get_submodule(owner), owner, lists) for owner, lists in found.items()]
