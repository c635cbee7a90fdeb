"""The reader of DeepSpeed's checkpoints, and the directory of one by the ranks in its file names.

ZeRO 0 to 3, fp32, fp16, bf16, any optimizer.

    tag's directory --files--> model states (weights in the dtype that forward uses, buffers, counters)
                    --files--> optimizer states --by form--> stage 0 | 1 and 2, bf16 optimizer | 3
                                                             fp32 weights and moments under parameter names

Nothing of DeepSpeed is imported. Files are mapped, and tensors put together when they are asked for. What parameters
are called and where they lie is taken from `param_shapes`, the order of the data, never from `param_slice_mappings`,
which is in another order with `round_robin_gradients`. Source of the formats: what DeepSpeed 0.19 writes.

    mp_rank_{mp:02d}_model_states.pt                                    stages 0 to 2, and every pipeline rank
    zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt                  stage 3; "pp" in the name means data rank
    [bf16_|fp16_]zero_pp_rank_{dp}_mp_rank_{mp:02d}[_]optim_states.pt   stages 1 to 3
    layer_{layer:02d}[-model_{tp:02d}]-model_states.pt                  pipelines
    layer_{L}_expert_{E}_..., expp_rank_...                             mixtures of experts

The number mp is `pp * tp_degree + tp`. The names are parsed, not globbed: rank 10 comes after rank 9.

Tensor-parallel shards are joined, and pipeline stages put in a row.

    state of (stage 0, tensor 0) --+
    state of (stage 0, tensor 1) --+-- merge_tensor_ranks --> stage 0 --+
    state of (stage 1, tensor 0) --+                                    +-- merge_stages --> whole
    state of (stage 1, tensor 1) --+-- merge_tensor_ranks --> stage 1 --+

Shapes are computed at once, and with them it is known whether shards fit; tensors are joined when they are asked for.
Counters, client state and the like are the first rank's.

A grid has a pipeline, a tensor and a data dimension. Model files are numbered `pp * tp_degree + tp`, optimizer files
`dp * pp_degree * tp_degree + pp * tp_degree + tp`. A smaller grid has neighbours merged: along pipeline and tensor,
rank i of n takes the i-th of n equal blocks. Along data, the files of a merged pipeline and tensor position are put in
a row, position by position and for each all its data ranks, and the row is cut into equal parts; that is the order in
which DeepSpeed merges them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from zero_strategy.checkpoint.layout import TensorSpec, is_inner_path
from zero_strategy.convert.deepspeed_model import (
    LATEST,
    CheckpointFiles,
    MasterState,
    ModelFiles,
    ModelRank,
    assemble,
    complete,
    find_tag,
    is_tag,
)
from zero_strategy.convert.deepspeed_zero import (
    is_partitioned,
    is_sliced,
    rank_count,
    read_partitioned,
    read_sliced,
    read_whole,
)
from zero_strategy.convert.megatron import MergeRules, Rule, merge, merged_shape
from zero_strategy.convert.pickle_globals import Record
from zero_strategy.convert.pickles import load_restricted
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor
from zero_strategy.runtime.regular_files import read_regular

_DICTS = ("lightning.fabric.utilities.data", "lightning_fabric.utilities.data", "pytorch_lightning.utilities.parsing")
LIGHTNING: Mapping[str, None] = dict.fromkeys(f"{module}.AttributeDict" for module in _DICTS)
"""A dict of hyper-parameters, in the client state that Lightning's strategy for DeepSpeed saves."""


def detect(path: Path) -> bool:
    """True if a path is a directory of DeepSpeed's, or the directory of one tag."""
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
        layers = import_module("zero_strategy.convert.pipeline_layers")
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


def read_model_files(rank: ModelRank, allow: Mapping[str, None] | None = None, *, verify: bool = False) -> ModelFiles:
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


_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_STAGE3 = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-[a-z]+_(\d+))?[-_]model_states\.pt")
_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_.*\.pt|expp_rank_.*\.pt")
K = TypeVar("K")


