"""The suites that train: step time, scaling over ranks, memory with elements sent."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks import footprint
from benchmarks.contenders import REGIMES, Workload, note
from benchmarks.footprint import Footprint
from benchmarks.ratios import TURNS, Ratio, bootstrap, round_ratio
from benchmarks.step import Pair, Plan, compare, default_pairs, overhead
from benchmarks.suite import Options, Row, Suite, exact, joined, row_of, rows_of

_QUICK = {"model": "transformer-tiny", "batch": 2, "length": 16}


def workload(options: Options, regime: str, precision: str) -> Workload:
    """Model that a regime trains, with fused AdamW and clipping by norm."""
    return Workload(**(_QUICK if options.quick else REGIMES[regime]), precision=precision)


def plan_of(options: Options, work: Workload) -> Plan:
    return Plan(work, options.rounds, 1 if options.quick else 2, 1 if options.quick else 2, threads=1)


def pairs_of(options: Options, stages: tuple[int, ...]) -> list[Pair]:
    """(ours, peer)."""
    peers = [peer for peer in ("ddp", "zero_redundancy", "fsdp2", "deepspeed") if options.wants(peer)]
    return default_pairs(peers, stages) if peers else []


def _name(case: tuple[Any, ...]) -> str:
    *what, ranks = case
    return ", ".join([*map(_said, what), f"{ranks} ranks"])


def _said(part: Any) -> str:
    """A pair, a stage, or a word."""
    return " / ".join(part) if isinstance(part, tuple) else f"zero{part}" if isinstance(part, int) else str(part)


def step_row(suite: str, options: Options, pair: Pair, work: Workload, what: str, ranks: int) -> Row:
    """The peer's step over ours."""
    ours, peer = pair
    found = compare((peer, ours), plan_of(options, work), ranks, options.timeout)
    differ = "" if found["same_training"] else f"losses differ by {found['loss_difference']:.2g}"
    details = {"workload": asdict(work), "ranks": ranks, "rounds": found["rounds"]}
    notes = joined([*found["notes"], differ])
    ratio = Ratio(**found["ratio"])
    seconds = found["seconds_b"], found["seconds_a"]
    return row_of(suite, what, peer, ratio, *seconds, "s", note=notes, details=details)


def step(options: Options) -> list[Row]:
    """Every stage against the peers nearest to it, and our engine against its parts."""
    settings = list(itertools.product(options.regimes, options.precisions, options.ranks))

    def against(case: tuple[Pair, str, str, int]) -> list[Row]:
        pair, regime, precision, ranks = case
        what = f"step, {pair[0]}, {regime}, {precision}, {ranks} ranks"
        return [step_row("step", options, pair, workload(options, regime, precision), what, ranks)]

    cases = [(pair, *setting) for setting in settings for pair in pairs_of(options, options.stages)]
    engines = [(stage, *setting) for setting in settings for stage in options.stages]
    rows = rows_of("step", options, cases, _name, against)
    return rows + rows_of("overhead", options, engines, _name, partial(_against_parts, options))


def _against_parts(options: Options, case: tuple[int, str, str, int]) -> list[Row]:
    stage, regime, precision, ranks = case
    found = overhead(stage, plan_of(options, workload(options, regime, precision)), ranks, options.timeout)
    share = found["overhead"]
    gloo = found["overhead_beside_gloo"]
    said = f"overhead {100 * share['median']:.1f} % ({100 * share['low']:.1f} - {100 * share['high']:.1f})"
    said += f", with gloo's collectives {100 * gloo['median']:.1f} %"
    what = f"parts of a step, zero{stage}, {regime}, {precision}, {ranks} ranks"
    ratio, parts = Ratio(**found["parts_over_step"]), sum(found["parts"].values())
    return [row_of("step", what, "parts", ratio, found["step"], parts, "s", note=said, details=found)]


