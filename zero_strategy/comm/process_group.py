"""Process groups: rank and world size, start from the launcher's environment, subgroups.

| launcher | rank | ranks | rank on its host |
| --- | --- | --- | --- |
| torchrun and its like | RANK | WORLD_SIZE | LOCAL_RANK |
| srun | SLURM_PROCID | SLURM_STEP_NUM_TASKS | SLURM_LOCALID |
| Open MPI's mpirun | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK |
| MPICH's and Intel's mpirun | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID |
"""

from __future__ import annotations

import os
import re
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from zero_strategy.comm.gloo_address import connecting_by_gloo, connecting_late
from zero_strategy.comm.meeting import CONNECT_SECONDS, meet
from zero_strategy.runtime.compute_device import bound_device, current_gpu, gpu_of_local_rank, occupy
from zero_strategy.runtime.torch_private import HashStore, backend_of, set_group_timeout


def world_size() -> int:
    """Size of the default process group, 1 without one; a warning if the launcher started more processes than that."""
    if dist.is_initialized():
        return dist.get_world_size()
    if (launched := os.environ.get("WORLD_SIZE", "1")) not in ("", "0", "1"):
        warnings.warn(
            f"WORLD_SIZE is {launched}, but there is no process group, so every process trains alone; call "
            "torch.distributed.init_process_group() first",
            stacklevel=3,
        )
    elif (place := unread_place(os.environ)) is not None:
        warnings.warn(
            f"{place.launcher} started {place.world_size} processes, but there is no process group, so every process "
            "trains alone; call zero_strategy.init_distributed() first, or set WORLD_SIZE=1 if that is meant",
            stacklevel=3,
        )
    return 1


def world_rank() -> int:
    """This process in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def has_process_group() -> bool:
    """True if the default process group was started."""
    return dist.is_initialized()


def default_group() -> dist.ProcessGroup | None:
    """The default process group, if it was started."""
    return dist.group.WORLD if dist.is_initialized() else None


def group_takes_gpu() -> bool:
    """True if ranks of the default process group may compute on GPUs; without one, this process may."""
    return not dist.is_initialized() or "nccl" in dist.get_backend()


DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=30)


class Place(NamedTuple):
    """Position of this process among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    """Of rank 0's host."""
    launcher: str


