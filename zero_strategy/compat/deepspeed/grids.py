"""Grids of pipeline, tensor and data ranks: the files that each position of a smaller one merges, and who writes what.

Names and arguments are DeepSpeed's (`deepspeed.checkpoint.reshape_*`, `deepspeed.runtime.model_checkpointing`); where
it asserts, these raise ValueError and say why. Nothing here asks torch.distributed: the numbers are given.

*Writers.* A *slice* is what is the same on a set of data-parallel ranks: the whole model (DDP), one tensor and
pipeline position (3D), or one expert position (2D). The ranks of a set share the writing of their slice among writers,
one per *unit*:

| unit | writers of a slice |
| --- | --- |
| None | data rank 0 |
| REPLICA | every data rank |
| SOCKET | the first rank on each socket that serves the slice |
| MACHINE | the first rank on each machine that serves the slice |

On one machine several slices compete, so sockets or machines are divided among pipeline stages, then among tensor
ranks. Under ZeRO every rank has optimizer state of its own: who writes no slice writes that alone, and at stage 3
everybody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from zero_strategy.convert import deepspeed as parallel_grid
from zero_strategy.convert.deepspeed import Degrees, parts


class meg_2d_parallel_map:
    """Data of each (pipeline, tensor) position, usually numbers of files.

    Args:
        pp_degree: Pipeline stages.
        tp_degree: Tensor-parallel ranks.

    Attributes:
        map: "pp,tp" -> list.
    """

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[int]] = {}

    def simple_init(self) -> None:
        """Give every position its own number, pipeline-major."""
        own = Degrees(self.pp_degree, self.tp_degree)
        self._set(parallel_grid.model_files(own, own))

    def add_data(self, pp_index: int, tp_index: int, data: list[int]) -> None:
        """Append to a position.

        Raises:
            TypeError: If `data` is no list.
            ValueError: If there is no such position.
        """
        if not isinstance(data, list):
            raise TypeError(f"data of a position must be a list, got {type(data).__name__}")
        self._check(pp_index, tp_index)
        self.map.setdefault(f"{pp_index},{tp_index}", []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """The data of a position, or of a row or column or of all, where an index is None.

        Raises:
            ValueError: If there is no such position.
        """
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for pp in stages for tp in ranks for item in self.map.get(f"{pp},{tp}", [])]

    def print_data(self, tag: str) -> None:
        """Print all of it."""
        print(tag)
        for position, data in self.map.items():
            print(f"{position} = {data}")

    @classmethod
    def _of(cls, degrees: Degrees, cells: parallel_grid.Cells) -> meg_2d_parallel_map:
        made = cls(degrees.pp, degrees.tp)
        made._set(cells)
        return made

    def _set(self, cells: parallel_grid.Cells) -> None:
        self.map = {f"{pp},{tp}": list(data) for (pp, tp), data in cells.items()}

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        for name, index, degree in (("pp", pp_index, self.pp_degree), ("tp", tp_index, self.tp_degree)):
            if index is not None and not 0 <= index < degree:
                raise ValueError(f"{name} index {index} is not within the {name} degree {degree}")


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int, verbose: bool = False
) -> meg_2d_parallel_map:
    """Map each position of a smaller grid to the old model files that it merges.

    Raises:
        ValueError: If a degree would grow, or is no multiple of the new one.
    """
    target = Degrees(new_pp_degree, new_tp_degree)
    made = meg_2d_parallel_map._of(target, parallel_grid.model_files(Degrees(old_pp_degree, old_tp_degree), target))
    if verbose:
        made.print_data(f"2d map of pp {old_pp_degree}, tp {old_tp_degree} -> pp {new_pp_degree}, tp {new_tp_degree}")
    return made


class model_3d_desc:
    """Degrees of a grid of ranks."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[meg_2d_parallel_map]:
        """Map each position of a smaller grid to the optimizer files that it merges, one map per data rank.

        Raises:
            ValueError: If the grids do not fit, saying where.
        """
        target = target_3d_desc._degrees()
        made = [
            meg_2d_parallel_map._of(target, cells) for cells in parallel_grid.optimizer_files(self._degrees(), target)
        ]
        if verbose:
            for number, grid in enumerate(made):
                grid.print_data(f"dp = {number}")
        return made

    def get_desc(self) -> str:
        """For printing."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """True if there is such a rank, and if not, why."""
        indices = (("PP", pp_index, self.pp_degree), ("TP", tp_index, self.tp_degree), ("DP", dp_index, self.dp_degree))
        found = [f"{name} index {index} is not within {size}" for name, index, size in indices if index >= size]
        return not found, found

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """True if files can be merged for this grid, and if not, why."""
        found = parallel_grid.obstacles(self._degrees(), target_3d_desc._degrees())
        return not found, found

    def _degrees(self) -> Degrees:
        return Degrees(self.pp_degree, self.tp_degree, self.dp_degree)


def flatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, src_2d_size: int, dp_degree: int) -> meg_2d_parallel_map:
    """Put the files of all data ranks of each position in a row.

    Args:
        meg_2d_map: Numbers of data rank 0.
        src_2d_size: Files of one data rank.
        dp_degree: Data ranks.
    """
    made = meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree)
    for pp in range(made.pp_degree):
        for tp in range(made.tp_degree):
            row = [number + dp * src_2d_size for number in meg_2d_map.get_data(pp, tp) for dp in range(dp_degree)]
            made.add_data(pp, tp, row)
    return made


def unflatten_dp_dimension(meg_2d_map: meg_2d_parallel_map, dp_degree: int) -> list[meg_2d_parallel_map]:
    """Cut the row of each position into equal parts, one per data rank.

    Raises:
        ValueError: If the parts would not be equal.
    """
    made = [meg_2d_parallel_map(meg_2d_map.pp_degree, meg_2d_map.tp_degree) for _ in range(dp_degree)]
    for pp in range(meg_2d_map.pp_degree):
        for tp in range(meg_2d_map.tp_degree):
            cut = parts(meg_2d_map.get_data(pp, tp), dp_degree, "files of a position")
            for grid, part in zip(made, cut, strict=True):
                grid.add_data(pp, tp, part)
    return made


def get_mpu_ranks(
    tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, virtual_pp_size: int | None = None
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Ranks of all (tensor, pipeline, data) groups in Megatron's order. `virtual_pp_size` has no effect."""
    return parallel_grid.groups_of(Degrees(pp_size, tp_size, dp_size))