def scaling(options: Options) -> list[Row]:
    """Steps with the same rows per rank at 1, 2 and 4 ranks."""
    work = workload(options, "balanced", options.precisions[0])

    def against(case: tuple[Pair, int]) -> list[Row]:
        pair, ranks = case
        what = f"step, {pair[0]}, balanced, {work.precision}, {ranks} ranks"
        return [step_row("scaling", options, pair, work, what, ranks)]

    stages = tuple(stage for stage in options.stages if stage in (1, 3))
    cases = [(pair, ranks) for ranks in (1, 2, 4) for pair in pairs_of(options, stages)]
    return rows_of("scaling", options, cases, _name, against)


def memory(options: Options) -> list[Row]:
    """Growth of the process and elements sent, each contender alone in fresh processes; ours against the table."""
    contenders = [*pairs_of(options, options.stages), *((f"zero{stage}", "table") for stage in options.stages)]
    settings = itertools.product(options.precisions, options.ranks)
    cases = [(pair, *setting) for setting in settings for pair in contenders]
    return rows_of("memory", options, cases, _name, partial(_footprints, options))


def _footprints(options: Options, case: tuple[Pair, str, int]) -> list[Row]:
    (ours, peer), precision, ranks = case
    work = workload(options, "compute", precision)
    if peer == "table":
        return _against_table(int(ours[-1]), work, ranks, options)
    where, sent = f"{ours}, {work.precision}, {ranks} ranks", list[int]()
    notes = joined(note(name, work) for name in (ours, peer))
    rows = []
    for default_heap in (False, True):
        rounds = [_turns(ours, peer, work, ranks, options, default_heap) for _ in range(min(options.rounds, 3))]
        found = {name: [one for turns in rounds for turn, one in turns if turn == name] for name in (ours, peer)}
        details = {"workload": asdict(work)} | {name: [asdict(one) for one in each] for name, each in found.items()}
        sent = [found[name][0].sent for name in (ours, peer)]
        measured = [("held between steps", "held")] * (not default_heap)
        peak = "peak of a step" + ", glibc's heap as it is" * default_heap
        for what, key in ((peak, "peak"), *measured):
            # A tiny model may grow by nothing.
            ratio = bootstrap([round_ratio([[max(getattr(one, key), 1.0)] for _, one in turns]) for turns in rounds])
            mine, theirs = (statistics.median(getattr(one, key) for one in found[name]) for name in (ours, peer))
            said = f"{what}, {where}"
            rows.append(row_of("memory", said, peer, ratio, mine, theirs, "bytes", note=notes, details=details))
    if ranks > 1:
        rows.append(exact("memory", f"sent per step, {where}", peer, sent[0], sent[1], "elements"))
    return rows


def _turns(
    ours: str, peer: str, work: Workload, ranks: int, options: Options, default_heap: bool
) -> list[tuple[str, Footprint]]:
    """One round: peer, ours, ours, peer."""
    names = [peer if turn == "A" else ours for turn in TURNS]
    return [(name, footprint.measure(name, work, ranks, options.timeout, default_heap)) for name in names]


def _against_table(stage: int, work: Workload, ranks: int, options: Options) -> list[Row]:
    """Figures of the design's table for sent and held elements."""
    found = footprint.measure(f"zero{stage}", work, ranks, options.timeout)
    parameters = footprint.elements_of(work)
    where = f"zero{stage}, {work.precision}, {ranks} ranks"
    state = footprint.table_bytes(stage, parameters, ranks, work)
    rows = [exact("memory", f"persistent state, {where}", "table", found.state, state, "bytes")]
    if ranks > 1:
        elements = footprint.table_elements(stage, parameters, ranks, work.accumulation)
        rows.append(exact("memory", f"sent per step, {where}", "table", found.sent, elements, "elements"))
    return [replace(row, details=asdict(found)) for row in rows]


SUITES = (
    Suite("step", "step time by stage, regime and precision against each peer, and the engine's overhead", step),
    Suite("scaling", "step time at 1, 2 and 4 ranks", scaling),
    Suite("memory", "memory of a process and elements sent per step, each contender by itself", memory),
)
