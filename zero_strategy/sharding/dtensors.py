"""Tensor-parallel parameters: what buckets ask of `DTensor`s.

A parameter that `parallelize_module` has divided is a `DTensor`: it has the shape of the whole and holds a plain
tensor, this rank's part. A bucket holds the parts. The parameter object stays what it is; what it holds points into the
bucket, as the `.data` of a plain parameter does.

Only what lies on one mesh dimension is taken: `Shard(d)`, in whatever lengths, and `Replicate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from zero_strategy.distributed.dtensors import is_dtensor
from zero_strategy.runtime.torch_private import hooks_kept
from zero_strategy.sharding.tensor_part import TensorPart

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def held_by(tensor: Tensor) -> Tensor:
    """The plain tensor with this rank's values: the very one that a `DTensor` holds, else `tensor` itself."""
    if not is_dtensor(tensor):
        return tensor
    # `to_local()` gives a view of it. This is the protocol by which tensor subclasses show what they are made of.
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return cast(Tensor, getattr(tensor, names[0]))


def check_placement(name: str, tensor: Tensor) -> None:
    """Raise unless a parameter or buffer lies as this package can divide it further.

    Raises:
        ValueError: Naming it, its placements and its mesh.
    """
    if not is_dtensor(tensor):
        return
    from torch.distributed.tensor import Replicate, Shard

    found = cast("DTensor", tensor)
    if len(found.placements) != 1 or type(found.placements[0]) not in (Shard, Replicate):
        raise ValueError(
            f"{name!r} is a DTensor with placements {found.placements} on {found.device_mesh}: accepted are Shard(dim) "
            "and Replicate() on a mesh of one dimension, that of tensor parallelism, such as device_mesh['tp']. ZeRO "
            "divides what is left among the data-parallel ranks itself, so leave out other dimensions and fully_shard"
        )


def tensor_ranks(module: nn.Module) -> list[int] | None:
    """The ranks of the world among which the module's `DTensor`s are divided, in order; None if there are none.

    Raises:
        ValueError: If one cannot be taken, or they are on different meshes; names the parameters.
    """
    known: tuple[str, list[int]] | None = None
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_dtensor(tensor):
            continue
        check_placement(name, tensor)
        ranks = cast("DTensor", tensor).device_mesh.mesh.flatten().tolist()
        if known is not None and known[1] != ranks:
            raise ValueError(
                f"DTensors {known[0]!r} and {name!r} are divided among different ranks, {known[1]} and {ranks}: "
                "parallelize all of a model on one mesh"
            )
        known = known or (name, ranks)
    return None if known is None else known[1]


def part_of(parameter: Tensor, rank: int = 0) -> TensorPart:
    """What this rank has of a parameter.

    Args:
        parameter: Divided, or whole on all ranks.
        rank: This one among the tensor-parallel ranks; a `DTensor` knows it.
    """
    shape = tuple(parameter.shape)
    if not is_dtensor(parameter):
        return TensorPart(shape, rank=rank)
    from torch.distributed.tensor import Shard

    found = cast("DTensor", parameter)
    placement, rank = found.placements[0], found.device_mesh.get_local_rank()
    if not isinstance(placement, Shard):
        return TensorPart(shape, rank=rank)
    dim = placement.dim % len(shape)
    size, length = found.device_mesh.size(), shape[dim]
    chunk = -(-length // size)  # as `torch.chunk` divides
    start = min(rank * chunk, length)
    part = TensorPart(shape, dim, start, min(chunk, length - start), rank)
    assert held_by(parameter).shape == part.local_shape, "DTensor divides as torch.chunk does"
    return part


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as what it is of the whole: a `DTensor` placed as the parameter; a plain parameter's is left as it is."""
    if not is_dtensor(parameter):
        return local
    from torch.distributed.tensor import DTensor

    known = cast("DTensor", parameter)
    return DTensor.from_local(
        local, known.device_mesh, known.placements, run_check=False, shape=known.shape, stride=known.stride()
    )


def local_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """This rank's part of a gradient as autograd gives it; partial sums are added up. A collective if they are."""
    if not is_dtensor(gradient):
        return gradient
    found, wanted = cast("DTensor", gradient), cast("DTensor", parameter)
    if found.placements != wanted.placements:
        found = found.redistribute(placements=wanted.placements)
    return found.to_local()


def local_values(part: TensorPart, parameter: Tensor, values: Tensor) -> Tensor:
    """This rank's part of values for a parameter: whole ones, or a `DTensor`. A collective if that lies otherwise."""
    with torch.no_grad():
        return local_gradient(parameter, values) if is_dtensor(values) else part.of_whole(values)


def whole_of(parameter: Tensor, local: Tensor) -> Tensor:
    """The whole of what every rank has a part of. A collective of the tensor-parallel ranks if it is divided."""
    placed = like(parameter, local)
    return cast("DTensor", placed).full_tensor() if is_dtensor(placed) else placed


def recast(parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Give a `DTensor` parameter, which stays the same object and keeps its hooks, another dtype or device.

    A plain one takes both with its `.data`; this one's own are fixed when it is made.
    """
    local = held_by(parameter)
    if not is_dtensor(parameter) or (local.dtype == dtype and local.device == device):
        return
    moved = torch.empty_like(local, dtype=dtype, device=device) if local.is_meta else local.to(device, dtype)
    put_back = hooks_kept(parameter)
    torch.utils.swap_tensors(parameter, nn.Parameter(like(parameter, moved), parameter.requires_grad))
    # Their tables stay with the object and are called by what went: hooks to come would never be.
    put_back()

