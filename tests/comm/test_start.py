"""Variables of launchers, and the process group that is started from it."""

from __future__ import annotations

import argparse
import os
import socket
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.fake_ranks import fake_world
from tests.device.gpus import Gpus
from tests.warm import run_warm
from zero_strategy.comm import process_group
from zero_strategy.comm.process_group import Place, discover, first_host, init_distributed, port_of_job, world_size
from zero_strategy.compat.deepspeed.scripts.entry import add_config_arguments, config_of

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "OMPI_", "PMI_", "MPI_")

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[07-08,11],login"
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "first",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (TORCHRUN, Place(5, 8, 1, "head", "torchrun")),
        (SRUN, Place(3, 4, 1, "gpu07", "srun")),
        (OPEN_MPI, Place(2, 4, 0, "first", "Open MPI")),
        (MPICH, Place(1, 2, 1, "127.0.0.1", "MPICH")),
        ({**MPICH, **TORCHRUN}, Place(5, 8, 1, "head", "torchrun")),
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # sbatch's own script
        ({"WORLD_SIZE": "1"}, None),
    ],
)
def test_launchers(env: dict[str, str], place: Place | None) -> None:
    assert discover(env) == place


def test_mpi_is_not_looked_for_unasked() -> None:
    assert discover(MPICH, mpi=False) is None and discover(TORCHRUN, mpi=False) is not None


def test_launch_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"Open MPI started 4 ranks on several hosts.*MASTER_ADDR"):
        discover({key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"})
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but RANK is not set"):
        discover({"WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="RANK is 1, but WORLD_SIZE is not set"):
        discover({"RANK": "1"})
    assert discover({"RANK": "1", **SRUN}) == Place(3, 4, 1, "gpu07", "srun")


class Started:
    """`init_process_group` of torch, and GPUs, on paper; variables of a launcher."""

    def __init__(self, patch: pytest.MonkeyPatch, env: dict[str, str], seen: int, current: int = 0) -> None:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            patch.delenv(name)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):  # to be put back
            patch.setenv(name, "")
            patch.delenv(name)
        for name, value in env.items():
            patch.setenv(name, value)
        self.gpus, self.asked = Gpus(patch, seen, current), dict[str, Any]()
        patch.setattr(dist, "init_process_group", self._start)

    def _start(self, backend: str, **options: Any) -> None:
        self.asked = {"backend": backend, **options, "current": self.gpus.current}


@pytest.mark.parametrize(("seen", "current"), [(1, 0), (2, 1), (4, 3)])
def test_each_task_of_srun_takes_a_gpu_that_it_sees(monkeypatch: pytest.MonkeyPatch, seen: int, current: int) -> None:
    """`srun --gpus-per-task=1`: every task sees one GPU, number 0."""
    started = Started(monkeypatch, {**SRUN, "SLURM_LOCALID": "3", "SLURM_JOB_ID": "71234"}, seen)
    init_distributed(verbose=False)
    assert started.asked["backend"] == "nccl" and started.asked["current"] == current
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.parametrize(
    ("env", "port"),
    [
        ({**SRUN, "SLURM_JOB_ID": "71234"}, "16234"),
        ({**SRUN, "SLURM_JOB_ID": "71235", "SLURM_STEP_ID": "0"}, "16235"),
        ({**SRUN, "SLURM_JOB_ID": "71234", "SLURM_STEP_ID": "1"}, "17231"),
        ({**SRUN, "SLURM_JOB_ID": "71234", "MASTER_PORT": "1234"}, "1234"),
        ({**SRUN, "SLURM_JOB_ID": "71234", "MASTER_PORT": ""}, "16234"),
        (SRUN, "15000"),
        (MPICH, "29500"),
    ],
)
def test_slurm_jobs_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], port: str) -> None:
    Started(monkeypatch, env, 1)
    init_distributed(verbose=False)
    assert os.environ["MASTER_PORT"] == port


def test_a_port_that_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Started(monkeypatch, {**SRUN, "SLURM_JOB_ID": "71234"}, 1)
    init_distributed(verbose=False, distributed_port=4321)
    assert os.environ["MASTER_PORT"] == "4321"


@pytest.mark.parametrize("env", [SRUN, MPICH, {**MPICH, "MPI_LOCALNRANKS": "1"}])
def test_processes_of_srun_and_mpirun_without_a_group_are_told(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str]
) -> None:
    Started(monkeypatch, env, 1)
    with pytest.warns(UserWarning, match=r"started [24] processes, but .*every process trains alone.*init_distributed"):
        assert world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world_size() == 1


