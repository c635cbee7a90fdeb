"""The cheapest changes of settings after which a plan fits, and what could use the memory that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from zero_strategy.offload.chunk_store import PAGE_BYTES
from zero_strategy.planning.buckets import (
    TIER_ORDER,
    BucketFacts,
    Offload,
    facts_of,
    placement_of,
    staying,
    staying_bytes,
    stop_of,
)
from zero_strategy.planning.ledger import Ledger
from zero_strategy.planning.machine import Machine
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.room import Budget, fits, needs
from zero_strategy.runtime.terminal import size

_ENDLESS = 1 << 60


def with_resident(plan: MemoryPlan, nbytes: int) -> MemoryPlan:
    """The plan with another `offload.resident_bytes`."""
    return plan.changed(offload=replace(plan.offload, resident_bytes=nbytes))


def kept_bytes(plan: MemoryPlan) -> int:
    """Bytes of `offload.resident_bytes` that are used; a setting of just these keeps the same."""
    return staying_bytes(facts_of(plan.model, plan.resolved, plan.compute_dtype), plan.resolved, plan.offload)


def largest_resident(
    plan: MemoryPlan, fits: Callable[[MemoryPlan], bool], low: int, high: int | None = None
) -> int | None:
    """The largest `offload.resident_bytes` from `low` to `high` with which a plan fits; None if it does with none.

    No more than is used: what it keeps is what the next larger ones do that fit. `high` None: all that is in files.
    """
    if not fits(with_resident(plan, low)):
        return None
    most = kept_bytes(with_resident(plan, _ENDLESS if high is None else high))
    good, bad = low // PAGE_BYTES, max(most, low) // PAGE_BYTES + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(with_resident(plan, middle * PAGE_BYTES)):
            good = middle
        else:
            bad = middle
    return kept_bytes(with_resident(plan, max(good * PAGE_BYTES, low)))


def moved_bytes(plan: MemoryPlan, rank: int = 0) -> int:
    """Bytes of parameters and gradients that a rank reads from files and writes in a step of one micro-batch.

    Parameters are read for forward and for backward, read and written by the step; gradients are written once they are
    reduced, and read by the step. Clipping by a norm reads gradients once more, and is left out.
    """
    units, offload = facts_of(plan.model, plan.resolved, plan.compute_dtype), plan.offload
    stays, placement = staying(units, plan.resolved, offload), placement_of(plan.resolved)
    gradients_in_files = offload.gradient_tier(plan.resolved.gradient_reduction) == "nvme"
    total = 0
    for bucket in (bucket for unit in units for bucket in unit):
        here = stays[id(bucket)]
        if offload.parameters == "nvme":
            numel = bucket.layout.slice_numel
            left = numel - stop_of(offload.cuts(numel), here.weights)
            total += left * bucket.dtype.itemsize * (4 if bucket.trainable else 2)
        if gradients_in_files and bucket.trainable:
            start, stop = bucket.owned(placement, rank)
            cuts = offload.cuts(stop - start)
            left = stop - start - (stop_of(cuts, cuts.heads + here.gradients))
            total += 2 * left * bucket.gradient_dtype.itemsize
    return total


_MOST_RANKS = 4096
_SMALL_SHM = 1 << 30
_NO_SNAPSHOTS = "checkpoint.asynchronous: false"


@dataclass(frozen=True)
class Change:
    """A change of settings.

    Attributes:
        what: The settings that change, such as "stage: 3" or "offload.optimizer: cpu".
        plan: The plan with them.
    """

    what: tuple[str, ...]
    plan: MemoryPlan


def changes_that_fit(plan: MemoryPlan, budget: Budget) -> list[Change]:
    """The smallest change after which the plan fits, and after it the first that fits of each other kind.

    In order of cost: saves that wait, steps that begin after backward, less that stays in host memory, a higher stage
    (more is sent), the ranks that are there, offload to the host, then to drives, more ranks than are there. Empty if
    nothing helps, or it fits as it is.
    """
    found = []
    groups = (_synchronous, _less_staying, _stages, _present_ranks, _to_host, _to_drives, _more_ranks)
    for group in groups:
        first = next((change for change in group(plan, budget) if fits(change.plan, budget)), None)
        if first is None and plan.snapshots and group is not _synchronous:
            without = group(plan.changed(snapshots=False), budget)
            first = next((change for change in without if fits(change.plan, budget)), None)
            first = None if first is None else Change((*first.what, _NO_SNAPSHOTS), first.plan)
        if first is not None:
            found.append(first)
    return found


def _synchronous(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    if plan.snapshots:
        yield Change((_NO_SNAPSHOTS,), plan.changed(snapshots=False))


def _less_staying(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    """More of what is in files read and written, as little as will do."""
    if plan.offload.in_files and kept_bytes(plan):
        most = _largest_resident(plan, budget, 0, plan.offload.resident_bytes)
        if most is not None:
            yield Change((f"offload.resident_bytes: {most}",), with_resident(plan, most))


def _largest_resident(plan: MemoryPlan, budget: Budget, low: int, high: int | None = None) -> int | None:
    """Choose by the fullest rank, for a plan of each rank takes long; then look at all."""
    rank = plan.fullest_rank()

    def fits_one(other: MemoryPlan) -> bool:
        return all(need.fits for need in needs(other, budget, other.ledger(rank)))

    found = largest_resident(plan, fits_one, low, high)
    if found is None or fits(with_resident(plan, found), budget):
        return found
    return largest_resident(plan, lambda other: fits(other, budget), low, high)


def suggestions(plan: MemoryPlan, budget: Budget) -> list[str]:
    """Changes that a plan that fits could make with the memory that is left."""
    if not plan.offload.in_files or budget.host is None or not fits(plan, budget):
        return []
    most = _largest_resident(plan, budget, plan.offload.resident_bytes)
    if most is None or most <= kept_bytes(plan):
        return []
    saved = moved_bytes(plan) - moved_bytes(with_resident(plan, most))
    return [f"offload.resident_bytes could be {most}: saves {size(saved)} read and written per step"]


_CHANGED_BYTES = 0.05
"""Bytes of coded changes over those of bf16 values, at 1e-5."""
_CODE_SECONDS, _APPLY_SECONDS = 5e-9, 4e-9
"""Of one core, per element of the own slice and of the others'; docs/performance.md says where."""


