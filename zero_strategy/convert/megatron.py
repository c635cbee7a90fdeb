"""Shards of tensor-parallel ranks (Megatron): rules of joining and dividing, and state dicts.

Megatron-LM and DeepSpeed's AutoTP divide parameters among ranks in a few ways, which DeepSpeed checkpoints name in
`universal_checkpoint_info`, as lists of regular expressions over parameter names (`re.match`, at most one per list):

| way | key | full parameter |
| --- | --- | --- |
| column | (none; everything else) | shards one after another along dimension 0 |
| row | `parameter_with_row_parallelism_patterns` | along dimension 1 |
| replicated | `tp_replicated_parameter_patterns` | any shard, all are equal |
| average | `parameter_to_average_patterns` | the mean |
| two halves | `parameter_with_2_sub_params_cat_dim_0` | first halves of all shards, then second halves |
| sub-parameters | `parameter_with_sub_params`, `sub_param_shard_widths` | sub-parameter by sub-parameter |

A name in several lists follows the first of replicated, average, two halves, sub-parameters, row. Besides, a name in
`vocabulary_parameter_patterns` loses the rows that only padded the vocabulary (`original_vocab_size`). Moments of an
optimizer are divided like their parameter. Up to version 0.3 of the information a sub-parameter is divided evenly; from
0.4 on its widths are given.

The layer names say how: attention's and the feed-forward's output projections are divided by rows (dimension 1), their
input projections, embeddings and the output layer by columns (dimension 0), everything else is held whole by all ranks.
The fused query-key-value weight depends on the checkpoint's version. With np heads per rank of size hn, its rows are

    version 0      3 * np * hn     all queries, all keys, all values
    version 1.0    np * hn * 3     per head, interleaved
    version 2.0    np * 3 * hn     per head, one after the other
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Kind = Literal["column", "row", "replicated", "average", "halves", "sub_params"]

_LISTS: dict[str, Kind] = {
    "tp_replicated_parameter_patterns": "replicated",
    "parameter_to_average_patterns": "average",
    "parameter_with_2_sub_params_cat_dim_0": "halves",
    "parameter_with_row_parallelism_patterns": "row",
}
_VOCABULARY = "vocabulary_parameter_patterns"
_PIPELINE = "pipeline_replicated_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_WIDTHS_SINCE = 0.4


@dataclass(frozen=True)
class SubparamShape:
    """A parameter that is several in one, such as a fused query-key-value weight.

    Attributes:
        patterns: Regular expressions of the names.
        shape: Of the full parameter. At `partition_dim` either the sizes of the sub-parameters, or their number where
            they are equal; one other size may be -1.
        partition_dim: The divided dimension.
    """

    patterns: tuple[str, ...]
    shape: tuple[int | tuple[int, ...], ...]
    partition_dim: int

    @classmethod
    def of(cls, value: object) -> SubparamShape:
        """Make one from a mapping with these keys, or an object of a pickle with this state.

        Raises:
            ValueError: If one is missing or malformed.
        """
        fields = value if isinstance(value, Mapping) else getattr(value, "state", None)
        if not isinstance(fields, Mapping):
            fields = {}
        if not {"patterns", "shape", "partition_dim"} <= fields.keys():
            raise ValueError(f"a sub-parameter shape needs patterns, shape and partition_dim, got {value!r}")
        shape = tuple(tuple(size) if isinstance(size, (list, tuple)) else int(size) for size in fields["shape"])
        dim = int(fields["partition_dim"])
        if not 0 <= dim < len(shape):
            raise ValueError(f"a sub-parameter shape has partition_dim {dim}, which is not in its shape {shape}")
        return cls(tuple(fields["patterns"]), shape, dim)


@dataclass(frozen=True)
class Rule:
    """Division of one parameter.

    Attributes:
        kind: See the module.
        sub_params: For sub-parameters, their shape.
        widths: For sub-parameters, the size on each rank of each; None divides evenly.
        vocabulary_size: Rows without padding, of a parameter along the vocabulary.
    """

    kind: Kind = "column"
    sub_params: SubparamShape | None = None
    widths: tuple[tuple[int, ...], ...] | None = None
    vocabulary_size: int | None = None

    @property
    def dim(self) -> int | None:
        """The divided dimension; None where ranks hold whole copies."""
        if self.kind in ("replicated", "average"):
            return None
        if self.sub_params is not None:
            return self.sub_params.partition_dim
        return 1 if self.kind == "row" else 0


@dataclass(frozen=True)
class MergeRules:
    """The rules of one checkpoint. `MergeRules()` divides every parameter by columns.

    Attributes:
        patterns: Kind -> regular expressions.
        sub_params: Shapes of parameters that are several in one.
        widths: Pattern -> sizes per sub-parameter and rank.
        vocabulary: Patterns of parameters along the vocabulary.
        vocabulary_size: Their rows without padding.
        pipeline_replicated: Patterns of what later pipeline stages hold copies of.
        unsupported: Pattern -> why the checkpoint's writer could not describe it.
        version: Of the information, such as 0.4.
    """

    patterns: Mapping[Kind, tuple[str, ...]] = field(default_factory=dict)
    sub_params: tuple[SubparamShape, ...] = ()
    widths: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    vocabulary_size: int | None = None
    pipeline_replicated: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    version: float = 0.0

    @classmethod
    def from_info(cls, info: Mapping[str, Any] | None) -> MergeRules:
        """Make one from `universal_checkpoint_info`; other keys have no effect.

        Raises:
            ValueError: If an entry is malformed.
        """
        info = info or {}
        size = info.get("original_vocab_size")
        return cls(
            patterns={kind: tuple(info.get(key, ())) for key, kind in _LISTS.items()},
            sub_params=tuple(SubparamShape.of(entry) for entry in info.get("parameter_with_sub_params", ())),
            widths={
                pattern: tuple(tuple(int(width) for width in widths) for widths in entry)
                for pattern, entry in info.get("sub_param_shard_widths", {}).items()
            },
            vocabulary=tuple(info.get(_VOCABULARY, ())),
            vocabulary_size=None if size is None else int(size),
            pipeline_replicated=tuple(info.get(_PIPELINE, ())),
            unsupported=dict(info.get(_UNSUPPORTED, {})),
            version=float(info.get("universal_checkpoint_version", 0.0)),
        )

    def rule(self, name: str) -> Rule:
        """The rule of a parameter.

        Raises:
            ValueError: Naming the parameter, if it matches two patterns of one list, the widths of its sub-parameters
                or the vocabulary size are missing, or its writer said that it cannot be merged.
        """
        if reason := _match(name, self.unsupported):
            raise ValueError(f"parameter {name!r} cannot be merged: {self.unsupported[reason]}")
        size = self.vocabulary_size if _match(name, self.vocabulary) else None
        if size is None and _match(name, self.vocabulary):
            raise ValueError(f"parameter {name!r} is along the vocabulary, but original_vocab_size is not given")
        for kind in ("replicated", "average", "halves"):
            if _match(name, self.patterns.get(kind, ())):
                return Rule(kind, vocabulary_size=size)
        for shape in self.sub_params:
            if pattern := _match(name, shape.patterns):
                return Rule("sub_params", shape, self._widths(name, pattern), size)
        row = _match(name, self.patterns.get("row", ()))
        return Rule("row" if row else "column", vocabulary_size=size)

    def unused(self, names: Iterable[str]) -> list[str]:
        """Patterns that match none of these names, which are likely typing errors."""
        names = list(names)
        patterns = {pattern for group in self.patterns.values() for pattern in group} | set(self.vocabulary)
        patterns |= {pattern for shape in self.sub_params for pattern in shape.patterns}
        return sorted(pattern for pattern in patterns if not any(re.match(pattern, name) for name in names))

    def held_by_first_stage(self, name: str) -> bool:
        """True if later pipeline stages hold mere copies of this parameter."""
        return any(re.match(pattern, name) for pattern in self.pipeline_replicated)

    def _widths(self, name: str, pattern: str) -> tuple[tuple[int, ...], ...] | None:
        if self.version < _WIDTHS_SINCE:
            return None
        if pattern not in self.widths:
            raise ValueError(
                f"parameter {name!r} has sub-parameters (pattern {pattern!r}), but sub_param_shard_widths has no entry"
            )
        return self.widths[pattern]


def merge(name: str, shards: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """Joins the shards of one parameter, or of one of its moments.

    Args:
        name: The parameter, for errors.
        shards: One per tensor-parallel rank, in order; of one dtype. A rank may hold an empty one.
        rule: How the parameter is divided.

    Returns:
        The full tensor, of the shards' dtype. It may be one of the shards.

    Raises:
        ValueError: Naming the parameter, if the shards do not fit together or copies differ.
    """
    _check_shards(name, shards, rule)
    if rule.kind == "replicated":
        whole = _equal_copies(name, shards)
    elif rule.kind == "average":
        whole = _mean(shards)
    elif rule.kind == "halves":
        parts = [_halves(name, shard) for shard in shards]
        whole = torch.cat([half for number in (0, 1) for half in (part[number] for part in parts)])
    elif rule.sub_params is not None:
        whole = _merge_sub_params(name, shards, rule)
    else:
        whole = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=rule.dim or 0)
    if rule.vocabulary_size is not None:
        if whole.dim() == 0 or whole.shape[0] < rule.vocabulary_size:
            raise ValueError(
                f"parameter {name!r} of shape {tuple(whole.shape)} has fewer rows than the vocabulary, "
                f"{rule.vocabulary_size}"
            )
        whole = whole[: rule.vocabulary_size]
    return whole


def merged_shape(name: str, shapes: Sequence[Sequence[int]], rule: Rule) -> tuple[int, ...]:
    """Shape of the whole of shards of these shapes.

    Raises:
        ValueError: As `merge`, but for what depends on values.
    """
    shards = [torch.empty(tuple(shape), device="meta") for shape in shapes]
    if rule.kind == "replicated":
        _check_shards(name, shards, rule)
        rule, shards = Rule(vocabulary_size=rule.vocabulary_size), shards[:1]
    return tuple(merge(name, shards, rule).shape)


def split(name: str, whole: torch.Tensor, rule: Rule, degree: int) -> list[torch.Tensor]:
    """Divides a parameter among tensor-parallel ranks; `merge` undoes it.

    Args:
        name: The parameter, for errors.
        whole: The tensor.
        rule: How to divide. Along the vocabulary, rows of zeros are added up to a multiple of `degree`.
        degree: Number of ranks.

    Returns:
        One tensor per rank, views where possible.

    Raises:
        ValueError: Naming the parameter, if it cannot be divided so.
    """
    if rule.vocabulary_size is not None and whole.dim():
        missing = -whole.shape[0] % degree
        whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
    if rule.dim is None:
        return [whole] * degree
    if rule.kind == "halves":
        first, second = (_chunks(name, half, degree, 0) for half in _halves(name, whole))
        return [torch.cat(pair) for pair in zip(first, second, strict=True)]
    if rule.sub_params is not None:
        return _split_sub_params(name, whole, rule, degree)
    return _chunks(name, whole, degree, rule.dim)


def _match(name: str, patterns: Iterable[str]) -> str | None:
    found = [pattern for pattern in patterns if re.match(pattern, name)]
    if len(found) > 1:
        raise ValueError(f"parameter {name!r} matches several patterns of one list: {found}")
    return found[0] if found else None


def _check_shards(name: str, shards: Sequence[torch.Tensor], rule: Rule) -> None:
    shapes = [tuple(shard.shape) for shard in shards]
    if not shards:
        raise ValueError(f"parameter {name!r} has no shards")
    if len({shard.dtype for shard in shards}) > 1:
        raise ValueError(f"parameter {name!r} has shards of different dtypes: {[shard.dtype for shard in shards]}")
    dim = rule.dim
    joined = len(shards) > 1 or rule.sub_params is not None
    if dim is not None and joined and any(len(shape) <= dim for shape in shapes):
        raise ValueError(
            f"parameter {name!r} is divided along dimension {dim} ({rule.kind}), but its shards have the shapes "
            f"{shapes}"
        )
    rest = {shape if dim is None else shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(rest) > 1:
        raise ValueError(f"parameter {name!r} ({rule.kind}) has shards that do not fit together: {shapes}")


def _equal_copies(name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    for rank, shard in enumerate(shards[1:], start=1):
        if not _same_bits(shards[0], shard):
            differing = int((shards[0] != shard).sum())
            raise ValueError(
                f"parameter {name!r} is replicated, but its copies on tensor-parallel ranks 0 and {rank} differ in "
                f"{differing} of {shard.numel()} elements; if that is meant, name it in parameter_to_average_patterns"
            )
    return shards[0]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _mean(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    total = shards[0].float() if shards[0].dtype in (torch.float16, torch.bfloat16) else shards[0]
    for shard in shards[1:]:
        total = total + shard
    return (total / len(shards)).to(shards[0].dtype)


def _halves(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.dim() == 0 or tensor.shape[0] % 2:
        raise ValueError(f"parameter {name!r} of shape {tuple(tensor.shape)} does not consist of two equal halves")
    size = tensor.shape[0] // 2
    return tensor[:size], tensor[size:]


def _chunks(name: str, tensor: torch.Tensor, degree: int, dim: int) -> list[torch.Tensor]:
    if tensor.dim() <= dim or tensor.shape[dim] % degree:
        raise ValueError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} cannot be divided among {degree} ranks along "
            f"dimension {dim}"
        )
    return list(tensor.split(tensor.shape[dim] // degree, dim)) if tensor.shape[dim] else [tensor] * degree


def _merge_sub_params(name: str, shards: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    assert rule.sub_params is not None
    dim = rule.sub_params.partition_dim
    total = sum(shard.shape[dim] for shard in shards)
    widths = _shard_widths(name, rule, len(shards), total)
    pieces: list[list[torch.Tensor]] = [[] for _ in widths]
    for rank, shard in enumerate(shards):
        mine = [per_rank[rank] for per_rank in widths]
        if sum(mine) != shard.shape[dim]:
            raise ValueError(
                f"parameter {name!r}: rank {rank} holds {shard.shape[dim]} along dimension {dim}, its sub-parameters "
                f"take {mine}"
            )
        for number, piece in enumerate(shard.split(mine, dim)):
            pieces[number].append(piece)
    return torch.cat([piece for group in pieces for piece in group], dim)


def _split_sub_params(name: str, whole: torch.Tensor, rule: Rule, degree: int) -> list[torch.Tensor]:
    assert rule.sub_params is not None
    dim = rule.sub_params.partition_dim
    widths = _shard_widths(name, rule, degree, whole.shape[dim])
    subs = whole.split([sum(per_rank) for per_rank in widths], dim)
    parts = [sub.split(list(per_rank), dim) for sub, per_rank in zip(subs, widths, strict=True)]
    return [torch.cat([part[rank] for part in parts], dim) for rank in range(degree)]


def _shard_widths(name: str, rule: Rule, degree: int, total: int) -> list[Sequence[int]]:
    """Sizes along the divided dimension, of each sub-parameter on each rank."""
    assert rule.sub_params is not None
    shape = rule.sub_params
    spec = shape.shape[shape.partition_dim]
    if isinstance(spec, tuple):
        sizes = list(spec)
    elif rule.widths is not None:
        sizes = [sum(per_rank) for per_rank in rule.widths]
    else:
        if spec <= 0 or total % spec:
            raise ValueError(f"parameter {name!r}: {total} rows do not consist of {spec} equal sub-parameters")
        sizes = [total // spec] * spec
    if sum(sizes) != total:
        raise ValueError(f"parameter {name!r}: sub-parameters of sizes {sizes} do not add up to {total}")
    if rule.widths is None:
        if uneven := [size for size in sizes if size % degree]:
            raise ValueError(
                f"parameter {name!r}: sub-parameters of sizes {uneven} do not divide evenly among {degree} ranks, and "
                "the checkpoint has no sub_param_shard_widths"
            )
        return [[size // degree] * degree for size in sizes]
    widths = [list(per_rank) for per_rank in rule.widths]
    if [sum(per_rank) for per_rank in widths] != sizes or any(len(per_rank) != degree for per_rank in widths):
        raise ValueError(
            f"parameter {name!r}: sub_param_shard_widths {widths} do not describe sub-parameters of sizes {sizes} on "
            f"{degree} ranks"
        )
    return [*widths]


VERSIONS = (0, 1.0, 2.0)
_ROWS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")
_COLUMNS = ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias", "word_embeddings.weight", "final_linear.weight")
_FUSED = "attention.query_key_value"
REQUIRED = (*_ROWS, _FUSED, "mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias")
"""Parts of names that a Megatron transformer's state dict has."""


