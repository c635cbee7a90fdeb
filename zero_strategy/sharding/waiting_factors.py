"""Factors that wait until somebody reads what they multiply, or multiplies it anyway."""

from __future__ import annotations

import math
from collections.abc import Callable


class WaitingFactors:
    """One factor per parameter; two are joined only where their product rounds as one after the other does.

    Args:
        multiply: Carries a factor out on a parameter's values.
    """

    def __init__(self, multiply: Callable[[int, float], object]) -> None:
        self._multiply = multiply
        self._factors: dict[int, float] = {}

    def of(self, index: int) -> float:
        """That of a parameter; 1 if none waits."""
        return self._factors.get(index, 1.0)

    def add(self, index: int, factor: float) -> None:
        """One more."""
        waiting = self.of(index)
        if not (_is_power_of_two(waiting) or _is_power_of_two(factor)):
            self.carry_out()
            waiting = 1.0
        self._factors[index] = waiting * factor

    def drop(self, index: int) -> None:
        """The values are of no use any more: nan times zero is no zero."""
        self._factors.pop(index, None)

    def clear(self) -> None:
        """The same of all."""
        self._factors.clear()

    def carry_out(self) -> None:
        """Multiply now."""
        factors, self._factors = self._factors, {}
        for index, factor in factors.items():
            if factor != 1.0:
                self._multiply(index, factor)

    def carry_out_those_that_round(self) -> None:
        """The same, if some factor rounds, as before a look at the result."""
        if not all(map(_is_power_of_two, self._factors.values())):
            self.carry_out()


def _is_power_of_two(factor: float) -> bool:
    return abs(math.frexp(factor)[0]) == 0.5
