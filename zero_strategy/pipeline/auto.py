"""`pipeline.schedule: auto`: the first step is measured, and the fastest schedule that fits is chosen.

auto`: the fastest schedule whose activations fit, by simulation.

auto`: the first step is measured, the rest run what is then expected to be fastest and to fit.

The module, and so the number and place of its stages, stays; schedules that place stages alike are compared. Half a
backward is taken for half of its time: the first step runs backwards in one piece.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_strategy.activation.offload import Storages, add_storage
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.schedules import SCHEDULES, Kind, Placement, build_table
from zero_strategy.pipeline.simulator import Event, Timeline, Times, simulate
from zero_strategy.planning.held import Machine

Bounds = Callable[[int], Sequence[int]]
"""From a number of stages to where each of them begins among the layers, and the end: one number more than stages."""

_EQUAL = 1.01
"""Makespans that differ by less than this factor count as equal: the measurement is not better."""


@dataclass(frozen=True)
class LayerCost:
    """Cost of a micro-batch in a layer, as measured.

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
    """Expected figures of every schedule that there can be, in the order of SCHEDULES."""
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
    """Cost of each stage."""
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


_FIRST = {"loop": ("1f1b", "interleaved_1f1b"), "v": ("zbv", "zbv")}
"""What the first step runs: with one chunk, with several."""
_MARGIN = 0.8
"""The part of the free memory that activations may take: other buffers come and go beside them."""


def first_schedule(placement: Placement) -> str:
    """Schedule that is run until there are measurements."""
    return _FIRST[placement.shape][placement.chunks > 1]


class ActivationBytes:
    """Counts what autograd keeps of forwards in each of a rank's chunks.

    Args:
        known: What does not count; see `storage_keys`.

    Attributes:
        by_chunk: Bytes.
    """

    def __init__(self, known: Callable[[], frozenset[int]]) -> None:
        self._known = known
        self.by_chunk: dict[int, int] = {}

    @contextmanager
    def count(self, chunk: int) -> Iterator[None]:
        """A forward inside; the chunk's largest counts."""
        known, kept = self._known(), Storages()

        def pack(tensor: Tensor) -> Tensor:
            add_storage(kept, tensor, known)
            return tensor.detach()  # else a result that is kept would hold itself

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.by_chunk[chunk] = max(self.by_chunk.get(chunk, 0), sum(kept.values()))


def measured_costs(
    placement: Placement, events: Sequence[Sequence[Event]], activation_bytes: Sequence[dict[int, int]]
) -> list[LayerCost]:
    """Cost of every global stage, in the median over the micro-batches.

    Args:
        placement: Of the stages.
        events: Of every rank, of one step.
        activation_bytes: Of every rank, by chunk.
    """
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank, mine in enumerate(events):
        for event in mine:
            if event.computes:
                times[placement.stage_of(rank, event.chunk), event.kind].append(event.end - event.start)
    median = {key: statistics.median(found) for key, found in times.items()}
    costs = []
    for stage in range(placement.stages):
        rank, chunk = placement.rank_of(stage), placement.chunk_of(stage)
        whole = median.get((stage, Kind.BACKWARD.value))
        halves = [median.get((stage, kind.value), 0.0) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        backward, weight = halves if whole is None else (whole / 2, whole / 2)
        nbytes = activation_bytes[rank].get(chunk, 0)
        costs.append(LayerCost(median[stage, Kind.FORWARD.value], backward, weight, whole, nbytes))
    return costs


def memory_left(device: torch.device, ranks_here: int, held: int) -> int | None:
    """Bytes that the activations of a rank may take; None: unknown.

    Args:
        device: Of the rank.
        ranks_here: Ranks that share the host's memory.
        held: Bytes of activations that the rank still holds, or whose memory it keeps to use again.
    """
    here = Machine.here()
    if device.type == "cuda":
        free: int | None = torch.cuda.mem_get_info(device)[0]
    else:
        free = None if here.host_free is None else here.host_free // ranks_here
    return None if free is None else int(_MARGIN * free) + held


def choose(
    placement: Placement, micro_batches: int, costs: Sequence[LayerCost], memory: Sequence[int | None]
) -> Choice:
    """The fastest of the schedules for these stages whose activations fit; if none does, the one that holds least.

    Args:
        placement: Of the stages.
        micro_batches: Of a step.
        costs: Of every global stage.
        memory: What each rank has for activations.
    """
    bounds: Callable[[int], Sequence[int]] = lambda stages: range(stages + 1)  # noqa: E731
    candidates = [
        choice
        for choice in predictions(
            placement.ranks, micro_batches, costs, bounds, chunks=placement.chunks, most_chunks=placement.chunks
        )
        if build_table(choice.schedule, placement.ranks, micro_batches, placement.chunks).placement == placement
    ]
    fitting = [
        choice
        for choice in candidates
        if all(limit is None or held <= limit for held, limit in zip(choice.activation_bytes, memory, strict=True))
    ]
    if not fitting:
        return min(candidates, key=lambda choice: max(choice.activation_bytes))
    fastest = min(choice.makespan for choice in fitting)
    return min(
        (choice for choice in fitting if choice.makespan <= 1.01 * fastest),
        key=lambda choice: max(choice.activation_bytes),
    )
