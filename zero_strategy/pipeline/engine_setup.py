"""Setup of a pipeline engine: settings, units and names derived from its module, and the choice of its schedule.

With `pipeline.schedule: auto` the first step is measured, and the fastest schedule whose activations fit is chosen, by
simulation.

The module, and so the number and place of its stages, stays; schedules that place stages alike are compared. Half a
backward is taken for half of its time: the first step runs backwards in one piece.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_strategy.activation.functional import non_reentrant_checkpoint
from zero_strategy.activation.offload import Storages, add_storage
from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.mesh import on_host_and_gpus
from zero_strategy.comm.process_group import world_size
from zero_strategy.config import DEFAULT, ResolvedConfig, ZeroConfig, check_owned, dtype_fact, load_config, resolve
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.pipeline.lowering import lower
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import SCHEDULES, Kind, Placement, build_table
from zero_strategy.pipeline.simulator import Event, Timeline, Times, simulate
from zero_strategy.pipeline.ties import TiedWeights
from zero_strategy.planning.machine import Machine
from zero_strategy.train_state import ModelPart
from zero_strategy.watchdog.diagnosis import RankLabels


def apply_section(module: PipelineModule, section: Mapping[str, Any]) -> None:
    """Let a module recompute as a JSON says; as in DeepSpeed, that wins over the module's own arguments.

    Args:
        module: The module.
        section: Of the keys only `activation_checkpoint_interval`, above 0, and `use_reentrant: false` change anything.

    Raises:
        ValueError: If the interval is negative.
    """
    if interval := section.get("activation_checkpoint_interval", 0):
        module.set_checkpoint_interval(interval)
    if section.get("use_reentrant") is False:
        module.activation_checkpoint_func = non_reentrant_checkpoint


AUTO = "auto"
"""The value of `pipeline.schedule` that leaves the choice to a measurement."""
PIPE = "pipe"
"""The name of the group of one rank of every stage among those of an engine's mesh."""


def resolved_for(module: PipelineModule, config: Any, compute_dtype: torch.dtype | None) -> ResolvedConfig:
    """The config, with what the module decides filled in."""
    if isinstance(config, ResolvedConfig):
        resolved = config
    else:
        asked = load_config(config)
        if asked.pipeline.stages == 1 and module.num_stages > 1:  # 1 is the default: nothing was asked for
            asked.pipeline.record("stages", module.num_stages, "derived: the PipelineModule")
        # Before `resolve`, which would take the number of chunks from the schedule's name alone.
        derive_schedule(asked, module)
        if asked.mesh.tensor is None and module.mpu().slice_parallel_size > 1:
            asked.mesh.record("tensor", module.mpu().slice_parallel_size, "derived: the PipelineModule's topology")
        resolved = resolve(asked, world_size())
        check_owned(resolved.config, dtype_fact(compute_dtype))
    _check_fits(resolved.config, module)
    _check_slots(resolved.config, module)
    return resolved


def derive_schedule(asked: ZeroConfig, module: PipelineModule) -> None:
    """Fill in what a module's chunks and placement say of the schedule, where the config leaves it open."""
    if asked.pipeline.chunks is None and module.chunks > 1:
        asked.pipeline.record("chunks", module.chunks, "derived: the PipelineModule")
    if asked.origin_of("pipeline.schedule") == DEFAULT:
        name = first_schedule(module.placement)
        if name != asked.pipeline.schedule:
            asked.pipeline.record("schedule", name, "derived: the PipelineModule's chunks and placement")


