"""Tensor-parallel parameters (`DTensor`): local parts, and which elements of the whole they are.

`DTensor` is asked for when there is one: importing it takes seconds, and plain runs have none.

Pure arithmetic.

    whole, shape (3, 4), divided along dimension 1 between two ranks; rank 1 has the elements in brackets

        . . [2 3]          the row-major whole:  . . 2 3 . . 6 7 . . 10 11
        . . [6 7]          of this rank:             2 3     6 7     10 11     (rows of 2 in rows of 4, from column 2)
        . . [10 11]

What comes after the divided dimension is one run of elements, so a part is a number of equal runs ("rows"): a single
one where the first dimension is divided.

A parameter that `parallelize_module` has divided is a `DTensor`: it has the shape of the whole and holds a plain
tensor, this rank's part. A bucket holds the parts. The parameter object stays what it is; what it holds points into the
bucket, as the `.data` of a plain parameter does.

Only what lies on one mesh dimension is taken: `Shard(d)`, in whatever lengths, and `Replicate`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.runtime.torch_private import hooks_kept, swap_values

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


ProcessGroup = dist.ProcessGroup


def is_dtensor(tensor: object) -> bool:
    """True if it is a DTensor; without importing their module, which nobody has one without."""
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
    # A mesh of one axis has one group only, however the tensor lies.
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


@dataclass(frozen=True)
class Span:
    """Elements of a part that are one range of the whole.

    Attributes:
        start, stop: In the flattened whole.
        local: Index of the first in the flattened part.
    """

    start: int
    stop: int
    local: int


@dataclass(frozen=True)
class TensorPart:
    """One rank's part of a parameter.

    Attributes:
        shape: Of the whole.
        dim: The divided dimension; None: every rank has the whole.
        start: Index of this rank's first element along it.
        length: How many it has along it.
        rank: This rank among those that divide it.
        copy: Number of this part among equal ones of other ranks, beside those that ZeRO divides.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    length: int = 0
    rank: int = 0
    copy: int = 0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    @property
    def counts(self) -> bool:
        """True if these elements are this rank's in sums over the ranks, and its to write: copies count once."""
        return self.copy == 0 and (self.dim is not None or self.rank == 0)

    @property
    def rows(self) -> int:
        """Number of runs."""
        return 1 if self.dim is None else math.prod(self.shape[: self.dim])

    @property
    def row(self) -> int:
        """Elements of a run."""
        return math.prod(self.local_shape if self.dim is None else self.local_shape[self.dim :])

    @property
    def whole_row(self) -> int:
        """Elements from the beginning of a run to that of the next, in the full tensor."""
        return math.prod(self.shape if self.dim is None else self.shape[self.dim :])

    @property
    def offset(self) -> int:
        """Place of the first run in the full tensor."""
        return 0 if self.dim is None else self.start * math.prod(self.shape[self.dim + 1 :])

    @property
    def is_one_range(self) -> bool:
        """True if every rank's part is a single range of the whole."""
        return self.rows <= 1

    def whole_index(self, local: int) -> int:
        """Position of an element of the part in the flattened whole."""
        row, column = divmod(local, max(self.row, 1))  # an empty part has runs of no elements
        return row * self.whole_row + self.offset + column

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Elements [start, stop) of the flattened part as ranges of the whole, in order."""
        # Runs without gaps between them are one range: one span for all.
        if self.is_one_range or self.row == self.whole_row:
            first = self.offset + start
            yield Span(first, first + stop - start, start)
            return
        while start < stop:
            end = min((start // self.row + 1) * self.row, stop)
            first = self.whole_index(start)
            yield Span(first, first + end - start, start)
            start = end

    def whole_rows(self, start: int, stop: int) -> tuple[int, int]:
        """The runs that lie in elements [start, stop) of the part from end to end: first, one past the last."""
        first, last = -(-start // max(self.row, 1)), stop // max(self.row, 1)
        # A range inside of one run holds none from end to end, and `last` would come before `first`.
        return first, max(first, last)

    def pick(self, values: Tensor, rows: int) -> Tensor:
        """This rank's elements of so many rows.

        Args:
            values: Of the whole, flat, from the beginning of the first run to the end of the last.

        Returns:
            Flat, (rows * row,).
        """
        return values.as_strided((rows, self.row), (self.whole_row, 1)).reshape(-1)

    def of_whole(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole's shape: a view."""
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)


def held_by(tensor: Tensor) -> Tensor:
    """The plain tensor with this rank's values: the very one that a `DTensor` holds, else `tensor` itself."""
    if not is_dtensor(tensor):
        return tensor
    # `to_local()` gives a view of it. This is the protocol by which tensor subclasses show what they are made of.
    names, _ = cast(Any, tensor).__tensor_flatten__()
    return cast(Tensor, getattr(tensor, names[0]))


def divided_alike(one: Tensor, other: Tensor) -> bool:
    """True if both are `DTensor`s of which this rank has the same elements."""
    if not (is_dtensor(one) and is_dtensor(other)) or one.shape != other.shape:
        return False
    first, second = cast("DTensor", one), cast("DTensor", other)
    return first.placements == second.placements and first.device_mesh == second.device_mesh


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
    """Part of a parameter that this rank has.

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
    # No check: it would be a collective. Shape and stride of the whole are given, since `from_local` takes all parts
    # for equally long otherwise.
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
    """This rank's part of values for a parameter: whole ones, that part itself, or a `DTensor`.

    A collective if a `DTensor` lies otherwise.
    """
    if not is_dtensor(values) and values.shape == part.local_shape:
        return values
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
    # What is on the meta device has no values, and torch refuses to copy it.
    moved = torch.empty_like(local, dtype=dtype, device=device) if local.is_meta else local.to(device, dtype)
    put_back = hooks_kept(parameter)
    swap_values(parameter, like(parameter, moved))
    # Their tables stay with the object and are called by what went: hooks to come would never be.
    put_back()
