"""The mesh of data-parallel ranks: replicate x shard, beside tensor-parallel groups.

    8 ranks, groups of 2:   [0 1] [2 3] [4 5] [6 7]     lanes: [0 2 4 6] and [1 3 5 7]

A lane holds the same part of every layer; ZeRO divides its state among the lane.

a replicate axis times a shard axis.

Rank r sits at (r // shard, r % shard): neighbours, which usually share a node, shard among themselves, and the copies
on other nodes replicate (hybrid sharding). Parameter gathers, gradient reductions and control messages each have a
group of their own, so that an early gather never waits behind a reduction.

Where the world trains one model in parts (pipeline stages, tensor-parallel parts of layers), every part has a mesh of
its own, over its *lane* of ranks;
what concerns all of the model (checkpoints, above all) is for the *team*, the ranks of all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist

from zero_strategy.comm.barrier import StoreRendezvous
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import end_group, has_process_group, own_group
from zero_strategy.comm.store import own_store
from zero_strategy.config import GuardConfig
from zero_strategy.runtime.observer import Observed
from zero_strategy.watchdog.diagnosis import Titles, title_of
from zero_strategy.watchdog.peers import own_card
from zero_strategy.watchdog.watchdog import Guard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def tensor_groups_of(ranks: Sequence[int] | None, size: int) -> list[list[int]]:
    """The groups of all ranks, from the one that each is in. A collective of the world.

    Args:
        ranks: Those with which this rank divides layers, as its model says; None: it does not say.
        size: How many they are to be.

    Returns:
        In the order of their first ranks.

    Raises:
        ValueError: If a rank's model says nothing, or other than `size`, or groups overlap.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    everyone: list[Sequence[int] | None] = [ranks]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, ranks)
    found = [None if one is None else tuple(one) for one in everyone]
    for rank, one in enumerate(found):
        if one is None:
            raise ValueError(
                f"mesh.tensor is {size}, but on rank {rank} no parameter is divided: call parallelize_module(module, "
                "device_mesh['tp'], plan) before the engine is made (under a Trainer in configure_model(), with "
                "self.device_mesh['tensor_parallel'])"
            )
        if len(one) != size or rank not in one or any(found[other] != one for other in one):
            raise ValueError(
                f"mesh.tensor is {size}, but the parameters of rank {rank} are divided among ranks {list(one)}; make "
                "the device mesh with as many, such as zero_strategy.comm.mesh.make_device_mesh"
                f"('cpu', tensor={size})"
            )
    return [list(one) for one in sorted({one for one in found if one is not None})]