def get_model_3d_descriptor(dir: str | PathLike[str]) -> model_3d_desc:
    """The degrees that a checkpoint directory was saved with.

    Raises:
        ValueError: If the directory is no DeepSpeed checkpoint or its files contradict each other.
    """
    from zero_strategy.convert.deepspeed import DeepSpeedDirectory

    degrees = DeepSpeedDirectory(dir).degrees
    return model_3d_desc(degrees.pp, degrees.tp, degrees.dp)


# ---- nested state ----


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Join two states of the same structure.

    Args:
        state_a: Nested dicts, lists and tuples.
        state_b: The same structure; keys that only one of them has are kept.
        key_list: Where in the whole this is, for errors.

    Returns:
        Tensors of both, one after the other; of everything else `state_a`'s.

    Raises:
        ValueError: Naming the place, if the types or the lengths of lists differ.
    """
    where = ".".join(key_list) or "the state"
    if type(state_a) is not type(state_b):
        raise ValueError(f"{where} is a {type(state_a).__name__} and a {type(state_b).__name__}; cannot be merged")
    if isinstance(state_a, dict):
        keys = [*state_b, *(key for key in state_a if key not in state_b)]
        made = {
            key: merge_state(state_a[key], state_b[key], [*key_list, str(key)])
            if key in state_a and key in state_b
            else (state_b if key in state_b else state_a)[key]
            for key in keys
        }
        return type(state_a)(made)
    if isinstance(state_a, (list, tuple)):
        if len(state_a) != len(state_b):
            raise ValueError(f"{where} has {len(state_a)} and {len(state_b)} entries; cannot be merged")
        return type(state_a)(merge_state(a, b, [*key_list, str(i)]) for i, (a, b) in enumerate(zip(state_a, state_b)))
    if isinstance(state_a, torch.Tensor):
        return torch.cat([state_a, state_b], 0)
    return state_a


def partition_data(data_list: list[Any], num_partitions: int) -> list[list[Any]]:
    """Cut a list into equal parts.

    Raises:
        ValueError: If the parts would not be equal.
    """
    return parts(data_list, num_partitions)


# ---- writers ----


class CheckpointDataParallel:
    """Units."""

    REPLICA = "REPLICA"
    SOCKET = "SOCKET"
    MACHINE = "MACHINE"


CHECKPOINT_DATA_PARALLEL_UNITS = [
    CheckpointDataParallel.REPLICA,
    CheckpointDataParallel.SOCKET,
    CheckpointDataParallel.MACHINE,
]


@dataclass
class MPUInfo:
    """This rank's place in a grid of pipeline, tensor and data ranks."""

    pp_world_size: int
    pp_rank: int
    tp_world_size: int
    tp_rank: int
    dp_world_size: int
    dp_peer_ranks: list[int]
    dp_rank: int


