"""The states of model-parallel ranks made one, and the grid that tells which files belong together.

tensor-parallel shards are joined, pipeline stages put in a row.

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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from zero_strategy.checkpoint.layout import TensorSpec
from zero_strategy.convert.megatron import MergeRules, Rule, merge, merged_shape
from zero_strategy.convert.portable import PortableOptimizer, PortableState, StoredTensor


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
