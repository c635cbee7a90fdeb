"""The topology: ranks on named axes, and this rank's place with its process groups.

    ProcessTopology(["pipe", "data"], [2, 3])       pipe 0: ranks 0 1 2
                                                    pipe 1: ranks 3 4 5       the last axis runs fastest

Arguments and results are those of DeepSpeed's classes of these names; where those assert, these raise.

Attributes and methods are those of DeepSpeed's `PipelineParallelGrid`, an `mpu` for whoever takes one.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.mesh import mesh_of_group
from zero_strategy.comm.process_group import (
    ProcessGroup,
    group_size,
    has_process_group,
    own_group,
    world_rank,
    world_size,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
            if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:  # True is an int, too
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
        omit_axes: Iterable[str] = ("data", "pipe"),  # a layer's file has one name for all stages and copies
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


class PipelineParallelGrid:
    """The grid from one rank's point of view. Making it is a collective over all ranks.

    Args:
        topology: Which rank is where; axes "pipe", "data" and "model" are looked at. None: pipelines and copies of
            them, the world's prime factors given to both in turn.
        process_group: A group of all ranks, or None.
        rank: Look at the grid as this rank without making process groups; None: as this process.

    Attributes:
        global_rank, world_size: Of this rank.
        stage_id, data_parallel_id: Its place in its pipeline, and which pipeline that is.
        is_first_stage, is_last_stage: Whether it is at an end of its pipeline.
        pipe_parallel_size, data_parallel_size, model_parallel_size, slice_parallel_size: Ranks along the axes; the
            last two are the same.
        pp_group, dp_group, slice_group: Ranks of this rank's pipeline, of its copies, of those that divide its layers.
        pipe_groups, dp_groups, model_groups: The same of all ranks.
        p2p_groups: For each rank, it and the next one in its pipeline; the first one comes after the last.
        pp_proc_group, dp_proc_group, slice_proc_group: Process groups; None if there is none.
        ds_model_proc_group, ds_model_rank, ds_model_world_size: All ranks that hold parts of one copy of the model.

    Raises:
        ValueError: If the topology has another number of ranks than there are.
    """

    def __init__(
        self,
        topology: ProcessTopology | None = None,
        process_group: ProcessGroup | None = None,
        *,
        rank: int | None = None,
    ) -> None:
        # Who only looks at a rank need not have started as many processes.
        ranks = topology.world_size() if rank is not None and topology is not None else world_size()
        self._topo = topology if topology is not None else _default_topology(ranks)
        self.world_size, self.global_rank = ranks, world_rank() if rank is None else rank
        # Before any group is made, which all ranks would wait for.
        self._check(process_group)
        self.pipe_parallel_size = max(self._topo.get_dim("pipe"), 1)
        self.data_parallel_size = max(self._topo.get_dim("data"), 1)
        self.model_parallel_size = self.slice_parallel_size = max(self._topo.get_dim("model"), 1)
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1

        self.pipe_groups, self.dp_groups = self._groups_of("pipe"), self._groups_of("data")
        self.model_groups = self._groups_of("model")
        self.pp_group, self.dp_group = self._own(self.pipe_groups), self._own(self.dp_groups)
        self.slice_group = self._own(self.model_groups)
        self.p2p_groups = self._pairs()
        copies = self._copies()
        self._ds_model_group = self._own(copies)
        self.ds_model_rank = self._ds_model_group.index(self.global_rank)
        self.ds_model_world_size = len(self._ds_model_group)

        # All ranks make all groups, in this order: `new_group` counts its calls, and ranks meet by that number.
        makes = rank is None and has_process_group()
        self.pp_proc_group = own_group(self.pipe_groups) if makes else None
        self.dp_proc_group = own_group(self.dp_groups) if makes else None
        self.slice_proc_group = own_group(self.model_groups) if makes else None
        # Of gloo whatever the default backend is: flags and objects are exchanged on the host.
        everyone = own_group([range(ranks)], backend="gloo") if makes else None
        self._tensor_mesh: DeviceMesh | None = None
        self._control = Communicator(everyone, CommunicationCounters())
        # Where copies are divided along no other axis they are pipelines, whose group there is already.
        whole = makes and copies != self.pipe_groups
        self.ds_model_proc_group = own_group(copies) if whole else self.pp_proc_group

    def _check(self, process_group: ProcessGroup | None) -> None:
        if self._topo.world_size() != self.world_size:
            raise ValueError(
                f"the topology {self._topo} has {self._topo.world_size()} ranks, but {self.world_size} take part; "
                "start as many ranks as it has, or change it"
            )
        if process_group is not None and group_size(process_group) != self.world_size:
            raise ValueError(
                f"process_group has {group_size(process_group)} of {self.world_size} ranks; a grid spans all of them, "
                "so leave process_group out"
            )

    def _groups_of(self, axis: str) -> list[list[int]]:
        """Ranks of an axis's communicators; an axis that is not there has one rank."""
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _own(self, groups: list[list[int]]) -> list[int]:
        return next(group for group in groups if self.global_rank in group)

    def _copies(self) -> list[list[int]]:
        """Ranks of each copy of the model."""
        if "data" not in self._topo.get_axis_names():
            return [list(range(self.world_size))]
        return [self._topo.get_axis_list("data", index) for index in range(self.data_parallel_size)]

    def _pairs(self) -> list[list[int]]:
        after: dict[int, int] = {}
        for group in self.pipe_groups:
            after.update(zip(group, [*group[1:], group[0]]))
        return [[rank, after[rank]] for rank in range(self.world_size)]

    def _place_on(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def __deepcopy__(self, memo: object) -> PipelineParallelGrid:
        return self  # a copy of a module is in the same place, and process groups cannot be copied

    def topology(self) -> ProcessTopology:
        """Topology of the ranks."""
        return self._topo

    def control(self) -> Communicator:
        """All ranks, on the host, for flags and objects; this rank alone without process groups."""
        return self._control

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at another place of this rank's pipeline.

        Args:
            stage_id: Index on the axis "pipe".
            **kwargs: Indices on other axes, where they are not this rank's.
        """
        place: dict[str, Any] = self._topo.get_coord(self.global_rank)._asdict()
        if "pipe" in place:
            place["pipe"] = stage_id
        elif stage_id != 0:
            raise ValueError(f"there is no stage {stage_id}: {self._topo} has no axis 'pipe'")
        return self._topo.get_rank(**{**place, **kwargs})

    def get_global_rank(self) -> int:
        """This rank among all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """This rank's place in its pipeline."""
        return self._place_on("pipe")

    def get_data_parallel_id(self) -> int:
        """Number of this rank's pipeline."""
        return self._place_on("data")

    def get_pipe_parallel_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.get_stage_id()

    def get_pipe_parallel_world_size(self) -> int:
        """Ranks of a pipeline."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """The ranks of this rank's pipeline."""
        return self.pp_proc_group

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Number of this rank's pipeline."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Number of pipelines."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """The ranks that hold the same layers."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Ranks of the data-parallel group, numbered in the world."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """This rank among those of its copy of the model: over stages and slices."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Number of those."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """The group of those."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Number of this rank's slice of its layers, of tensor parallelism."""
        return self._place_on("model")

    def get_slice_parallel_world_size(self) -> int:
        """Number of slices."""
        return self.slice_parallel_size

    def pipeline_id(self) -> int:
        """Number of this rank's pipeline: copies have several each where layers are divided."""
        return self.get_data_parallel_id() * self.slice_parallel_size + self.get_slice_parallel_rank()

    def tensor_mesh(self) -> DeviceMesh | None:
        """The ranks that have slices of the same layers, for `parallelize_module`; None without process groups."""
        if self._tensor_mesh is None and self.slice_proc_group is not None:
            self._tensor_mesh = mesh_of_group(self.slice_proc_group, self.slice_group)
        return self._tensor_mesh

    def get_slice_parallel_group(self) -> ProcessGroup | None:
        """The ranks that have slices of the same layers."""
        return self.slice_proc_group

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group


def _default_topology(ranks: int) -> PipeDataParallelTopology:
    """Prime factors from the least on, given to pipelines and to copies in turn."""
    # As DeepSpeed's grid without a topology divides the ranks.
    sizes, turn, factor = [1, 1], 0, 2
    while ranks > 1:
        if ranks % factor:
            factor += 1
            continue
        sizes[turn] *= factor
        turn, ranks = 1 - turn, ranks // factor
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
