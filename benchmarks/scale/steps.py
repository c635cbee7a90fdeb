"""The time of a training step: computation, communication unit by unit, what is hidden of it, and the rest.

A pass over U units that each compute for c seconds and communicate for m: the first message and the last computation
have nothing beside them, in between both go on at once as far as the machine lets them:

    pass = m + c + (U - 1) (c + m - overlap min(c, m))

so overlap 0 is one after the other, and 1 the pipeline of two machines. To that comes the host's time for each unit:
added where it does the computing itself, or, where a device does, a lower bound of each term.

| stage | forward | backward | after the step |
| --- | --- | --- | --- |
| 0 | | all-reduce of gradients, with the last micro-batch | |
| 1 | | reduce-scatter, with the last micro-batch | all-gather of parameters, nothing beside it |
| 2 | | reduce-scatter, with every micro-batch | the same |
| 3 | all-gather, with every micro-batch | all-gather and reduce-scatter, with every micro-batch | |
| 3, `kept` | all-gather, with the first micro-batch | reduce-scatter, with every micro-batch | |

With copies (`mesh.replicate`) a reduce-scatter along the row is followed by an all-reduce of the slice along the
column.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scale.hardware import Machine
from zero_strategy.fsdp.layout import PLACEMENTS
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.schedules import build_table
from zero_strategy.pipeline.simulator import Times, simulate

_CONTROL_BYTES = 64
"""Of the small messages that end a backward and a norm."""


@dataclass(frozen=True)
class Workload:
    """Subject of the training.

    Attributes:
        name: Of the model.
        parameters: How many.
        units: What is gathered and reduced as one; parameters are divided among them evenly.
        layers: Of the transformer.
        hidden: Its width.
        sequence: Tokens of a row.
        tokens: Of a rank and a step.
        micro_batches: Of a rank and a step; a pipeline has its own.
        parameter_bytes: Of an element of the parameters.
        gradient_bytes: Of an element of a gradient on its way (`precision.reduce_dtype`).
        recompute: Forwards are run again in backward.
    """

    name: str
    parameters: float
    units: int
    layers: int
    hidden: int
    sequence: int
    tokens: float
    micro_batches: int = 1
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.units < 1 or self.micro_batches < 1:
            raise ValueError(f"{self.units} units and {self.micro_batches} micro-batches: at least one of each")

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: 6 P + 12 layers x hidden x sequence (Chowdhery et al., "PaLM", 2022, appendix B)."""
        return 6 * self.parameters + 12 * self.layers * self.hidden * self.sequence


@dataclass(frozen=True)
class Layout:
    """Division of the work among ranks.

    Attributes:
        name: For tables.
        stage: Of ZeRO.
        ranks: All of them.
        shard: Ranks of a row, that divide the state; the rest are copies.
        stages: Of a pipeline.
        schedule: Of the pipeline.
        micro_batches: Of a pipeline and a step; 0: four for each stage.
        kept: At stage 3 what was gathered stays until the optimizer's step.
    """

    name: str
    stage: int
    ranks: int
    shard: int
    stages: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 0
    kept: bool = False

    def __post_init__(self) -> None:
        if self.stage not in PLACEMENTS:
            raise ValueError(f"stage {self.stage}: there are {', '.join(map(str, PLACEMENTS))}")
        if min(self.ranks, self.shard, self.stages) < 1 or self.ranks % (self.shard * self.stages):
            raise ValueError(f"{self.ranks} ranks are not copies of {self.stages} stages x {self.shard} ranks")
        if self.stages > 1 and self.stage > 1:
            raise ValueError(f"stage {self.stage} in a pipeline reduces per micro-batch; modelled are 0 and 1")
        if self.kept and self.stage != 3:
            raise ValueError(f"kept at stage {self.stage}: parameters are gathered at stage 3 alone")

    @property
    def replicate(self) -> int:
        """Copies of the state."""
        return self.ranks // (self.shard * self.stages)

    @property
    def pipeline_micro_batches(self) -> int:
        """Of a pipeline and a step."""
        return self.micro_batches or 4 * self.stages


