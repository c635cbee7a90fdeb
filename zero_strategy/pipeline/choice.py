"""`schedule: auto`: the fastest schedule whose activations fit, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.registry import SCHEDULES, build_table
from zero_strategy.pipeline.simulator import Times, simulate
from zero_strategy.pipeline.timeline import Timeline

Bounds = Callable[[int], Sequence[int]]
"""From a number of stages to where each of them begins among the layers, and the end: one number more than stages."""

_EQUAL = 1.01
"""Makespans that differ by less than this factor count as equal: the measurement is not better."""


@dataclass(frozen=True)
class LayerCost:
    """What a micro-batch costs in a layer, as measured.

    Attributes:
        forward: Seconds of its forward.
        backward: Seconds of the input half of its backward.
        weight: Seconds of the weight half.
        whole: Seconds of a backward in one piece; None: the sum of the halves.
        activation_bytes: What it keeps from the forward for the backward.
    """

    forward: float
    backward: float
    weight: float
    whole: float | None = None
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class Choice:
    """A schedule, and what is expected of it.

    Attributes:
        schedule: Its name.
        chunks: Stages of each rank.
        makespan: Seconds of a step's computations.
        idle: Mean fraction of that in which a rank has nothing to do.
        activation_bytes: The most that each rank holds at once.
    """

    schedule: str
    chunks: int
    makespan: float
    idle: float
    activation_bytes: tuple[float, ...]


def choose_schedule(
    stages: int,
    micro_batches: int,
    layers: Sequence[LayerCost],
    bounds: Bounds,
    memory: float | Sequence[float] | None = None,
    *,
    chunks: int | None = None,
    latency: float = 0.0,
    most_chunks: int = 4,
) -> Choice:
    """The schedule with the shortest step among those whose activations fit; of equally fast ones, which holds least.

    Args:
        stages: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.
        layers: What each layer costs, in order.
        bounds: How layers are divided among that many stages, such as `balanced_bounds` of their seconds.
        memory: Bytes left for activations, on every rank or on each; None: any.
        chunks: Stages of each rank, if that is settled.
        latency: Seconds of a message.
        most_chunks: How many chunks are tried.

    Raises:
        ValueError: If there are fewer layers than ranks, or no schedule fits; it tells what the smallest needs.
    """
    if len(layers) < stages:
        raise ValueError(f"{len(layers)} layers cannot be divided among {stages} stages")
    there = [memory] * stages if memory is None or isinstance(memory, float | int) else list(memory)
    if len(there) != stages:
        raise ValueError(f"memory: {len(there)} numbers for {stages} ranks")
    choices = predictions(
        stages, micro_batches, layers, bounds, chunks=chunks, latency=latency, most_chunks=most_chunks
    )
    if not choices:
        raise ValueError(
            f"{chunks} chunks per rank: there are {len(layers)} layers for {stages} x {chunks} stages, and up to "
            f"{most_chunks} chunks are tried"
        )
    fitting = [c for c in choices if all(m is None or b <= m for b, m in zip(c.activation_bytes, there, strict=True))]
    if not fitting:
        least = min(choices, key=lambda choice: max(choice.activation_bytes))
        needed = ", ".join(f"{nbytes:,.0f}" for nbytes in least.activation_bytes)
        raise ValueError(
            f"the activations of no schedule fit into {memory} bytes per rank; {least.schedule} needs least: {needed}. "
            "Smaller or fewer micro-batches, or activation checkpointing, need less"
        )
    fastest = min(choice.makespan for choice in fitting)
    equal = [choice for choice in fitting if choice.makespan <= fastest * _EQUAL]
    return min(equal, key=lambda choice: (max(choice.activation_bytes), choice.chunks))


def predictions(
    stages: int,
    micro_batches: int,
    layers: Sequence[LayerCost],
    bounds: Bounds,
    *,
    chunks: int | None = None,
    latency: float = 0.0,
    most_chunks: int = 4,
) -> list[Choice]:
    """What is expected of every schedule that there can be, in the order of SCHEDULES."""
    found = []
    for name, count in _candidates(chunks, min(most_chunks, len(layers) // stages)):
        table = build_table(name, stages, micro_batches, count)
        parts = _summed(layers, bounds(stages * count))
        timeline = simulate(lower(table), _times(parts, latency))
        held = tuple(_held(timeline, table.placement, parts, rank) for rank in range(stages))
        idle = sum(usage.idle for usage in timeline.usage) / stages
        found.append(Choice(name, count, timeline.makespan, idle, held))
    return found


def _candidates(chunks: int | None, most: int) -> Iterable[tuple[str, int]]:
    for name, schedule in SCHEDULES.items():
        fewest, limit = schedule.chunks
        for count in range(fewest, min(most, limit or most) + 1):
            if chunks is None or count == chunks:
                yield name, count


def _summed(layers: Sequence[LayerCost], bounds: Sequence[int]) -> list[LayerCost]:
    """What each stage costs."""
    parts = [layers[first:end] for first, end in pairwise(bounds)]
    return [
        LayerCost(
            forward=sum(layer.forward for layer in part),
            backward=sum(layer.backward for layer in part),
            weight=sum(layer.weight for layer in part),
            whole=sum(_whole(layer) for layer in part),
            activation_bytes=sum(layer.activation_bytes for layer in part),
        )
        for part in parts
    ]


def _times(parts: Sequence[LayerCost], latency: float) -> Times:
    return Times(
        forward=[part.forward for part in parts],
        backward=[part.backward for part in parts],
        weight=[part.weight for part in parts],
        whole=[_whole(part) for part in parts],
        latency=latency,
    )


def _held(timeline: Timeline, placement: Placement, parts: Sequence[LayerCost], rank: int) -> float:
    """The most bytes of activations on a rank at once."""
    return timeline.peak(rank, lambda chunk: parts[placement.stage_of(rank, chunk)].activation_bytes)


def _whole(layer: LayerCost) -> float:
    return layer.backward + layer.weight if layer.whole is None else layer.whole

