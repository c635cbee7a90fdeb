"""Where ranks are: coordinates on named axes, and the rank of each.

    ProcessTopology(["pipe", "data"], [2, 3])       pipe 0: ranks 0 1 2
                                                    pipe 1: ranks 3 4 5       the last axis runs fastest

Arguments and results are those of DeepSpeed's classes of these names; where those assert, these raise.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, cast


class ProcessTopology:
    """Ranks on a grid with named axes.

    Args:
        axes: Names of the axes. Ranks that differ by one in the last one are neighbours.
        dims: Ranks along each axis.

    Attributes:
        axes: As passed.
        dims: As passed.
        ProcessCoord: The class of coordinates, a named tuple with the axes as its fields.
        mapping: {coordinate: rank}, in the order of ranks.

    Raises:
        ValueError: If there is not one positive length for each axis, or a name cannot be a named tuple's field.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        if len(self.axes) != len(self.dims):
            raise ValueError(f"axes {self.axes} and dims {self.dims} differ in length; give one length for each axis")
        for axis, dim in zip(self.axes, self.dims):
            if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
                raise ValueError(f"axis {axis!r} has {dim!r} ranks; accepted: integers from 1 on")
        self.ProcessCoord = cast(Any, namedtuple)("ProcessCoord", self.axes)
        self._coords = [self.ProcessCoord(*place) for place in product(*(range(dim) for dim in self.dims))]
        self.mapping: dict[Any, int] = {coord: rank for rank, coord in enumerate(self._coords)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a coordinate: `get_rank(pipe=0, data=1)`.

        Raises:
            ValueError: If not exactly the axes are named, or there is no such coordinate.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank({_text(coord_kwargs)}) must name each axis of {self.axes} once; filter_match() takes some"
            )
        rank = self.mapping.get(self.ProcessCoord(**coord_kwargs))
        if rank is None:
            raise ValueError(f"there is no rank at {_text(coord_kwargs)} in {self}")
        return rank

    def get_axis_names(self) -> list[str]:
        """The axes, in their order."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A rank's coordinate as text for file names, such as "model_01".

        Args:
            rank: The rank.
            omit_axes: Axes that are left out.
            inner_sep: Between an axis and its index, which has two digits at least.
            outer_sep: Between axes.
        """
        coord, omitted = self.get_coord(rank), frozenset(omit_axes)
        kept = [axis for axis in self.axes if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, a `ProcessCoord`.

        Raises:
            ValueError: If there is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"rank {rank} is not one of the {len(self._coords)} ranks of {self}")
        return self._coords[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in `axis` alone, which need a communicator; none for an unknown axis."""
        if axis not in self.axes:
            return []
        place = self.axes.index(axis)
        groups: dict[tuple[int, ...], list[int]] = {}
        for coord, rank in self.mapping.items():
            groups.setdefault((*coord[:place], *coord[place + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks whose coordinates agree with all that is named: `filter_match(pipe=0)`.

        Raises:
            ValueError: If an axis is unknown.
        """
        for axis in filter_kwargs:
            self._require(axis)
        wanted = filter_kwargs.items()
        return [
            rank for coord, rank in self.mapping.items() if all(getattr(coord, axis) == idx for axis, idx in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose index on `axis` is `idx`.

        Raises:
            ValueError: If the axis is unknown.
        """
        self._require(axis)
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.mapping)

    def _require(self, axis: str) -> None:
        if axis not in self.axes:
            raise ValueError(f"the topology has no axis {axis!r}; its axes: {self.axes}")

    def __getstate__(self) -> dict[str, Any]:
        return {"axes": self.axes, "dims": self.dims}  # the class of coordinates cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        ProcessTopology.__init__(self, state["axes"], state["dims"])

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{axis}={dim}' for axis, dim in zip(self.axes, self.dims))})"


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines beside each other. The ranks of one stage, which reduce gradients, are neighbours.

    Args:
        num_pp: Ranks of a pipeline.
        num_dp: Pipelines.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines whose layers are divided among tensor-parallel ranks, which are neighbours.

    Args:
        num_pp: Ranks of a pipeline.
        num_mp: Ranks that divide a layer.
        num_dp: Pipelines.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _text(coord: dict[str, int]) -> str:
    return ", ".join(f"{axis}={idx}" for axis, idx in coord.items())
