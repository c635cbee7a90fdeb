"""`megatron_fsdp.utils`: its names, each the package's own function or class; its meshes and groups in one place.

    mesh = init_device_mesh("cuda", (outer, shard, tensor), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    index = FSDPDistributedIndex(mesh, "dp_shard", "dp_outer", "tp", hybrid_fsdp_group=mesh["dp_outer", "dp_shard"]...)

    plain          parameters are divided among the ranks of `dp_shard_dim`
    hybrid         ... and copied along `dp_outer_dim`
    full hybrid    ... and divided again along `dp_outer_dim` (`hsdp_outer_dp_shard`): inner ranks first, then outer

In the full hybrid the k-th part belongs to the rank with `get_logical_hybrid_fsdp_rank() == k`, which is
inner rank x outer size + outer rank; the group's own ranks run the other way round.

Flat groups of tensors are padded to a boundary, and gathered:

    group of tensors --align_dense_tensors--> + zeros, so that the elements can be divided
                     ranks update one partition each
    partitions       --all_gather_dp_groups--> every rank has all partitions
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zero_strategy.compat.megatron.lifecycle as versions
from zero_strategy.activation.functional import get_cuda_rng_tracker, initialize_rng_tracker
from zero_strategy.activation.rng import DEFAULT_NAME, _get_cuda_rng_state, _set_cuda_rng_state
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.compat.megatron.core_utils import STATE
from zero_strategy.compat.megatron.groups import contains_submesh, get_mesh_names, group_of, submesh
from zero_strategy.compat.megatron.lifecycle import get_te_version
from zero_strategy.compat.megatron.models import (
    create_updated_function_signature,
    get_mcore_tensor_parallel_partition_dim,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    is_submodule,
)
from zero_strategy.compat.megatron.tensors import GlobalMemoryBuffer

logger = logging.getLogger(__name__)

_MODEL_PARALLEL_RNG_TRACKER_NAME = DEFAULT_NAME

get_global_memory_buffer = STATE.get_global_memory_buffer

__all__ = [
    "FSDPDistributedIndex",
    "GlobalMemoryBuffer",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME",
    "_get_cuda_rng_state",
    "_set_cuda_rng_state",
    "contains_submesh",
    "create_updated_function_signature",
    "get_cuda_rng_tracker",
    "get_global_memory_buffer",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "get_te_version",
    "initialize_rng_tracker",
    "is_mcore_tensor_model_parallel",
    "is_mcore_tensor_parallel_duplicated",
    "is_submodule",
    "is_te_min_version",
    "logger",
]


def is_te_min_version(vers: str, check_equality: bool = True) -> bool:
    """`versions.is_te_min_version`, with the argument's name of this page."""
    return versions.is_te_min_version(vers, check_equality)


ProcessGroup = dist.ProcessGroup


