"""Megatron's process groups: `ParallelGroups`, ranks and sizes, context parallelism.

`get_pg_size`, `get_pg_rank`, `get_pg_src_rank`.

None stands for a group of this process alone, as it does for an axis that a run does not have (`tp_group=None`), with
or without a default process group. The default group itself is `torch.distributed.group.WORLD`.

`get_mesh_names`, `contains_submesh`.

`ParallelGroups`.

Scripts that divide weights among tensor- or expert-parallel ranks tell the functions that must know (slices of a
batch, sharded tensors of a checkpoint, logging once per stage) which groups there are: as a device mesh with named
axes, or group by group. An axis that is not there is None: a group of one.

    2 x ranks chunks:    0  1  2  3  4  5  6  7          rank r has chunks r and 2 x ranks - 1 - r:
                         0  1  2  3  3  2  1  0  <- rank

In causal attention a late position has more to attend to than an early one; a rank with one chunk from either end has
as much work as any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero_strategy.runtime.torch_private import flattened_meshes

ProcessGroup = dist.ProcessGroup


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Ranks of a group; 1 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    return dist.get_world_size(_member(group, "size")) if group is not None and dist.is_initialized() else 1


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """This process in a group; 0 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    return dist.get_rank(_member(group, "rank")) if group is not None and dist.is_initialized() else 0


def get_pg_src_rank(group: ProcessGroup | None = None) -> int:
    """Global rank of a group's first rank; 0 for None, and without `torch.distributed` being initialized.

    Raises:
        ValueError: If this process is no member of the group.
    """
    if group is None or not dist.is_initialized():
        return 0
    return dist.get_process_group_ranks(_member(group, "first rank"))[0]


