"""Reads the directories that DeepSpeed's `save_checkpoint` writes: ZeRO 0 to 3, fp32, fp16, bf16, any optimizer.

    tag's directory --files--> model states (weights in the dtype that forward uses, buffers, counters)
                    --files--> optimizer states --by form--> stage 0 | 1 and 2, bf16 optimizer | 3
                                                             fp32 weights and moments under parameter names

Nothing of DeepSpeed is imported. Files are mapped, and tensors put together when they are asked for. What parameters
are called and where they lie is taken from `param_shapes`, the order of the data, never from `param_slice_mappings`,
which is in another order with `round_robin_gradients`. Source of the formats: what DeepSpeed 0.19 writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint.interop.deepspeed_files import (
    LATEST,
    CheckpointFiles,
    ModelRank,
    complete,
    find_tag,
    is_tag,
)
from zero_strategy.checkpoint.interop.deepspeed_model import ModelFiles, assemble
from zero_strategy.checkpoint.interop.deepspeed_optimizer import MasterState
from zero_strategy.checkpoint.interop.deepspeed_whole import read_whole
from zero_strategy.checkpoint.interop.deepspeed_zero import is_sliced, rank_count, read_sliced
from zero_strategy.checkpoint.interop.deepspeed_zero3 import is_partitioned, read_partitioned
from zero_strategy.checkpoint.interop.pickles import Record, load_restricted
from zero_strategy.checkpoint.names import is_inner_path
from zero_strategy.checkpoint.portable import PortableState
from zero_strategy.runtime.regular_files import read_regular

_DICTS = ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data", "pytorch_lightning.utilities.parsing")
LIGHTNING: Mapping[str, None] = dict.fromkeys(f"{module}.AttributeDict" for module in _DICTS)
"""A dict of hyper-parameters, in the client state that Lightning's strategy for DeepSpeed saves."""


def detect(path: Path) -> bool:
    """Whether a path is a directory of DeepSpeed's, or the directory of one tag."""
    if not path.is_dir():
        return False
    if is_tag(path):
        return True
    if (path / LATEST).is_file():
        tag = read_regular(path / LATEST)[:256].decode(errors="replace").strip()
        return is_inner_path(tag) and "/" not in tag and is_tag(path / tag)
    return any(is_tag(child) for child in path.iterdir())


def read(
    path: Path,
    tag: str | None = None,
    *,
    optimizer: bool = True,
    groups: Sequence[Sequence[str]] | None = None,
    allow: Mapping[str, None] | None = None,
    verify: bool = True,
    **options: Any,
) -> PortableState:
    """The state that a checkpoint holds.

    Args:
        path: What was given as `save_dir`, or the directory of one tag.
        tag: Which; by default the one that `latest` names.
        optimizer: Read masters, moments and hyper-parameters, too.
        groups: For stage 0, whose files have no names: the parameter names of each param group, if they are not told by
            order, shapes and values.
        allow: Further class names to read as inert records (see `load_restricted`).
        verify: Compare the CRCs of all files first, which takes one pass over them.
        options: For pipelines and tensor-parallel ranks: see `pipeline_layers.read`.

    Raises:
        ValueError: Naming the file, rank or parameter that is missing, damaged, or of another save, and class names
            that are not on the list of what may be in such files.
    """
    directory = find_tag(Path(path), tag)
    allow = {**LIGHTNING, **(allow or {})}
    files = CheckpointFiles.find(directory)
    if files.layers or len(files.ranks) > 1:
        layers = import_module("zero_strategy.checkpoint.interop.pipeline_layers")
        if verify:
            for file in files.all():
                load_restricted(file, allow=allow, verify=True)
        merged: PortableState = layers.read(directory, optimizer=optimizer, allow=allow, **options)
        return merged
    if options:
        raise TypeError(f"unknown option(s) {sorted(options)}: the checkpoint has no pipeline or tensor-parallel ranks")
    (rank,) = files.ranks.values()
    model = read_model_files(rank, allow, verify=verify)
    stage = stage_of(rank, model)
    if optimizer:
        masters = read_optimizer_files(rank, model, groups=groups, allow=allow, verify=verify)
        return assemble(model, masters, stage=stage)
    masters = None
    if stage == 3:  # whose weights are the rounded masters
        masters = read_optimizer_files(rank, model, moments=False, allow=allow, verify=verify)
    state = assemble(model, masters, stage=stage)
    state.optimizers, state.loss_scaler = [], None
    return state


