"""Layers that some ranks skip and others use (LayerDrop): all ranks gather them, in one order (`units.may_skip`).

A gather takes all ranks, so a rank that skips a layer takes part in its gather all the same, and then lets it go. No
message is needed for that, since the order is known. It is that of the list:

    forward of the module that holds the list     layer 0, 1, 2, ...     at its end those that are left
    backward of that forward                      ..., 2, 1, 0           before any earlier unit, or at the end of all

Units inside of a layer belong to the list, too: they follow their layer, in forward in the order of `named_modules`, in
backward in the opposite one, and its gradients are complete after theirs. Of lists within lists the outermost counts.

Before a layer is used, those that were passed over are gathered and released. Gradients are reduced where backward
passes on from a layer to the one before it, so gathers and reductions interleave alike on all ranks. What happens is
decided by calls that are the same on all ranks, never by what this rank has used:

- layers are released after each use, and fetched ahead in the order of the list;
- a forward that no gradient reaches, since what this rank used of it needs none, has its turn all the same: autograd
  goes through forwards from the last to the first, so it comes before the next one that was earlier, or at the end;
- if the module ran several times, gradients are reduced in the last of its backwards;
- a pass over a list has the turn at which its first layer is gathered, and backward comes to those with later turns
  first: a module with a list of its own may be called before or after the layers of the one that calls it.

A layer that is called out of order, or twice in one forward, is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.unit import Unit
from zero_strategy.fsdp.unshard import Unsharder, tensors_in
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import in_backward, uncompiled

_PASSES = 64
"""Forwards of a list that are remembered, for a backward that comes late or twice."""


class LayerList:
    """Units that are the members of one `ModuleList`, or lie inside of them.

    Args:
        name: Name of the list.
        units: In the order of the list, each before those inside of it.

    Attributes:
        backward: What a backward does in turn: the number of a unit, and True to gather it, False where it is over.
        begins: Place in `backward` at which a unit is gathered, by its number.
        ends: Place at which it is over.
        nested: True if units lie inside of others.
        followers: What has been seen to come after the list in a forward of its module: a unit or a module with lists,
            and the number of its call.
    """

    def __init__(self, name: str, units: Sequence[Unit]) -> None:
        self.name, self.units = name, list(units)
        self.numbers = {unit: number for number, unit in enumerate(self.units)}
        self.passes: list[Pass] = []
        self.followers: set[tuple[Unit | nn.Module, int]] = set()
        self.backward = list(self._backward(0, len(self.units)))
        self.begins = {number: place for place, (number, begins) in enumerate(self.backward) if begins}
        self.ends = {number: place for place, (number, begins) in enumerate(self.backward) if not begins}
        self.nested = any(self.ends[number] > place + 1 for number, place in self.begins.items())

    def _backward(self, first: int, last: int) -> Iterator[tuple[int, bool]]:
        outer = []
        while first < last:
            inside = f"{self.units[first].name}."
            after = next((n for n in range(first + 1, last) if not self.units[n].name.startswith(inside)), last)
            outer.append((first, after))
            first = after
        for number, after in reversed(outer):
            yield number, True
            yield from self._backward(number + 1, after)
            yield number, False

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
        around: Calls of units around that module, under way when it began.

    Attributes:
        last: Calls of members have a lower number.
        arrived: Number at which its first layer was gathered in forward, 0 before.
        position: In forward, units before it have been gathered; in backward, what precedes it in `LayerList.backward`
            is done.
        begun: Its backward has begun, or was taken up at the end of another.
        together: The passes of one forward of the module, over all of its lists.
    """

    def __init__(self, layers: LayerList, first: int, place: int, around: frozenset[int]) -> None:
        self.layers, self.first, self.last, self.around = layers, first, first, around
        self._place = place
        self.arrived = 0
        self.position = 0
        self.begun = False
        self.together: list[Pass] = []

    @property
    def turn(self) -> tuple[int, int]:
        """The order of passes: a higher one comes later in forward, and earlier in backward."""
        return self.arrived, self._place


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
                "units.may_skip: the model has no ModuleList with two members or more that are units or hold some; "
                "name its layers in units.classes or units.patterns, or leave it out"
            )
        self._owners = {owner: name for owner, name, _ in owners}
        self._list_of = {unit: layers for _, _, lists in owners for layers in lists for unit in layers.units}
        self._owner_of = {layers: name for _, name, lists in owners for layers in lists}
        self._open: list[tuple[nn.Module, list[Pass], Counter[Unit | nn.Module]]] = []
        """Forwards under way of modules that hold lists, the innermost last, with what else was called in them."""
        self._current: Pass | None = None
        """The pass whose layers backward goes through."""
        self._active: set[Pass] = set()
        """Those that have begun in the present backward, and are not over."""
        self._seen: set[Pass] = set()
        """Those that have begun in it."""
        for owner, _, lists in owners:
            # Ahead of the unsharder's hook on it, which takes the next number for the owner's own call.
            owner.register_forward_pre_hook(_OwnerHook(self, lists, enter=True), prepend=True)
            owner.register_forward_hook(_OwnerHook(self, lists, enter=False))

    # ---- forward ----

    def owner_begins(self, owner: nn.Module, lists: Sequence[LayerList]) -> None:
        """The forward of a module that holds lists begins."""
        if in_backward():  # computed again: its layers are whole in their turn, or refused
            return
        places = [place for place, (other, *_) in enumerate(self._open) if other is owner]
        del self._open[min(places, default=len(self._open)) :]  # left by an exception
        self._turn_of_other(owner)
        around = {unit.open_calls[-1] for unit in self._unsharder.units[1:] if unit.open_calls}
        first = self._unsharder.new_call()
        if any(unit.module is owner for unit in self._unsharder.units[1:]):
            around.add(first + 1)  # its own call, which comes next
        passes = [Pass(layers, first, place, frozenset(around)) for place, layers in enumerate(lists)]
        self._open.append((owner, passes, Counter()))

    def owner_ends(self, owner: nn.Module, output: Any) -> None:
        """The forward of a module that holds lists has ended with this result."""
        if in_backward() or not self._open or self._open[-1][0] is not owner:
            return
        passes = self._open[-1][1]
        # Also those that this rank has not come to: the others gather them.
        for one in passes:
            self._complete(one)
        self._open.pop()
        if not torch.is_grad_enabled():  # no backward to remember passes for
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
            self.before_other(unit, max(unit.awaited, default=None) if in_backward() else None)
        elif in_backward():
            one, number = self._current, layers.numbers[unit]
            begun = one.position if one is not None and one.layers is layers else 0
            due = layers.begins[number] < begun <= layers.ends[number]
            if not due and (layers.nested or not unit.under_way):
                raise RuntimeError(
                    f"unit {unit.name!r} is computed again in backward before its turn: under units.may_skip a "
                    f"checkpoint may hold one layer of {layers.name!r} that has no units inside, not the module around "
                    "them"
                )
        elif self._open and (one := next((one for one in self._open[-1][1] if one.layers is layers), None)) is not None:
            # Lists of one module are gathered one after the other, as they are in it.
            for earlier in self._open[-1][1]:
                if earlier is one:
                    break
                self._complete(earlier)
            number = layers.numbers[unit]
            if number < one.position:
                raise self._out_of_turn(unit, layers.units[one.position - 1])
            self._advance(one, number)
            self._fetch(one, number)

    def before_other(self, unit: Unit, call: int | None = None) -> None:
        """A unit of no list is about to be gathered: what is left of lists that have their turn comes before it.

        Args:
            unit: The unit.
            call: In backward, the forward of it that has its turn; None: it is not known.
        """
        # No gather follows, whose place among the others would matter.
        if unit.under_way:
            return
        if not in_backward():
            self._turn_of_other(unit)
        elif call is not None:
            self._close((call, 0), call)
        else:
            # Nothing tells which forward it was: all that has begun is ended first.
            for one in sorted(self._active, key=lambda one: one.turn, reverse=True):
                self._reduce(self._rest(one))

    def _turn_of_other(self, other: Unit | nn.Module) -> None:
        """A unit of no list, or a module with lists of its own, is used in the module under way: end what precedes it.

        Those are the lists that this forward has begun, and those that it skips as a whole but earlier ones had begun
        by then.
        """
        if not self._open:
            return
        _, passes, met = self._open[-1]
        met[other] += 1
        follower = other, met[other]
        for one in passes:
            if one.position or follower in one.layers.followers:
                one.layers.followers.add(follower)
                self._complete(one)

    def _complete(self, one: Pass) -> None:
        self._advance(one, len(one.layers.units))
        one.arrived = one.arrived or self._unsharder.new_call()

    def _advance(self, one: Pass, number: int) -> None:
        while one.position < number:
            self._fetch(one, one.position).release()

    def _fetch(self, one: Pass, number: int) -> Unit:
        """Gather a layer in forward and start on those that follow it."""
        one.arrived = one.arrived or self._unsharder.new_call()
        one.position = number + 1
        units = one.layers.units
        self._unsharder.use(units[number])
        self._unsharder.fetch_ahead(units[number + 1 : number + 1 + self._unsharder.prefetch])
        return units[number]

    # ---- backward ----

    def begin(self, one: Pass) -> None:
        """A gradient of what this forward gave has arrived."""
        if one not in self._seen:
            self._close((one.last, 0))
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
        if one is not self._current:
            self._close(one.turn)
            self._current = one
        number = layers.numbers[unit]
        if one.position > layers.ends[number]:
            last = layers.backward[one.position - 1][0]
            raise self._out_of_turn(unit, layers.units[last])
        while one.position <= layers.begins[number]:  # further, if units inside of it came first
            self._reduce(self._next(one))

    def ends(self, unit: Unit, call: int) -> bool:
        """True if the end of this call's backward is decided here, and not by the gradients of its inputs."""
        layers = self._list_of.get(unit)
        return layers is not None and layers.pass_of(call) is not None

    def _start(self, one: Pass) -> None:
        one.begun, one.position = True, 0
        self._seen.add(one)
        self._active.add(one)

    def _next(self, one: Pass) -> Iterator[Unit]:
        """Gather the layer whose turn it is and start on those that follow it, or release it; gives what to reduce."""
        units, left = one.layers.units, one.layers.backward[one.position :]
        one.position += 1
        if left[0][1]:
            unit, *ahead = [units[number] for number, begins in left if begins][: self._unsharder.prefetch + 1]
            self._unsharder.use(unit)
            self._unsharder.fetch_ahead(ahead)
            return
        unit = units[left[0][0]]
        self._unsharder.backward_of_layer_over(unit, one.first, one.last)
        # Until the last of its backwards more is added to the sums.
        if all(other.begun for other in one.layers.passes):
            yield unit

    def _close(self, turn: tuple[int, int], call: int | None = None) -> None:
        """Another unit, or the backward of an earlier forward, has its turn: end those of later ones."""
        self._reduce(self._rest_of_all(turn, call))

    def _reduce(self, units: Iterator[Unit]) -> None:
        for unit in units:
            self._unsharder.reduce_unit(unit)

    def _rest(self, one: Pass) -> Iterator[Unit]:
        """Gather what the present backward has not come to; gives units whose gradients are to be reduced."""
        while one.position < len(one.layers.backward):
            yield from self._next(one)
        self._active.discard(one)
        if one is self._current:
            self._current = None

    def finish(self) -> Iterator[Unit]:
        """Backward is over: gather what it has not come to, and give units to reduce before the next gather."""
        # Below the turn of any pass that has gathered a layer.
        yield from self._rest_of_all((0, 0))
        self._seen.clear()

    def _rest_of_all(self, turn: tuple[int, int], call: int | None = None) -> Iterator[Unit]:
        """Gather what passes with a later turn have left that have begun in this backward, or should have.

        Args:
            turn: Of what comes next.
            call: Of the unit that comes next: passes inside of it stay.
        """
        # Listed first: ending one changes what is active.
        left = [
            one
            for layers in self._owner_of
            for one in layers.passes
            if one.turn > turn and call not in one.around and (one in self._active or self._is_due(one))
        ]
        for one in sorted(left, key=lambda one: one.turn, reverse=True):
            if one not in self._active:
                self._start(one)
            yield from self._rest(one)

    def _is_due(self, one: Pass) -> bool:
        if one in self._seen or not one.layers.trains:
            return False
        # A second backward through the same graph comes to all lists of its forward again.
        return not one.begun or any(other in self._seen for other in one.together)

    def reset(self) -> None:
        """Forget a forward or a backward that an exception tore apart."""
        self._open.clear()
        self._seen.clear()
        self._active.clear()
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


