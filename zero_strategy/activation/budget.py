"""The activation budget: what units keep and compute is profiled, and the cheapest choice that fits is made.

    forward     a unit that is computed again keeps its inputs, another one all that its backward needs
    backward    from the last unit to the first; one that is computed again has all that its backward needs once more

Bytes are at their largest at the end of the forward, or while a unit is computed again: they are then what the units
before it keep, and all that it computes.

Bytes are those of memory that saved-tensor hooks see; costs are counted and not timed, so that all ranks measure alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from zero_strategy.activation.offload import Storages, add_storage, storage_keys
from zero_strategy.fsdp.unshard import tensors_in
from zero_strategy.runtime.torch_private import TorchDispatchMode, packet_of, schema_of

_STATES = 4096
"""Partial choices that are followed at once. Models of some dozen different units need fewer, for which the choice is
the best one."""


class UnitCall(NamedTuple):
    """One forward of a unit.

    Attributes:
        unit: Number of the unit.
        kept: Bytes that it keeps if it is not computed again.
        inputs: Bytes that it keeps if it is.
        transient: Bytes besides the inputs while it is computed again.
        cost: Of computing it again, in operations.
    """

    unit: int
    kept: int
    inputs: int
    transient: int
    cost: int


class Profile(NamedTuple):
    """The forwards of one pass, in order.

    Attributes:
        calls: Each without the memory that others keep, too.
        shared: Bytes of that memory.
    """

    calls: tuple[UnitCall, ...]
    shared: int

    @property
    def kept(self) -> int:
        """Bytes that are kept if nothing is computed again."""
        return self.shared + sum(call.kept for call in self.calls)

    @property
    def units(self) -> list[int]:
        """Numbers of the units, in the order of their first forwards."""
        return list(dict.fromkeys(call.unit for call in self.calls))

    def cost(self, chosen: Collection[int]) -> int:
        """Operations that computing the units `chosen` again takes."""
        return sum(call.cost for call in self.calls if call.unit in chosen)

    def peak(self, chosen: Collection[int]) -> int:
        """Bytes at most if the units `chosen` are computed again."""
        total = peak = self.shared
        for call in self.calls:
            if call.unit in chosen:
                peak = max(peak, total + call.inputs + call.transient)
            total += call.inputs if call.unit in chosen else call.kept
        return max(peak, total)


class _State(NamedTuple):
    """A choice for the units so far: operations, bytes kept, and the units as bits."""

    cost: int
    total: int
    bits: int


def choose(profile: Profile, budget: int) -> frozenset[int] | None:
    """The units to compute again; None if no choice keeps to the budget.

    Args:
        profile: The pass.
        budget: Bytes.

    Returns:
        Of all choices with `peak(choice) <= budget` one of the least cost, the same for the same profile.
    """
    states = [_State(0, profile.shared, 0)] if profile.shared <= budget else []
    last = {call.unit: number for number, call in enumerate(profile.calls)}
    decided: set[int] = set()
    for number, call in enumerate(profile.calls):
        found = []
        for state in states:
            bit = 1 << call.unit
            again = bool(state.bits & bit)
            if call.unit not in decided or not again:
                found.append(_State(state.cost, state.total + call.kept, state.bits))
            if (call.unit not in decided or again) and state.total + call.inputs + call.transient <= budget:
                found.append(_State(state.cost + call.cost, state.total + call.inputs, state.bits | bit))
        decided.add(call.unit)
        open_bits = sum(1 << unit for unit in decided if last[unit] > number)
        states = _thinned([state for state in found if state.total <= budget], open_bits, budget)
    if not states:
        return None
    # Tuples are ordered alike on all ranks, whichever choices cost the same.
    best = min(states)
    return frozenset(unit for unit in profile.units if best.bits >> unit & 1)


def choose_within(profile: Profile, budget: float, *, derived: bool) -> tuple[frozenset[int] | None, int]:
    """The units to compute again, and the bytes that they may take; None: no choice keeps to that.

    Args:
        profile: The pass.
        budget: Part of the bytes that are kept if nothing is computed again.
        derived: Nobody has set it: where it is too small, what is taken with all units computed again counts.
    """
    limit = int(budget * profile.kept)
    chosen = choose(profile, limit)
    # Nobody has asked for this number, so it is no reason to fail.
    if chosen is None and derived:
        limit = max(limit, profile.peak(profile.units))  # then the least that there is
        chosen = choose(profile, limit)
    return chosen, limit


def _thinned(states: list[_State], open_bits: int, budget: int) -> list[_State]:
    """Without those that another one beats in bytes and cost, and that decides alike on units that come again."""
    groups: dict[int, list[_State]] = {}
    for state in sorted(states):
        # Choices for units that come again stay apart, as they bind what follows.
        front = groups.setdefault(state.bits & open_bits, [])
        if not front or state.total < front[-1].total:
            front.append(state)
    left = [state for front in groups.values() for state in front]
    if len(left) <= _STATES:
        return left
    grain = max(1, budget // _STATES)
    cells: dict[int, _State] = {}
    for state in sorted(left):
        cells.setdefault(state.total // grain, state)
    return list(cells.values())


_PER_ELEMENT = 64
"""Operations of a matrix product that take about as long as writing one element of a result."""


@dataclass
class _Seen:
    """One forward of a unit: memory by the reason for which it is kept, and its outputs' in order."""

    unit: int
    cost: int
    kept: Storages = field(default_factory=dict)
    inputs: Storages = field(default_factory=dict)
    outputs: list[StorageWeakRef] = field(default_factory=list)


