"""A rank's part of a tensor that is divided among ranks, described so that a checkpoint can put it together.

    global_shape             of the whole tensor
    axis_fragmentations      into how many equal parts each of its axes is cut
    global_offset            where this part begins
    replica_id               which copy of the part this is; the one of all zeros is written
    prepend_axis_num         leading axes that the rank's own tensor does not have (a layer's number, say)

Arithmetic only: who is which rank is told by the builders (`saving/sharded_tensors.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

ReplicaId = int | tuple[int, ...]


class AxisOffset(NamedTuple):
    """One axis of the whole tensor that is divided evenly."""

    axis: int
    place: int
    """This rank's, of so many:"""
    parts: int


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """See above.

    Attributes:
        key: The tensor's name in the checkpoint.
        data: This rank's part, without the prepended axes; None: its description alone.
        dtype: Of its elements.
        local_shape: Shape of `data`.
        global_shape: With the prepended axes.
        global_offset: Likewise.
        axis_fragmentations: Likewise.
        replica_id: An integer, or several.
        prepend_axis_num: Number of prepended axes.
        allow_shape_mismatch: The whole tensor may have another shape in the checkpoint (a padded vocabulary).
    """

    key: str
    data: Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """The part of a rank, from its places along the divided axes.

        Args:
            key: The tensor's name.
            data: This rank's part.
            rank_offsets: (axis of the whole tensor, this rank's place, places), once per axis at most.
            replica_id: Which copy.
            prepend_axis_num: Leading axes that `data` does not have; each needs an offset.
            allow_shape_mismatch: See above.

        Raises:
            ValueError: If an axis is not there, is named twice, or a place lies outside.
        """
        local = (1,) * prepend_axis_num + tuple(data.shape)
        places = {offset.axis: offset for offset in _checked(key, rank_offsets, len(local), prepend_axis_num)}
        ones = [places.get(axis, AxisOffset(axis, 0, 1)) for axis in range(len(local))]
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(size * place.parts for size, place in zip(local, ones, strict=True)),
            tuple(size * place.place for size, place in zip(local, ones, strict=True)),
            tuple(place.parts for place in ones),
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
        )

    @property
    def is_main_replica(self) -> bool:
        """Whether this copy is the one that is written."""
        return self.replica_id == 0 if isinstance(self.replica_id, int) else not any(self.replica_id)

    def global_slice(self) -> tuple[slice | int, ...]:
        """Where the part lies: `whole[part.global_slice()]` has the shape of `data`."""
        places: list[slice | int] = list(self.global_offset[: self.prepend_axis_num])
        lengths = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (*places, *(slice(start, start + length) for start, length in lengths))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The part as runs of neighbouring elements of the whole, which is what writers of files take.

        Yields:
            (first element in the flattened whole, one past the last, first element in the flattened part).
        """
        local = (1,) * self.prepend_axis_num + self.local_shape
        if not prod(local):
            return
        whole = len(local)
        while whole > 0 and local[whole - 1] == self.global_shape[whole - 1]:
            whole -= 1  # trailing axes that are all there
        outer, axis = max(whole - 1, 0), max(whole - 1, 0)
        inner = prod(self.global_shape[axis + 1 :])
        length = (local[axis] if local else 1) * inner
        strides = [prod(self.global_shape[dim + 1 :]) for dim in range(len(local))]
        begin = sum(offset * stride for offset, stride in zip(self.global_offset, strides, strict=True))
        for number, place in enumerate(itertools.product(*(range(size) for size in local[:outer]))):
            start = begin + sum(index * stride for index, stride in zip(place, strides))
            yield start, start + length, number * length


def assemble(parts: Iterable[ShardedTensor]) -> Tensor:
    """The whole tensor from the parts of all ranks; other copies than the main ones are passed over.

    Raises:
        ValueError: If parts are of different tensors, overlap, or leave elements out.
    """
    main = [part for part in parts if part.is_main_replica]
    if not main:
        raise ValueError("there is no part with a replica_id of zeros")
    first = main[0]
    whole = torch.empty(first.global_shape, dtype=first.dtype)
    seen = torch.zeros(first.global_shape, dtype=torch.bool)
    for part in main:
        if (part.key, part.global_shape, part.dtype) != (first.key, first.global_shape, first.dtype):
            raise ValueError(
                f"a part of {part.key!r}, {part.dtype} {list(part.global_shape)}, among those of {first.key!r}, "
                f"{first.dtype} {list(first.global_shape)}"
            )
        if part.data is None:
            raise ValueError(f"{part.key!r}: a part has no data")
        place = part.global_slice()
        if bool(seen[place].any()):
            raise ValueError(f"{part.key!r}: elements at {list(part.global_offset)} are in two parts")
        whole[place] = part.data.detach().to(whole.device)
        seen[place] = True
    if not bool(seen.all()):
        raise ValueError(f"{first.key!r}: {int((~seen).sum())} of {seen.numel()} elements are in no part")
    return whole


def _checked(key: str, offsets: Iterable[tuple[int, int, int]], axes: int, prepended: int) -> Iterator[AxisOffset]:
    named = set[int]()
    for given in offsets:
        offset = AxisOffset(*given)
        if not 0 <= offset.axis < axes or offset.axis in named:
            what = "twice" if offset.axis in named else f"but it has axes 0 to {axes - 1}"
            raise ValueError(f"{key!r}: an offset is for axis {offset.axis}, {what}")
        if not 0 <= offset.place < offset.parts:
            raise ValueError(f"{key!r}: place {offset.place} of {offset.parts} along axis {offset.axis}")
        named.add(offset.axis)
        yield offset
    if missing := set(range(prepended)) - named:
        raise ValueError(f"{key!r}: prepended axes {sorted(missing)} have no offsets")