@dataclass
class ExpertParallelInfo:
    """This rank's place in a grid of expert and expert-data ranks."""

    ep_world_size: int
    ep_rank: int
    dp_world_size: int
    dp_peer_ranks: list[int]
    dp_rank: int


@dataclass
class UniversalParallelInfo:
    """This rank's place in everything.

    Attributes:
        mpu_info: None without model parallelism.
        ep_info: None without experts.
        pure_dp: Whether all ranks are data-parallel.
        num_machines: Of the job.
        machine_rank: This one.
        num_sockets: Of all machines together.
    """

    global_world_size: int
    global_rank: int
    local_rank: int
    mpu_info: MPUInfo | None
    ep_info: ExpertParallelInfo | None
    pure_dp: bool
    num_machines: int
    machine_rank: int
    num_sockets: int


@dataclass
class DataParallelWriterConfig:
    """A writer: number `rank` of the `world_size` that share a slice."""

    world_size: int
    rank: int
    global_rank: int
    local_rank: int
    pure_dp: bool


class DataParallelWriterFactory:
    """Decides for one rank.

    Args:
        uni_parallel_info: The rank's place.
        parallel_unit: One of `CHECKPOINT_DATA_PARALLEL_UNITS`, or None.

    Raises:
        ValueError: If there is no such unit.
    """

    def __init__(self, uni_parallel_info: UniversalParallelInfo, parallel_unit: str | None) -> None:
        if parallel_unit is not None and parallel_unit not in CHECKPOINT_DATA_PARALLEL_UNITS:
            raise ValueError(f"writer unit {parallel_unit!r} is not one of {CHECKPOINT_DATA_PARALLEL_UNITS} or None")
        self._info = uni_parallel_info
        self._unit = parallel_unit
        socket = parallel_unit == CheckpointDataParallel.SOCKET
        self._resources = uni_parallel_info.num_sockets if socket else uni_parallel_info.num_machines
        self._ranks_each = max(1, uni_parallel_info.global_world_size // self._resources)

    def create_config(self, zero_stage: Any, has_moe_layers: bool = False) -> DataParallelWriterConfig | None:
        """The part that this rank writes.

        Args:
            zero_stage: 0 to 3, or an object with a `stage`.
            has_moe_layers: Whether the slices are experts'.

        Returns:
            Its place among the writers of its slice; None if it writes nothing.

        Raises:
            ValueError: If sockets or machines cannot be divided evenly, or the rank's place is incomplete.
            NotImplementedError: For experts together with tensor or pipeline parallelism.
        """
        stage = int(getattr(zero_stage, "stage", zero_stage))
        if stage == 3:
            return self._writer(1, 0)
        found = self._of_experts() if has_moe_layers else self._of_model()
        return self._writer(1, 0) if found is None and stage >= 1 else found

    def _writer(self, world_size: int, rank: int) -> DataParallelWriterConfig:
        info = self._info
        return DataParallelWriterConfig(world_size, rank, info.global_rank, info.local_rank, info.pure_dp)

    def _of_model(self) -> DataParallelWriterConfig | None:
        info, mpu = self._info, self._info.mpu_info
        if self._unit is None:
            # Without an mpu all ranks are data-parallel, so the global rank is the data rank.
            return self._writer(1, 0) if (info.global_rank if mpu is None else mpu.dp_rank) == 0 else None
        if info.pure_dp:
            return self._of_ddp(info.global_world_size, info.global_rank)
        if mpu is None:
            raise ValueError("not all ranks are data-parallel (pure_dp is False), but mpu_info is None")
        if self._unit == CheckpointDataParallel.REPLICA:
            return self._writer(mpu.dp_world_size, mpu.dp_rank)
        if mpu.tp_world_size * mpu.pp_world_size > self._ranks_each:
            serving = self._resources_of_peers(mpu)
        else:
            serving = self._resources_of_slice(mpu)
        return self._first_of_each(serving, mpu.dp_peer_ranks)

    def _of_experts(self) -> DataParallelWriterConfig | None:
        experts = self._info.ep_info
        if experts is None:
            raise ValueError("there are experts (has_moe_layers), but ep_info is None")
        if self._unit is None:
            return self._writer(1, 0) if experts.dp_rank == 0 else None
        if not self._info.pure_dp:
            raise NotImplementedError("writers of experts together with tensor or pipeline parallelism are not defined")
        if self._unit == CheckpointDataParallel.REPLICA or experts.ep_world_size == 1:
            return self._of_ddp(experts.dp_world_size, experts.dp_rank)
        on = [rank // self._ranks_each for rank in experts.dp_peer_ranks]
        slices = min(self._ranks_each, experts.ep_world_size)
        serving = parts(on, slices, f"places of expert data ranks ({self._unit})")[experts.ep_rank % slices]
        return self._first_of_each(serving, experts.dp_peer_ranks)

    def _of_ddp(self, world_size: int, rank: int) -> DataParallelWriterConfig | None:
        if self._unit == CheckpointDataParallel.REPLICA:
            return self._writer(world_size, rank)
        machines = self._info.num_machines
        if self._unit == CheckpointDataParallel.SOCKET:
            count = machines if world_size == machines else self._info.num_sockets
            count = min(count, world_size)
            each = world_size // count
            return self._writer(count, rank // each) if rank % each == 0 else None
        each = max(1, world_size // machines)
        return self._writer(machines, self._info.machine_rank) if rank % each == 0 else None

    def _resources_of_peers(self, mpu: MPUInfo) -> list[int]:
        """Resources of the data peers, shared: a machine or socket has fewer ranks than there are slices."""
        on = _stretched([rank // self._ranks_each for rank in mpu.dp_peer_ranks], self._ranks_each)
        position = mpu.pp_rank * mpu.tp_world_size + mpu.tp_rank
        return parts(on, self._ranks_each, f"places of data ranks ({self._unit})")[position % self._ranks_each]

    def _resources_of_slice(self, mpu: MPUInfo) -> list[int]:
        """All machines or sockets, divided among stages and then among tensor ranks."""
        every = _stretched(list(range(self._resources)), mpu.pp_world_size)
        stage = parts(every, mpu.pp_world_size, f"places of pipeline stages ({self._unit})")[mpu.pp_rank]
        stage = _stretched(stage, mpu.tp_world_size)
        return parts(stage, mpu.tp_world_size, f"places of tensor ranks ({self._unit})")[mpu.tp_rank]

    def _first_of_each(self, serving: Sequence[int], peers: Sequence[int]) -> DataParallelWriterConfig | None:
        """One writer per machine or socket: the first of the peers there."""
        writers = []
        for place in dict.fromkeys(serving):
            there = [rank for rank in peers if rank // self._ranks_each == place]
            if not there:
                raise ValueError(f"none of the data ranks {list(peers)} is on {self._unit} {place}")
            writers.append(there[0])
        if self._info.global_rank not in writers:
            return None
        return self._writer(len(writers), writers.index(self._info.global_rank))


def _stretched(places: list[int], size: int) -> list[int]:
    """Each place several times over, so that there are `size`."""
    if len(places) >= size:
        return places
    if size % len(places):
        raise ValueError(f"{len(places)} places cannot serve {size} slices evenly")
    return [place for place in places for _ in range(size // len(places))]
