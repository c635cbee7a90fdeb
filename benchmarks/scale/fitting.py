"""Parameters of the model from measurements, by least squares of relative errors.

Collectives: seconds = turns x latency + bytes sent / bandwidth + bytes added x add, where ranks exchange their slices
on one host; of N ranks a gather has N - 1 turns, in which (N - 1)/N of the bytes are sent. What starting one costs is
part of the latency: with one number of ranks the two cannot be told apart.

Steps: what was measured, less computation and collectives one after the other, is
passes over units x overhead + overhead of a step - overlap x what could be hidden.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.collectives import Link
from benchmarks.scale.hardware import Machine
from benchmarks.scale.steps import Compute, Layout, Prediction, Workload, predict

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CollectiveTime:
    """One measurement: the least of the slowest rank's, of `nbytes` in all."""

    kind: str
    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """One measurement: a step, and what its parts take by themselves on as many ranks at once; seconds."""

    stage: int
    ranks: int
    units: int
    parameters: int
    tokens: int
    forward: float
    backward: float
    optimizer: float
    seconds: float

    def workload(self) -> Workload:
        """Settings of the training: in float32, one micro-batch."""
        layers = self.units - 1
        return Workload("measured", self.parameters, self.units, layers, 0, 0, self.tokens, parameter_bytes=4)

    def predicted(self, machine: Machine) -> Prediction:
        """Prediction of the model for it."""
        layout = Layout(f"zero{self.stage}", self.stage, self.ranks, self.ranks)
        return predict(self.workload(), layout, machine, Compute(self.forward, self.backward, self.optimizer))


def fit_machine(
    collectives: Sequence[CollectiveTime], steps: Sequence[StepTime], name: str, ranks_per_host: int
) -> Machine:
    """The machine that was measured. Its peaks are not known: predictions take measured computation.

    Raises:
        ValueError: If a kind of collective is unknown, or there are fewer measurements than parameters.
    """
    latency, seconds_per_byte, add = fit_collectives(collectives)
    link = Link(latency, 1 / seconds_per_byte if seconds_per_byte else math.inf)
    bare = Machine(
        name=name,
        peak_flops=math.inf,
        compute_efficiency=1.0,
        memory_bytes=math.inf,
        memory_bandwidth=math.inf,
        memory_efficiency=1.0,
        ranks_per_host=ranks_per_host,
        within=link,
        between=link,
        add=add,
        overlap=0.0,
        asynchronous=False,
    )
    unit, step, overlap = fit_steps(bare, steps)
    return replace(bare, unit_overhead=unit, step_overhead=step, overlap=overlap)


def fit_collectives(times: Sequence[CollectiveTime]) -> tuple[float, float, float]:
    """Latency of a turn (seconds), seconds of a byte on its way, seconds to add a byte."""
    rows = [_collective_row(one) for one in times]
    found = least_squares(rows, [one.seconds for one in times])
    return found[0], found[1], found[2]


def _collective_row(one: CollectiveTime) -> list[float]:
    if one.kind not in KINDS:
        raise ValueError(f"collective {one.kind!r}: there are {', '.join(KINDS)}")
    turns, share = one.ranks - 1, (one.ranks - 1) / one.ranks * one.nbytes
    there = 2 if one.kind == "all_reduce" else 1
    return [there * turns, there * share, 0.0 if one.kind == "all_gather" else share]


def fit_steps(machine: Machine, steps: Sequence[StepTime]) -> tuple[float, float, float]:
    """Seconds of the host per pass of a unit and per step, and the part of the communication that is hidden."""
    apart = replace(machine, overlap=0.0, unit_overhead=0.0, step_overhead=0.0, asynchronous=False)
    together = replace(apart, overlap=1.0)
    rows, left = [], []
    for one in steps:
        serial = one.predicted(apart).step
        rows.append([2.0 * one.units, 1.0, one.predicted(together).step - serial])
        left.append(one.seconds - serial)
    found = least_squares(rows, left, [one.seconds for one in steps], most=(math.inf, math.inf, 1.0))
    return found[0], found[1], found[2]


def least_squares(
    rows: Sequence[Sequence[float]],
    target: Sequence[float],
    scale: Sequence[float] | None = None,
    most: Sequence[float] | None = None,
) -> list[float]:
    """The x between 0 and `most` for which sum(((rows x - target) / scale)^2) is least.

    Every bound is tried active and inactive: exact, for a handful of parameters.

    Args:
        rows: A row for each measurement.
        target: Of each.
        scale: Of each; None: the target, so that errors are relative.
        most: Of each parameter; None: any.

    Raises:
        ValueError: If there are fewer measurements than parameters.
    """
    matrix, wanted = np.array(rows, dtype=np.float64), np.array(target, dtype=np.float64)
    count = matrix.shape[1] if matrix.ndim == 2 else 0
    if len(wanted) < max(count, 1):
        raise ValueError(f"{len(wanted)} measurements do not determine {count} parameters; measure more of them")
    weight = 1 / np.array(target if scale is None else scale, dtype=np.float64)
    matrix, wanted = matrix * weight[:, None], wanted * weight
    bounds = [math.inf] * count if most is None else list(most)
    best: tuple[float, Floats] | None = None
    for states in itertools.product(*((None, 0.0) if bound == math.inf else (None, 0.0, bound) for bound in bounds)):
        found = np.array([0.0 if state is None else state for state in states])
        free = [index for index, state in enumerate(states) if state is None]
        if free:
            found[free] = np.linalg.lstsq(matrix[:, free], wanted - matrix @ found, rcond=None)[0]
        if np.any(found < 0) or np.any(found > bounds):
            continue
        error = float(np.sum((matrix @ found - wanted) ** 2))
        if best is None or error < best[0]:
            best = error, found
    assert best is not None  # all at zero is always possible
    return [float(one) for one in best[1]]


def stretched(steps: Sequence[StepTime], wanted: Sequence[StepTime], by: float) -> list[StepTime]:
    """The steps `wanted` with computation as measured in `steps` of the same models, and taking so much longer.

    An update grows with what a rank owns.
    """
    known = {(one.stage, one.units): one for one in steps}
    found = []
    for one in wanted:
        like = known[one.stage, one.units]
        optimizer = like.optimizer * like.ranks / one.ranks
        found.append(
            StepTime(
                one.stage, one.ranks, one.units, one.parameters, one.tokens,
                by * like.forward, by * like.backward, by * optimizer, one.seconds,
            )
        )  # fmt: skip
    return found


def crowded(machine: Machine, ranks: int, cores: int) -> Machine:
    """The machine with more ranks than cores: all of a rank's work, messages too, waits for its turn.

    Computation that was measured on other ranks is the caller's to stretch, by `crowding`.
    """
    by = crowding(ranks, cores)
    link = Link(machine.within.latency * by, machine.within.bandwidth / by)
    return replace(
        machine,
        within=link,
        between=link,
        add=machine.add * by,
        unit_overhead=machine.unit_overhead * by,
        step_overhead=machine.step_overhead * by,
    )


def crowding(ranks: int, cores: int) -> float:
    """Factor on all times."""
    return max(1.0, ranks / cores)


def error(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of (predicted, measured): median and largest relative difference."""
    off = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return statistics.median(off), max(off)


def collective_seconds(machine: Machine, kind: str, ranks: int, nbytes: float) -> float:
    """Prediction of the model for one."""
    group = machine.group(ranks)
    seconds = {
        "all_gather": group.all_gather, "reduce_scatter": group.reduce_scatter, "all_reduce": group.ring_all_reduce
    }  # fmt: skip
    return seconds[kind](nbytes)