def gather_advice(plan: MemoryPlan, gigabits: float) -> str:
    """The quicker setting of `communication.parameters` on a link of so many Gbit/s; "" where there is no choice.

    A rank's slices go to the other ranks over the link, at stages 1 and 2 in low precision. Those of experts that ranks
    divide go to the ranks that have the same ones, as values in any case.
    """
    config, ranks = plan.resolved.config, plan.resolved.config.mesh.shard or plan.resolved.world_size
    itemsize = plan.compute_dtype.itemsize if plan.compute_dtype is not None else 4
    if config.stage not in (1, 2) or ranks == 1 or itemsize > 2:
        return ""
    units = facts_of(plan.model, plan.resolved, plan.compute_dtype)
    trained = [bucket for unit in units for bucket in unit if bucket.trainable]
    experts = [bucket for bucket in trained if bucket.neighbours > 1]
    plain = _sent_seconds(experts, itemsize, gigabits)
    own = sum(bucket.elements / bucket.layout.world_size for bucket in trained if bucket.neighbours == 1)
    others = own * (plan.resolved.shard - 1)
    values = _sent_seconds(trained, itemsize, gigabits)
    delta = plain + _CHANGED_BYTES * (values - plain) + own * _CODE_SECONDS + others * _APPLY_SECONDS
    better = "delta" if delta < values else "values"
    return (
        f"communication.parameters: {better} is quicker on {gigabits:g} Gbit/s: after a step values take about "
        f"{values:.2g} s, coded changes {delta:.2g} s (at learning rates of fine-tuning)"
    )


def _sent_seconds(buckets: Iterable[BucketFacts], itemsize: int, gigabits: float) -> float:
    """Time in which the other ranks' slices of buckets come over a link, as values."""
    elements = sum(bucket.elements * (1 - 1 / bucket.layout.world_size) for bucket in buckets)
    return elements * itemsize * 8 / (gigabits * 1e9)