def _check_fits(config: ZeroConfig, module: PipelineModule) -> None:
    pipeline = config.pipeline
    if config.uneven_batches != "error":
        raise ValueError(
            f"uneven_batches is {config.uneven_batches!r} [{config.origin_of('uneven_batches')}], and a pipeline runs "
            "the micro-batches of a step by a schedule that all its copies share: give all of them as many batches, "
            "and leave the setting out"
        )
    for key, there in (("stages", module.num_stages), ("chunks", module.chunks)):
        if getattr(pipeline, key) != there:
            raise ValueError(
                f"pipeline.{key} is {getattr(pipeline, key)} [{config.origin_of(f'pipeline.{key}')}], but the "
                f"PipelineModule was made with {there}; {_same(key, pipeline.schedule)}"
            )
    if (config.mesh.tensor or 1) != module.mpu().slice_parallel_size:
        raise ValueError(
            f"mesh.tensor is {config.mesh.tensor} [{config.origin_of('mesh.tensor')}], but the PipelineModule's "
            f"topology has {module.mpu().slice_parallel_size} rank(s) on its axis 'model'; make both the same"
        )
    name = first_schedule(module.placement) if pipeline.schedule == AUTO else pipeline.schedule
    # The placement does not depend on the number of micro-batches.
    table = build_table(name, module.num_stages, pipeline.micro_batches or 1, pipeline.chunks)
    if table.placement != module.placement:
        raise ValueError(
            f"pipeline.schedule {pipeline.schedule} places stages in the shape {table.placement.shape!r}, but the "
            f"PipelineModule was made with placement={module.placement.shape!r}; {_same('chunks', pipeline.schedule)}"
        )


def _check_slots(config: ZeroConfig, module: PipelineModule) -> None:
    """Raise if the bits of `reproducible.slots` would depend on the stages, or micro-batches are no slots."""
    slots, origin = config.reproducible.slots, config.origin_of("reproducible.slots")
    if not slots:
        return
    ranks, there = config.mesh.replicate * (config.mesh.shard or 1), config.pipeline.micro_batches
    if there != slots // ranks:
        raise ValueError(
            f"reproducible.slots is {slots} [{origin}], and pipeline.micro_batches is {there} "
            f"[{config.origin_of('pipeline.micro_batches')}]: micro-batches are slots; leave it out, or set it to "
            f"{slots // ranks}"
        )
    for key, stages in module.ties_over_stages().items():
        raise ValueError(
            f"reproducible.slots is {slots} [{origin}], and stages {', '.join(map(str, stages))} share the tied weight "
            f"{key!r}: its gradients would be summed use by use, and not slot by slot as on one stage. Untie it, give "
            "PipelineModule bounds that keep its layers on one stage (partition_method), or train with one stage"
        )


def _same(key: str, schedule: str) -> str:
    if key == "stages":
        return "make both the same"
    return (
        f"make it with PipelineModule(..., schedule={schedule!r}), which decides on its chunks and placement, or leave "
        "pipeline.schedule and pipeline.chunks out, which then follow the module"
    )


def check_divided(module: PipelineModule) -> None:
    """A stage may have nothing to divide; where no stage has, its ranks would train copies as if they were parts."""
    mine = any(map(is_dtensor, module.parameters()))
    if not any(module.mpu().control().all_gather_objects(mine)):
        raise ValueError(
            f"the topology {module.topology()} divides layers among the ranks of its axis 'model', but no parameter is "
            "divided: give PipelineModule parallelize=function(layer, name, mesh), which calls torch's "
            "parallelize_module, or a plan {pattern of names: style}"
        )


def prefix_of(module: PipelineModule, root: nn.Module) -> str:
    """Prefix of names in the root."""
    name = next((name for name, child in root.named_modules() if child is module), None)
    if name is None:
        raise ValueError(f"the PipelineModule is not below the {type(root).__name__} that is passed as its root")
    return f"{name}." if name else ""


def with_units(resolved: ResolvedConfig, module: PipelineModule, prefix: str) -> ResolvedConfig:
    """Units named one by one: every layer, or what the config names as far as it is in this part of the model."""
    units = resolved.config.units
    if units.classes or units.patterns:
        names = [
            name
            for name, child in module.named_modules()
            if name
            and (
                type(child).__name__ in units.classes
                or any(fnmatchcase(prefix + name, pattern) for pattern in units.patterns)
            )
        ]
    else:
        names = [name for name in module.unit_names() if any(True for _ in module.get_submodule(name).parameters())]
    names = [prefix + name for name in names]
    if prefix:
        names.insert(0, prefix.removesuffix("."))  # what is in no layer's unit is used in this module's forward
    config = deepcopy(resolved.config)  # The caller may make other engines of it
    origin = "derived: the PipelineModule's layers"
    config.units.record("classes", [], origin)
    # A bracket in a name must not begin a set of characters, as it does in a pattern.
    config.units.record("patterns", [name.replace("[", "[[]") for name in names], origin)
    return replace(resolved, config=config)


