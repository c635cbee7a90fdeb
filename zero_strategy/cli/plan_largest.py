"""The largest model, and the longest sequences of a model, that fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zero_strategy.planning.buckets import (
    Offload,
)
from zero_strategy.planning.ledger import TIERS
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.model_shape import ModelShape
from zero_strategy.planning.room import Budget, fits
from zero_strategy.runtime.terminal import size, table

_MOST_STEPS = 1 << 14
"""Bound of the search: a hidden size of a million."""

OFFLOADS = (
    Offload(),
    Offload(optimizer="cpu"),
    Offload(optimizer="nvme"),
    Offload(optimizer="cpu", parameters="cpu"),
    Offload(optimizer="nvme", parameters="cpu"),
    Offload(optimizer="nvme", parameters="nvme"),
)


@dataclass(frozen=True)
class Largest:
    """The largest model under one setting.

    Attributes:
        stage: The stage.
        offload: What lies outside of the device.
        plan: Its plan; None if not even the smallest fits.
    """

    stage: int
    offload: Offload
    plan: MemoryPlan | None


def largest_models(plan: MemoryPlan, budget: Budget, member: Callable[[int], ModelShape]) -> Iterator[Largest]:
    """The largest model for every stage and offload that the budget has tiers for.

    Args:
        plan: World size, precision, optimizer and the rest; its model does not count.
        budget: What there is.
        member: Shapes of a family by number, 1, 2, ...; each at least as large as the one before.
    """
    for stage in range(4):
        for offload in OFFLOADS:
            tiers = (offload.optimizer, offload.parameters)
            if (offload.parameters != "none" and stage != 3) or ("nvme" in tiers and budget.disk is None):
                continue
            if "cpu" in tiers and plan.device_type == "cpu":
                continue  # the same memory
            base = plan.changed(settings={"stage": stage}, offload=offload)
            yield Largest(stage, offload, _search(base, budget, member))


def _search(base: MemoryPlan, budget: Budget, member: Callable[[int], ModelShape]) -> MemoryPlan | None:
    """`fits` is monotone along the family."""
    step = _most(lambda step: fits(replace(base, model=member(step)), budget), _MOST_STEPS)
    return replace(base, model=member(step)) if step else None


def _most(good: Callable[[int], bool], bound: int) -> int:
    """The largest number, up to about `bound`, that is good, as all before it are; 0: none. Doubles, then halves."""
    low, high = 0, 1
    while high <= bound and good(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


TILE = 2048
"""Tokens of a tile, in answers to how long sequences can be."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence under one setting.

    Attributes:
        mode: Of activation checkpointing.
        tile_tokens: 0: no tiles.
        sequence: Ranks that divide a sequence.
        tokens: Its length; 0 if not even the shortest fits.
        plan: Its plan; None for 0.
    """

    mode: str
    tile_tokens: int
    sequence: int
    tokens: int
    plan: MemoryPlan | None


def longest_sequences(plan: MemoryPlan, budget: Budget, micro_batch: int = 1) -> Iterator[Longest]:
    """The longest sequence with and without recomputation and tiles, whole and divided among more and more ranks.

    Args:
        plan: Its model has costs of tokens.
        budget: What there is.
        micro_batch: Sequences of a micro-batch.
    """
    world = plan.resolved.world_size // plan.ways
    for sequence in (n for n in range(1, world + 1) if world % n == 0 and n & (n - 1) == 0):
        mesh = replace(plan.resolved.config.mesh, sequence=sequence, ulysses=None, shard=None)
        for mode in ("none", "full"):
            for tile in (0, TILE):
                kept = replace(plan.resolved.config.activation_checkpointing, mode=mode, tile_tokens=tile)
                base = plan.changed(settings={"activation_checkpointing": kept, "mesh": mesh})
                yield _longest(base, budget, micro_batch, Longest(mode, tile, sequence, 0, None))


def _longest(base: MemoryPlan, budget: Budget, micro_batch: int, setting: Longest) -> Longest:
    """The longest that fits, in steps that can be divided."""
    step = 2 * setting.sequence

    def plan_of(count: int) -> MemoryPlan:
        return replace(base, tokens=count * step * micro_batch)

    count = _most(lambda count: fits(plan_of(count), budget), _MOST_TOKENS // step)
    return replace(setting, tokens=count * step, plan=plan_of(count)) if count else setting


_MOST_TOKENS = 1 << 32


def longest_table(found: Sequence[Longest]) -> str:
    """Columns: recomputation, tiles, ranks of a sequence, tokens, bytes per rank."""
    rows = [
        (
            entry.mode,
            entry.tile_tokens or "-",
            entry.sequence,
            f"{entry.tokens:,}" if entry.tokens else "none fits",
            "" if entry.plan is None else size(entry.plan.ledger().tier_bytes("device")),
        )
        for entry in found
    ]
    header = ("activation_checkpointing", "tile_tokens", "mesh.sequence", "tokens of a sequence", "device")
    return table(rows, header, right=(1, 2, 3, 4))


def longest_json(found: Sequence[Longest]) -> list[dict[str, object]]:
    """The figures as plain types."""
    return [
        {
            "activation_checkpointing": entry.mode,
            "tile_tokens": entry.tile_tokens,
            "sequence_ranks": entry.sequence,
            "tokens": entry.tokens,
            "ledger": None if entry.plan is None else entry.plan.ledger().to_json(entries=False),
        }
        for entry in found
    ]


def largest_table(models: list[Largest]) -> str:
    """Columns: stage, offload, parameters, layers and hidden, bytes per rank and tier."""
    rows: list[tuple[object, ...]] = []
    for entry in models:
        if entry.plan is None:
            rows.append((entry.stage, entry.offload.describe(), "none fits", "", "", "", ""))
            continue
        ledger, shape = entry.plan.ledger(), entry.plan.model
        layers = len(shape.units) - 1
        hidden = shape.units[0].parameters[0][1].shape[1]
        sizes = [size(ledger.tier_bytes(tier)) if ledger.tier_bytes(tier) else "-" for tier in TIERS]
        rows.append(
            (entry.stage, entry.offload.describe(), f"{shape.parameters / 1e9:.2f}B", f"{layers} x {hidden}", *sizes)
        )
    header = ("stage", "offload", "parameters", "layers x hidden", "device", "host", "nvme")
    return table(rows, header, right=(2, 4, 5, 6))


def largest_json(models: list[Largest]) -> list[dict[str, object]]:
    """The figures as plain types."""
    return [
        {
            "stage": entry.stage,
            "offload": {"optimizer": entry.offload.optimizer, "parameters": entry.offload.parameters},
            "parameters": None if entry.plan is None else entry.plan.model.parameters,
            "model": None if entry.plan is None else entry.plan.model.title,
            "ledger": None if entry.plan is None else entry.plan.ledger().to_json(entries=False),
        }
        for entry in models
    ]