def test_jobs_of_one_node_have_different_ports() -> None:
    ids = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(900, 964) for step in range(8)]
    ports = [port_of_job(env) for env in ids]
    assert len(set(ports)) == len(ports) and all(15000 <= port < 25000 for port in ports)


@pytest.mark.parametrize(
    ("bound", "before", "after"), [(None, 0, 1), (None, 2, 2), (torch.device("cuda", 3), 0, 3)], ids=str
)
def test_a_group_that_is_there_leads_to_its_gpu(
    monkeypatch: pytest.MonkeyPatch, bound: torch.device | None, before: int, after: int
) -> None:
    """The script has started it: without saying a GPU, after `set_device(2)`, with `device_id`."""

    class Group:
        bound_device_id = bound

    started = Started(monkeypatch, TORCHRUN, 4, before)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(process_group, "default_group", Group)
    init_distributed()
    assert not started.asked and started.gpus.current == after


def test_groups_of_the_host_are_made_beside_a_bound_group_without_its_communicator() -> None:
    with fake_world(0, 4):
        default = dist.group.WORLD
        assert default is not None
        default.bound_device_id = torch.device("cuda", 0)
        seen: list[Any] = []

        def new_group(ranks: list[int], **options: Any) -> object:
            seen.append((options["backend"], default.bound_device_id))
            return object()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", new_group)
            for backend in ("gloo", None):
                process_group.own_group([[0, 1]], backend=backend)
        assert seen == [("gloo", None), (None, torch.device("cuda", 0))]
        assert default.bound_device_id == torch.device("cuda", 0)
        default.bound_device_id = None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a,b", "a"), ("n[3-5]", "n3"), ("n[03,05]x,m", "n03x"), ("a1,n[1-2]", "a1"), ("r[1-2]n[3-4]", "r1n3")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


SCRIPT = """
import os, sys, torch, torch.distributed as dist, zero_strategy.compat.deepspeed.scripts as deepspeed
deepspeed.init_distributed({backend!r}, distributed_port={port}, verbose={verbose})
deepspeed.init_distributed()
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), total.item(), os.environ.get("LOCAL_RANK"))
dist.destroy_process_group()
"""


def start(envs: list[dict[str, str]], backend: str | None = None, verbose: bool = True) -> list[str]:
    """Output of the processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHERS)}
    code = SCRIPT.format(backend=backend, port=port, verbose=verbose)
    environments = [{**clean, "CUDA_VISIBLE_DEVICES": "", **env} for env in envs]
    with ThreadPoolExecutor(len(envs)) as pool:
        found = list(pool.map(lambda env: run_warm(code, cwd=ROOT, env=env, timeout=100), environments))
    assert not any(done.returncode for done in found), found
    return [done.stdout for done in found]


def test_a_process_alone_has_a_group_of_one() -> None:
    line = "zero_strategy: dist_backend 'nccl' needs a GPU, and there is none: gloo is used\n"
    assert start([{}], "nccl") == [line + "0 1 gloo 1.0 None\n"]


def test_ranks_of_mpi_find_each_other_without_mpi() -> None:
    envs = [{**MPICH, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(2)]
    first, second = start(envs)
    assert first == "zero_strategy: 2 ranks started by MPICH, backend gloo\n0 2 gloo 3.0 0\n"
    assert second == "1 2 gloo 3.0 1\n"


# ---- command lines ----


def test_arguments() -> None:
    parser = argparse.ArgumentParser()
    assert add_config_arguments(parser) is parser
    assert vars(parser.parse_args([])) == {
        "deepspeed": False, "deepspeed_config": None, "deepscale": False, "deepscale_config": None,
        "deepspeed_mpi": False,
    }  # fmt: skip
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--deepspeed_mpi"])
    assert args.deepspeed and config_of(args, None, None) == "ds.json"
    with pytest.warns(UserWarning, match="--deepscale_config is an old spelling"):
        assert config_of(parser.parse_args(["--deepscale_config", "old.json"]), None, None) == "old.json"
    with pytest.raises(ValueError, match=r"args.deepspeed_config and args.deepscale_config are given"):
        config_of({"deepspeed_config": "a", "deepscale_config": "b"}, None, None)


def test_local_rank_has_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_strategy.compat.deepspeed.scripts.entry import initialize

    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=r"args.local_rank is 0, the variable LOCAL_RANK 1"):
        initialize({"local_rank": 0}, torch.nn.Linear(1, 1), config={"stage": 0})


def test_starting_can_be_left_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_strategy.compat.deepspeed.scripts.entry import initialize

    for name, value in {**TORCHRUN, "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="dist_init_required=False, but torchrun started 8 ranks"):
        initialize(model=torch.nn.Linear(1, 1), config={"stage": 0}, dist_init_required=False)