def _member(group: ProcessGroup, what: str) -> ProcessGroup:
    """The group; `new_group` gives a number in its place to processes that are not in it."""
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"rank {dist.get_rank()} asks for the {what} of a group that it is not a member of; only its members may"
        )
    return group


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Names of a mesh's axes, then those of axes that were flattened of several.

    Args:
        device_mesh: The mesh; None has no names.
        only_submesh_dims: Leave flattened ones out.
    """
    if device_mesh is None:
        return []
    names = list(device_mesh.mesh_dim_names or ())
    return names if only_submesh_dims else names + list(flattened_axes(device_mesh))


def flattened_axes(mesh: DeviceMesh) -> dict[str, DeviceMesh]:
    """The meshes of one axis that were made of several axes of this one, by name."""
    found = flattened_meshes(mesh)
    own, ranks = mesh.mesh_dim_names or (), set(mesh.mesh.flatten().tolist())
    return {
        name: flat for name, flat in found.items() if name not in own and ranks.issuperset(flat.mesh.flatten().tolist())
    }


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """True if a mesh has all axes of these names, flattened ones included.

    Args:
        device_mesh: The mesh; None has no axes.
        submesh_names: One name, or several; None and an empty sequence name nothing, which no mesh contains.
    """
    if device_mesh is None or not submesh_names:
        return False
    wanted = (submesh_names,) if isinstance(submesh_names, str) else tuple(submesh_names)
    names = get_mesh_names(device_mesh)
    return all(name in names for name in wanted)


@dataclass(frozen=True)
class ParallelGroups:
    """Groups that this process is in.

    Attributes:
        tensor: Ranks among which a layer's weights are divided (tp).
        expert_tensor: The same for the weights of experts.
        pipeline: Ranks that hold the stages of one pipeline (pp).
        context: Ranks among which a sequence is divided (cp).
        data: Ranks with the same weights and other samples (dp).
        data_context: Ranks with the same weights: data and context together (dp_cp).
        expert: Ranks among which experts are divided (ep).
    """

    tensor: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    context: ProcessGroup | None = None
    data: ProcessGroup | None = None
    data_context: ProcessGroup | None = None
    expert: ProcessGroup | None = None

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> ParallelGroups:
        """The groups of a mesh whose axes have the usual names.

        Args:
            mesh: Axes among "tp", "pp", "cp", "dp" and "dp_cp" (which may be flattened of the last two); without
                "dp_cp", the data-parallel ranks are taken for it where there is no "cp", and the other way round.
            expert_mesh: Axes "ep", "tp" or "expt_tp" of the experts.

        Raises:
            ValueError: If there are both "dp" and "cp", and nothing that joins them.
        """
        data, context = group_of(mesh, "dp"), group_of(mesh, "cp")
        both = group_of(mesh, "dp_cp")
        if both is None and data is not None and context is not None:
            raise ValueError(
                "the mesh has axes 'dp' and 'cp', but not both together; call mesh['dp', 'cp']._flatten('dp_cp') first"
            )
        return cls(
            tensor=group_of(mesh, "tp"),
            expert_tensor=group_of(expert_mesh, "expt_tp") or group_of(expert_mesh, "tp"),
            pipeline=group_of(mesh, "pp"),
            context=context,
            data=data,
            data_context=both or data or context,
            expert=group_of(expert_mesh, "ep"),
        )


def group_of(mesh: DeviceMesh | None, axis: str) -> ProcessGroup | None:
    """The group of this process along an axis, which may be a flattened one; None if the mesh has none of the name."""
    if mesh is None or not contains_submesh(mesh, axis):
        return None
    return submesh(mesh, (axis,)).get_group()


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """`mesh[names]`, also where they name a flattened axis: torch means to give that up, and warns."""
    if len(names) == 1 and (flat := flattened_axes(mesh).get(names[0])) is not None:
        return flat
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        found: DeviceMesh = mesh[names[0] if len(names) == 1 else tuple(names)]
    return found


def tensor_parallel_group(
    tp_group: ProcessGroup | None, groups: ParallelGroups, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """`tp_group`, or the run's own with a deprecation warning.

    Args:
        tp_group: What the caller was given.
        groups: The run's.
        is_expert: The group of the experts' weights.
        check_initialized: A run without such a group is an error.

    Returns:
        The group; None without `torch.distributed` being initialized.

    Raises:
        ValueError: If neither is there, and that is to be checked.
    """
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    if dist.get_rank() == 0:
        warnings.warn(
            "tp_group is None, so the run's own tensor-parallel group is taken; pass tp_group",
            DeprecationWarning,
            stacklevel=3,
        )
    found = groups.expert_tensor if is_expert else groups.tensor
    if found is None and check_initialized:
        kind = "expert_tensor" if is_expert else "tensor"
        raise ValueError(
            f"there is no {kind}-parallel group; pass tp_group, or set ParallelGroups({kind}=...) with "
            "integrations.megatron.set_parallel_groups()"
        )
    return found


MASK = "attention_mask"
"""The entry of a batch whose sequence dimension is 2 (batch, 1, queries, keys): its rows of queries are divided."""


def get_batch_on_this_cp_rank(batch: Mapping[str, Any], cp_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """This rank's part of a batch.

    Args:
        batch: Tensors with the sequence in dimension 1 (2 for "attention_mask"); other values are left as they are.
        cp_group: The ranks among which sequences are divided; None: this rank alone.

    Raises:
        ValueError: See `batch_on_rank`.
    """
    return batch_on_rank(batch, get_pg_rank(cp_group), get_pg_size(cp_group))


def batch_on_rank(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The part of a batch that rank `rank` of `size` has; with one rank, everything.

    Raises:
        ValueError: If a sequence is no multiple of 2 x size long; names the entry.
    """
    if size == 1:
        return dict(batch)
    return {
        name: _part(name, value, rank, size) if isinstance(value, Tensor) else value for name, value in batch.items()
    }


def batch_from_ranks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The batch whose parts these are, in the order of ranks: the inverse of `batch_on_rank`.

    Raises:
        ValueError: If parts have different entries.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"parts have different entries: {[sorted(part) for part in parts]}")
    return {
        name: _whole(name, [part[name] for part in parts]) if isinstance(value, Tensor) else value
        for name, value in parts[0].items()
    }


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The chunks of a rank, of 2 x size."""
    return rank, 2 * size - 1 - rank


def _dim(name: str) -> int:
    return 2 if name == MASK else 1


def _part(name: str, value: Tensor, rank: int, size: int) -> Tensor:
    dim = _dim(name)
    if value.dim() <= dim or value.shape[dim] % (2 * size):
        raise ValueError(
            f"{name!r} of shape {list(value.shape)} cannot be divided among {size} context-parallel ranks: dimension "
            f"{dim}, the sequence, must be a multiple of {2 * size}; pad it"
        )
    chunks = value.chunk(2 * size, dim)
    return torch.cat([chunks[index] for index in chunks_of(rank, size)], dim)


def _whole(name: str, parts: Sequence[Tensor]) -> Tensor:
    size, dim = len(parts), _dim(name)
    if size == 1:
        return parts[0]
    chunks: list[Tensor] = [parts[0]] * (2 * size)
    for rank, part in enumerate(parts):
        for index, chunk in zip(chunks_of(rank, size), part.chunk(2, dim), strict=True):
            chunks[index] = chunk
    return torch.cat(chunks, dim)
