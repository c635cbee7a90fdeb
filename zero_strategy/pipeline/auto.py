"""`pipeline.schedule: auto`: the first step is measured, the rest run what is then expected to be fastest and to fit.

The module, and so the number and place of its stages, stays; schedules that place stages alike are compared. Half a
backward is taken for half of its time: the first step runs backwards in one piece.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_strategy.activation.storages import Storages, add_storage
from zero_strategy.memory.machine import Machine
from zero_strategy.pipeline.actions import Kind
from zero_strategy.pipeline.choice import Choice, LayerCost, predictions
from zero_strategy.pipeline.placement import Placement
from zero_strategy.pipeline.registry import build_table
from zero_strategy.pipeline.timeline import Event

_FIRST = {"loop": ("1f1b", "interleaved_1f1b"), "v": ("zbv", "zbv")}
"""What the first step runs: with one chunk, with several."""
_MARGIN = 0.8
"""The part of the free memory that activations may take: other buffers come and go beside them."""


def first_schedule(placement: Placement) -> str:
    """What is run until there are measurements."""
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
    """What every global stage costs, in the median over the micro-batches.

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