@dataclass(frozen=True)
class Compute:
    """Seconds of a rank and a step.

    Attributes:
        forward: Of all micro-batches.
        backward: The same.
        optimizer: Of the update of what the rank owns.
    """

    forward: float
    backward: float
    optimizer: float


@dataclass(frozen=True)
class Prediction:
    """A step, in seconds.

    Attributes:
        layout: Of which.
        compute: Forward and backward.
        optimizer: The update.
        communication: All of it, hidden or not.
        exposed: What nothing was beside.
        bubble: Of a pipeline.
        overhead: Of the host.
        step: The sum of all but `communication`.
        state_bytes: Persistent model state of a rank.
        tokens_per_second: Of a rank.
        utilization: Operations of the model per second over the device's peak.
    """

    layout: Layout
    compute: float
    optimizer: float
    communication: float
    exposed: float
    bubble: float
    overhead: float
    step: float
    state_bytes: float
    tokens_per_second: float
    utilization: float


@dataclass(frozen=True)
class Pass:
    """Some passes over units: of each unit, seconds of computation and communication, and whether it costs the host."""

    units: float
    compute: float
    communication: float
    times: int = 1
    hooks: bool = True

    def seconds(self, machine: Machine, overhead: float) -> float:
        """With so many seconds of the host for a unit."""
        c, m = self.compute, self.communication
        beside = c + m - machine.overlap * min(c, m)
        own = overhead if self.hooks else 0.0
        if machine.asynchronous:
            one = max(c + m, own) + (self.units - 1) * max(beside, own)
        else:
            one = c + m + (self.units - 1) * beside + self.units * own
        return self.times * one


def predict(workload: Workload, layout: Layout, machine: Machine, compute: Compute | None = None) -> Prediction:
    """A step.

    Args:
        workload: What is trained.
        layout: By whom.
        machine: On what.
        compute: Seconds that were measured; None: by the machine's figures.
    """
    known = compute_of(workload, layout, machine) if compute is None else compute
    if layout.stages > 1:
        return _pipeline(workload, layout, machine, known)
    passes = passes_of(workload, layout, machine, known)
    control = (workload.micro_batches + 1) * machine.group(layout.ranks).all_reduce(_CONTROL_BYTES)
    busy = known.forward + known.backward
    bare = sum(one.seconds(machine, 0.0) for one in passes)
    whole = sum(one.seconds(machine, machine.unit_overhead) for one in passes)
    communication = sum(one.times * one.units * one.communication for one in passes) + control
    return _made(
        workload, layout, machine, known, communication,
        exposed=bare - busy + control, bubble=0.0, overhead=whole - bare + machine.step_overhead,
    )  # fmt: skip


def compute_of(workload: Workload, layout: Layout, machine: Machine) -> Compute:
    """By the machine's peaks: backward is two forwards, three with `recompute`; the update is bound by memory."""
    forward = workload.tokens * workload.flops_per_token / 3 / (machine.peak_flops * machine.compute_efficiency)
    owned = workload.parameters / layout.stages / (layout.shard if layout.stage else 1)
    # Moments and master weights read and written, the gradient read, and the low-precision copy written.
    moved = 28 + (workload.parameter_bytes if workload.parameter_bytes < 4 else 0)
    update = owned * moved / (machine.memory_bandwidth * machine.memory_efficiency)
    return Compute(forward, (3 if workload.recompute else 2) * forward, update)


def passes_of(workload: Workload, layout: Layout, machine: Machine, compute: Compute) -> list[Pass]:
    """Of a step without a pipeline."""
    units, times, placement = workload.units, workload.micro_batches, PLACEMENTS[layout.stage]
    forward, backward = compute.forward / times / units, compute.backward / times / units
    gather, reduce = messages_of(workload, layout, machine)
    first = gather if placement.shard_parameters else 0.0
    before = 0.0 if layout.kept else first
    passes = [Pass(units, forward, first), Pass(units, forward, before, times - 1)]
    if placement.shard_gradients:
        passes.append(Pass(units, backward, before + reduce, times))
    else:
        passes += [Pass(units, backward, 0.0, times - 1), Pass(units, backward, reduce)]
    if placement.shard_optimizer and not placement.shard_parameters:
        passes.append(Pass(units, 0.0, gather, hooks=False))
    return passes


