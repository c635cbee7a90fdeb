"""The choice among candidates: of those that fit, by the plan and a margin, the quickest; and why not the others.

candidates      every combination of open settings, with the plan of each
activations     foreseen without memory, see `foreseen.py`
fits            plan + activations <= what there is, less the margin
seconds         see `seconds.py`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zero_strategy.auto.candidates import Candidate, Plans, batches_of, candidates, is_open, pinned
from zero_strategy.auto.fullest import beside, expected, gaps, to_come
from zero_strategy.auto.micro_batches import MicroBatchBytes, MicroBatches
from zero_strategy.auto.recomputation import plain_ways, saving_ways
from zero_strategy.auto.roof import Roof
from zero_strategy.auto.seconds import Seconds, seconds_of
from zero_strategy.config import ZeroConfig, resolve
from zero_strategy.planning.changes import changes_that_fit
from zero_strategy.planning.ledger import COMMUNICATORS, TIERS, Entry, Ledger, Owner
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.room import Budget, Need, needs
from zero_strategy.runtime.terminal import size, table

SHOWN = 10
"""Candidates of a table."""
_WORTH = 0.03
"""Part of a step's time that has to be gained by ways that save memory, before they are looked at: it takes time."""
_NEAR = 0.01
"""Part of a step's time by which two candidates are alike; of such the simpler one is taken."""


@dataclass(frozen=True)
class Considered:
    """A candidate that was looked at.

    Attributes:
        candidate: As above.
        activations: Bytes of them, on the device.
        beside: Bytes at the fullest moment beyond the candidate's ledger, as they are expected.
        most: The same, at most.
        needs: What it needs, and what there is.
        seconds: Of a step.
        why: Why it is not chosen; "" for the one that is.
    """

    candidate: Candidate
    activations: int
    beside: int
    most: int
    needs: Sequence[Need]
    seconds: Seconds
    why: str = ""

    @property
    def fits(self) -> bool:
        """True if there is enough of all that is known."""
        return all(need.fits for need in self.needs)

    @property
    def excess(self) -> float:
        """Need over what there is, of the scarcest."""
        return max((need.needed / max(need.there, 1) for need in self.needs if need.there is not None), default=0.0)


class NothingFitsError(ValueError):
    """No candidate fits."""


