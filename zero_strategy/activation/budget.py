"""Which units are computed again so that what they keep fits into a number of bytes, at the least computation.

    forward     a unit that is computed again keeps its inputs, another one all that its backward needs
    backward    from the last unit to the first; one that is computed again has all that its backward needs once more

so the bytes are at their largest at the end of the forward, or while a unit is computed again: they are what units
before it keep, and all of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

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
    best = min(states)
    return frozenset(unit for unit in profile.units if best.bits >> unit & 1)


def _thinned(states: list[_State], open_bits: int, budget: int) -> list[_State]:
    """Without those that another one beats in bytes and cost, and that decides alike on units that come again."""
    groups: dict[int, list[_State]] = {}
    for state in sorted(states):
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
