"""Code that takes both plain tensors and torch's DTensors: the local part, the group, the whole where it must be.

`DTensor` is asked for when there is one: importing it takes seconds, and plain runs have none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

ProcessGroup = dist.ProcessGroup


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; without importing their module, which nobody has one without."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = _any(tensor).to_local()
    return local


def get_full_tensor_if_necessary(tensor: Tensor) -> Tensor:
    """A DTensor of which some rank has no element, gathered to the whole; any other tensor itself.

    A collective of the tensor's mesh then; all ranks decide alike, from shape, placements and mesh.
    """
    if not is_dtensor(tensor) or not _some_rank_has_nothing(tensor):
        return tensor
    whole: Tensor = _any(tensor).full_tensor()
    return whole


def get_data_parallel_group_if_dtensor(
    tensor: Tensor, data_parallel_group: ProcessGroup | None = None
) -> ProcessGroup | None:
    """The group among which a DTensor is divided; None for any other tensor.

    Args:
        tensor: Divided along at most one axis of its mesh.
        data_parallel_group: Must be that one, if it is given.

    Raises:
        ValueError: If it is another one, or the tensor is divided along several axes.
    """
    if not is_dtensor(tensor):
        return None
    mesh, placements = _any(tensor).device_mesh, _any(tensor).placements
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()] if mesh.ndim > 1 else [0]
    if len(axes) != 1:
        raise ValueError(
            f"a DTensor with placements {list(placements)} on a mesh of {mesh.ndim} axes has no one data-parallel "
            "group; it must be divided along exactly one axis"
        )
    group: ProcessGroup = mesh.get_group(axes[0])
    if data_parallel_group is not None and group is not data_parallel_group:
        raise ValueError(
            f"the DTensor is divided among ranks {dist.get_process_group_ranks(group)}, but data_parallel_group has "
            f"ranks {dist.get_process_group_ranks(data_parallel_group)}"
        )
    return group


def _some_rank_has_nothing(tensor: Tensor) -> bool:
    """A dimension of n elements is cut into chunks of ceil(n / ranks), so that the last ranks may get none."""
    mesh, placements = _any(tensor).device_mesh, _any(tensor).placements
    sizes = {dim: {size} for dim, size in enumerate(tensor.shape)}
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            ranks, dim = mesh.size(axis), placement.dim
            sizes[dim] = {part for size in sizes[dim] for part in _chunks(size, ranks)}
    return tensor.numel() > 0 and any(0 in found for found in sizes.values())


def _chunks(size: int, ranks: int) -> list[int]:
    chunk = -(-size // ranks)
    return [min(chunk, max(0, size - rank * chunk)) for rank in range(ranks)]


def _any(tensor: Tensor) -> Any:
    return tensor