@dataclass(frozen=True)
class Choice:
    """A choice and its reasons.

    Attributes:
        chosen: The candidate.
        considered: All, the chosen one first, then in the order of their time; what does not fit comes last.
        activations: How their bytes are known: "foreseen without memory", or why they are not.
        margin: Part of the memory that stays free.
        asked: The config as it was given.
        to_come: Bytes that the chosen one's micro-batch still takes after each unit's forward, in order.
        speeds: Where they come from.
        modes: Of activation checkpointing, that are known of the model.
        tried: Settings that a running engine can change, of which a trial takes the quickest; the first are chosen.
    """

    chosen: Considered
    considered: Sequence[Considered]
    activations: str
    margin: float
    asked: ZeroConfig = field(repr=False)
    speeds: str = "measured"
    modes: Sequence[str] = ()
    tried: Sequence[Mapping[str, Any]] = ()
    to_come: Sequence[int] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Chosen settings, by dotted key."""
        return dict(self.chosen.candidate.settings)

    def table(self) -> str:
        """Columns: settings, micro-batch, bytes by tier, predicted seconds, why it is not taken."""
        rows = []
        for each in shown(self.considered):
            ledger = each.candidate.ledger
            tiers = [ledger.tier_bytes(tier) + (each.beside if tier == "device" else 0) for tier in TIERS]
            batch = f"{each.candidate.rows or '?'} x {each.candidate.accumulation}"
            memory = " + ".join(f"{size(n)} {t}" for n, t in zip(tiers, TIERS, strict=True) if n and t != "device")
            rows.append(
                (each.candidate.describe(), batch, size(tiers[0]) + (f" + {memory}" if memory else ""),
                 f"{each.seconds.total:.3g}", each.why or "chosen")
            )  # fmt: skip
        left = len(self.considered) - len(rows)
        header = ("settings", "rows x micro-batches", "memory of a rank", "seconds", "")
        text = table(rows, header, right=(3,))
        text += f"\n{left} more candidates" if left else ""
        text += f"\nactivations: {self.activations}; {self.margin:.0%} of the memory stays free"
        on_host = self.chosen.candidate.plan.device_type == "cpu"
        fitted = ", gaps of malloc's heap fitted to measured ones" if on_host else ""
        return f"{text}\nbytes: computed{fitted}; speeds: {self.speeds}"

    def to_json(self, most: int = SHOWN) -> dict[str, Any]:
        """The figures as plain types, of so many candidates at most."""
        told = shown(self.considered, most)
        return {
            "settings": self.settings,
            "rows": self.chosen.candidate.rows,
            "accumulation": self.chosen.candidate.accumulation,
            "activations": self.activations,
            "margin": self.margin,
            "speeds are": self.speeds,
            "to come": list(self.to_come),
            "modes": list(self.modes),
            "tried": [dict(each) for each in self.tried],
            "candidates": [_figures(each) for each in told],
            "left out": len(self.considered) - len(told),
        }

    def pinned_yaml(self) -> str:
        """A config file with what was chosen and what was given."""
        import yaml  # type: ignore[import-untyped, unused-ignore]

        given = {
            key: setting.value
            for key, setting in self.asked.settings()
            if setting.origin != "default" and not setting.origin.startswith("derived") and not key.startswith("auto.")
        }
        nested: dict[str, Any] = {}
        for key, value in {**given, **self.settings}.items():
            *path, name = key.split(".")
            where = nested
            for part in path:
                where = where.setdefault(part, {})
            where[name] = value
        candidate = self.chosen.candidate
        batch = f"# micro-batches of {candidate.rows or '?'} row(s), {candidate.accumulation} a step"
        return f"{batch}\n{yaml.safe_dump(nested, sort_keys=False)}"


def _figures(each: Considered) -> dict[str, Any]:
    return {
        "said": each.candidate.describe(),
        "settings": dict(each.candidate.settings),
        "rows": each.candidate.rows,
        "accumulation": each.candidate.accumulation,
        "activations": each.activations,
        "beside": each.beside,
        "foreseen": _where_it_computes(each),
        "ledger": each.candidate.ledger.to_json(entries=False),
        "seconds": {
            name: _finite(value) for name, value in (*vars(each.seconds).items(), ("total", each.seconds.total))
        },
        "needs": [vars(need) for need in each.needs],
        "fits": each.fits,
        "why": each.why,
    }


def _where_it_computes(each: Considered) -> int:
    """Bytes of a rank in the memory where it computes, beside a copy for saves and what NCCL takes for itself."""
    tiers = ("device",) if each.candidate.plan.device_type != "cpu" else ("device", "host")
    entries = (entry for entry in each.candidate.ledger if entry.tier in tiers and entry.category != "snapshot")
    return each.beside + sum(entry.taken for entry in entries if entry.owner != COMMUNICATORS)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def shown(considered: Sequence[Considered], most: int = SHOWN) -> list[Considered]:
    """The chosen one, the quickest that fit, and the quickest that do not; of those that differ in saves alone one."""
    found: dict[Any, Considered] = {}
    for each in considered:
        candidate = each.candidate
        same = {key: value for key, value in candidate.settings.items() if key != "checkpoint.asynchronous"}
        found.setdefault((tuple(same.items()), candidate.rows), each)
    fitting = [each for each in found.values() if each.fits]
    others = sorted((each for each in found.values() if not each.fits), key=lambda each: each.seconds.total)
    few = min(len(others), most // 3)
    return [*fitting[: most - few], *others[:few]]


def choose(
    asked: ZeroConfig,
    plan: MemoryPlan,
    budget: Budget,
    roof: Roof,
    foreseen: MicroBatches | None,
    *,
    rows: int = 0,
    unknown: str = "not known, as there is no example of a batch",
    speeds: str = "measured",
) -> Choice:
    """Choose what nobody has set.

    Args:
        asked: The config as it was given.
        plan: Of it, without activations.
        budget: What there is, and the margin.
        roof: Of the slowest rank.
        foreseen: Micro-batches; None: nobody knows.
        rows: Of a micro-batch as it comes.
        unknown: Why activations are not known, if they are not.
        speeds: Where those of the roof come from.

    Raises:
        NothingFitsError: If nothing fits; names what is nearest, and ways out.
        ValueError: If the ranks do not divide `auto.global_batch`.
    """
    divides = foreseen is not None and not foreseen.rows
    batches = batches_of(asked, shares_of(plan), rows, plan.accumulation, divides=divides)

    planned: Plans = {}
    ways = plain_ways(asked, () if foreseen is None else foreseen.modes)
    found = [_considered(each, foreseen, budget, roof) for each in candidates(asked, plan, batches, ways, planned)]
    if foreseen is not None and (lacking := _lacking(found)):
        saving = list(saving_ways(asked, foreseen.modes, plan.device_type, tiles=foreseen.tiles))
        more = candidates(asked, plan, batches, saving, planned) if saving else ()
        found += _saving(more, found, lacking, foreseen, budget, roof)
    fitting = [each for each in found if each.fits]
    if not fitting:
        raise NothingFitsError(_nearest(min(found, key=lambda each: each.excess), budget, asked))
    quickest = _quickest(found)
    # The first of those that are alike: candidates come in the order of what they change.
    best = next(each for each in fitting if each.seconds.total <= quickest * (1 + _NEAR))
    rest = sorted((each for each in found if each is not best), key=lambda each: (not each.fits, each.seconds.total))
    told = [_with_reason(each, best) for each in rest]
    known = unknown if foreseen is None else "foreseen without memory"
    micro_batch, modes = _bytes_of(best.candidate, foreseen), () if foreseen is None else foreseen.modes
    tried = _tried(asked, best, budget, micro_batch)
    return Choice(
        best, [best, *told], known, budget.margin, asked, speeds, modes, tried, to_come(best.candidate, micro_batch)
    )


def _quickest(found: Sequence[Considered]) -> float:
    """Seconds of the quickest that fits; inf: nothing does."""
    return min((each.seconds.total for each in found if each.fits), default=math.inf)


def _lacking(found: Sequence[Considered]) -> dict[Any, Considered]:
    """Candidates that keep all that their settings allow, do not fit, and would be quicker than all that fit."""
    best = _quickest(found)
    return {
        _but_recomputation(each.candidate): each
        for each in reversed(found)  # of each kind the first one, which computes nothing again
        if not each.fits and each.seconds.total < best * (1 - _WORTH)
    }


def _but_recomputation(candidate: Candidate) -> Any:
    settings = candidate.settings.items()
    return candidate.rows, tuple(item for item in settings if not item[0].startswith("activation_checkpointing."))


def _saving(
    more: Iterable[Candidate],
    found: Sequence[Considered],
    lacking: Mapping[Any, Considered],
    foreseen: MicroBatches,
    budget: Budget,
    roof: Roof,
) -> Iterator[Considered]:
    """Candidates that keep less, where keeping all lacks room and would be quicker.

    They take longer than what keeps all, and with tiles a model gives no logits. Each way is run without memory, once.
    """
    best = _quickest(found)
    seen: dict[Any, list[Considered]] = {}
    for candidate in more:
        of = _but_recomputation(candidate)
        if (whole := lacking.get(of)) is None:
            continue
        alike = seen.setdefault(of, [whole])
        too_slow = (each for each in alike if each.seconds.total > best * (1 - _WORTH))
        if any(candidate.way.is_slower(each.candidate.way) for each in too_slow):
            continue
        # Nothing that computes a part again is quicker than what keeps all, tiles of MLPs included.
        if whole.seconds.total > best * (1 - _WORTH) or not foreseen.knows(candidate.way):
            continue
        considered = _considered(candidate, foreseen, budget, roof)
        best = min(best, considered.seconds.total) if considered.fits else best
        alike.append(considered)
        yield considered


def _tried(asked: ZeroConfig, best: Considered, budget: Budget, micro_batch: MicroBatchBytes) -> list[dict[str, Any]]:
    """Ways to gather ahead, and to keep units, beside what is chosen, as far as they fit."""
    config, plan = best.candidate.config, best.candidate.plan
    if config.stage != 3 or plan.resolved.shard == 1 or config.units.may_skip:
        return []
    chosen = {"prefetch": config.prefetch, "reshard_after_forward": config.reshard_after_forward}
    others = [{**chosen, "reshard_after_forward": not config.reshard_after_forward}, {**chosen, "prefetch": 2}]
    found = [chosen]
    for settings in others:
        changed = {key: value for key, value in settings.items() if value != chosen[key]}
        if not changed or not all(is_open(asked, key) for key in changed) or not config.reshard_after_backward:
            continue
        ledger = replace(plan, resolved=resolve(pinned(config, settings), plan.resolved.world_size)).ledger()
        more = beside(best.candidate, micro_batch, ledger) + gaps(best.candidate, micro_batch, ledger).most
        if all(need.fits for need in needs(plan, budget, with_activations(ledger, more))):
            found.append(settings)
    return found


def _considered(candidate: Candidate, foreseen: MicroBatches | None, budget: Budget, roof: Roof) -> Considered:
    micro_batch, seconds = _bytes_of(candidate, foreseen), 0.0
    if foreseen is not None:
        maps = candidate.config.mmap_threshold > 0
        seconds = foreseen.seconds(candidate.way, candidate.rows, roof, maps=maps)
    most = beside(candidate, micro_batch) + gaps(candidate, micro_batch).most
    found = needs(candidate.plan, budget, with_activations(candidate.ledger, most))
    time = seconds_of(candidate, seconds, roof)
    return Considered(candidate, micro_batch.peak, expected(candidate, micro_batch), most, found, time)


def _bytes_of(candidate: Candidate, foreseen: MicroBatches | None) -> MicroBatchBytes:
    return MicroBatchBytes() if foreseen is None else foreseen.bytes_of(candidate.way, candidate.rows)


def shares_of(plan: MemoryPlan) -> int:
    """Ranks that get different rows: those that divide sequences or layers get the same."""
    return plan.resolved.shard * plan.resolved.config.mesh.replicate // plan.resolved.config.mesh.sequence


def with_activations(ledger: Ledger, nbytes: int) -> Ledger:
    """A ledger with activations of so many bytes."""
    found = Ledger(device_type=ledger.device_type)
    for entry in ledger:
        found.add(entry)
    found.add(Entry("activations", "device", Owner("micro-batch"), nbytes, nbytes, peak=True))
    return found


def _with_reason(each: Considered, best: Considered) -> Considered:
    lacking = [need for need in each.needs if not need.fits]
    if lacking:
        need = lacking[0]
        assert need.there is not None
        why = f"{need.what}: {size(need.needed)}, there {size(need.there)}"
    else:
        more = each.seconds.total / best.seconds.total - 1
        why = f"{more:+.0%} time" if abs(more) > _NEAR else "alike, with more changes"
    return replace(each, why=why)


def _nearest(nearest: Considered, budget: Budget, asked: ZeroConfig) -> str:
    """Why nothing fits, and ways out: first changes with which this candidate does."""
    plan = nearest.candidate.plan
    lacking = next(need for need in nearest.needs if not need.fits)
    assert lacking.there is not None
    whole = replace(plan, activations=nearest.most)
    ways = [f"it fits with {', '.join(change.what)}" for change in changes_that_fit(whole, budget)]
    ways.append("a smaller model, or shorter sequences")
    if not asked.offload.nvme_path:
        ways.insert(0, "offload.nvme_path: [a directory on a drive]")
    if not asked.auto.global_batch and nearest.activations:
        ways.insert(0, "fewer rows in a batch, or auto.global_batch, of which micro-batches are made")
    fixed = [key for key, setting in asked.settings() if setting.origin.startswith("user") and _is_chosen(key)]
    if fixed:
        ways.insert(0, f"leave open what is set: {', '.join(fixed)}")
    return (
        f"nothing fits {plan.model.title} on {plan.resolved.world_size} rank(s): the nearest is "
        f"{nearest.candidate.describe()}, micro-batches of {nearest.candidate.rows or '?'} row(s), which needs "
        f"{size(lacking.needed)} of {lacking.what}, and {size(lacking.there)} are there. Ways out: {'; '.join(ways)}"
    )


_CHOOSABLE = (
    "stage", "offload.optimizer", "offload.parameters", "reshard_after_forward", "reshard_after_backward",
    "activation_checkpointing.mode", "activation_checkpointing.budget", "activation_checkpointing.tile_tokens",
    "checkpoint.asynchronous", "mmap_threshold",
)  # fmt: skip


def _is_chosen(key: str) -> bool:
    return key in _CHOOSABLE
