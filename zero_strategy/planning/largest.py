"""The largest trainable model of a family of shapes, by stage and offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zero_strategy.memory.ledger import TIERS
from zero_strategy.memory.offload import Offload
from zero_strategy.memory.plan import MemoryPlan
from zero_strategy.memory.shapes import ModelShape
from zero_strategy.planning.fit import Budget, fits
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
    """By doubling, then by halving; `fits` is monotone along the family."""
    found: MemoryPlan | None = None
    low, high = 0, 1

    def good(step: int) -> bool:
        nonlocal found
        tried = replace(base, model=member(step))
        if fits(tried, budget):
            found = tried
            return True
        return False

    while high <= _MOST_STEPS and good(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return found


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
    """The same as plain types."""
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