_SRUN = "srun"
_OMPI = "OMPI_COMM_WORLD_"
_MPI = (
    ("Open MPI", f"{_OMPI}RANK", f"{_OMPI}SIZE", f"{_OMPI}LOCAL_RANK", f"{_OMPI}LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Name, and the variables of rank, ranks, rank on the host, ranks on the host."""


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group, unless there is one.

    The variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set for what was found, since
    scripts read them. Without any launcher the group is this one process. With NCCL the rank's GPU becomes the current
    one: that of the local rank, modulo the GPUs that the process sees.

    Args:
        dist_backend: "nccl", "gloo", ...; None: what suits the machine. "nccl" becomes "gloo", with a line that says
            so, where there is no GPU.
        auto_mpi_discovery: Look for the variables of srun and mpirun where torchrun's are missing.
        distributed_port: Port on rank 0's host, where MASTER_PORT does not say. Under srun 29500, which every script
            has, stands for a port of the job's own: see `port_of_job`.
        verbose: Print on rank 0 what was found.
        timeout: Of collectives.
        init_method: A URL for torch, such as "tcp://host:port" or "file:///path"; None: by the variables.
        dist_init_required: False: start none; there must be one.
        config: Accepted without effect: what DeepSpeed reads of it is its log of messages.
        rank: This process, in place of what a launcher says.
        world_size: Number of ranks, likewise; both or neither.

    Raises:
        ValueError: If the launcher's variables do not tell enough (names the missing one), or `rank` and `world_size`
            do not fit each other.
        RuntimeError: If gloo cannot connect the ranks; names the address that this one took, and GLOO_SOCKET_IFNAME.
    """
    if dist.is_initialized():
        _occupy_unchosen(auto_mpi_discovery)
        return
    if dist_init_required is False:
        require_group("dist_init_required=False")
        return
    place = _told(rank, world_size) or discover(os.environ, auto_mpi_discovery)
    rank = 0 if place is None else place.rank
    backend = _backend(dist_backend, loud=rank == 0)
    if place is None:
        # A store in memory: one rank needs no port, which another process of the host may have.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    # Before the group is started, which reads them (env://).
    os.environ.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank),
        MASTER_ADDR=place.address, MASTER_PORT=os.environ.get("MASTER_PORT") or str(_port(place, distributed_port)),
    )  # fmt: skip
    if "nccl" in backend:
        # Before any collective: NCCL asks the current device which GPU a communicator is for.
        occupy(gpu_of_local_rank(place.local_rank))
    if verbose and rank == 0:
        print(f"zero_strategy: {place.world_size} ranks started by {place.launcher}, backend {backend}", flush=True)
    with connecting_by_gloo(), connecting_late(place.world_size > MOST_DIRECT):
        dist.init_process_group(
            backend, init_method=init_method or "env://", rank=place.rank, world_size=place.world_size, timeout=timeout
        )
    if (group := default_group()) is not None and dist.get_backend(group) == dist.Backend.GLOO:
        # An address that other ranks cannot reach is named here, and not at the first collective.
        try_connections(group)


_JOB_PORTS = range(15000, 25000)
"""Below those that Linux gives to outgoing connections, from 32768 on."""


def port_of_job(env: Mapping[str, str]) -> int:
    """Port for rank 0 of a Slurm job: 15000 + (SLURM_JOB_ID + 997 x SLURM_STEP_ID) mod 10000.

    All tasks of a step come to the same one; jobs that share a node, which have near numbers, and steps that run at the
    same time in one job, come to different ones.
    """
    job, step = (int(found) if (found := env.get(name, "")).isdigit() else 0 for name in _JOB_AND_STEP)
    return _JOB_PORTS[(job + 997 * step) % len(_JOB_PORTS)]


_JOB_AND_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID")


def _port(place: Place, asked: int) -> int:
    return port_of_job(os.environ) if place.launcher == _SRUN and asked == DEFAULT_PORT else asked


def _occupy_unchosen(mpi: bool) -> None:
    """Compute on the GPU of the process group that somebody else has started, or on that of the local rank.

    Not where the script has set another than the first, which is current until somebody sets one.
    """
    if "nccl" not in dist.get_backend():
        return
    bound = bound_device(default_group())
    if bound is None and current_gpu().index == 0:
        with suppress(ValueError):  # the group is there, so it does not matter what the variables do not tell
            place = discover(os.environ, mpi)
            bound = None if place is None else gpu_of_local_rank(place.local_rank)
    if bound is not None:
        occupy(bound)


def _told(rank: int, world_size: int) -> Place | None:
    if rank < 0 and world_size < 0:
        return None
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} and world_size {world_size}; give both, rank from 0 to world_size - 1")
    local = int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
    return Place(rank, world_size, local, _address(os.environ, None), "the script")


def require_group(why: str) -> None:
    """Raise if a launcher started several ranks and there is no process group.

    Args:
        why: What leaves the start to the script.

    Raises:
        ValueError: Then.
    """
    place = None if dist.is_initialized() else discover(os.environ)
    if place is not None and place.world_size > 1:
        raise ValueError(
            f"{why}, but {place.launcher} started {place.world_size} ranks and there is no process group; call "
            "torch.distributed.init_process_group() before, or leave it to initialize()"
        )


def discover(env: Mapping[str, str], mpi: bool = True) -> Place | None:
    """Settings from a launcher's variables; None without a launcher.

    Args:
        env: The environment.
        mpi: Look for srun and mpirun too.

    Raises:
        ValueError: If variables are missing; names them and the way out.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        rank = int(env["RANK"])
        local = int(env.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
        return Place(rank, int(env["WORLD_SIZE"]), local, _address(env, None), "torchrun")
    found = (_of_srun(env) or _of_mpirun(env)) if mpi else None
    if found is None and int(env.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(f"WORLD_SIZE is {env['WORLD_SIZE']}, but RANK is not set; start the script with torchrun")
    if found is None and env.get("RANK"):
        raise ValueError(
            f"RANK is {env['RANK']}, but WORLD_SIZE is not set: this process would train alone; start the script with "
            "torchrun, or set both"
        )
    return found


def unread_place(env: Mapping[str, str]) -> Place | None:
    """Place among several processes of srun or mpirun, whose variables neither torch nor Accelerate on GPUs reads.

    None where torchrun's variables say anything; WORLD_SIZE=1 is the way to say that each process is alone.
    """
    if env.keys() & {"RANK", "WORLD_SIZE"}:
        return None
    # They are counted only: where rank 0 is does not matter.
    place = _of_srun(env) or _of_mpirun({"MASTER_ADDR": "", **env})
    return place if place is not None and place.world_size > 1 else None


def _of_srun(env: Mapping[str, str]) -> Place | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:  # sbatch's own script is in no step
        return None
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    address = _address(env, first_host(hosts) if hosts else None)
    size = int(env["SLURM_STEP_NUM_TASKS"])
    return Place(int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID", "0")), address, _SRUN)


def _of_mpirun(env: Mapping[str, str]) -> Place | None:
    for name, rank, world_size, local_rank, local_size in _MPI:
        if rank not in env or world_size not in env:
            continue
        size = env[world_size]
        if env.get(local_size, size) != size and "MASTER_ADDR" not in env:
            raise ValueError(
                f"{name} started {size} ranks on several hosts, and cannot tell where rank 0 is; set MASTER_ADDR to "
                "its host (mpirun -x MASTER_ADDR=HOST, or mpirun -genv MASTER_ADDR HOST)"
            )
        return Place(int(env[rank]), int(size), int(env.get(local_rank, "0")), _address(env, None), name)
    return None


def first_host(nodes: str) -> str:
    """The first name in SLURM's compressed list of hosts: "node[03-05,9],other" gives "node03"."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    numbers, _, tail = rest.partition("]")
    return head + re.split("[-,]", numbers)[0] + (first_host(tail) if tail else "")


def _address(env: Mapping[str, str], found: str | None) -> str:
    return env.get("MASTER_ADDR") or found or "127.0.0.1"


def _backend(asked: str | None, *, loud: bool) -> str:
    if torch.cuda.is_available():
        return asked or "nccl"
    if asked == "nccl" and loud:
        print("zero_strategy: dist_backend 'nccl' needs a GPU, and there is none: gloo is used", flush=True)
    return "gloo" if asked in (None, "nccl") else asked


T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
MOST_DIRECT = 8
"""Ranks of a group on the host in which each has a connection to each other one, and sends it small messages itself."""


def own_group(
    lists: Iterable[Sequence[int]], *, timeout: timedelta | None = None, backend: str | None = None
) -> ProcessGroup | None:
    """Make a group of each list of ranks. A collective over the default process group: all pass the same lists.

    Args:
        lists: Ranks of each group; a rank is in one of them at most.
        timeout: Of their collectives; None: the backend's.
        backend: "gloo", "nccl"; None: the default group's.

    Returns:
        The group that this rank is in, or None.

    Raises:
        RuntimeError: If gloo cannot connect the ranks, as `init_distributed` does.
        RankGoneError: If a rank has died before, in a run that goes on then.
    """
    mine, met = None, meet("a process group")
    for ranks in lists:  # every rank takes part in making every group
        late = len(ranks) > MOST_DIRECT
        first = CONNECT_SECONDS if met and not late else timeout
        # The first group of gloo where the default one is on GPUs.
        with connecting_by_gloo(), _unsplit() if backend == "gloo" else nullcontext(), connecting_late(late):
            group = dist.new_group(list(ranks), timeout=first, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
            if first != timeout:
                set_group_timeout(timeout or DEFAULT_TIMEOUT, group)
    return mine


def try_connections(group: ProcessGroup) -> None:
    """Connect the ranks of a group of gloo that `own_group` has not connected yet. All of them call it.

    Raises:
        RuntimeError: As `own_group` does.
    """
    if group_size(group) > MOST_DIRECT:
        # The rounds of a barrier go between the same ranks as those of small messages.
        with connecting_by_gloo(only=True):
            dist.barrier(group)


@contextmanager
def _unsplit() -> Iterator[None]:
    """Inside, groups are made as if the default one had not been bound to a GPU (`device_id`).

    Of a bound one torch splits NCCL's communicator for each new group, on the ranks that are not in it, too, and
    whatever the new group's backend is. Those that are in a group of gloo do not, so where some rank is in no group of
    a list, ranks would wait for each other without end.
    """
    default = default_group()
    bound = bound_device(default)
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def end_group(group: ProcessGroup) -> None:
    """End a group that `own_group` made. Its ranks do so in the same order, when nothing is under way in it."""
    with suppress(ValueError):  # all groups were ended before, with the default one
        dist.destroy_process_group(group)


def end_with(owner: object, group: ProcessGroup) -> weakref.finalize[..., Any]:
    """End a group that `own_group` made when its owner is garbage: it is torch that holds it until then.

    Nothing may be under way in it that the owner does not take part in. Not where it is on GPUs: NCCL ends a
    communicator with all of its ranks, in one order, and garbage has none.
    """
    finalizer = weakref.finalize(owner, _end_dropped, group, os.getpid())
    # At exit the connections end with the process, and torch may be half gone.
    finalizer.atexit = False
    return finalizer


def _end_dropped(group: ProcessGroup, pid: int) -> None:
    if os.getpid() != pid or sys.is_finalizing():  # in a fork the group is its parent's
        return
    with suppress(Exception):  # collected anywhere: whoever runs there has not asked for it
        if not _on_gpus(group):
            end_group(group)


def _on_gpus(group: ProcessGroup) -> bool:
    """True if anything but gloo connects its GPUs."""
    try:
        return not isinstance(backend_of(group, "cuda"), dist.ProcessGroupGloo)
    except RuntimeError:  # nothing does
        return False


def group_size(group: ProcessGroup) -> int:
    """Number of its ranks."""
    return dist.get_world_size(group)


def from_first_rank(value: T) -> T:
    """Rank 0's picklable `value`, on all ranks; the value itself without a process group. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values: list[T | None] = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(values, src=0)
    found = values[0]
    assert found is not None
    return found
