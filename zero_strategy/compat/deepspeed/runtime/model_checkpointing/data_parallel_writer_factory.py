"""`deepspeed.runtime.model_checkpointing`'s choice of who writes what of a checkpoint, as plain arithmetic.

A *slice* is what is the same on a set of data-parallel ranks: the whole model (DDP), one tensor and pipeline position
(3D), or one expert position (2D). The ranks of a set share the writing of their slice among writers, one per *unit*:

| unit | writers of a slice |
| --- | --- |
| None | data rank 0 |
| REPLICA | every data rank |
| SOCKET | the first rank on each socket that serves the slice |
| MACHINE | the first rank on each machine that serves the slice |

On one machine several slices compete, so sockets or machines are divided among pipeline stages, then among tensor
ranks. Under ZeRO every rank has optimizer state of its own: who writes no slice writes that alone, and at stage 3
everybody does. Nothing here asks torch.distributed: the numbers are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_strategy.convert.merge_ranks import parts


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
        """What this rank writes.

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
        """Where a machine or socket has fewer ranks than there are slices: those of the data peers, shared."""
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
