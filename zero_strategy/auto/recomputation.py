"""Ways to keep less than all activations: modes of activation checkpointing, budgets of it, and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from zero_strategy.activation.budget import Profile, choose_within
from zero_strategy.auto.foreseen import Foreseen, MicroBatch, UnforeseenError, foresee, profile_units
from zero_strategy.config import DEFAULT, DEFAULT_BUDGET, ZeroConfig

MODES = ("none", "selective", "full")
"""Of activation checkpointing, that are looked at in any case, in the order of their time."""
_BUDGETS = (0.75, 0.5, 0.25)
"""That are looked at where memory is scarce."""
_TILES = {"cpu": 256}
_TILE = 2048
"""Tokens of a tile: of matrices that are large enough for a processor of that kind; others are taken for a GPU."""
_SECTION = "activation_checkpointing."


class Recomputation(NamedTuple):
    """A choice of activations that are computed again instead of kept.

    Attributes:
        mode: Of activation checkpointing.
        budget: Of mode "budget"; 0: of another one.
        every_n: Of mode "every_n"; 0: of another one.
        tile_tokens: Tokens that MLPs and the loss compute at a time; 0: all.
        derived: Nobody has set the budget.
    """

    mode: str = "none"
    budget: float = 0.0
    every_n: int = 0
    tile_tokens: int = 0
    derived: bool = False

    @classmethod
    def of(cls, config: ZeroConfig) -> Recomputation:
        """That of a config."""
        settings = config.activation_checkpointing
        budget = settings.budget or DEFAULT_BUDGET if settings.mode == "budget" else 0.0
        # A chosen one is as good as a user's, who may pin it.
        chosen = config.origin_of(f"{_SECTION}budget").startswith("chosen")
        derived = bool(budget) and (settings.budget is None or (settings.is_derived("budget") and not chosen))
        every_n = settings.every_n if settings.mode == "every_n" else 0
        return cls(settings.mode, budget, every_n, settings.tile_tokens, derived)

    def is_slower(self, other: Recomputation) -> bool:
        """True if it takes no less time than another way in any case: it computes the same units again, or more."""
        if self.tile_tokens != other.tile_tokens:
            return False
        if other.mode == "budget":
            return self.mode == "full" or (self.mode == "budget" and self.budget <= other.budget)
        return other.mode == "none" or self.mode == other.mode == "full"

    def foresee(self, given: MicroBatch, profile: Callable[[], Profile | None] | None = None) -> Foreseen:
        """Run a micro-batch without memory; tiles are a matter of its context.

        Args:
            given: What is run.
            profile: Gives the profile of its units, by which a budget chooses; default: they are profiled.

        Raises:
            UnforeseenError: If that fails, or no choice of units keeps to the budget; says why.
            LeftBehindError: See `foreseen.foresee`.
        """
        return foresee(given, mode=self.mode if self.mode in MODES else "full", again=self.units_again(given, profile))

    def units_again(self, given: MicroBatch, profile: Callable[[], Profile | None] | None = None) -> Sequence[str]:
        """Names of the units that are computed again, as an engine chooses them. See `foresee`."""
        if self.mode == "every_n":
            return given.units[:: self.every_n]
        if self.mode != "budget":
            return given.units if self.mode != "none" else ()
        found = profile_units(given) if profile is None else profile()
        chosen, _ = (None, 0) if found is None else choose_within(found, self.budget, derived=self.derived)
        if chosen is None:
            raise UnforeseenError(f"no units keep to a budget of {self.budget:g}")
        return [name for number, name in enumerate(given.units) if number in chosen]

    def describe(self) -> list[str]:
        """Words for all that differs from keeping activations."""
        words = []
        if self.mode == "budget":
            words.append(f"keeps {self.budget:.0%} of activations")
        elif self.mode == "every_n":
            words.append(f"recomputes 1 in {self.every_n}")
        elif self.mode != "none":
            words.append(f"recomputes {self.mode}")
        if self.tile_tokens:
            words.append(f"tiles of {self.tile_tokens} tokens")
        return words


def plain_ways(config: ZeroConfig, known: Sequence[str]) -> list[dict[str, Any]]:
    """Settings of modes that are looked at in any case, by dotted key; an empty one where a user has set the mode.

    Args:
        config: As it was given.
        known: Modes that are known of the model.
    """
    if config.origin_of(f"{_SECTION}mode") != DEFAULT:
        return [{}]
    return [{f"{_SECTION}mode": mode} for mode in known or MODES[:1]]


def saving_ways(config: ZeroConfig, known: Sequence[str], device_type: str, *, tiles: bool) -> Iterator[dict[str, Any]]:
    """Settings that are looked at where memory is scarce, beside the plain ones.

    Args:
        config: As it was given.
        known: Modes that are known of the model: budgets are, if "full" is.
        device_type: Where it computes.
        tiles: MLPs and the loss of the model can be computed in tiles.
    """
    plain = plain_ways(config, known)
    mode_open = config.origin_of(f"{_SECTION}mode") == DEFAULT
    has_budget = "full" in known and (mode_open or config.activation_checkpointing.mode == "budget")
    budgets: list[dict[str, Any]] = []
    if has_budget and config.origin_of(f"{_SECTION}budget") == DEFAULT:
        mode: dict[str, Any] = {f"{_SECTION}mode": "budget"} if mode_open else {}
        budgets = [{**mode, f"{_SECTION}budget": budget} for budget in _BUDGETS]
    yield from budgets
    if tiles and config.origin_of(f"{_SECTION}tile_tokens") == DEFAULT:
        tokens = _TILES.get(device_type, _TILE)
        for way in (*plain, *budgets):
            yield {**way, f"{_SECTION}tile_tokens": tokens}
