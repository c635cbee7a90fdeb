"""A plan as a picture: stacked bars, one panel per tier, one bar per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_strategy.memory.ledger import CATEGORIES, TIERS, Ledger
from zero_strategy.memory.plan import MemoryPlan
from zero_strategy.planning.fit import Budget

_GB = 1e9
_VISIBLE = 0.002
"""Fraction of the tallest bar below which a category has no place in the legend."""
_COLORS = (*(f"C{number}" for number in range(10)), "black", "gold", "navy")


def draw(plan: MemoryPlan, budget: Budget, path: Path) -> None:
    """Write a PNG: what the fullest rank takes by category, for the plan's stage and the others with it.

    Raises:
        ValueError: If matplotlib is missing, or the name does not end in .png.
        OSError: If the file cannot be written.
    """
    if path.suffix != ".png":
        raise ValueError(f"--png {path}: the name must end in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError("--png needs matplotlib: pip install zero-strategy[plan]") from error
    ledgers = _by_stage(plan)
    tiers = [tier for tier in TIERS if any(ledger.tier_bytes(tier) for ledger in ledgers.values())]
    figure: Any = Figure(figsize=(1.5 + 4.5 * len(tiers), 5.5), dpi=120)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tiers), squeeze=False)[0]
    colors = dict(zip(CATEGORIES, _COLORS, strict=True))
    for panel, tier in zip(panels, tiers, strict=True):
        for place, ledger in enumerate(ledgers.values()):
            bottom = 0.0
            for (category, peak), total in ledger.only(tier=tier).sums("category", "peak").items():
                height, hatch = total.taken / _GB, "//" if peak else None
                panel.bar(place, height, 0.7, bottom, color=colors[category], hatch=hatch, edgecolor="white")
                bottom += height
            panel.text(place, bottom, f"{bottom:.3g}", ha="center", va="bottom", fontsize=8)
        panel.set_xticks(range(len(ledgers)), [_label(plan, stage) for stage in ledgers])
        panel.set(title=f"{tier}, per rank", ylabel="GB")
        there = _line(plan, budget, tier)
        if there is not None:
            panel.axhline(there / _GB, color="black", linestyle="--", linewidth=1)
            panel.text(-0.5, there / _GB, " there", va="bottom", fontsize=8)
    tallest = max(ledger.tier_bytes(tier) for ledger in ledgers.values() for tier in tiers)
    largest = {c: max(ledger.only(category=c).total.taken for ledger in ledgers.values()) for c in CATEGORIES}
    used = [category for category in CATEGORIES if largest[category] > _VISIBLE * tallest]
    keys = [Patch(facecolor=colors[category], label=category) for category in used]
    keys.append(Patch(facecolor="lightgray", hatch="//", edgecolor="white", label="inside a step only"))
    figure.legend(handles=keys, loc="lower center", ncols=5, fontsize=8, frameon=False)
    settings = f"{plan.resolved.world_size} ranks, {plan.optimizer.name}, offload: {plan.offload.describe()}"
    figure.suptitle(f"{plan.model.title}: {plan.model.parameters / 1e6:,.4g}M parameters, {settings}", fontsize=10)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path)


def _by_stage(plan: MemoryPlan) -> dict[int, Ledger]:
    stages = [3] if plan.offload.parameters != "none" else [0, 1, 2, 3]
    return {stage: plan.changed(settings={"stage": stage}).ledger() for stage in stages}


def _label(plan: MemoryPlan, stage: int) -> str:
    return f"stage {stage}" + ("\n(chosen)" if stage == plan.resolved.config.stage else "")


def _line(plan: MemoryPlan, budget: Budget, tier: str) -> float | None:
    """What a rank may take of a tier, if it is known."""
    if tier == "device" and plan.device_type == "cuda":
        return budget.device
    there = budget.disk if tier == "nvme" else budget.host
    return None if there is None else there / plan.ranks_per_host
