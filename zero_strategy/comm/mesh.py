"""The mesh of data-parallel ranks: a replicate axis times a shard axis, beside tensor-parallel groups.

    8 ranks, tensor groups of 2:   [0 1] [2 3] [4 5] [6 7]     data-parallel groups: [0 2 4 6] and [1 3 5 7]

The ranks of a data-parallel group hold the same part of every layer; ZeRO divides its state among them.

Rank r sits at (r // shard, r % shard): neighbours, which usually share a node, shard among themselves, and the copies
on other nodes replicate (hybrid sharding). Parameter gathers, gradient reductions and control messages each have a
group of their own, so that an early gather never waits behind a reduction.

Where the world trains one model in parts (pipeline stages, tensor-parallel parts of layers), every part has a mesh of
its own, over its data-parallel group; what concerns all of the model (checkpoints, above all) is for the world group,
the ranks of all data-parallel groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.process_group import (
    end_group,
    group_takes_gpu,
    has_process_group,
    own_group,
    try_connections,
)
from zero_strategy.comm.store import StoreBarrier, gather_everywhere, own_store
from zero_strategy.config import WatchdogConfig
from zero_strategy.runtime.compute_device import bytes_beside_torch
from zero_strategy.runtime.observer import Observed
from zero_strategy.watchdog.diagnosis import RankLabels, rank_label
from zero_strategy.watchdog.peers import own_card
from zero_strategy.watchdog.watchdog import Watchdog

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
    # Every rank looks at the answers of all, so all raise the same, and none goes on to wait for the others.
    found = [None if one is None else tuple(one) for one in gather_everywhere(ranks)]
    for rank, one in enumerate(found):
        if one is None:
            raise ValueError(
                f"mesh.tensor is {size}, but on rank {rank} no parameter is divided: call parallelize_module(module, "
                "device_mesh['tp'], plan), or divide_layers(model, device_mesh['tp']) for Hugging Face models, before "
                "the engine is made (under a Trainer in configure_model(), with "
                "self.device_mesh['tensor_parallel'])"
            )
        if len(one) != size or rank not in one or any(found[other] != one for other in one):
            raise ValueError(
                f"mesh.tensor is {size}, but the parameters of rank {rank} are divided among ranks {list(one)}; make "
                "the device mesh with as many, such as zero_strategy.comm.mesh.make_device_mesh"
                f"('cpu', tensor={size})"
            )
    return [list(one) for one in sorted({one for one in found if one is not None})]


def dp_groups_across(groups: Sequence[Sequence[int]]) -> list[list[int]]:
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
class WorldGroup:
    """All ranks that train one model, in whatever parts, from this rank's point of view.

    Attributes:
        control: Them, on the host, for flags and objects.
        barrier: Bounded meeting of them.
    """

    control: Communicator
    barrier: StoreBarrier

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.control.rank

    @property
    def world_size(self) -> int:
        """Number of them."""
        return self.control.size


@dataclass(frozen=True)
class ShardRanks:
    """Ranks that share buckets of one kind of parameters, from this rank's point of view.

    Attributes:
        gather: Those that have the slices, for parameters.
        reduce: The same ranks, for gradients.
        replicate: Ranks that hold the same slice.
        parts: Ranks that hold the other parts of the same parameters.
        copies: Ranks with copies of what no rank divides, on the host.
        neighbours: Data-parallel ranks side by side that have the same slice of other parts.
        barrier: Bounded meeting of all data-parallel ranks.
        world_size: Number of data-parallel ranks, of whose gradients the mean is taken.
        warns: This rank is the one that warns.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    parts: Communicator
    copies: Communicator
    neighbours: int
    barrier: StoreBarrier
    world_size: int
    warns: bool

    @property
    def shard_rank(self) -> int:
        """Index of the slice that this rank owns."""
        return self.gather.rank

    @property
    def shard_size(self) -> int:
        """Number of slices."""
        return self.gather.size

    def place(self, rank: int) -> tuple[int, int]:
        """Row and column of a data-parallel rank: its numbers in `replicate` and in `gather`."""
        return divmod(rank // self.neighbours, self.shard_size)


@dataclass(eq=False)
class Mesh:
    """Groups of the data-parallel mesh, from this rank's point of view.

    Attributes:
        gather: Ranks of the shard axis, for parameters.
        reduce: The same ranks, for gradients.
        replicate: Ranks that hold the same slice.
        control: All data-parallel ranks, on the host, for flags, norms and objects.
        shard_control: The ranks of the shard axis, on the host, for norms.
        barrier: Bounded meeting of all data-parallel ranks.
        world_group: The ranks of all data-parallel groups; the data-parallel ranks where there is one group.
        tensor: Ranks that divide the same layers (tensor parallelism), on the host, for norms, flags and copies.
        sequence: Ranks that divide the tokens of the same sequences.
        expert: Neighbours of the shard axis that divide the experts of each layer.
        expert_gather: Ranks of the shard axis that hold the same experts, for parameters.
        expert_reduce: The same ranks, for gradients.
        counters: What this rank sent.
        watchdog: Watches all of these; None: nobody does.
        further: Groups of ranks that train other parts of the model, by name.
        observed: Who is told what all of these communicators do.
        communicator_bytes: Memory of the GPU that NCCL has taken for these groups, as far as `warm_up` could measure.
    """

    gather: Communicator
    reduce: Communicator
    replicate: Communicator
    control: Communicator
    shard_control: Communicator
    barrier: StoreBarrier
    world_group: WorldGroup
    tensor: Communicator
    sequence: Communicator
    expert: Communicator
    expert_gather: Communicator
    expert_reduce: Communicator
    counters: CommunicationCounters = field(default_factory=CommunicationCounters)
    watchdog: Watchdog | None = None
    further: dict[str, Communicator] = field(default_factory=dict)
    closed: bool = False
    observed: Observed = field(default_factory=Observed)
    communicator_bytes: int = 0

    def __post_init__(self) -> None:
        for communicator in self._communicators:
            communicator.observed_by(self.observed)

    @property
    def _communicators(self) -> tuple[Communicator, ...]:
        """All of them, in the order in which they end."""
        data_parallel = self.gather, self.reduce, self.replicate, self.shard_control, self.control
        experts = self.expert, self.expert_gather, self.expert_reduce
        return (*data_parallel, self.world_group.control, self.tensor, self.sequence, *experts, *self.further.values())

    @cached_property
    def of_dense(self) -> ShardRanks:
        """Ranks that share the buckets of all parameters but those of divided experts."""
        axes = self.gather, self.reduce, self.replicate, self.tensor
        return ShardRanks(*axes, self.tensor, 1, self.barrier, self.world_size, self.world_group.rank == 0)

    @cached_property
    def of_experts(self) -> ShardRanks:
        """Ranks that share the buckets of divided experts: those that hold the same ones."""
        axes = self.expert_gather, self.expert_reduce, self.replicate, self.expert
        first = self.world_group.rank == 0
        return ShardRanks(*axes, self.tensor, self.expert.size, self.barrier, self.world_size, first)

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
        barrier_seconds: float,
        name: str,
        dp_groups: Sequence[Sequence[int]] | None = None,
        watchdog: WatchdogConfig | None = None,
        tensor_groups: Sequence[Sequence[int]] | None = None,
        sequence: int = 1,
        expert: int = 1,
        further: Callable[[], Mapping[str, Communicator]] = dict,
        rank_labels: RankLabels = rank_label,
    ) -> Mesh:
        """Make the groups; a collective over the default process group.

        Args:
            replicate: Size of the replicate axis.
            shard: Size of the shard axis.
            timeout: Seconds after which a collective of these groups fails.
            barrier_seconds: Bound of our own waits.
            name: Tells engines of one process apart; equal on all ranks.
            dp_groups: The ranks of every mesh, this rank's among them; the same on all ranks, every rank in one.
                Default: one group of all ranks.
            watchdog: How collectives are watched; None: not at all.
            tensor_groups: The ranks that divide the same layers, of every such group. Default: every rank by itself.
            sequence: Neighbouring ranks that divide the tokens of the same sequences.
            expert: Neighbouring ranks of a shard axis that divide the experts of each layer.
            further: Makes groups beyond these, by name, which the mesh watches and closes as its own.
            rank_labels: Ranks in words.

        Raises:
            ValueError: If replicate x shard is not the size of a group, a rank is in no group or in two, or `expert`
                does not divide `shard`.
        """
        counters = CommunicationCounters()
        world = dist.get_world_size() if dist.is_initialized() else 1
        dp_groups = [range(world)] if dp_groups is None else dp_groups
        _check_dp_groups(dp_groups, world, replicate, shard)
        if shard % expert:
            raise ValueError(f"{expert} ranks that divide experts do not divide the {shard} ranks of a shard axis")
        if world == 1:
            alone, meeting = Communicator(None, counters), StoreBarrier(0, 1, 0.0, name)
            world_group = WorldGroup(alone, meeting)
            mesh = cls(
                alone, alone, alone, alone, alone, meeting, world_group, alone, alone, alone, alone, alone, counters
            )
            mesh._join(further())
            return mesh
        limit = timedelta(seconds=timeout)

        def group_of(lists: list[list[int]], backend: str | None = None) -> Communicator:
            return Communicator(own_group(lists, timeout=limit, backend=backend), counters, owns=True)

        rows = [list(dp_group[row * shard : (row + 1) * shard]) for dp_group in dp_groups for row in range(replicate)]
        columns = [list(dp_group[column::shard]) for dp_group in dp_groups for column in range(shard)]
        # Each call makes its groups together with all ranks of the world, so none may be left out on some of them.
        # Flags, norms and objects are in host memory: those go by gloo, whatever the default backend is.
        everyone = group_of([list(range(world))], backend="gloo")
        control = (
            everyone if len(dp_groups) == 1 else group_of([list(dp_group) for dp_group in dp_groups], backend="gloo")
        )
        # Its ranks are those of `control`, or this one alone: no group more to make and to watch.
        if shard == 1 or replicate == 1:
            shard_control = control if replicate == 1 else Communicator(None, counters)
        else:
            shard_control = group_of(rows, backend="gloo")
        divided = Communicator(None, counters)
        if tensor_groups is not None and len(tensor_groups[0]) > 1:
            divided = on_host_and_gpus([list(ranks) for ranks in tensor_groups], limit, counters)
        tokens = [
            list(dp_group[at : at + sequence]) for dp_group in dp_groups for at in range(0, len(dp_group), sequence)
        ]
        neighbours = [row[at : at + expert] for row in rows for at in range(0, shard, expert)]
        same_experts = [row[place::expert] for row in rows for place in range(expert)]
        meeting = StoreBarrier(dist.get_rank(), world, barrier_seconds, name)
        dp_group = next(number for number, ranks in enumerate(dp_groups) if dist.get_rank() in ranks)
        rank = list(dp_groups[dp_group]).index(dist.get_rank())
        # Data-parallel groups meet one without the other, so each has keys of its own.
        local = StoreBarrier(rank, replicate * shard, barrier_seconds, f"{name}.lane{dp_group}")
        gather, reduce = (group_of(rows) if shard > 1 else Communicator(None, counters) for _ in range(2))
        expert_gather, expert_reduce = gather, reduce
        if expert > 1:
            expert_gather, expert_reduce = (
                group_of(same_experts) if shard > expert else Communicator(None, counters) for _ in range(2)
            )
        mesh = cls(
            gather=gather,
            reduce=reduce,
            replicate=group_of(columns) if replicate > 1 else Communicator(None, counters),
            control=control,
            shard_control=shard_control,
            barrier=meeting if len(dp_groups) == 1 else local,
            world_group=WorldGroup(everyone, meeting),
            tensor=divided,
            sequence=Communicator(None, counters) if sequence == 1 else group_of(tokens),
            expert=Communicator(None, counters) if expert == 1 else group_of(neighbours),
            expert_gather=expert_gather,
            expert_reduce=expert_reduce,
            counters=counters,
        )
        # Before `_join`, which lets it watch the further groups, too.
        if watchdog is not None and watchdog.mode != "off":
            mesh._watch(
                watchdog,
                name,
                lambda lists: own_group(lists, timeout=limit, backend="gloo"),
                rows,
                columns,
                tokens,
                rank_labels,
                neighbours,
                same_experts,
            )
        mesh._join(further())
        return mesh

    def warm_up(self, device: torch.device) -> None:
        """Connect the ranks by which tensors of a device go, before the first of them does. All ranks call it.

        What that takes on the device is measured: the growth of what is not torch's. Communicators that a group bound
        to its GPU has made already, and what other processes take on the same GPU meanwhile, make it wrong.
        """
        # An address that other ranks cannot reach is named here, and not in the first step.
        for control in dict.fromkeys((self.world_group.control, self.control, self.shard_control, self.tensor)):
            if control.group is not None:
                try_connections(control.group)
        experts = (self.expert, self.expert_gather, self.expert_reduce) if self.expert.size > 1 else ()
        groups = list(dict.fromkeys((self.gather, self.reduce, self.replicate, self.sequence, *experts)))
        # Of numbers alone: most of these are there on the host only.
        groups += [one for one in (self.tensor, *self.further.values()) if one.gpu_group is not None]
        if device.type != "cuda" or all(one.size == 1 for one in groups):
            return
        before = bytes_beside_torch(device)
        for communicator in groups:
            communicator.warm_up(device)
        self.shard_control.send_numbers_by(self.reduce, device)
        self.expert.send_numbers_by(self.expert, device)
        self.communicator_bytes = max(0, bytes_beside_torch(device) - before)

    def close(self, *, together: bool = True) -> None:
        """End the groups, in the same order on all ranks, and what watches them. All ranks call it.

        They meet first, for some seconds: who closes a connection early takes from a slower rank what is under way. Not
        where the ranks are known to have failed, or without `together`. A second call does nothing.
        """
        if self.closed:
            return
        self.closed = True
        meeting, failed = self.world_group.barrier, self.watchdog is not None and self.watchdog.failure is not None
        # Where the default group is gone, so are its store, through which ranks meet, and all other groups.
        if together and self.world_group.world_size > 1 and not failed and has_process_group():
            with suppress(Exception):  # a rank that does not come any more is no reason to stay
                seconds = min(meeting.timeout, _CLOSING_SECONDS)
                StoreBarrier(meeting.rank, meeting.world_size, seconds, f"{meeting.prefix}.end").wait_for_all("close()")
        communicators = self._communicators
        # Noted before `close` lets go of them, and each once: several communicators may share a group.
        groups = [group for one in communicators for group in (one.group, one.gpu_group) if group is not None]
        for communicator in communicators:
            communicator.close()
        if self.watchdog is not None:
            self.watchdog.close()
        # In the order of `_communicators`, the same on all ranks: NCCL ends a communicator with all of its ranks.
        for group in dict.fromkeys(groups):
            end_group(group)

    def _join(self, further: Mapping[str, Communicator]) -> None:
        """Take groups in that others have made."""
        self.further.update(further)
        for name, communicator in further.items():
            communicator.observed_by(self.observed)
            if self.watchdog is not None:
                communicator.guarded(self.watchdog, name)

    def _watch(
        self,
        settings: WatchdogConfig,
        name: str,
        on_host: Callable[[list[list[int]]], dist.ProcessGroup | None],
        rows: list[list[int]],
        columns: list[list[int]],
        tokens: list[list[int]],
        rank_labels: RankLabels,
        neighbours: list[list[int]],
        same_experts: list[list[int]],
    ) -> None:
        world_group, strict = self.world_group.control, settings.mode == "strict"
        cards = world_group.all_gather_objects(own_card())
        connect = partial(own_store, world_group.size)
        self.watchdog = watchdog = Watchdog(
            world_group.rank, cards, connect, name,
            wait_seconds=settings.wait_seconds, silence_seconds=settings.silence_seconds,
            unheard_seconds=settings.unheard_seconds, strict=strict, rank_labels=rank_labels,
        )  # fmt: skip
        experts: tuple[tuple[Communicator, str, list[list[int]]], ...] = ()
        if self.expert.size > 1:
            experts = (
                (self.expert, "expert", neighbours), (self.expert_gather, "expert gather", same_experts),
                (self.expert_reduce, "expert reduce", same_experts),
            )  # fmt: skip
        for communicator, what, lists in (
            (world_group, "team", rows), (self.control, "control", rows), (self.shard_control, "shard_control", rows),
            (self.gather, "gather", rows), (self.reduce, "reduce", rows), (self.replicate, "replicate", columns),
            (self.tensor, "tensor", rows), (self.sequence, "sequence", tokens), *experts,
        ):  # fmt: skip
            # A strict watchdog compares on the host: groups of GPUs get a second one there. Making it takes all ranks,
            # and all decide alike, as sizes and backends are the same everywhere.
            host_group = on_host(lists) if strict and communicator.size > 1 and not communicator.on_host else None
            communicator.guarded(watchdog, what, host_group)
        for meeting, control in ((self.world_group.barrier, world_group), (self.barrier, self.control)):
            assert control.group is not None
            meeting.guarded(watchdog, dist.get_process_group_ranks(control.group))


