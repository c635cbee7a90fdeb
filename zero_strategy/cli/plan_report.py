"""A plan as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_strategy.cli.figures import figure, style, theme
from zero_strategy.planning.changes import Change, changes_that_fit, gather_advice, notes, suggestions
from zero_strategy.planning.ledger import CATEGORIES, DEQUANTISED, TIERS, Key, Ledger, Tier
from zero_strategy.planning.machine import Machine
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.room import Budget, needs
from zero_strategy.runtime.terminal import size, table


def report(
    plan: MemoryPlan, budget: Budget, machine: Machine, rank: int | None = None, link: float | None = None
) -> dict[str, Any]:
    """Output of `--json`: settings, the ledger of one rank, what fits, changes that would."""
    config, chosen = plan.resolved.config, plan.fullest_rank() if rank is None else rank
    ledger = plan.ledger(chosen)
    found = needs(plan, budget)
    fits = all(need.fits for need in found)
    advice = "" if link is None else gather_advice(plan, link)
    return {
        "model": plan.model.title,
        "parameters": plan.model.parameters,
        "trainable": plan.model.trainable,
        "units": len(plan.model.units),
        "settings": {
            "stage": config.stage,
            "world_size": plan.resolved.world_size,
            "mesh": {
                "replicate": config.mesh.replicate,
                "shard": config.mesh.shard,
                "tensor": plan.ways,
                "expert": config.mesh.expert,
            },
            "ranks_per_host": plan.ranks_per_host,
            "compute_dtype": _dtype(plan),
            "accumulation": plan.accumulation,
            "gradient_reduction": config.gradient_reduction,
            "optimizer": plan.optimizer.name,
            "offload": plan.offload.describe(),
            "device": plan.device_type,
            "snapshots": plan.snapshots,
        },
        "rank": chosen,
        "fullest": rank is None,
        "ledger": ledger.to_json(),
        "needs": [need.__dict__ | {"fits": need.fits} for need in found],
        "margin": budget.margin,
        "fits": fits,
        "changes": [] if fits else [_change(change) for change in changes_that_fit(plan, budget)],
        "suggestions": [*(suggestions(plan, budget) if fits else []), *filter(None, [advice])],
        "machine": machine.__dict__,
        "notes": notes(plan, machine, ledger),
    }


def _change(change: Change) -> dict[str, Any]:
    ledger = change.plan.ledger()
    return {"what": list(change.what), "ledger": ledger.to_json(entries=False)}


def _dtype(plan: MemoryPlan) -> str:
    return "as built" if plan.compute_dtype is None else str(plan.compute_dtype).removeprefix("torch.")


def report_text(plan: MemoryPlan, found: dict[str, Any], machine: Machine, by: tuple[Key, ...] = ()) -> str:
    """The report for people."""
    settings = found["settings"]
    frozen = found["parameters"] - found["trainable"]
    facts = [
        ("model", found["model"]),
        ("parameters", f"{found['parameters']:,}" + (f" ({frozen:,} of them frozen)" if frozen else "")),
        ("units", f"{found['units']}"),
        ("stage", f"{settings['stage']}, gradients reduced {settings['gradient_reduction']}"),
        ("micro-batches", f"{settings['accumulation']} per step"),
        ("ranks", _ranks(settings)),
        ("precision", settings["compute_dtype"]),
        ("optimizer", settings["optimizer"]),
        ("offload", settings["offload"]),
    ]
    ledger = plan.ledger(found["rank"])
    which = f"rank {found['rank']}{', the fullest' if found['fullest'] else ''}"
    parts = [table(facts), f"{which}:\n{ledger.table(*by)}", _verdict(found)]
    if machine.host_free is not None and machine.host_bound:
        parts[-1] += f"\nhost memory is bounded by {machine.host_bound}"
    if not found["fits"]:
        parts.append(_ways_out(found))
    parts += found["suggestions"]
    parts += [f"note: {note}" for note in found["notes"]]
    return "\n\n".join(parts)


def _ranks(settings: dict[str, Any]) -> str:
    mesh, text = settings["mesh"], f"{settings['world_size']}, {settings['ranks_per_host']} per host"
    text += "" if mesh["replicate"] == 1 else f", {mesh['replicate']} replicas of {mesh['shard']}"
    text += "" if mesh["tensor"] == 1 else f", each layer divided among {mesh['tensor']}"
    return text + ("" if mesh["expert"] == 1 else f", experts divided among {mesh['expert']}")


def _verdict(found: dict[str, Any]) -> str:
    rows = []
    for need in found["needs"]:
        there = "not known" if need["there"] is None else size(need["there"])
        state = "?" if need["there"] is None else "fits" if need["fits"] else "too large"
        rows.append((need["what"], size(need["needed"]), there, state))
    lines = [table(rows, ("memory", "needed", "there", ""), right=(1, 2))]
    owners = {row["owner"]["unit"] for row in found["ledger"]["entries"] if row["category"] == "activations"}
    reserved = bool(owners - {DEQUANTISED.unit})
    free = f"{found['margin']:.0%} of what there is stays free"
    lines.append(free if reserved else f"{free}; activations come on top (see --activations, --micro-batch)")
    return "\n".join(lines)


def _ways_out(found: dict[str, Any]) -> str:
    if not found["changes"]:
        return "It does not fit, and neither stages, offload nor more ranks make it fit: the largest unit is too large."
    lines = []
    for number, change in enumerate(found["changes"]):
        tiers = change["ledger"]["tiers"]
        taken = ", ".join(f"{tier} {size(total['taken'])}" for tier, total in tiers.items() if total["taken"])
        lead = "It fits with" if number == 0 else "or with     "
        lines.append(f"{lead} {', '.join(change['what'])}  ({taken} per rank)")
    return "It does not fit.\n" + "\n".join(lines)


_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_VISIBLE = 0.002
"""Fraction of the tallest bar below which a category has no place in the legend."""
_NEAR = 2.5
"""Times the tallest bar: memory that is farther above it is told in words, for bars would be flat beside its line."""
_LIMIT: dict[str, Any] = {"linestyle": "--", "linewidth": 1.2}


def draw(plan: MemoryPlan, budget: Budget, path: Path, *, dark: bool = False) -> None:
    """Write a PNG: what the fullest rank takes by category, for the plan's stage and the others with it.

    Raises:
        ValueError: If matplotlib is missing, or the name does not end in .png.
        OSError: If the file cannot be written.
    """
    if path.suffix != ".png":
        raise ValueError(f"--png {path}: the name must end in .png")
    ledgers = _by_stage(plan)
    tiers = [tier for tier in TIERS if any(ledger.tier_bytes(tier) for ledger in ledgers.values())]
    colors = dict(zip(CATEGORIES, theme(dark).series, strict=True))
    with figure(2.5 + 4.5 * len(tiers), 6.2, dark=dark, option="--png") as drawing:
        panels = drawing.subplots(1, len(tiers), squeeze=False)[0]
        for panel, tier in zip(panels, tiers, strict=True):
            there = _there(plan, budget, tier)
            _bars(panel, ledgers, tier, there, colors, plan.resolved.config.stage, theme(dark).alarm)
            _axes(panel, ledgers, tier, there, dark)
        keys = _keys(ledgers, tiers, colors, dark, limit=any(panel.lines for panel in panels))
        drawing.legend(handles=keys, loc="lower center", ncols=min(len(keys), 2 + 2 * len(tiers)))
        world = plan.resolved.world_size
        settings = f"{world} rank{'s' * (world > 1)}, {plan.ranks_per_host} per host, {plan.optimizer.name}"
        drawing.suptitle(_title(plan), x=0.02, y=0.975, ha="left", fontweight="bold")
        drawing.text(
            0.02, 0.905, f"Memory of the fullest rank by ZeRO stage: {settings}, offload: {plan.offload.describe()}",
            ha="left", fontsize=10, color=theme(dark).soft,
        )  # fmt: skip
        drawing.tight_layout(rect=(0, 0.1, 1, 0.9), w_pad=3.0)
        drawing.savefig(path)


def _keys(
    ledgers: dict[int, Ledger], tiers: Sequence[Tier], colors: dict[Any, str], dark: bool, *, limit: bool
) -> list[Any]:
    """The legend: categories that are seen, and signs."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tallest = max(ledger.tier_bytes(tier) for ledger in ledgers.values() for tier in tiers)
    largest = {c: max(ledger.only(category=c).total.taken for ledger in ledgers.values()) for c in CATEGORIES}
    used = [category for category in CATEGORIES if largest[category] > _VISIBLE * tallest]
    keys: list[Any] = [Patch(facecolor=colors[category], label=category) for category in used]
    page, idle = theme(dark).page, theme(dark).series[-1]
    keys.append(Patch(facecolor=idle, hatch="////", edgecolor=page, linewidth=0.0, label="inside a step only"))
    if limit:
        keys.append(Line2D([], [], label="available", color=theme(dark).alarm, **_LIMIT))
    return keys


