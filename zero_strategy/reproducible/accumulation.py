"""Accumulation of a framework that counts micro-batches of a rank, and the slots of a rank before it has an engine.

A step has as many slots whatever the number of ranks, and on each rank as many micro-batches as divide them.
"""

from __future__ import annotations

import logging

from zero_strategy.config import ResolvedConfig, ZeroConfig
from zero_strategy.reproducible.slots import SlotPlaces
from zero_strategy.runtime.terminal import report

_logger = logging.getLogger(__name__)


def accumulation_of(config: ZeroConfig, ranks: int, given: int, name: str, *, tells: bool) -> int:
    """Micro-batches of a step that a framework is to accumulate on each rank; without slots the number it was given.

    Args:
        config: The settings.
        ranks: Those that get different samples.
        given: The framework's number; 1, its default, gives way.
        name: Of what sets it, for messages.
        tells: This rank says that the number was derived.

    Raises:
        ValueError: If the number was given and does not fit, or the ranks do not divide the slots.
    """
    slots, origin = config.reproducible.slots, config.origin_of("reproducible.slots")
    if not slots:
        return given
    if slots % ranks:
        raise ValueError(
            f"reproducible.slots is {slots} [{origin}], and {ranks} data-parallel ranks do not divide it; accepted: a "
            f"multiple of the ranks, such as {-(-slots // ranks) * ranks}, or ranks that divide {slots}"
        )
    wanted = slots // ranks
    if given == wanted:
        return wanted
    if given != 1:
        raise ValueError(
            f"{name} is {given}, and reproducible.slots is {slots} [{origin}]: on {ranks} data-parallel rank(s) a step "
            f"is {wanted} micro-batch(es) of each. Leave {name} out, or set it to {wanted}; for steps of {given} "
            f"micro-batches of each, set reproducible.slots to {given * ranks}"
        )
    if tells:
        text = "%s is %d [derived: reproducible.slots %d [%s] / %d data-parallel ranks]"
        report(_logger, text, name, wanted, slots, origin, ranks)
    return wanted


def own_slots(resolved: ResolvedConfig, rank: int) -> list[int]:
    """Slots of a data-parallel rank, in the order in which it computes them, as its engine will have them."""
    config = resolved.config
    shards = config.mesh.shard or 1
    per_step = config.gradient_reduction == "per_step"
    return SlotPlaces(config.reproducible.slots, config.mesh.replicate, shards, per_step).own(*divmod(rank, shards))
