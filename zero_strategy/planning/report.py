"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from zero_strategy.memory.ledger import Key
from zero_strategy.memory.machine import Machine
from zero_strategy.memory.plan import MemoryPlan
from zero_strategy.planning.fit import Budget, Change, changes_that_fit, needs, notes, suggestions
from zero_strategy.runtime.terminal import size, table


def report(plan: MemoryPlan, budget: Budget, machine: Machine, rank: int | None = None) -> dict[str, Any]:
    """What `--json` prints: settings, the ledger of one rank, what fits, changes that would."""
    config, chosen = plan.resolved.config, plan.fullest_rank() if rank is None else rank
    ledger = plan.ledger(chosen)
    found = needs(plan, budget)
    fits = all(need.fits for need in found)
    return {
        "model": plan.model.title,
        "parameters": plan.model.parameters,
        "trainable": plan.model.trainable,
        "units": len(plan.model.units),
        "settings": {
            "stage": config.stage,
            "world_size": plan.resolved.world_size,
            "mesh": {"replicate": config.mesh.replicate, "shard": config.mesh.shard},
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
        "suggestions": suggestions(plan, budget) if fits else [],
        "machine": machine.__dict__,
        "notes": notes(plan, machine, ledger),
    }


def _change(change: Change) -> dict[str, Any]:
    ledger = change.plan.ledger()
    return {"what": list(change.what), "ledger": ledger.to_json(entries=False)}


def _dtype(plan: MemoryPlan) -> str:
    return "as built" if plan.compute_dtype is None else str(plan.compute_dtype).removeprefix("torch.")


def report_text(plan: MemoryPlan, found: dict[str, Any], machine: Machine, by: tuple[Key, ...] = ()) -> str:
    """The same for people."""
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
    return text if mesh["replicate"] == 1 else text + f", {mesh['replicate']} replicas of {mesh['shard']}"


def _verdict(found: dict[str, Any]) -> str:
    rows = []
    for need in found["needs"]:
        there = "not known" if need["there"] is None else size(need["there"])
        state = "?" if need["there"] is None else "fits" if need["fits"] else "too large"
        rows.append((need["what"], size(need["needed"]), there, state))
    lines = [table(rows, ("memory", "needed", "there", ""), right=(1, 2))]
    reserved = any(row["category"] == "activations" for row in found["ledger"]["sums"])
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