def lanes_across(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks that hold the same part: those at one place of every group."""
    return [[group[place] for group in groups] for place in range(len(groups[0]))]


def mesh_of_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> DeviceMesh:
    """The device mesh of one group of ranks, for `parallelize_module`.

    Args:
        group: This rank's.
        ranks: Its ranks in the world, in their order.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device_type = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    return DeviceMesh.from_group(group, device_type, mesh=list(ranks), mesh_dim_names=("tp",))


def make_device_mesh(
    device_type: str, *, tensor: int, stages: int = 1, names: tuple[str, str] = ("dp", "tp")
) -> DeviceMesh:
    """The device mesh of all ranks, for `parallelize_module`. A collective of the world.

    Args:
        device_type: "cpu" or "cuda".
        tensor: Ranks that divide each layer; these are neighbours.
        stages: Pipeline stages.
        names: Of the last two dimensions.

    Returns:
        With the dimensions "dp" and "tp", after "pp" where there are stages: `mesh["tp"]` is what
        `parallelize_module` takes, `mesh["dp"]` has the ranks that get different data.

    Raises:
        ValueError: If the world size is not a multiple of tensor x stages.
    """
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if tensor < 1 or stages < 1 or world % (tensor * stages):
        raise ValueError(f"{tensor} tensor-parallel ranks x {stages} stages do not divide the world size {world}")
    copies = world // (tensor * stages)
    if stages > 1:
        return init_device_mesh(device_type, (stages, copies, tensor), mesh_dim_names=("pp", *names))
    return init_device_mesh(device_type, (copies, tensor), mesh_dim_names=names)

_CLOSING_SECONDS = 5.0


@dataclass(frozen=True)
class Team:
    """All ranks that train one model, in whatever parts, from this rank's point of view.

    Attributes:
        control: Them, on the host, for flags and objects.
        rendezvous: Bounded meeting of them.
    """

    control: Communicator
    rendezvous: StoreRendezvous

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """How many they are."""
        return self.control.size


@dataclass
class Mesh:
    """Groups of the data-parallel mesh, from this rank's point of view.

    Attributes:
        gather: Ranks of the shard axis, for parameters.
        reduce: The same ranks, for gradients.
        replicate: Ranks that hold the same slice.
        control: All data-parallel ranks, on the host, for flags, norms and objects.
        shard_control: The ranks of the shard axis, on the host, for norms.
        rendezvous: Bounded meeting of all data-parallel ranks.
        team: The ranks of all lanes; the data-parallel ranks where there is one lane.
        tensor: Ranks that divide the same layers (tensor parallelism), on the host, for norms, flags and copies.
        counters: What this rank sent.
        guard: Watches all of these; None: nobody does.
        further: Groups of ranks that train other parts of the model, by name.
        observed: Who is told what all of these communicators do.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    control: Communicator
    shard_control: Communicator
    rendezvous: StoreRendezvous
    team: Team
    tensor: Communicator
    counters: CommunicationCounters = field(default_factory=CommunicationCounters)
    guard: Guard | None = None
    further: dict[str, Communicator] = field(default_factory=dict)
    closed: bool = False
    observed: Observed = field(default_factory=Observed)

    def __post_init__(self) -> None:
        groups = (self.gather, self.reduce, self.replicate, self.control, self.shard_control, self.team.control)
        for communicator in (*groups, self.tensor):
            communicator.observed = self.observed

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.control.size

    @property
    def rank(self) -> int:
        """This rank among all data-parallel ranks."""
        return self.control.rank

    @property
    def shard_rank(self) -> int:
        """Index of the slice that this rank owns."""
        return self.gather.rank

    @property
    def shard_size(self) -> int:
        """Number of slices."""
        return self.gather.size

    @classmethod
    def build(
        cls,
        *,
        replicate: int,
        shard: int,
        timeout: float,
        rendezvous_seconds: float,
        name: str,
        lanes: Sequence[Sequence[int]] | None = None,
        guard: GuardConfig | None = None,
        tensor_groups: Sequence[Sequence[int]] | None = None,
        further: Callable[[], Mapping[str, Communicator]] = dict,
        titles: Titles = title_of,
    ) -> Mesh:
        """Make the groups; a collective over the default process group.

        Args:
            replicate: Size of the replicate axis.
            shard: Size of the shard axis.
            timeout: Seconds after which a collective of these groups fails.
            rendezvous_seconds: Bound of our own waits.
            name: Tells engines of one process apart; equal on all ranks.
            lanes: The ranks of every mesh, this rank's among them; the same on all ranks, every rank in one.
                Default: one lane of all ranks.
            guard: How collectives are watched; None: not at all.
            tensor_groups: The ranks that divide the same layers, of every such group. Default: every rank by itself.
            further: Makes groups beyond these, by name, which the mesh watches and closes as its own.
            titles: Ranks in words.

        Raises:
            ValueError: If replicate x shard is not the size of a lane, or a rank is in no lane or in two.
        """
        counters = CommunicationCounters()
        world = dist.get_world_size() if dist.is_initialized() else 1
        lanes = [range(world)] if lanes is None else lanes
        _check_lanes(lanes, world, replicate, shard)
        if world == 1:
            alone, meeting = Communicator(None, counters), StoreRendezvous(0, 1, 0.0, name)
            mesh = cls(alone, alone, alone, alone, alone, meeting, Team(alone, meeting), alone, counters)
            mesh._join(further())
            return mesh
        limit = timedelta(seconds=timeout)

        def group_of(lists: list[list[int]], backend: str | None = None) -> Communicator:
            return Communicator(own_group(lists, timeout=limit, backend=backend), counters, owns=True)

        rows = [list(lane[row * shard : (row + 1) * shard]) for lane in lanes for row in range(replicate)]
        columns = [list(lane[column::shard]) for lane in lanes for column in range(shard)]
        everyone = group_of([list(range(world))], backend="gloo")
        control = everyone if len(lanes) == 1 else group_of([list(lane) for lane in lanes], backend="gloo")
        if shard == 1 or replicate == 1:
            shard_control = control if replicate == 1 else Communicator(None, counters)
        else:
            shard_control = group_of(rows, backend="gloo")
        divided = Communicator(None, counters)
        if tensor_groups is not None and len(tensor_groups[0]) > 1:
            divided = group_of([list(ranks) for ranks in tensor_groups], backend="gloo")
        meeting = StoreRendezvous(dist.get_rank(), world, rendezvous_seconds, name)
        lane = next(number for number, ranks in enumerate(lanes) if dist.get_rank() in ranks)
        rank = list(lanes[lane]).index(dist.get_rank())
        own = StoreRendezvous(rank, replicate * shard, rendezvous_seconds, f"{name}.lane{lane}")
        mesh = cls(
            gather=group_of(rows) if shard > 1 else Communicator(None, counters),
            reduce=group_of(rows) if shard > 1 else Communicator(None, counters),
            replicate=group_of(columns) if replicate > 1 else Communicator(None, counters),
            control=control,
            shard_control=shard_control,
            rendezvous=meeting if len(lanes) == 1 else own,
            team=Team(everyone, meeting),
            tensor=divided,
            counters=counters,
        )
        if guard is not None and guard.mode != "off":
            mesh._watch(
                guard,
                name,
                lambda lists: own_group(lists, timeout=limit, backend="gloo"),
                rows,
                columns,
                titles,
            )
        mesh._join(further())
        return mesh

    def close(self) -> None:
        """End the groups, in the same order on all ranks, and what watches them. All ranks call it.

        They meet first, for some seconds: who closes a connection early takes from a slower rank what is under way. Not
        where the ranks are known to have failed. A second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        meeting, failed = self.team.rendezvous, self.guard is not None and self.guard.failure is not None
        if self.team.world_size > 1 and not failed and has_process_group():
            with suppress(Exception):  # a rank that does not come any more is no reason to stay
                seconds = min(meeting.timeout, _CLOSING_SECONDS)
                StoreRendezvous(meeting.rank, meeting.world_size, seconds, f"{meeting.prefix}.end").meet("close()")
        communicators = (
            self.gather, self.reduce, self.replicate, self.shard_control, self.control, self.team.control, self.tensor,
            *self.further.values(),
        )  # fmt: skip
        groups = {one.group: None for one in communicators if one.group is not None}
        for communicator in communicators:
            communicator.close()
        if self.guard is not None:
            self.guard.close()
        for group in groups:
            end_group(group)

    def _join(self, further: Mapping[str, Communicator]) -> None:
        """Take groups in that others have made."""
        self.further.update(further)
        for name, communicator in further.items():
            communicator.observed = self.observed
            if self.guard is not None:
                communicator.guarded(self.guard, name)

    def _watch(
        self,
        settings: GuardConfig,
        name: str,
        on_host: Callable[[list[list[int]]], dist.ProcessGroup | None],
        rows: list[list[int]],
        columns: list[list[int]],
        titles: Titles,
    ) -> None:
        team, strict = self.team.control, settings.mode == "strict"
        cards = team.gather_objects(own_card())
        connect = partial(own_store, team.size)
        self.guard = guard = Guard(
            team.rank, cards, connect, name,
            wait_seconds=settings.wait_seconds, silence_seconds=settings.silence_seconds,
            unheard_seconds=settings.unheard_seconds, strict=strict, titles=titles,
        )  # fmt: skip
        for communicator, what, lists in (
            (team, "team", rows), (self.control, "control", rows), (self.shard_control, "shard_control", rows),
            (self.gather, "gather", rows), (self.reduce, "reduce", rows), (self.replicate, "replicate", columns),
            (self.tensor, "tensor", rows),
        ):  # fmt: skip
            twin = on_host(lists) if strict and communicator.size > 1 and not communicator.on_host else None
            communicator.guarded(guard, what, twin)
        for meeting in (self.team.rendezvous, self.rendezvous):
            if meeting.world_size > 1 and meeting.track is None:
                ranks = dist.get_process_group_ranks((team if meeting is self.team.rendezvous else self.control).group)
                meeting.track = guard.track("meeting", ranks, compared=False)


def _check_lanes(lanes: Sequence[Sequence[int]], world: int, replicate: int, shard: int) -> None:
    size = len(lanes[0])
    if replicate * shard != size:
        what = f"the world size {world}" if len(lanes) == 1 else f"{size}, the ranks of a lane"
        raise ValueError(f"mesh.replicate {replicate} x mesh.shard {shard} is not {what}")
    if sorted(rank for lane in lanes for rank in lane) != list(range(world)) or {len(lane) for lane in lanes} != {size}:
        raise ValueError(
            f"lanes {[list(lane) for lane in lanes]} must hold each of the {world} ranks once, and be of one size"
        )