def read_model_files(
    rank: ModelRank, allow: Mapping[str, None] | None = None, *, verify: bool = False
) -> ModelFiles:
    """The model states of one model-parallel rank.

    Args:
        rank: Its files.
        allow: As for `read`.
        verify: As for `read`.

    Raises:
        ValueError: If files are missing or do not belong together.
    """
    if not rank.model:
        source = next(iter(rank.optimizer.values()))
        raise ValueError(f"{source.parent}: the model states of model-parallel rank {rank.number} are missing")
    first = rank.model[min(rank.model)]
    states = {number: ModelFiles.load(path, allow, verify) for number, path in rank.model.items()}
    content = states[min(states)]
    if len(states) > 1 or "zero_pp_rank" in first.name:
        count = content.get("dp_world_size")
        if type(count) is not int:
            raise ValueError(f"{first}: does not say how many ranks saved (dp_world_size)")
        paths = complete(rank.model, count, "files of model states", first)
        return ModelFiles(paths, [states[number] for number in range(count)])
    return ModelFiles([first], [content])


def read_optimizer_files(
    rank: ModelRank,
    model: ModelFiles,
    *,
    moments: bool = True,
    groups: Sequence[Sequence[str]] | None = None,
    allow: Mapping[str, None] | None = None,
    verify: bool = False,
) -> MasterState | None:
    """The optimizer states of one model-parallel rank, by parameter name.

    Args:
        rank: Its files.
        model: Its model states, which name the parameters.
        moments: Read more than the weights (of stage 3; the others' can be had without these files).
        groups: As for `read`.
        allow: As for `read`.
        verify: As for `read`.

    Returns:
        None if there was no optimizer.

    Raises:
        ValueError: If files are missing, do not belong together, or are of an unknown form.
    """
    whole = model.first.get("optimizer")
    shapes = model.param_shapes
    if not rank.optimizer:
        if isinstance(whole, dict):
            return read_whole(whole, model.parameters(), model.paths[0], groups)
        if shapes:
            raise ValueError(
                f"{model.paths[0].parent}: the files of optimizer states (*_optim_states.pt) are missing; copy them, "
                "or, up to stage 2, read the weights alone (optimizer=False)"
            )
        return None
    if not shapes:
        raise ValueError(f"{model.paths[0]}: has no param_shapes, so the optimizer files beside it are of another save")
    loaded = {number: optimizer_state(path, allow, verify) for number, path in rank.optimizer.items()}
    number = min(loaded)
    source = rank.optimizer[number]
    paths = complete(rank.optimizer, rank_count(loaded[number], source), "files of optimizer states", source)
    states = [loaded[number] for number in range(len(paths))]
    for state, path in zip(states, paths, strict=True):
        if state.keys() != states[0].keys() or rank_count(state, path) != len(paths):
            raise ValueError(f"{path}: is of another save than {paths[0].name}: another form or number of ranks")
    if is_sliced(states[0]):
        return read_sliced(states, shapes, paths)
    if is_partitioned(states[0]):
        if len(model.paths) != len(paths):
            raise ValueError(f"{source.parent}: {len(model.paths)} rank(s) saved the model, {len(paths)} the optimizer")
        return read_partitioned(states, shapes, paths, moments=moments)
    raise ValueError(f"{source}: its optimizer state is of an unknown form ({', '.join(sorted(states[0])[:8])})")


def optimizer_state(path: Path, allow: Mapping[str, None] | None = None, verify: bool = False) -> dict[str, Any]:
    """The entry `optimizer_state_dict` of an optimizer file.

    Raises:
        ValueError: If there is none.
    """
    content = load_restricted(path, allow=allow, verify=verify)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise ValueError(f"{path}: has no optimizer_state_dict, so DeepSpeed did not write it")
    return state


def stage_of(rank: ModelRank, model: ModelFiles) -> int:
    """ZeRO's stage, as the files tell it."""
    if "zero_pp_rank" in model.paths[0].name:
        return 3
    config = model.first.get("ds_config")
    zero = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    stage = stage.arguments[0] if isinstance(stage, Record) and stage.arguments else stage
    return stage if type(stage) is int else 0
