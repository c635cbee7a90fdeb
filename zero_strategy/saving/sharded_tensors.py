"""Which part of a tensor this rank has, told by its process groups: builders of `ShardedTensor`.

    make_tp_sharded_tensor_for_checkpoint    one axis is divided among tensor-parallel ranks
    make_sharded_tensor_for_checkpoint       every rank has all of it

Data- and context-parallel ranks have copies, of which the first is written. A DTensor is divided along its mesh, too:
inside of what its tensor-parallel rank has.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zero_strategy.checkpoint.sharded_tensor import ReplicaId, ShardedTensor
from zero_strategy.distributed.dtensors import get_data_parallel_group_if_dtensor, is_dtensor, to_local_if_dtensor
from zero_strategy.distributed.group_ranks import get_pg_rank, get_pg_size
from zero_strategy.distributed.parallel_groups import ParallelGroups

Offsets = tuple[tuple[int, int, int], ...]


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    *,
    groups: ParallelGroups | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """This rank's part of a tensor whose axis `tp_axis` is divided among tensor-parallel ranks.

    Args:
        tensor: The part, without prepended axes; a DTensor is the part, and divided once more.
        key: The tensor's name.
        tp_axis: The axis of `tensor`.
        replica_id: Which copy it is; default: (0, 0, data-parallel rank), the last 0 for a DTensor.
        prepend_offsets: (axis, place, places) of new leading axes.
        groups: The run's groups, taken where these are not given:
        kwargs: `tp_group` and `dp_cp_group`, and options of `ShardedTensor.from_rank_offsets`.

    Raises:
        ValueError: See `ShardedTensor.from_rank_offsets`; or a DTensor is divided unevenly.
    """
    tp_group, dp_group, options = _groups(groups, kwargs)
    axis = tp_axis % tensor.dim() if tensor.dim() else tp_axis
    places = {axis: (get_pg_rank(tp_group), get_pg_size(tp_group))}
    return _build(tensor, key, places, prepend_offsets, replica_id, (0, 0), dp_group, options)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    groups: ParallelGroups | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that every tensor- and data-parallel rank has all of.

    Args:
        tensor: All of it; of a DTensor, what its mesh has together.
        key: The tensor's name.
        prepend_offsets: (axis, place, places) of new leading axes.
        replica_id: Which copy it is; default: (0, tensor-parallel rank, data-parallel rank), the last 0 for a DTensor.
        groups: The run's groups, taken where these are not given:
        kwargs: `tp_group` and `dp_cp_group`, and options of `ShardedTensor.from_rank_offsets`.

    Raises:
        ValueError: See `ShardedTensor.from_rank_offsets`; or a DTensor is divided unevenly.
    """
    tp_group, dp_group, options = _groups(groups, kwargs)
    return _build(tensor, key, {}, prepend_offsets, replica_id, (0, get_pg_rank(tp_group)), dp_group, options)


def _build(
    tensor: Tensor,
    key: str,
    places: dict[int, tuple[int, int]],
    prepend: Offsets,
    replica_id: ReplicaId | None,
    replica: tuple[int, int],
    dp_group: Any,
    options: dict[str, Any],
) -> ShardedTensor:
    copy = get_pg_rank(dp_group)
    if is_dtensor(tensor):
        copy = 0 if (axis := _dtensor_axis(tensor, key)) is not None else copy
        group = get_data_parallel_group_if_dtensor(tensor)
        if axis is not None:
            index, parts = places.get(axis, (0, 1))
            size = get_pg_size(group)
            places[axis] = (index * size + get_pg_rank(group), parts * size)
    offsets = [(axis + len(prepend), index, parts) for axis, (index, parts) in places.items()]
    return ShardedTensor.from_rank_offsets(
        key,
        to_local_if_dtensor(tensor),
        *prepend,
        *offsets,
        replica_id=(*replica, copy) if replica_id is None else replica_id,
        prepend_axis_num=len(prepend),
        **options,
    )


def _dtensor_axis(tensor: Any, key: str) -> int | None:
    """The axis along which a DTensor is divided; None if its ranks have copies."""
    shards = [placement for placement in tensor.placements if placement.is_shard()]
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{key!r}: a DTensor with placements {list(tensor.placements)} is a sum that is not taken yet")
    if not shards:
        return None
    group = get_data_parallel_group_if_dtensor(tensor)
    axis = int(shards[0].dim)
    if tensor.shape[axis] % get_pg_size(group):
        raise ValueError(
            f"{key!r}: axis {axis} of a DTensor of shape {list(tensor.shape)} is not divided evenly among "
            f"{get_pg_size(group)} ranks; gather it (get_full_tensor_if_necessary, full_tensor) first"
        )
    return axis


def _groups(groups: ParallelGroups | None, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The tensor-parallel group, that of copies, and what is left."""
    found, options = groups or ParallelGroups(), dict(kwargs)
    tensor, data = options.pop("tp_group", None), options.pop("dp_cp_group", None)
    return tensor or found.tensor, data or found.data_context, options