def rule_of(name: str, version: float) -> Rule:
    """Division of a tensor of a Megatron transformer.

    Args:
        name: Its name; a part of it decides.
        version: The checkpoint's version.

    Raises:
        ValueError: If the version is not one of `VERSIONS`.
    """
    if version not in VERSIONS:
        raise ValueError(f"Megatron checkpoint version {version} is not known; known are {VERSIONS}")
    if any(part in name for part in _ROWS):
        return Rule("row")
    if _FUSED in name:
        return Rule("sub_params", SubparamShape((), (3, -1), 0)) if version == 0 else Rule("column")
    kind: Kind = "column" if any(part in name for part in _COLUMNS) else "replicated"
    return Rule(kind)


def merge_states(states: Sequence[Mapping[str, torch.Tensor]], version: float) -> OrderedDict[str, torch.Tensor]:
    """Joins the state dicts of neighbouring tensor-parallel ranks.

    What is held whole is taken from the first; copies are not compared, for position counters and the like differ.

    Raises:
        ValueError: If a tensor is missing from one, or shards do not fit, by name.
    """
    if not states:
        raise ValueError("there are no state dicts to merge")
    for rank, state in enumerate(states):
        if differing := sorted(states[0].keys() ^ state.keys()):
            raise ValueError(f"the state dicts of tensor ranks 0 and {rank} do not have the same names: {differing}")
    merged: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in states[0].items():
        rule = rule_of(name, version)
        whole = rule.kind == "replicated" or not isinstance(value, torch.Tensor)
        merged[name] = value if whole else merge(name, [state[name] for state in states], rule)
    return merged


def split_state(
    state: Mapping[str, torch.Tensor], version: float, degree: int, rank: int
) -> OrderedDict[str, torch.Tensor]:
    """One of `degree` equal tensor-parallel shards of a state dict; views where possible.

    Raises:
        ValueError: If a tensor cannot be divided so, by name.
    """
    if not 0 <= rank < degree:
        raise ValueError(f"shard {rank} is not one of {degree}")
    divided: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in state.items():
        rule = rule_of(name, version)
        whole = rule.kind == "replicated" or not isinstance(value, torch.Tensor)
        divided[name] = value if whole else split(name, value, rule, degree)[rank]
    return divided


def missing_names(state: Mapping[str, object]) -> list[str]:
    """Parts of names that a Megatron transformer has and this state dict lacks."""
    return [part for part in REQUIRED if not any(part in name for name in state)]
