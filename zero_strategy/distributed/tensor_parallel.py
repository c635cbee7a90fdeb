"""Where the ranks are that divide layers (tensor parallelism), and the lanes of data-parallel ranks across them.

    8 ranks, groups of 2:   [0 1] [2 3] [4 5] [6 7]     lanes: [0 2 4 6] and [1 3 5 7]

A lane holds the same part of every layer; ZeRO divides its state among the lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def tensor_groups_of(ranks: Sequence[int] | None, size: int) -> list[list[int]]:
    """The groups of all ranks, from the one that each is in. A collective of the world.

    Args:
        ranks: Those with which this rank divides layers, as its model says; None: it does not say.
        size: How many they are to be.

    Returns:
        In the order of their first ranks.

    Raises:
        ValueError: If a rank's model says nothing, or other than `size`, or groups overlap.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone: list[Sequence[int] | None] = [ranks]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, ranks)
    found = [None if one is None else tuple(one) for one in everyone]
    for rank, one in enumerate(found):
        if one is None:
            raise ValueError(
                f"mesh.tensor is {size}, but on rank {rank} no parameter is divided: call parallelize_module(module, "
                "device_mesh['tp'], plan) before the engine is made (under a Trainer in configure_model(), with "
                "self.device_mesh['tensor_parallel'])"
            )
        if len(one) != size or rank not in one or any(found[other] != one for other in one):
            raise ValueError(
                f"mesh.tensor is {size}, but the parameters of rank {rank} are divided among ranks {list(one)}; make "
                "the device mesh with as many, such as zero_strategy.distributed.tensor_parallel.make_device_mesh"
                f"('cpu', tensor={size})"
            )
    return [list(one) for one in sorted({one for one in found if one is not None})]


def lanes_across(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks that hold the same part: those at one place of every group."""
    return [[group[place] for group in groups] for place in range(len(groups[0]))]


def mesh_of_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> DeviceMesh:
    """The device mesh of one group of ranks, for `parallelize_module`.

    Args:
        group: This rank's.
        ranks: Its ranks in the world, in their order.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device_type = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    return DeviceMesh.from_group(group, device_type, mesh=list(ranks), mesh_dim_names=("tp",))


def make_device_mesh(
    device_type: str, *, tensor: int, stages: int = 1, names: tuple[str, str] = ("dp", "tp")
) -> DeviceMesh:
    """The device mesh of all ranks, for `parallelize_module`. A collective of the world.

    Args:
        device_type: "cpu" or "cuda".
        tensor: Ranks that divide each layer; these are neighbours.
        stages: Pipeline stages.
        names: Of the last two dimensions.

    Returns:
        With the dimensions "dp" and "tp", after "pp" where there are stages: `mesh["tp"]` is what
        `parallelize_module` takes, `mesh["dp"]` has the ranks that get different data.

    Raises:
        ValueError: If the world size is not a multiple of tensor x stages.
    """
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if tensor < 1 or stages < 1 or world % (tensor * stages):
        raise ValueError(f"{tensor} tensor-parallel ranks x {stages} stages do not divide the world size {world}")
    copies = world // (tensor * stages)
    if stages > 1:
        return init_device_mesh(device_type, (stages, copies, tensor), mesh_dim_names=("pp", *names))
    return init_device_mesh(device_type, (copies, tensor), mesh_dim_names=names)
