"""Ways to train a model: every combination of the settings that nobody has set, with the plan of each.

Settings of a user are constraints. What is chosen among: the stage, tiers, whether stage 3 keeps what it has gathered,
what is computed again in backward, saves in the background, and the rows of a micro-batch where the batch of a step is
given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from zero_strategy.auto.recomputation import Recomputation
from zero_strategy.config import DEFAULT, ZeroConfig, resolve
from zero_strategy.planning.buckets import Offload
from zero_strategy.planning.ledger import Ledger
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.runtime.host_heap import MAPPED
from zero_strategy.runtime.host_heap import is_open as heap_is_open

CHOSEN = "chosen: auto.enabled"
"""Origin of settings that were chosen."""
_KEPT: tuple[dict[str, bool], ...] = (
    {"reshard_after_forward": True, "reshard_after_backward": True},
    {"reshard_after_forward": False, "reshard_after_backward": True},
    {"reshard_after_forward": False, "reshard_after_backward": False},
)
"""How long stage 3 keeps what it has gathered."""
_UNPLANNED = (
    "activation_checkpointing.mode", "activation_checkpointing.budget", "activation_checkpointing.tile_tokens",
    "mmap_threshold",
)  # fmt: skip
"""Settings that change nothing of what an engine holds."""
_TIERS = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme"))
"""Of the optimizer's state and of parameters."""


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        settings: By dotted key: what was open, as this one has it.
        rows: Of a micro-batch of one rank; 0: nobody knows.
        accumulation: Micro-batches of a step.
        plan: Memory of it, activations left out.
        ledger: Of the plan's fullest rank.
    """

    settings: Mapping[str, Any]
    rows: int
    accumulation: int
    plan: MemoryPlan = field(repr=False)
    ledger: Ledger = field(repr=False)

    @property
    def config(self) -> ZeroConfig:
        """The settings of the run."""
        return self.plan.resolved.config

    @property
    def way(self) -> Recomputation:
        """Mode, budget and tiles, by which activations are computed again."""
        return Recomputation.of(self.config)

    def describe(self) -> str:
        """The stage, and in words what differs from the defaults."""
        config, words = self.config, [f"stage {self.config.stage}"]
        for name in ("optimizer", "parameters"):
            if (tier := getattr(config.offload, name)) != "none":
                words.append(f"{name} {tier}")
        words += self.way.describe()
        if not config.reshard_after_forward:
            words.append("keeps units" if config.reshard_after_backward else "keeps units for a step")
        if config.mmap_threshold:
            words.append("maps blocks")
        if self.settings.get("checkpoint.asynchronous") is False:
            words.append("saves wait")
        return ", ".join(words)


def is_open(config: ZeroConfig, key: str) -> bool:
    """True if nobody has set a setting."""
    return config.origin_of(key) == DEFAULT


def batches_of(
    config: ZeroConfig, world_size: int, rows: int, accumulation: int, *, divides: bool = True
) -> list[tuple[int, int]]:
    """(rows of a micro-batch, micro-batches of a step) that make up the wanted batch, the largest rows first.

    Args:
        config: `auto.global_batch` is the batch of a step.
        world_size: Ranks that get different rows.
        rows, accumulation: As they are, where no batch is wanted.
        divides: Micro-batches of any rows are known; else those of `rows` are.

    Raises:
        ValueError: If the ranks do not divide it; names the nearest ones that they do.
    """
    wanted, slots = config.auto.global_batch, config.reproducible.slots
    if not wanted:
        return [(rows, accumulation)]
    unit = slots or world_size
    if wanted % unit:
        what = f"reproducible.slots is {slots}" if slots else f"there are {world_size} ranks"
        below, above = wanted // unit * unit, (wanted // unit + 1) * unit
        nearest = f"{below} or {above}" if below else str(above)
        raise ValueError(f"auto.global_batch is {wanted} and {what}; the nearest that can be divided: {nearest}")
    if slots:
        return [(wanted // slots, slots // world_size)]
    share = wanted // world_size
    if divides:
        return _spread([(share // count, count) for count in range(1, share + 1) if share % count == 0])
    if rows and share % rows == 0:
        return [(rows, share // rows)]
    raise ValueError(
        f"auto.global_batch is {wanted}, {share} rows of a rank, and nothing is known of micro-batches of other rows "
        f"than {rows or 'those of the loader'}: give an Example of which all tensors have as many rows, or leave it out"
    )


_BATCHES = 8
"""Micro-batches of so many different rows are looked at."""


def _spread(batches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first and the last, and some between."""
    if len(batches) <= _BATCHES:
        return batches
    return [batches[round(number * (len(batches) - 1) / (_BATCHES - 1))] for number in range(_BATCHES)]


Plans = dict[Any, tuple[MemoryPlan, Ledger] | None]
"""Plans that were made, by their settings; None: the settings contradict each other."""