def part_of(module: PipelineModule, root: nn.Module, prefix: str, ties: TiedWeights, timeout: float) -> ModelPart:
    """Link between this rank's layers and those of the other stages.

    Args:
        module: The layers.
        root: The engine's module.
        prefix: What names in it begin with.
        ties: Weights that the stages have in common.
        timeout: Seconds after which what stages tell each other fails.
    """
    grid = module.mpu()
    return ModelPart(
        dp_groups=grid.dp_groups,
        tensor_groups=grid.model_groups,
        further_groups=lambda: {PIPE: _pipe(module, timeout)},
        rank_labels=_rank_labels(module),
        order=order_of(module, root, prefix),
        copies=ties,
    )


def _pipe(module: PipelineModule, timeout: float) -> Communicator:
    counters = CommunicationCounters()
    if module.num_stages == 1:
        return Communicator(None, counters)
    # On the host whatever the device: counts, flags and objects go there.
    return on_host_and_gpus(module.mpu().pipe_groups, timedelta(seconds=timeout), counters)


def _rank_labels(module: PipelineModule) -> RankLabels:
    """Ranks in words, with their stages."""
    placement = module.placement
    stages = {
        rank: [placement.stage_of(place, chunk) for chunk in range(placement.chunks)]
        for ranks in module.mpu().pipe_groups
        for place, rank in enumerate(ranks)
    }
    return lambda rank: f"stage{'s' if len(stages[rank]) > 1 else ''} {', '.join(map(str, stages[rank]))} (rank {rank})"


def order_of(module: PipelineModule, root: nn.Module, prefix: str) -> Callable[[str], tuple[int, ...]]:
    """Place of a tensor in the whole model: by its layer, then as in the layer."""
    places = {}
    # The layer comes first, as its number counts through all stages; an entry's own number is of this rank only.
    for number, (name, _) in enumerate(state_dict_entries(root)):
        places[name] = module.layer_of(name.removeprefix(prefix)), number
    return places.__getitem__


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
    # A stage has a layer at least.
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
        # Parameters are saved by autograd, too, but are there anyway.
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
    # The first micro-batch would spoil a mean: what is made once is made there, and its activations are counted.
    median = {key: statistics.median(found) for key, found in times.items()}
    costs = []
    for stage in range(placement.stages):
        rank, chunk = placement.rank_of(stage), placement.chunk_of(stage)
        whole = median.get((stage, Kind.BACKWARD.value))
        halves = [median.get((stage, kind.value), 0.0) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        # The first step of a loop placement runs whole backwards: of those, halves are a guess.
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
    # The costs are of stages, which are not divided anew: each stands for one layer.
    bounds: Callable[[int], Sequence[int]] = lambda stages: range(stages + 1)  # noqa: E731
    candidates = [
        choice
        for choice in predictions(
            placement.ranks, micro_batches, costs, bounds, chunks=placement.chunks, most_chunks=placement.chunks
        )
        # The stages are built: a schedule that places them otherwise cannot run them.
        if build_table(choice.schedule, placement.ranks, micro_batches, placement.chunks).placement == placement
    ]
    fitting = [
        choice
        for choice in candidates
        # A rank whose free memory is unknown refuses nothing.
        if all(limit is None or held <= limit for held, limit in zip(choice.activation_bytes, memory, strict=True))
    ]
    # No error, as in `choose_schedule`: the module is built, and has trained its first step by one of these.
    if not fitting:
        return min(candidates, key=lambda choice: max(choice.activation_bytes))
    fastest = min(choice.makespan for choice in fitting)
    return min(
        (choice for choice in fitting if choice.makespan <= fastest * _EQUAL),
        key=lambda choice: max(choice.activation_bytes),
    )