class DeepSpeedDirectory:
    """A checkpoint's files.

    Args:
        path: The directory of one tag.

    Attributes:
        path: The same.
        model_files: mp rank -> `mp_rank_*` file.
        stage3_files: (data rank, mp rank) -> model file of stage 3.
        optimizer_files: (data rank, mp rank) -> optimizer file.
        layer_files: Layer -> tensor rank -> file.
        expert_files: All files of experts.

    Raises:
        ValueError: If it is no directory, has no model files, or has two files for one rank.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a directory")
        names = sorted(entry.name for entry in self.path.iterdir() if not entry.is_dir())
        self.model_files = self._numbered(names, _MODEL, lambda mp: mp)
        self.stage3_files = self._numbered(names, _STAGE3, lambda dp, mp: (dp, mp))
        self.optimizer_files = self._numbered(names, _OPTIMIZER, lambda dp, mp: (dp, mp))
        self.layer_files: dict[int, dict[int, Path]] = {}
        for (layer, tp), file in self._numbered(names, _LAYER, lambda layer, tp: (layer, tp)).items():
            self.layer_files.setdefault(layer, {})[tp] = file
        self.expert_files = [self.path / name for name in names if _EXPERT.fullmatch(name)]
        if not self.model_files and not self.stage3_files:
            raise ValueError(
                f"{self.path} is not a DeepSpeed checkpoint: it has neither mp_rank_*_model_states.pt nor "
                "zero_pp_rank_*_mp_rank_*_model_states.pt; name the directory of one tag, not its parent"
            )

    @property
    def is_pipeline(self) -> bool:
        """True if weights are stored layer by layer."""
        return bool(self.layer_files)

    @property
    def mp_ranks(self) -> list[int]:
        """Model-parallel ranks that have a model file."""
        return sorted(self.model_files or {mp for _, mp in self.stage3_files})

    def first_model_file(self, mp: int) -> Path:
        """The model file of a model-parallel rank, of data rank 0 under stage 3.

        Raises:
            ValueError: If there is none.
        """
        found = self.model_files.get(mp) or self.stage3_files.get((0, mp))
        if found is None:
            raise ValueError(f"{self.path} has no model file of mp rank {mp}")
        return found

    @cached_property
    def degrees(self) -> Degrees:
        """The grid that saved it: from `checkpoint_parallel_dimensions`, and in older ones from the files' names.

        Raises:
            ValueError: If files are missing or contradict each other, naming them.
        """
        tp, pp = self._model_degrees()
        ranks = self.mp_ranks
        if missing := sorted(set(range(tp * pp)) - set(ranks)):
            raise ValueError(f"{self.path}: model files of mp ranks {missing} are missing (pp {pp}, tp {tp})")
        if len(ranks) != tp * pp:
            raise ValueError(f"{self.path}: {len(ranks)} mp ranks have model files, pp {pp} and tp {tp} make {tp * pp}")
        dp = 1 + max((dp for dp, _ in [*self.optimizer_files, *self.stage3_files]), default=0)
        for what, files in (("optimizer", self.optimizer_files), ("model", self.stage3_files)):
            wanted = {(d, m) for d in range(dp) for m in ranks} if files else set()
            if missing_pairs := sorted(wanted - files.keys()):
                raise ValueError(f"{self.path}: {what} files of (data rank, mp rank) {missing_pairs} are missing")
        for layer, files in self.layer_files.items():
            if gaps := sorted(set(range(tp)) - files.keys()):
                raise ValueError(f"{self.path}: layer {layer} lacks the files of tensor ranks {gaps}")
        return Degrees(pp, tp, dp)

    def load(self, file: Path) -> Any:
        """Load a file with the restricted unpickler."""
        from zero_strategy.convert.pickles import load_restricted

        return load_restricted(file)

    def _model_degrees(self) -> tuple[int, int]:
        """(tensor, pipeline) degrees."""
        recorded = self._recorded(self.load(self.first_model_file(self.mp_ranks[0])))
        if recorded is not None:
            return recorded
        count = len(self.mp_ranks)
        if not self.layer_files:
            return count, 1
        tp = len(next(iter(self.layer_files.values())))
        if count % tp:
            raise ValueError(f"{self.path}: {count} model files do not belong to {tp} tensor ranks of each layer")
        return tp, count // tp

    def _recorded(self, state: Mapping[str, Any]) -> tuple[int, int] | None:
        dimensions = state.get("checkpoint_parallel_dimensions")
        if dimensions is None:
            return None
        found = dimensions if isinstance(dimensions, Mapping) else {}
        tp, pp = found.get("tp_degree"), found.get("pp_degree")
        if type(tp) is not int or type(pp) is not int or tp < 1 or pp < 1:
            raise ValueError(f"{self.path}: checkpoint_parallel_dimensions is {dimensions!r}, expected counts")
        return tp, pp

    def _numbered(self, names: Iterable[str], pattern: re.Pattern[str], key: Any) -> dict[Any, Path]:
        found: dict[Any, Path] = {}
        for name in names:
            if matched := pattern.fullmatch(name):
                rank = key(*(int(number or 0) for number in matched.groups()))
                if rank in found:
                    raise ValueError(f"{self.path}: {found[rank].name} and {name} are of the same rank {rank}")
                found[rank] = self.path / name
        return dict(sorted(found.items()))


def merge_tensor_ranks(
    states: Sequence[PortableState], rules: MergeRules, *, copies: Collection[str] = ()
) -> PortableState:
    """Joins the states of all tensor-parallel ranks of one pipeline stage.

    Args:
        states: In the order of the ranks.
        rules: How parameters are divided.
        copies: Names that all ranks hold whole whatever the rules say, such as buffers; single numbers are anyway.

    Returns:
        The stage's state. Along the vocabulary the rows that only pad are gone, also for a single rank.

    Raises:
        ValueError: Naming the parameter, if ranks do not have the same ones or shards do not fit. Copies that differ
            and step counts are compared too; the former when a tensor is loaded.
    """
    if not states:
        raise ValueError("there are no tensor-parallel ranks to merge")

    def rule_of(name: str) -> Rule:
        return Rule("replicated") if name in whole else rules.rule(name)

    first = states[0]
    whole = {*copies, *(name for name, weight in first.weights.items() if weight.spec.shape == ())}
    _check_same("weights", [state.weights for state in states])
    if len({len(state.optimizers) for state in states}) != 1:
        raise ValueError(f"tensor-parallel ranks have {[len(state.optimizers) for state in states]} optimizers")
    return replace(
        first,
        weights={
            name: _joined(name, [state.weights[name] for state in states], rule_of(name)) for name in first.weights
        },
        optimizers=[
            _joined_optimizer([state.optimizers[number] for state in states], rule_of)
            for number in range(len(first.optimizers))
        ],
    )


def merge_stages(stages: Sequence[PortableState], rules: MergeRules) -> PortableState:
    """Puts pipeline stages, each whole, in a row.

    Args:
        stages: In order.
        rules: Which parameters later stages hold mere copies of.

    Returns:
        The model's state. A parameter of several stages is a tied one: the first stage's is taken, and compared with
        the others' when it is loaded, unless the rules name it as a copy.

    Raises:
        ValueError: Naming the parameter or the group, if stages contradict each other.
    """
    if not stages:
        raise ValueError("there are no pipeline stages to merge")
    counts = {len(stage.optimizers) for stage in stages}
    if len(counts) != 1:
        raise ValueError(f"pipeline stages have {[len(stage.optimizers) for stage in stages]} optimizers")
    aliases = {alias: name for stage in reversed(stages) for alias, name in stage.aliases.items()}
    weights = _in_a_row([stage.weights for stage in stages], rules)
    return replace(
        stages[0],
        weights=weights,
        aliases={alias: name for alias, name in aliases.items() if alias not in weights},
        optimizers=[
            _optimizer_in_a_row([stage.optimizers[number] for stage in stages], rules) for number in range(counts.pop())
        ],
    )


# ---- tensor-parallel ranks ----


def _joined(name: str, shards: Sequence[StoredTensor], rule: Rule) -> StoredTensor:
    if len(shards) == 1 and rule.vocabulary_size is None:
        return shards[0]
    if len({shard.spec.dtype for shard in shards}) > 1:
        raise ValueError(f"parameter {name!r} has shards of the dtypes {[shard.spec.dtype for shard in shards]}")
    shape = merged_shape(name, [shard.spec.shape for shard in shards], rule)

    def load() -> torch.Tensor:
        return merge(name, [shard.load() for shard in shards], rule)

    return StoredTensor(TensorSpec(name, shards[0].spec.dtype, shape), load)


def _joined_optimizer(parts: Sequence[PortableOptimizer], rule_of: Any) -> PortableOptimizer:
    first = parts[0]
    _check_same("kinds of optimizer state", [part.kinds for part in parts])
    kinds: dict[str, dict[str, StoredTensor]] = {}
    for kind, tensors in first.kinds.items():
        _check_same(f"parameters with {kind!r}", [part.kinds[kind] for part in parts])
        kinds[kind] = {
            name: _joined(name, [part.kinds[kind][name] for part in parts], rule_of(name)) for name in tensors
        }
    for rank, part in enumerate(parts[1:], start=1):
        for name in sorted(first.scalars.keys() | part.scalars.keys()):
            if first.scalars.get(name) != part.scalars.get(name):
                raise ValueError(
                    f"parameter {name!r} has the state {first.scalars.get(name)} on tensor-parallel rank 0 and "
                    f"{part.scalars.get(name)} on rank {rank}"
                )
        _check_groups(first.param_groups, part.param_groups, f"tensor-parallel ranks 0 and {rank}", names=True)
    return replace(first, kinds=kinds)


def _check_same(what: str, found: Sequence[Mapping[str, object]]) -> None:
    for rank, names in enumerate(found[1:], start=1):
        if differing := sorted(found[0].keys() ^ names.keys()):
            raise ValueError(f"tensor-parallel ranks 0 and {rank} do not have the same {what}: {differing[:10]}")


# ---- pipeline stages ----


def _in_a_row(stages: Sequence[Mapping[str, StoredTensor]], rules: MergeRules) -> dict[str, StoredTensor]:
    holders: dict[str, list[tuple[int, StoredTensor]]] = {}
    for number, stage in enumerate(stages):
        for name, stored in stage.items():
            holders.setdefault(name, []).append((number, stored))
    return {
        name: held[0][1] if len(held) == 1 or rules.held_by_first_stage(name) else _tied(name, held)
        for name, held in holders.items()
    }


def _tied(name: str, held: Sequence[tuple[int, StoredTensor]]) -> StoredTensor:
    specs = {(stored.spec.dtype, stored.spec.shape) for _, stored in held}
    if len(specs) > 1:
        raise ValueError(f"parameter {name!r} is on the stages {[number for number, _ in held]} in different shapes")

    def load() -> torch.Tensor:
        (_, first), *others = held
        value = first.load()
        for number, other in others:
            if not torch.equal(value.view(-1).view(torch.uint8), other.load().view(-1).view(torch.uint8)):
                raise ValueError(
                    f"parameter {name!r} is tied, but stages {held[0][0]} and {number} have different values of it"
                )
        return value

    return StoredTensor(held[0][1].spec, load)


def _optimizer_in_a_row(parts: Sequence[PortableOptimizer], rules: MergeRules) -> PortableOptimizer:
    scalars: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for part in parts:
        scalars |= {name: values for name, values in part.scalars.items() if name not in scalars}
        dtypes |= part.scalar_dtypes
    kinds = list(dict.fromkeys(kind for part in parts for kind in part.kinds))
    groups = [dict(group) for group in parts[0].param_groups]
    for number, part in enumerate(parts[1:], start=1):
        _check_groups(groups, part.param_groups, f"pipeline stages 0 and {number}", names=False)
        for group, other in zip(groups, part.param_groups, strict=True):
            group["params"] = [*group["params"], *(name for name in other["params"] if name not in group["params"])]
    rows = {kind: _in_a_row([part.kinds.get(kind, {}) for part in parts], rules) for kind in kinds}
    return PortableOptimizer(rows, scalars, dtypes, groups)


def _check_groups(
    mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], where: str, *, names: bool
) -> None:
    if len(mine) != len(others):
        raise ValueError(f"{where} have {len(mine)} and {len(others)} param groups")
    for number, (a, b) in enumerate(zip(mine, others, strict=True)):
        keys = sorted(key for key in a.keys() | b.keys() if key != "params" or names)
        if differing := [key for key in keys if a.get(key) != b.get(key)]:
            raise ValueError(f"{where} have other values of {differing} in param group {number}")


T = TypeVar("T")
Cells = dict[tuple[int, int], list[int]]
"""(pipeline rank, tensor rank) -> numbers of files."""


@dataclass(frozen=True)
class Degrees:
    """Sizes of a grid of ranks, each at least 1."""

    pp: int = 1
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"the {name} degree of a grid must be at least 1, got {getattr(self, name)}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp

    def __str__(self) -> str:
        return f"pp {self.pp}, tp {self.tp}, dp {self.dp}"


def parts(items: Sequence[T], count: int, what: str = "items") -> list[list[T]]:
    """Cuts a sequence into equal parts.

    Raises:
        ValueError: If the parts would not be equal.
    """
    if count < 1 or len(items) % count:
        raise ValueError(f"{len(items)} {what} cannot be divided into {count} equal parts")
    size = len(items) // count
    return [list(items[number * size : (number + 1) * size]) for number in range(count)]


def obstacles(source: Degrees, target: Degrees) -> list[str]:
    """Why files of one grid cannot be merged for another; empty if they can.

    Data ranks only need to be fewer: the rows that are cut are longer than the data dimension.
    """
    found = []
    for name in ("pp", "tp", "dp"):
        old, new = getattr(source, name), getattr(target, name)
        if new > old:
            found.append(f"{name} would grow from {old} to {new}; files are merged, not divided")
        elif name != "dp" and old % new:
            found.append(f"{name} {old} is not a multiple of {new}")
    return found


def model_files(source: Degrees, target: Degrees) -> Cells:
    """The model files of each pipeline and tensor position of a smaller grid.

    Raises:
        ValueError: If the grids do not fit, saying where.
    """
    _check(source, target)
    tall, wide = source.pp // target.pp, source.tp // target.tp
    return {
        (pp, tp): [
            old_pp * source.tp + old_tp
            for old_pp in range(pp * tall, (pp + 1) * tall)
            for old_tp in range(tp * wide, (tp + 1) * wide)
        ]
        for pp in range(target.pp)
        for tp in range(target.tp)
    }


def optimizer_files(source: Degrees, target: Degrees) -> list[Cells]:
    """The optimizer files of each position, one mapping per data rank of the smaller grid.

    Raises:
        ValueError: If the grids do not fit, saying where.
    """
    stride = source.pp * source.tp
    result: list[Cells] = [{} for _ in range(target.dp)]
    for position, cell in model_files(source, target).items():
        row = [number + dp * stride for number in cell for dp in range(source.dp)]
        for cells, part in zip(result, parts(row, target.dp, "optimizer files of a position"), strict=True):
            cells[position] = part
    return result


def groups_of(degrees: Degrees) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Ranks of the (tensor, pipeline, data) groups; tensor ranks are neighbours, then data ranks, then stages.

    Returns:
        Lists of groups in the order of their first rank.
    """
    pp, tp, dp = degrees.pp, degrees.tp, degrees.dp

    def rank(stage: int, data: int, tensor: int) -> int:
        return (stage * dp + data) * tp + tensor

    tensor_groups = [[rank(s, d, t) for t in range(tp)] for s in range(pp) for d in range(dp)]
    pipeline_groups = [[rank(s, d, t) for s in range(pp)] for d in range(dp) for t in range(tp)]
    data_groups = [[rank(s, d, t) for d in range(dp)] for s in range(pp) for t in range(tp)]
    return tensor_groups, pipeline_groups, data_groups


def _check(source: Degrees, target: Degrees) -> None:
    if found := obstacles(source, target):
        raise ValueError(f"a checkpoint of {source} cannot be read as {target}: " + "; ".join(found))
