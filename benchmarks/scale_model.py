"""The time of a training step at N ranks: predicted by a model, whose parameters may be measured here.

    python -m benchmarks.scale_model --model gpt-7b --gpus 8,64,512,4096 --plot scale.png
    python -m benchmarks.scale_model --measure --json fitted.json        # what this machine says of the model
    python -m benchmarks.scale_model --fitted fitted.json                # its overhead per unit, on GPUs

Predicts stages 1 to 3 (3 also with parameters kept until the step), hybrid sharding (copies x rows) and a pipeline, on
GPUs whose figures are printed with their sources. Every GPU has the same number of tokens, however many there are.
--measure times collectives and steps on gloo ranks here, fits latency, bandwidth, overlap and overhead to two ranks,
and says how far that is off at four. How a step is put together: benchmarks/scale/steps.py; what collectives cost:
benchmarks/scale/collectives.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.scale.fitting import (
    CollectiveTime,
    collective_seconds,
    crowded,
    crowding,
    error,
    fit_machine,
    stretched,
)
from benchmarks.scale.hardware import PRESETS, Machine
from benchmarks.scale.layouts import LAYOUTS, MODELS, gpt, layout_of
from benchmarks.scale.measuring import Measured, MeasurePlan, measure
from benchmarks.scale.picture import draw
from benchmarks.scale.steps import Prediction, Workload, predict
from zero_strategy.runtime.terminal import table

GPUS = tuple(2**power for power in range(3, 13))
_FITTED = 2
"""Ranks that the model is fitted to."""


@dataclass(frozen=True)
class Check:
    """Prediction of the model for a measurement that it has not seen; seconds."""

    what: str
    ranks: int
    predicted: float
    measured: float


def predictions(options: argparse.Namespace, workload: Workload, machine: Machine) -> list[Prediction]:
    """Of all layouts at all numbers of ranks."""
    found = []
    for ranks in options.gpus:
        for name in options.layouts:
            layout = layout_of(
                name, ranks, workload, machine,
                shard=options.hybrid_shard, stages=options.pipeline_stages, schedule=options.schedule,
                micro_batches=options.pipeline_micro_batches,
            )  # fmt: skip
            if layout is not None:
                found.append(predict(workload, layout, machine))
    return found


def fit_and_check(plan: MeasurePlan, worlds: Sequence[int]) -> tuple[Machine, list[Check], dict[int, Measured]]:
    """Measures on each number of ranks, fits to the first, and holds the model against all."""
    from tests.launcher import RankPool  # only here: predictions need no ranks

    measured: dict[int, Measured] = {}
    for ranks in worlds:
        pool = RankPool(ranks)
        try:
            measured[ranks] = pool.run(measure, (plan,), timeout=600.0)[0]
        finally:
            pool.close()
    first = measured[worlds[0]]
    machine = fit_machine(first.collectives, first.steps, "here", ranks_per_host=max(worlds))
    return machine, [check for ranks in worlds for check in _checks(machine, first, measured[ranks], ranks)], measured


def _checks(machine: Machine, first: Measured, measured: Measured, ranks: int) -> list[Check]:
    """Computation is taken from the first measurement, and stretched where ranks share cores."""
    cores = os.cpu_count() or 1
    here, by = crowded(machine, ranks, cores), crowding(ranks, cores)
    checks = [
        Check(f"{one.kind} {one.nbytes >> 10} KiB", ranks, collective_seconds(here, *_of(one)), one.seconds)
        for one in measured.collectives
    ]
    for one, known in zip(measured.steps, stretched(first.steps, measured.steps, by), strict=True):
        name = f"step, stage {one.stage}, {one.units} units"
        checks.append(Check(name, ranks, known.predicted(here).step, one.seconds))
    return checks


def _of(one: CollectiveTime) -> tuple[str, int, int]:
    return one.kind, one.ranks, one.nbytes


def show_fit(machine: Machine, checks: Sequence[Check]) -> str:
    """Parameters that were fitted, and their error."""
    speed = machine.within.bandwidth / 1e9
    lines = [
        f"fitted to {_FITTED} gloo ranks on {os.cpu_count()} cores: latency {1e6 * machine.within.latency:.0f} us, "
        f"{speed:.2f} GB/s, {1e9 * machine.add:.3f} ns to add a byte, overlap {machine.overlap:.2f}, "
        f"{1e6 * machine.unit_overhead:.0f} us per unit and pass, {1e3 * machine.step_overhead:.2f} ms per step",
        "",
    ]
    rows = [
        (check.what, check.ranks, f"{1e3 * check.predicted:.3f}", f"{1e3 * check.measured:.3f}", _percent(check))
        for check in checks
    ]
    lines.append(table(rows, ("what", "ranks", "model, ms", "measured, ms", "off"), right=(1, 2, 3, 4)))
    for ranks in sorted({check.ranks for check in checks}):
        for steps in (False, True):
            own = [c for c in checks if c.ranks == ranks and c.what.startswith("step") == steps]
            middle, most = error([(check.predicted, check.measured) for check in own])
            seen = "fitted" if ranks == _FITTED else "predicted"
            what = "steps" if steps else "collectives"
            lines.append(f"{ranks} ranks, {what}, {seen}: median error {middle:.0%}, largest {most:.0%}")
    return "\n".join(lines)


def _percent(check: Check) -> str:
    return f"{check.predicted / check.measured - 1:+.0%}"


def assumptions(workload: Workload, machine: Machine, origin: str) -> list[str]:
    """All that the predictions rest on, in words."""
    state = "run again in backward" if workload.recompute else "kept"
    return [
        f"model: {workload.name}, {workload.parameters / 1e9:.2f}e9 parameters in {workload.units} equal units, rows "
        f"of {workload.sequence} tokens; bf16 weights ({workload.parameter_bytes} bytes), gradients reduced in "
        f"{workload.gradient_bytes} bytes, fp32 master weights and two moments",
        f"work: {workload.tokens:.0f} tokens per GPU and step at every size (weak scaling) in {workload.micro_batches} "
        f"micro-batch(es), activations {state}; 6 P + 12 layers x hidden x sequence operations per token",
        f"machine: {machine.name}, {machine.ranks_per_host} GPUs per host",
        *machine.sources,
        f"assumed: computation reaches {machine.compute_efficiency:.0%} of the peak, the optimizer "
        f"{machine.memory_efficiency:.0%} of the memory's bandwidth, large messages {machine.link_efficiency:.0%} of "
        f"the links'; {machine.overlap:.0%} of what can be hidden is",
        f"host: {1e6 * machine.unit_overhead:.0f} us per unit and pass, hidden while the device is busy longer; "
        f"{1e3 * machine.step_overhead:.1f} ms per step ({origin})",
        "collectives: rings for all-gather and reduce-scatter; the quicker of ring and double binary tree for "
        "all-reduce (benchmarks/scale/collectives.py); the ranks of a host use all its network ports together",
        "the first gather and the last reduction of a pass, and the all-gather of parameters after a step at stages 1 "
        "and 2, have nothing beside them",
        "zero3-kept: stage 3 with reshard_after_backward: false, which holds what stage 2 does",
        "hybrid: stage 3 in rows of a host, doubled until the state has room (or --hybrid-shard); copies of the rows "
        "all-reduce their slices",
        "pipeline: stage 1 in each lane; as many stages as the state needs; equal stages; the schedule simulated by "
        "zero_strategy.pipeline, with four micro-batches per stage (or --pipeline-micro-batches)",
        "not modelled: stragglers, congestion, topology above the host, data loading, checkpoints, activation memory",
    ]


def show(found: Sequence[Prediction], machine: Machine) -> str:
    """The table."""
    rows = [
        (
            one.layout.ranks, one.layout.name, f"{one.step:.3f}", f"{one.compute:.3f}", f"{one.optimizer:.4f}",
            f"{one.communication:.3f}", f"{one.exposed:.3f}", f"{one.bubble:.3f}", f"{one.overhead:.4f}",
            f"{one.tokens_per_second:,.0f}", f"{one.utilization:.1%}", _memory(one, machine),
        )
        for one in found
    ]  # fmt: skip
    header = (
        "GPUs", "layout", "step, s", "compute", "update", "messages", "exposed", "bubble", "host", "tokens/s/GPU",
        "of peak", "state, GB",
    )  # fmt: skip
    return table(rows, header, right=(0, *range(2, len(header))))


def _memory(one: Prediction, machine: Machine) -> str:
    return f"{one.state_bytes / 1e9:.1f}" + (" (too much)" if one.state_bytes > machine.memory_bytes else "")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LAYOUTS:
            raise argparse.ArgumentTypeError(f"{name!r}: there are {', '.join(LAYOUTS)}")
    return names


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("what is trained")
    model.add_argument("--model", choices=tuple(MODELS), default="gpt-7b")
    model.add_argument("--layers", type=int, help="instead of the model's")
    model.add_argument("--hidden", type=int, help="instead of the model's")
    model.add_argument("--sequence", type=int, default=4096, help="tokens of a row (default: %(default)s)")
    model.add_argument("--tokens-per-gpu", type=int, default=16384, help="in a step (default: %(default)s)")
    model.add_argument("--micro-batches", type=int, default=1, help="in a step (default: %(default)s)")
    model.add_argument("--recompute", action="store_true", help="layers are run again in backward")
    where = parser.add_argument_group("on what")
    where.add_argument("--hardware", choices=tuple(PRESETS), default="h100-sxm")
    where.add_argument("--gpus", type=_numbers, default=list(GPUS), help="default: 8, 16, ..., 4096")
    for name, what in (
        ("compute-efficiency", "part of the peak that computation reaches"),
        ("link-efficiency", "part of the links' bandwidth that messages reach"),
        ("overlap", "part of the hideable communication that is hidden"),
        ("network-gbps", "gigabits per second of a GPU's network port"),
    ):
        where.add_argument(f"--{name}", type=float, help=f"{what} (default: the hardware's)")
    how = parser.add_argument_group("how it is shared")
    how.add_argument("--layouts", type=_names, default=list(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    how.add_argument("--hybrid-shard", type=int, help="mesh.shard (default: a host, doubled until state fits)")
    how.add_argument("--pipeline-stages", type=int, help="default: 2, doubled until state fits")
    how.add_argument("--pipeline-micro-batches", type=int, default=0, help="default: 4 per stage")
    how.add_argument("--schedule", default="1f1b", help="of the pipeline (default: %(default)s)")
    fit = parser.add_argument_group("measurements")
    fit.add_argument("--measure", action="store_true", help="time gloo ranks here, fit the model to two, check at four")
    fit.add_argument("--quick", action="store_true", help="with small models and few repeats")
    fit.add_argument("--fitted", type=Path, help="what --measure --json wrote: its overheads are used")
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    answer.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG (needs matplotlib)")
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    """Options of the command line."""
    layers, hidden = MODELS[options.model]
    layers, hidden = options.layers or layers, options.hidden or hidden
    name = options.model if (layers, hidden) == MODELS[options.model] else f"gpt of {layers} layers, width {hidden}"
    return gpt(
        name, layers, hidden, sequence=options.sequence, tokens=options.tokens_per_gpu,
        micro_batches=options.micro_batches, recompute=options.recompute,
    )  # fmt: skip


def machine_of(options: argparse.Namespace) -> Machine:
    """The hardware, with what the command line changes of it."""
    machine = PRESETS[options.hardware]
    changed = {
        name: getattr(options, name)
        for name in ("compute_efficiency", "link_efficiency", "overlap")
        if getattr(options, name) is not None
    }
    if options.network_gbps is not None:
        changed["between"] = replace(machine.between, bandwidth=options.network_gbps / 8 * 1e9)
        changed["sources"] = (*machine.sources, f"network: {options.network_gbps:g} Gb/s per GPU, as asked for")
    return replace(machine, **changed)


def with_overheads(machine: Machine, fitted: Mapping[str, float]) -> Machine:
    """The machine with the fitted cost of this package's own code: what links and cores here do says nothing of it."""
    return replace(machine, unit_overhead=fitted["unit_overhead"], step_overhead=fitted["step_overhead"])