def on_host_and_gpus(
    lists: Sequence[Sequence[int]], timeout: timedelta, counters: CommunicationCounters
) -> Communicator:
    """Connect ranks on the host, and on GPUs for few numbers if they may be on some. A collective, as `own_group`.

    Args:
        lists: Ranks of each group; every rank is in one.
        timeout: Of their collectives.
        counters: Where what is sent gets counted.
    """
    host = own_group(lists, timeout=timeout, backend="gloo")
    gpus = own_group(lists, timeout=timeout, backend="nccl") if group_takes_gpu() else None
    return Communicator(host, counters, owns=True, gpu_group=gpus)


def _check_dp_groups(dp_groups: Sequence[Sequence[int]], world: int, replicate: int, shard: int) -> None:
    size = len(dp_groups[0])
    if replicate * shard != size:
        what = f"the world size {world}" if len(dp_groups) == 1 else f"{size}, the ranks of a data-parallel group"
        raise ValueError(f"mesh.replicate {replicate} x mesh.shard {shard} is not {what}")
    if sorted(rank for dp_group in dp_groups for rank in dp_group) != list(range(world)) or {
        len(dp_group) for dp_group in dp_groups
    } != {size}:
        raise ValueError(
            f"data-parallel groups {[list(group) for group in dp_groups]} must hold each of the {world} ranks once, "
            "and be of one size"
        )