def candidates(
    asked: ZeroConfig,
    plan: MemoryPlan,
    batches: Sequence[tuple[int, int]],
    ways: Sequence[Mapping[str, Any]],
    planned: Plans,
) -> Iterator[Candidate]:
    """All candidates, those that change less before others.

    Args:
        asked: The config as it was given.
        plan: Of it.
        batches: See `batches_of`.
        ways: Settings of recomputation.
        planned: Gets what is planned.

    Raises:
        ValueError: If no combination is one that the settings allow; says why the last one is not.
    """
    refused, some = ValueError("there is no combination of settings to choose from"), False
    for rows, accumulation in batches:
        for settings in _open_settings(asked, plan, ways):
            # Plans are the same for all of these, and for two micro-batches or more.
            held = {key: value for key, value in settings.items() if key not in _UNPLANNED}
            key = tuple(held.items()), accumulation > 1
            if key not in planned:
                try:
                    changed = _changed(asked, plan, held, accumulation)
                    planned[key] = changed, changed.ledger()
                except ValueError as error:  # a setting of the user's that this stage has no place for
                    planned[key], refused = None, error
            if (found := planned[key]) is None:
                continue
            changed, ledger = found
            if any(key in settings for key in _UNPLANNED):
                changed = _with_unplanned(changed, settings)
            some = True
            yield Candidate(settings, rows, accumulation, changed, ledger)
    if not some:
        raise refused


def _open_settings(config: ZeroConfig, plan: MemoryPlan, ways: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    choices: list[Sequence[Mapping[str, Any]]] = [
        [{"stage": stage, **tiers, **kept} for stage, tiers, kept in _layouts(config, plan)],
        ways,
        _values(config, "checkpoint.asynchronous", (True, False) if plan.snapshots else (False,)),
        _values(config, "mmap_threshold", (0, MAPPED)) if plan.device_type == "cpu" and heap_is_open() else [{}],
    ]
    for parts in product(*choices):
        merged: dict[str, Any] = {}
        for part in parts:
            merged |= part
        yield merged


def _layouts(config: ZeroConfig, plan: MemoryPlan) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Stages with the tiers and the ways to keep gathered units that each of them can have."""
    ranks = plan.resolved.shard
    given = (config.offload.optimizer, config.offload.parameters)
    free = [is_open(config, f"offload.{name}") for name in ("optimizer", "parameters")]
    kept_open = all(is_open(config, key) for key in _KEPT[0])
    # Stage 1 first: it takes no longer than stage 0, and less memory.
    stages = (1, 2, 3, 0) if is_open(config, "stage") else (config.stage,)
    # A pair that a user has set may be another one.
    for stage, tiers in product(stages, dict.fromkeys((*_TIERS, given))):
        if any(not each and tier != own for each, tier, own in zip(free, tiers, given, strict=True)):
            continue
        if not _possible(config, plan.device_type, stage, tiers, ranks):
            continue
        offload = dict(zip(("offload.optimizer", "offload.parameters"), tiers, strict=True))
        kept = _KEPT if stage == 3 and ranks > 1 and tiers[1] == "none" and kept_open else _KEPT[:1]
        for each in kept:
            yield stage, offload, {} if not kept_open else each


def _possible(config: ZeroConfig, device_type: str, stage: int, tiers: tuple[str, str], ranks: int) -> bool:
    if tiers[1] != "none" and stage != 3:
        return False
    if "cpu" in tiers and device_type == "cpu" and is_open(config, "offload.optimizer"):
        return False  # the same memory
    if "nvme" in tiers and not config.offload.nvme_path:
        return False
    # A rank alone divides nothing: stages differ by what tiers they allow.
    return ranks > 1 or not is_open(config, "stage") or stage == (3 if tiers[1] != "none" else 0)


def _values(config: ZeroConfig, key: str, values: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [{key: value} for value in values] if is_open(config, key) else [{}]


def pinned(config: ZeroConfig, settings: Mapping[str, Any]) -> ZeroConfig:
    """A config with chosen settings, whose origin says so."""
    found = deepcopy(config)
    for key, value in settings.items():
        owner, _, name = key.rpartition(".")
        section: Any = found
        for part in filter(None, owner.split(".")):
            section = getattr(section, part)
        section.record(name, value, CHOSEN)
    found.auto.record("enabled", False, CHOSEN)
    return found


def _changed(asked: ZeroConfig, plan: MemoryPlan, settings: Mapping[str, Any], accumulation: int) -> MemoryPlan:
    chosen = pinned(asked, settings)
    return replace(
        plan, resolved=resolve(chosen, plan.resolved.world_size), offload=Offload.of(chosen.offload),
        accumulation=accumulation, snapshots=plan.snapshots and chosen.checkpoint.asynchronous,
    )  # fmt: skip


def _with_unplanned(plan: MemoryPlan, settings: Mapping[str, Any]) -> MemoryPlan:
    config = pinned(plan.resolved.config, {key: settings[key] for key in _UNPLANNED if key in settings})
    return replace(plan, resolved=replace(plan.resolved, config=config))