def messages_of(workload: Workload, layout: Layout, machine: Machine) -> tuple[float, float]:
    """Seconds to gather a unit's parameters, and to reduce its gradients."""
    row = machine.group(layout.shard)
    column = machine.group(layout.replicate, stride=layout.shard)
    elements = workload.parameters / workload.units
    nbytes = elements * workload.gradient_bytes
    if layout.stage == 0:
        return 0.0, machine.group(layout.shard * layout.replicate).all_reduce(nbytes)
    reduce = row.reduce_scatter(nbytes) + column.all_reduce(nbytes / layout.shard)
    return row.all_gather(elements * workload.parameter_bytes), reduce


def _pipeline(workload: Workload, layout: Layout, machine: Machine, compute: Compute) -> Prediction:
    """The schedule is simulated; gradients are reduced beside the last backward, parameters gathered alone.

    PipelinePeers in a pipeline are as far apart as a stage has ranks, as in this package's topology.
    """
    count, units = layout.pipeline_micro_batches, workload.units / layout.stages
    own = units * machine.unit_overhead
    forward, backward = compute.forward / count, compute.backward / count
    taken = [max(one, own) if machine.asynchronous else one + own for one in (forward, backward)]
    rows = workload.tokens * layout.stages / count
    pair = machine.group(2, stride=layout.ranks // layout.stages)
    message = pair.message(rows * workload.hidden * workload.parameter_bytes)
    times = Times(forward=taken[0], backward=taken[1] / 2, weight=taken[1] / 2, latency=message)
    makespan = simulate(lower(build_table(layout.schedule, layout.stages, count)), times).makespan
    gather, reduce = messages_of(workload, layout, machine)
    last = Pass(units, backward / units, reduce)
    control = machine.group(layout.ranks).all_reduce(_CONTROL_BYTES)
    exposed = last.seconds(machine, 0.0) - backward + units * gather + 2 * control
    busy = count * sum(taken)
    return _made(
        workload, layout, machine, compute, units * (gather + reduce) + 2 * control + 2 * count * message,
        exposed=exposed, bubble=makespan - busy,
        overhead=busy - compute.forward - compute.backward + machine.step_overhead,
    )  # fmt: skip


def _made(
    workload: Workload,
    layout: Layout,
    machine: Machine,
    compute: Compute,
    communication: float,
    *,
    exposed: float,
    bubble: float,
    overhead: float,
) -> Prediction:
    busy = compute.forward + compute.backward
    step = busy + compute.optimizer + exposed + bubble + overhead
    speed = workload.tokens / step
    return Prediction(
        layout=layout,
        compute=busy,
        optimizer=compute.optimizer,
        communication=communication,
        exposed=exposed,
        bubble=bubble,
        overhead=overhead,
        step=step,
        state_bytes=state_bytes(workload, layout),
        tokens_per_second=speed,
        utilization=speed * workload.flops_per_token / machine.peak_flops,
    )


def state_bytes(workload: Workload, layout: Layout) -> float:
    """Persistent bytes of a rank: parameters, fp32 gradients, two moments, and master weights of low-precision ones.

    Stage 1 keeps whole gradients where some wait for later micro-batches. Where parameters are kept, memory is, too.
    """
    placement, elements = PLACEMENTS[layout.stage], workload.parameters / layout.stages
    waits = not placement.shard_gradients and (layout.stages > 1 or workload.micro_batches > 1)
    sliced = placement.shard_optimizer and not waits
    optimizer = 8 if workload.parameter_bytes >= 4 else 12
    return elements * (
        workload.parameter_bytes / (layout.shard if placement.shard_parameters and not layout.kept else 1)
        + 4 / (layout.shard if sliced else 1)
        + optimizer / (layout.shard if placement.shard_optimizer else 1)
    )