QUICK = MeasurePlan(nbytes=(1 << 12, 1 << 18), repeats=3, depths=(1, 2), width=64, length=16, stages=(1, 3), steps=2)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure if asked to, predict, print, write; returns what is written as JSON."""
    options = parse(arguments)
    workload, machine = workload_of(options), machine_of(options)
    report: dict[str, Any] = {}
    origin = "assumed; --measure or --fitted takes what was measured"
    if options.measure:
        here, checks, measured = fit_and_check(QUICK if options.quick else MeasurePlan(), (_FITTED, 4))
        print(show_fit(here, checks), end="\n\n")
        report["fitted"] = {name: getattr(here, name) for name in ("unit_overhead", "step_overhead", "overlap", "add")}
        report["fitted"] |= asdict(here.within)
        report["checks"] = [asdict(check) for check in checks]
        report["measured"] = {str(ranks): asdict(one) for ranks, one in measured.items()}
        machine, origin = with_overheads(machine, report["fitted"]), "as measured just now"
    elif options.fitted is not None:
        known = json.loads(options.fitted.read_text())["fitted"]
        machine, origin = with_overheads(machine, known), f"from {options.fitted}"
    found = predictions(options, workload, machine)
    said = assumptions(workload, machine, origin)
    print("\n".join(f"- {line}" for line in said), end="\n\n")
    print(show(found, machine))
    report |= {"assumptions": said, "workload": asdict(workload), "machine": asdict(machine)}
    report["predictions"] = [asdict(one) for one in found]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    if options.plot is not None:
        title = f"{workload.name} on {machine.name}, {workload.tokens:.0f} tokens per GPU"
        draw(found, title, machine.memory_bytes, options.plot)
    return report


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error_:
        sys.exit(f"scale_model: {error_}")
