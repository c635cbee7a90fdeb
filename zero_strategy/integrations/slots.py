"""Steps of slots (`reproducible.slots`) under a framework: its accumulation, and the slots of a rank before an engine.

A framework counts micro-batches of a rank; a step has as many slots whatever the number of ranks.
"""

from __future__ import annotations

import logging

from zero_strategy.config import ResolvedConfig, ZeroConfig, resolve
from zero_strategy.reproducible.slots import SlotPlaces
from zero_strategy.runtime.terminal import report

_logger = logging.getLogger(__name__)


def accumulation_of(config: ZeroConfig, processes: int, given: int, name: str, *, rank: int) -> int:
    """Micro-batches of a step that a framework is to accumulate on each rank; without slots what it was given.

    Args:
        config: The settings.
        processes: All ranks.
        given: The framework's number; 1, its default, gives way.
        name: What sets it, for the message.
        rank: This one; rank 0 says that a number was derived.

    Raises:
        ValueError: If the number was given and does not fit, or ranks do not divide the slots.
    """
    slots = config.reproducible.slots
    if not slots:
        return given
    if config.pipeline.stages > 1:  # all slots of a rank are in one batch
        wanted, ranks = 1, processes // config.pipeline.stages
    else:
        found = resolve(config, processes).config
        ranks = found.mesh.replicate * (found.mesh.shard or 1)
        wanted = slots // ranks
    if given == wanted:
        return wanted
    origin = config.origin_of("reproducible.slots")
    if given != 1:
        raise ValueError(
            f"{name} is {given}, and reproducible.slots is {slots} [{origin}]: on {ranks} data-parallel rank(s) a step "
            f"is {wanted} micro-batch(es) of each. Leave {name} out, or set it to {wanted}; for steps of {given} "
            f"micro-batches of each, set reproducible.slots to {given * ranks}"
        )
    if rank == 0:
        report(
            _logger,
            "%s is %d [derived: reproducible.slots %d [%s] / %d data-parallel ranks]",
            name,
            wanted,
            slots,
            origin,
            ranks,
        )
    return wanted


def own_slots(resolved: ResolvedConfig, rank: int) -> list[int]:
    """Slots of a data-parallel rank, in the order in which it computes them, as its engine will have them."""
    config = resolved.config
    shards = config.mesh.shard or 1
    per_step = config.gradient_reduction == "per_step"
    return SlotPlaces(config.reproducible.slots, config.mesh.replicate, shards, per_step).own(*divmod(rank, shards))
