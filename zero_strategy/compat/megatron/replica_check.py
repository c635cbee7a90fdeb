"""Comparison of the parameters of data-parallel replicas, bit by bit.

What is compared is what ranks hold alike: whole parameters at stages 0 to 2 and of modules that are not sharded; at
stage 3 a rank's slices, with those of the ranks that hold the same ones (`mesh.replicate`). Nothing is gathered but
digests, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import xxhash
from torch import Tensor, nn

from zero_strategy.comm.barrier import gather_everywhere
from zero_strategy.comm.mesh import Mesh
from zero_strategy.comm.process_group import world_rank
from zero_strategy.fsdp.dtensor import held_by
from zero_strategy.fsdp.model import sharded_model_of
from zero_strategy.fsdp.param_bucket import ParameterBucket


@dataclass(frozen=True)
class ReplicaDifference:
    """One parameter that replicas do not hold alike.

    Attributes:
        name: Of the parameter.
        groups: Data-parallel ranks that hold the same values together; those with replica 0 come first.
    """

    name: str
    groups: list[list[int]]

    @property
    def odd(self) -> list[int]:
        """The ranks that are not with most of them; of two equal halves, those that are not with the first."""
        most = max(self.groups, key=len)
        return sorted(rank for group in self.groups if group is not most for rank in group)

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.odd))
        return f"{self.name}: rank(s) {ranks} of {' | '.join(' '.join(map(str, group)) for group in self.groups)}"


@dataclass(frozen=True)
class ReplicaReport:
    """Result of a comparison; the same on every rank.

    Attributes:
        compared: How many parameters (at stage 3, parts of them on this rank's replicas) have more than one holder.
        differences: Those that are not equal.
    """

    compared: int
    differences: list[ReplicaDifference]

    def matches_first(self, rank: int) -> bool:
        """True if a rank holds what replica 0 of it holds."""
        holding = [each for each in self.differences if any(rank in group for group in each.groups)]
        return all(rank in each.groups[0] for each in holding)

    def __str__(self) -> str:
        if not self.differences:
            return f"replicas are equal ({self.compared} compared)"
        return "\n".join(["replicas differ:", *(f"  {difference}" for difference in self.differences)])


def check_param_hashes_across_dp_replicas(model: nn.Module | Sequence[nn.Module], cross_check: bool = False) -> bool:
    """True if this rank's parameters are those of data-parallel replica 0. A collective.

    Args:
        model: A module, or the chunks of one.
        cross_check: Whether all replicas' are equal instead: the same answer on every rank.

    Returns:
        Whether they are; `replica_report` says which are not.
    """
    report, rank = _compared(model)
    return not report.differences if cross_check else report.matches_first(rank)


def replica_report(model: nn.Module | Sequence[nn.Module]) -> ReplicaReport:
    """Parameters that replicas hold differently, and which ranks. A collective."""
    return _compared(model)[0]


def _compared(model: nn.Module | Sequence[nn.Module]) -> tuple[ReplicaReport, int]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    mesh = next((found for chunk in chunks if (found := _mesh_of(chunk)) is not None), None)
    mine: dict[str, str] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk {number}: " if len(chunks) > 1 else ""
        mine |= {prefix + name: value for name, value in _digests(chunk)}
    everyone: list[tuple[int, dict[str, str]]]
    if mesh is None:
        everyone = [(0, part) for part in gather_everywhere(mine)]
        rank = world_rank()
    else:
        everyone = mesh.control.all_gather_objects((mesh.shard_rank, mine))
        rank = mesh.rank
    return _report(everyone), rank


def _report(everyone: Sequence[tuple[int, dict[str, str]]]) -> ReplicaReport:
    """From each rank's column of the mesh and digests. Whole parameters say so, and have one column."""
    holders: dict[tuple[int, str], dict[str, list[int]]] = {}
    for rank, (column, part) in enumerate(everyone):
        for name, digest in part.items():
            shared, _, value = digest.partition(" ")
            key = (column if shared == "slice" else -1, name)
            holders.setdefault(key, {}).setdefault(value, []).append(rank)
    held = {key: list(values.values()) for key, values in holders.items()}
    several = {key: groups for key, groups in held.items() if sum(map(len, groups)) > 1}
    missing = {
        name: [present, sorted(set(range(len(everyone))) - set(present))]
        for (column, name), groups in held.items()
        if len(present := sorted(chain(*groups))) < len(everyone) and column < 0
    }
    found = [ReplicaDifference(name, groups) for (_, name), groups in several.items() if len(groups) > 1]
    found += [ReplicaDifference(f"{name} (not on all ranks)", groups) for name, groups in missing.items()]
    return ReplicaReport(len(several), found)


def _mesh_of(module: nn.Module) -> Mesh | None:
    for parameter in module.parameters():
        if (model := sharded_model_of(parameter)) is not None:
            return model.mesh
    return None


def _digests(module: nn.Module) -> Iterator[tuple[str, str]]:
    followed: set[int] = set()
    for name, parameter in module.named_parameters():
        model = sharded_model_of(parameter)
        place = None if model is None else model.place(parameter)
        if model is not None and id(model) not in followed:
            followed.add(id(model))
            model.follow_edits()
        if place is None or not place[0].placement.shard_parameters:
            yield name, f"whole {_digest(name, parameter.shape, held_by(parameter))}"
        elif (values := _slice_of(*place)) is not None:
            yield name, f"slice {_digest(name, parameter.shape, values)}"


def _slice_of(bucket: ParameterBucket, index: int) -> Tensor | None:
    for piece in bucket.slice_pieces:
        if piece.index == index and piece.numel:
            return bucket.shard.read(piece.offset, piece.offset + piece.numel)
    return None


def _digest(name: str, shape: torch.Size, values: Tensor) -> str:
    """Of raw bytes: NaNs and zeros of different bits differ."""
    raw = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = xxhash.xxh3_128(f"{name} {tuple(shape)} {values.dtype} ".encode())
    if raw.size:
        digest.update(raw.data)
    return digest.hexdigest()