def _stages(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    """Higher stages, gradients that are reduced every micro-batch; then what is gathered released, none ahead."""
    config, now = plan.resolved.config, plan.resolved.config.stage
    reduced: dict[str, object] = {"gradient_reduction": "per_micro_batch"}
    stages: list[dict[str, object]] = [{"stage": stage} for stage in range(now + 1, 4)]
    tried = [reduced, *stages] if now >= 2 else [*stages, reduced]  # stages 2 and 3 have it by default
    for settings in (*tried, *(settings | reduced for settings in stages)):
        yield _change(settings, plan.changed(settings=settings))
    released: dict[str, object] = {} if config.reshard_after_backward else {"reshard_after_backward": True}
    if released:
        settings = released if now == 3 else {"stage": 3, **released}
        yield _change(settings, plan.changed(settings=settings))
    if now == 3 and (config.prefetch or not config.reshard_after_forward or released):
        lean: dict[str, object] = {**released, "reshard_after_forward": True, "prefetch": 0}
        yield _change(lean, plan.changed(settings=lean))


def _change(settings: dict[str, object], plan: MemoryPlan, *first: str) -> Change:
    return Change((*first, *(f"{key}: {str(value).lower()}" for key, value in settings.items())), plan)


def _present_ranks(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    """All devices of this host."""
    world = plan.resolved.world_size
    counts = {world * 2**power for power in range(1, 13)} | {budget.gpus}
    here = sorted(count for count in counts if world < count <= budget.gpus)
    alone = plan.ranks_per_host == world
    yield from _with_ranks(plan, [(count, count if alone else plan.ranks_per_host) for count in here])


def _more_ranks(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    """Further hosts like this one."""
    world, per_host = plan.resolved.world_size, max(plan.ranks_per_host, budget.gpus)
    counts = [world * 2**power for power in range(1, 13)]
    yield from _with_ranks(
        plan, [(count, min(per_host, count)) for count in counts if max(world, budget.gpus) < count <= _MOST_RANKS]
    )


def _with_ranks(plan: MemoryPlan, counts: list[tuple[int, int]]) -> Iterator[Change]:
    """Numbers of ranks and of ranks per host; each with the present stage and with those above it."""
    now, mesh = plan.resolved.config.stage, plan.resolved.config.mesh
    for count, per_host in counts:
        if count % (mesh.replicate * plan.ways * mesh.expert) == 0:
            for stage in range(now, 4):
                settings: dict[str, object] = {} if stage == now else {"stage": stage}
                changed = plan.changed(world_size=count, ranks_per_host=per_host, settings=settings)
                yield _change(settings, changed, f"ranks: {count} ({per_host} per host)")


def _to_host(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    if plan.device_type != "cpu":  # else it is the same memory
        yield from _offloads(plan, "cpu")


def _to_drives(plan: MemoryPlan, budget: Budget) -> Iterator[Change]:
    if budget.disk is not None:
        yield from _offloads(plan, "nvme")


def _offloads(plan: MemoryPlan, tier: str) -> Iterator[Change]:
    """The optimizer off the device, then the parameters as well, each with the present stage and those above it."""
    now = plan.resolved.config.stage
    for parts in (("optimizer",), ("optimizer", "parameters")):
        now_at = {part: TIER_ORDER.index(getattr(plan.offload, part)) for part in parts}
        wanted = {part: tier for part in parts if TIER_ORDER.index(tier) > now_at[part]}
        offload = _offloaded(plan.offload, **wanted)
        for stage in range(now, 4):
            if wanted and (offload.parameters == "none" or stage == 3):
                settings: dict[str, object] = {} if stage == now else {"stage": stage}
                what = [f"offload.{part}: {where}" for part, where in wanted.items()]
                yield _change(settings, plan.changed(settings=settings, offload=offload), *what)


def _offloaded(before: Offload, optimizer: str | None = None, parameters: str | None = None) -> Offload:
    return replace(before, optimizer=optimizer or before.optimizer, parameters=parameters or before.parameters)


def notes(plan: MemoryPlan, machine: Machine, ledger: Ledger | None = None) -> list[str]:
    """Consequences of the machine's limits for the plan, beside its sizes."""
    ledger = plan.ledger() if ledger is None else ledger
    found = []
    pinned = ledger.tier_bytes("host")
    if plan.device_type == "cuda" and machine.memlock is not None and pinned > machine.memlock:
        found.append(
            f"memlock is {size(machine.memlock)}, and {size(pinned)} of host memory would be pinned: where the system "
            "refuses that, copies go through pageable memory, which is slower (raise `ulimit -l`)"
        )
    if plan.ranks_per_host > 1 and machine.shm_free is not None and machine.shm_free < _SMALL_SHM:
        found.append(
            f"/dev/shm has {size(machine.shm_free)} free: NCCL and DataLoader workers share memory there "
            "(in a container, --shm-size)"
        )
    if ledger.only(tier="nvme").total.taken and machine.disk_path is None:
        found.append("no drive was looked at: give --nvme-path, or --disk with its free bytes")
    return found
