"""Setup of a pipeline engine: settings, units and names derived from its module.

settings, units, its part of the model; what must fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zero_strategy.activation.functional import non_reentrant_checkpoint
from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import own_group, world_size
from zero_strategy.config import DEFAULT, ResolvedConfig, ZeroConfig, check_owned, dtype_fact, load_config, resolve
from zero_strategy.fsdp.dtensor import is_dtensor
from zero_strategy.pipeline.auto import first_schedule
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.pipeline.schedules import build_table
from zero_strategy.pipeline.ties import TiedWeights
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
        if asked.pipeline.stages == 1 and module.num_stages > 1:
            asked.pipeline.record("stages", module.num_stages, "derived: the PipelineModule")
        derive_schedule(asked, module)
        if asked.mesh.tensor is None and module.mpu().slice_parallel_size > 1:
            asked.mesh.record("tensor", module.mpu().slice_parallel_size, "derived: the PipelineModule's topology")
        resolved = resolve(asked, world_size())
        check_owned(resolved.config, dtype_fact(compute_dtype))
    _check_fits(resolved.config, module)
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
    table = build_table(name, module.num_stages, pipeline.micro_batches or 1, pipeline.chunks)
    if table.placement != module.placement:
        raise ValueError(
            f"pipeline.schedule {pipeline.schedule} places stages in the shape {table.placement.shape!r}, but the "
            f"PipelineModule was made with placement={module.placement.shape!r}; {_same('chunks', pipeline.schedule)}"
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
            "parallelize_module"
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
    config = deepcopy(resolved.config)
    origin = "derived: the PipelineModule's layers"
    config.units.record("classes", [], origin)
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
    alone, limit = module.num_stages == 1, timedelta(seconds=timeout)
    group = None if alone else own_group(module.mpu().pipe_groups, timeout=limit, backend="gloo")
    return Communicator(group, CommunicationCounters(), owns=True)


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
    for number, (name, _) in enumerate(state_dict_entries(root)):
        places[name] = module.layer_of(name.removeprefix(prefix)), number
    return places.__getitem__
