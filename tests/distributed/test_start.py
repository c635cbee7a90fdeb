"""Variables of launchers, and the process group that is started from it."""

from __future__ import annotations

import argparse
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.warm import run_warm
from zero_strategy.comm.process_group import Place, discover, first_host
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


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"Open MPI started 4 ranks on several hosts.*MASTER_ADDR"):
        discover({key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"})
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but RANK is not set"):
        discover({"WORLD_SIZE": "2"})


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