class _OwnerHook(EphemeralHook):
    """Forward pre-hook (`enter`) or post-hook of a module that holds lists; inert in a copy of the module."""

    def __init__(self, skipped: SkippedLayers, lists: Sequence[LayerList], *, enter: bool) -> None:
        self._skipped, self._lists, self._is_enter = skipped, lists, enter

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, *output: Any) -> None:
        if self._is_enter:
            self._skipped.owner_begins(module, self._lists)
        else:
            self._skipped.owner_ends(module, output[0])


def layer_lists(units: Sequence[Unit]) -> list[tuple[nn.Module, str, list[LayerList]]]:
    """Modules that hold lists of units, their names and the lists.

    Args:
        units: Of a model, the root first.

    Returns:
        The module is the nearest one around a list that has a forward. Of lists within lists the outermost counts that
        has units in two members or more.
    """
    root = units[0].module
    members: dict[str, dict[str, list[Unit]]] = {}
    """Units by the name of a list around them and of its member."""
    for unit in units[1:]:
        parts = unit.name.split(".")
        for length in range(1, len(parts)):
            name = ".".join(parts[:length])
            if unit.buckets and isinstance(root.get_submodule(name), nn.ModuleList):
                members.setdefault(name, {}).setdefault(parts[length], []).append(unit)
    found: dict[str, list[LayerList]] = {}
    taken: set[Unit] = set()
    # Outermost first: those take the units of lists inside of them.
    for name, inside in sorted(members.items(), key=lambda item: item[0].count(".")):
        own = [unit for each in inside.values() for unit in each]
        if len(inside) < 2 or not taken.isdisjoint(own):
            continue
        taken.update(own)
        owner = name.rpartition(".")[0]
        # These have no forward to hook.
        while isinstance(root.get_submodule(owner), (nn.ModuleList, nn.ModuleDict)):
            owner = owner.rpartition(".")[0]
        found.setdefault(owner, []).append(LayerList(name, own))
    numbers = {unit: number for number, unit in enumerate(units)}
    for lists in found.values():
        lists.sort(key=lambda layers: numbers[layers.units[0]])
    return [(root.get_submodule(owner), owner, lists) for owner, lists in found.items()]