class StepProfile:
    """Collects the forwards of units until a choice is made.

    Args:
        parameters: Memory that does not count.
    """

    def __init__(self, parameters: frozenset[int]) -> None:
        self._parameters = parameters
        self._passes: list[list[_Seen]] = [[]]

    def measure(
        self, unit: int, module: nn.Module, run: Callable[[], Any], inputs: Sequence[Tensor]
    ) -> Callable[[Any], None]:
        """Run a unit's forward for its numbers; random states stay.

        Args:
            unit: Its number.
            module: Its module, whose buffers do not count either.
            run: The forward; its result is dropped.
            inputs: The tensors that it is given.

        Returns:
            To be called with the result of the real forward.
        """
        known = self._parameters | storage_keys(module.buffers())
        kept: Storages = {}

        def pack(tensor: Tensor) -> Tensor:
            add_storage(kept, tensor, known)
            return tensor.detach()  # else a result that is kept would hold itself, and what leads to it

        # By default the states of all devices would be read and written.
        devices = sorted({tensor.device.index for tensor in inputs if tensor.device.type == "cuda"})
        eager = torch.compiler.set_stance("force_eager")  # nothing is compiled inside of a dispatch mode
        with torch.random.fork_rng(devices=devices), _casts_apart(), eager, _Operations() as operations:
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
                result = run()
        seen = _Seen(unit, operations.cost, kept)
        for tensor in inputs:
            add_storage(seen.inputs, tensor, known)
        seen.outputs = _storages_of(result)
        self._passes[-1].append(seen)
        return lambda real: _rename(seen, _storages_of(real))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A unit is computed again, so backward has begun: what is measured from here on is another pass."""
        if self._passes[-1]:
            self._passes.append([])
        yield

    def result(self) -> Profile | None:
        """The pass that keeps most; None if no unit was run."""
        profiles = [_profile(seen) for seen in self._passes if seen]
        return max(profiles, key=lambda profile: profile.kept, default=None)


def _storages_of(result: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(result) if tensor.layout == torch.strided]


def _rename(seen: _Seen, real: Sequence[StorageWeakRef]) -> None:
    """A result that is kept, too, is the input of another unit: known by the memory that it really has."""
    for measured, there in zip(seen.outputs, real, strict=True):
        if measured in seen.kept:
            seen.kept[there] = seen.kept.pop(measured)


def _profile(calls: Sequence[_Seen]) -> Profile:
    """Bytes of each call; what several keep counts once and always."""
    uses = Counter(storage for seen in calls for storage in {*seen.kept, *seen.inputs})
    common: Storages = {}
    found = []
    for seen in calls:
        for storages in (seen.kept, seen.inputs):
            common.update({storage: nbytes for storage, nbytes in storages.items() if uses[storage] > 1})
        kept = {storage: nbytes for storage, nbytes in seen.kept.items() if uses[storage] == 1}
        inputs = {storage: nbytes for storage, nbytes in seen.inputs.items() if uses[storage] == 1}
        transient = sum(nbytes for storage, nbytes in kept.items() if storage not in inputs)
        found.append(UnitCall(seen.unit, sum(kept.values()), sum(inputs.values()), transient, seen.cost))
    return Profile(tuple(found), sum(common.values()))


@contextmanager
def _casts_apart() -> Iterator[None]:
    """Weights that autocast casts here are not found by the real forward."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class _Operations(TorchDispatchMode):
    """Counts the operations of products and attention by torch's formulas, and the elements that other ops write."""

    # torch refuses `flex_attention` in a mode that does not say this.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.cost = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula: Any = flop_registry.get(packet_of(func))
        if formula is not None:
            self.cost += int(formula(*args, **kwargs, out_val=result))
        # torch's table lacks the fused attention of the CPU, among others.
        elif str(schema_of(func)).startswith("aten::_scaled_dot_product"):
            self.cost += int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
        elif not getattr(func, "is_view", False):
            self.cost += _PER_ELEMENT * sum(tensor.numel() for tensor in tensors_in(result))
        return result
