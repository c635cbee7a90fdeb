"""Flat groups of tensors that are divided among data-parallel ranks: padded to a boundary, and gathered.

    group of tensors --align_dense_tensors--> + zeros, so that the elements can be divided
                     ranks update one partition each
    partitions       --all_gather_dp_groups--> every rank has all partitions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.distributed.script_groups import ScriptCommunicator


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
        ranks = ScriptCommunicator(group)  # type: ignore[arg-type]
        _check(number, partitions, ranks.size)
        room = max(1, allgather_bucket_size // ranks.size // start_alignment_factor) * start_alignment_factor
        _gather(partitions, ranks, room)


def _gather(partitions: Sequence[Tensor], ranks: ScriptCommunicator, room: int) -> None:
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