class FSDPDistributedIndex:
    """Mesh and groups that a sharded model's collectives use.

    Args:
        device_mesh: With the axes named below.
        dp_shard_dim: Axis along which parameters are divided.
        dp_outer_dim: Axis of their copies, or of a second division; None: not hybrid.
        tp_dim: Axis of tensor parallelism, if there is one.
        hybrid_fsdp_group: The ranks of both data-parallel axes; needed where there is an outer one.
        hsdp_outer_dp_shard: Divide along the outer axis as well.
        expt_device_mesh: The mesh of the experts' parameters, with the axis `dp_shard_dim`.

    Attributes:
        expt_fsdp_group: The group along `dp_shard_dim` of the experts' mesh, or None.

    Raises:
        ValueError: If an axis is missing in the mesh, or an outer axis comes without the group of both.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.device_mesh, self.expt_device_mesh = device_mesh, expt_device_mesh
        self.dp_shard_dim, self.dp_outer_dim, self.tp_dim = dp_shard_dim, dp_outer_dim, tp_dim
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self._check(hybrid_fsdp_group)
        assert dp_shard_dim is not None
        self.fsdp_group = group_of(device_mesh, dp_shard_dim)
        self.outer_fsdp_group = None if dp_outer_dim is None else group_of(device_mesh, dp_outer_dim)
        self.hybrid_fsdp_group = hybrid_fsdp_group
        self.expt_fsdp_group = group_of(expt_device_mesh, dp_shard_dim)

    @property
    def use_hybrid_fsdp(self) -> bool:
        """True if there is an outer axis."""
        return self.dp_outer_dim is not None

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The part of the mesh with these axes.

        Raises:
            ValueError: If it lacks one; names those that there are.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        mesh = self.get_root_mesh(is_expert_parallel)
        if not contains_submesh(mesh, names):
            whose = "expert device mesh" if is_expert_parallel else "device mesh"
            raise ValueError(f"the {whose} has no axes {list(names)}; it has {get_mesh_names(mesh)}")
        return submesh(mesh, names)

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """All ranks among which samples are divided: those of both data-parallel axes, where there are two.

        Raises:
            ValueError: If the experts' is asked for, and there is none.
        """
        if is_expert_parallel or self.hybrid_fsdp_group is None:
            return self.get_fsdp_group(is_expert_parallel)
        return self.hybrid_fsdp_group

    def get_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """The ranks among which parameters are divided (first).

        Raises:
            ValueError: If the experts' is asked for, and there is none.
        """
        if not is_expert_parallel:
            assert self.fsdp_group is not None
            return self.fsdp_group
        if self.expt_fsdp_group is None:
            raise ValueError(
                f"there is no sharding group of experts; pass expt_device_mesh with an axis {self.dp_shard_dim!r}"
            )
        return self.expt_fsdp_group

    def get_outer_fsdp_group(self) -> ProcessGroup | None:
        """The ranks along the outer axis; None where there is none."""
        return self.outer_fsdp_group

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The whole mesh.

        Raises:
            ValueError: If the experts' is asked for, and there is none.
        """
        if not is_expert_parallel:
            return self.device_mesh
        if self.expt_device_mesh is None:
            raise ValueError("there is no mesh of experts; pass expt_device_mesh")
        return self.expt_device_mesh

    def get_logical_hybrid_fsdp_rank(self) -> int:
        """Part of a parameter that this process has in the full hybrid; see above.

        Raises:
            AssertionError: If parameters are not divided along the outer axis (`hsdp_outer_dp_shard`).
        """
        if not self.hsdp_outer_dp_shard:
            raise AssertionError(
                "parameters are divided along the inner axis only; a logical rank of both is there with "
                "FSDPDistributedIndex(..., hsdp_outer_dp_shard=True)"
            )
        inner, outer = self.fsdp_group, self.outer_fsdp_group
        assert inner is not None and outer is not None
        return dist.get_rank(inner) * dist.get_world_size(outer) + dist.get_rank(outer)

    def _check(self, hybrid: ProcessGroup | None) -> None:
        names = get_mesh_names(self.device_mesh)
        if self.dp_shard_dim is None:
            raise ValueError(f"dp_shard_dim must name the axis along which parameters are divided; axes: {names}")
        for what in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
            name = getattr(self, what)
            if name is not None and name not in names:
                raise ValueError(f"{what} {name!r} is no axis of the device mesh, which has {names}")
        expert = get_mesh_names(self.expt_device_mesh)
        if self.expt_device_mesh is not None and self.dp_shard_dim not in expert:
            raise ValueError(f"expt_device_mesh has no axis {self.dp_shard_dim!r} (dp_shard_dim); it has {expert}")
        if self.dp_outer_dim is not None and hybrid is None:
            raise ValueError(
                f"dp_outer_dim {self.dp_outer_dim!r} needs hybrid_fsdp_group, the group of both axes: "
                f"mesh[{self.dp_outer_dim!r}, {self.dp_shard_dim!r}]._flatten('hybrid').get_group()"
            )
        if self.hsdp_outer_dp_shard and self.dp_outer_dim is None:
            raise ValueError("hsdp_outer_dp_shard needs dp_outer_dim, the axis to divide along")


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The tensors, and one of zeros behind them if their elements together are no multiple of `alignment`.

    A collective divides what is flattened of them evenly if `alignment` is a multiple of the ranks, and on NCCL's
    boundaries if it is one of the ranks times the elements in 16 bytes.

    Args:
        tensor_list: Of one dtype and device.
        alignment: Elements.

    Raises:
        ValueError: If `alignment` is not positive, or tensors differ in dtype or device.
    """
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1, not {alignment}")
    kinds = {(tensor.dtype, tensor.device) for tensor in tensor_list}
    if len(kinds) > 1:
        raise ValueError(f"tensors of one flat group must have one dtype and device, not {sorted(map(str, kinds))}")
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    if not missing:
        return list(tensor_list)
    return [*tensor_list, tensor_list[0].new_zeros(missing)]


@torch.no_grad()
def all_gather_dp_groups(
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[dist.ProcessGroup | None] | dist.ProcessGroup | None,
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Fill the partitions of all ranks, in place, from the one that each rank has. A collective of the groups.

    Args:
        partitioned_param_groups: Per group of parameters, one contiguous flat partition per rank, all of one size; the
            one with this rank's number is sent.
        dp_process_group: The ranks of each group of parameters, or one for all; None: this rank alone.
        start_alignment_factor: Each message begins at a multiple of so many elements of the partition.
        allgather_bucket_size: Most elements of a message of all ranks together; at least one alignment is sent.

    Raises:
        ValueError: If partitions and ranks, or groups and process groups, differ in number, or partitions in size.
    """
    if start_alignment_factor < 1 or allgather_bucket_size < 1:
        raise ValueError(
            f"start_alignment_factor {start_alignment_factor} and allgather_bucket_size {allgather_bucket_size} must "
            "be at least 1"
        )
    one = dp_process_group is None or isinstance(dp_process_group, dist.ProcessGroup)
    groups = [dp_process_group] * len(partitioned_param_groups) if one else list(dp_process_group)  # type: ignore[arg-type]
    if len(groups) != len(partitioned_param_groups):
        raise ValueError(f"{len(partitioned_param_groups)} groups of parameters, but {len(groups)} process groups")
    for number, (partitions, group) in enumerate(zip(partitioned_param_groups, groups, strict=True)):
        ranks = Communicator(group, CommunicationCounters())  # type: ignore[arg-type]
        _check(number, partitions, ranks.size)
        room = max(1, allgather_bucket_size // ranks.size // start_alignment_factor) * start_alignment_factor
        _gather(partitions, ranks, room)


def _gather(partitions: Sequence[Tensor], ranks: Communicator, room: int) -> None:
    length = partitions[0].numel()
    bucket = partitions[0].new_empty(min(room, length) * ranks.size)
    for start in range(0, length, room):
        count = min(room, length - start)
        flat = bucket[: count * ranks.size]
        slices = flat.chunk(ranks.size)
        slices[ranks.rank].copy_(partitions[ranks.rank][start : start + count])
        ranks.all_gather(flat).wait()
        for rank, partition in enumerate(partitions):
            if rank != ranks.rank:
                partition[start : start + count].copy_(slices[rank])


def _check(number: int, partitions: Sequence[Tensor], ranks: int) -> None:
    if len(partitions) != ranks:
        raise ValueError(f"group {number} has {len(partitions)} partitions, but there are {ranks} ranks")
    if any(partition.dim() != 1 for partition in partitions) or len({part.numel() for part in partitions}) != 1:
        shapes = [list(partition.shape) for partition in partitions]
        raise ValueError(f"partitions of group {number} must be flat and of one size, not {shapes}")