def _bars(
    panel: Any,
    ledgers: dict[int, Ledger],
    tier: Tier,
    there: float | None,
    colors: dict[Any, str],
    chosen: int,
    alarm: str,
) -> None:
    """One tier: a bar for each stage, of the categories."""
    size, unit = _unit(max(ledger.tier_bytes(tier) for ledger in ledgers.values()))
    for place, ledger in enumerate(ledgers.values()):
        bottom = 0.0
        for (category, peak), total in ledger.only(tier=tier).sums("category", "peak").items():
            height, hatch = total.taken / size, "////" if peak else None
            panel.bar(
                place, height, 0.62, bottom, color=colors[category], hatch=hatch, edgecolor=panel.get_facecolor(),
                linewidth=0.6,
            )  # fmt: skip
            bottom += height
        much = there is not None and bottom * size > there
        panel.annotate(
            f"{bottom:.3g} {unit}" + "\ntoo large" * much, (place, bottom), (0, 3), textcoords="offset points",
            ha="center", va="bottom", color=alarm if much else None,
            bbox={"facecolor": panel.get_facecolor(), "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
        )  # fmt: skip
    panel.set_xticks(range(len(ledgers)), [f"stage {stage}" for stage in ledgers])
    for stage, label in zip(ledgers, panel.get_xticklabels(), strict=True):
        if stage == chosen:
            label.set(fontweight="bold")


def _axes(panel: Any, ledgers: dict[int, Ledger], tier: Tier, there: float | None, dark: bool) -> None:
    """Titles, scale, and a line at what there is."""
    tallest = max(ledger.tier_bytes(tier) for ledger in ledgers.values())
    size, unit = _unit(tallest)
    note = "" if there is None else f", {_bytes(there)} available"
    panel.set_title(f"{tier.replace('nvme', 'NVMe')}, per rank{note}", loc="left")
    panel.set_ylabel(unit)
    top = tallest / size
    if there is not None and there <= _NEAR * tallest:
        panel.axhline(there / size, color=theme(dark).alarm, **_LIMIT)
        top = max(top, there / size)
    alone = 0.6 if len(ledgers) == 1 else 0.0
    panel.set(ylim=(0, 1.16 * top), xlim=(-0.6 - alone, len(ledgers) - 0.4 + alone))
    style(panel, dark=dark)


def _title(plan: MemoryPlan) -> str:
    count = plan.model.parameters
    size, letter = next(((s, c) for s, c in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= s), (1.0, ""))
    return f"{plan.model.title}: {count / size:.3g}{letter} parameters"


def _unit(count: float) -> tuple[float, str]:
    """The largest unit of which there is one or more."""
    return next(((size, name) for size, name in _UNITS if count >= size), (1.0, "B"))


def _bytes(count: float) -> str:
    size, unit = _unit(count)
    return f"{count / size:.3g} {unit}"


def _by_stage(plan: MemoryPlan) -> dict[int, Ledger]:
    stages = [3] if plan.offload.parameters != "none" else [0, 1, 2, 3]
    return {stage: plan.changed(settings={"stage": stage}).ledger() for stage in stages}


def _there(plan: MemoryPlan, budget: Budget, tier: str) -> float | None:
    """Bytes that a rank may take of a tier, if it is known; the margin stays free."""
    if tier == "device" and plan.device_type == "cuda":
        there: float | None = budget.device
    else:
        whole = budget.disk if tier == "nvme" else budget.host
        there = None if whole is None else whole / plan.ranks_per_host
    return None if there is None else there * (1 - budget.margin)
