"""`accelerate launch`: with our templates, Accelerate's own scripts, and launches that cannot work."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from accelerate.parallelism_config import ParallelismConfig

from tests.integrations.accelerate.upstream import run_here
from tests.integrations.accelerate.warm_launch import run_warm_launch
from tests.launcher import Launcher
from tests.warm import plain_environment, run_warm_script
from zero_strategy.config import load_config
from zero_strategy.integrations.accelerate.launch import (
    asked_parallelism,
    check_processes,
    check_single_owner,
    check_uneven_batches,
    needs_cpu,
    with_parallelism,
    without_parallelism,
)

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "configs" / "accelerate"
UPSTREAM = Path(__file__).with_name("upstream.py")
LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch"]


def launch(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The launcher has its libraries loaded; the processes that it starts do not."""
    return run_warm_script(*LAUNCH, *arguments, cwd=folder, env=plain_environment(), timeout=150)


def test_a_script_of_accelerate_itself(tmp_path: Path) -> None:
    """In the environment of a launch; tests/examples/test_frameworks.py launches with this file."""
    words = ["--config_file", str(TEMPLATES / "cpu2.yaml"), str(UPSTREAM), "test_script", "2"]
    both = run_warm_launch(*words, cwd=tmp_path, env=plain_environment())
    assert [done.returncode for done in both] == [0, 0], "".join(done.stdout + done.stderr for done in both)
    assert "passed: test_script 2 2" in both[0].stdout, both[0].stdout + both[0].stderr


@pytest.mark.parametrize(
    "script",
    [
        "test_script 1",
        "test_ops 3",
        "test_sync 1",
        "test_sync 2 per_step",  # it asserts that `no_sync` leaves gradients on the rank, which is what this asks for
        "test_sync 3 per_step",
        "test_sync_matrix 1",
        "test_sync_matrix 2 per_step",
    ],
)
def test_other_scripts_of_accelerate(ranks: Launcher, script: str) -> None:
    """Not launched, which is the same for all of them: starting the processes takes far longer than the script."""
    name, stage, *_ = script.split()
    assert ranks(2, timeout=120)(run_here, *script.split()) == [f"passed: {name} {stage} 2"] * 2


SCRIPT = """
from zero_strategy.integrations.accelerate import ZeroAccelerator
accelerator = ZeroAccelerator()
print("processes", accelerator.num_processes, "stage", accelerator.zero_config.stage, flush=True)
accelerator.end_training()
"""


def test_the_environment_names_the_config(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "zero.yaml").write_text("stage: 2\n")
    template = str(TEMPLATES / "one_node.yaml")
    env = plain_environment(ZERO_STRATEGY_CONFIG="zero.yaml")
    words = ["--config_file", template, "--num_processes", "2", "script.py"]
    for done in run_warm_launch(*words, cwd=tmp_path, env=env):
        assert done.returncode == 0 and done.stdout.count("processes 2 stage 2") == 1, done.stdout + done.stderr


def test_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found: dict[int, subprocess.CompletedProcess[str]] = {}

    def node(rank: int) -> None:
        template = ["--config_file", str(TEMPLATES / "several_nodes.yaml"), "--num_processes", "2"]
        place = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        found[rank] = launch([*template, *place, "script.py"], tmp_path)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for done in found.values():
        assert "processes 2 stage 3" in done.stdout and done.returncode == 0, done.stdout + done.stderr


def test_one_process_in_place_of_two_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    done = launch([*command, "--dynamo_backend", "no", "script.py"], tmp_path)
    assert "processes 1 stage 3" in done.stdout
    assert "accelerate launch --multi_gpu --num_processes 2" in done.stderr, done.stderr


FORKED = """
import torch
from accelerate import debug_launcher, notebook_launcher


def train():
    from zero_strategy.integrations.accelerate import ZeroAccelerator

    accelerator = ZeroAccelerator(zero_config={"stage": 3, "units": {"min_numel": 0}})
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    places = accelerator.gather(torch.tensor([accelerator.process_index]))
    if accelerator.is_main_process:
        print("ranks", places.tolist(), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    debug_launcher(train, num_processes=2)
    notebook_launcher(train, num_processes=1)
"""


def test_starts_of_notebooks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKED)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_warm_script("script.py", cwd=tmp_path, env=env, timeout=150)
    assert "ranks [0, 1]" in done.stdout and "ranks [0]" in done.stdout, done.stdout + done.stderr


def test_other_ways_of_sharding_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ACCELERATE_USE_FSDP=true .*distributed_type: FSDP.*--use_fsdp"):
        check_single_owner({}, {"ACCELERATE_USE_FSDP": "true"})
    with pytest.raises(ValueError, match="distributed_type: DEEPSPEED"):
        check_single_owner({}, {"ACCELERATE_USE_DEEPSPEED": "True"})
    with pytest.raises(ValueError, match="fsdp_plugin"):
        check_single_owner({"fsdp_plugin": object()}, {})
    with pytest.raises(ValueError, match="torch_tp_plugin"):
        check_single_owner({"torch_tp_plugin": object()}, {})
    check_single_owner({"mixed_precision": "no"}, {"ACCELERATE_USE_FSDP": "false"})


def test_the_sizes_of_accelerate_are_settings() -> None:
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    assert asked_parallelism(None, {}) is None and asked_parallelism(None, variables) is not None
    with without_parallelism(variables):
        assert not variables
    assert variables
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    found = with_parallelism(load_config(), sizes, 8).mesh
    assert (found.replicate, found.sequence, found.ulysses) == (2, 2, 1)
    found = with_parallelism(load_config(), ParallelismConfig(sp_size=4), 8).mesh  # as Accelerate's example
    assert (found.replicate, found.sequence, found.ulysses) == (1, 4, None)
    with pytest.raises(ValueError, match="is of 8 processes, and there are 4"):
        with_parallelism(load_config(), sizes, 4)
    with pytest.raises(ValueError, match=r"mesh\.sequence is 4 .*ParallelismConfig says 2"):
        with_parallelism(load_config(mesh={"sequence": 4}), sizes, 8)


def test_experts_have_no_size_of_accelerate_s() -> None:
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
    assert not [name for name in vars(sizes) if name.startswith(("ep", "expert"))], "take it in with_parallelism"
    found = with_parallelism(load_config(mesh={"expert": 2}), sizes, 8).mesh
    assert (found.replicate, found.expert) == (2, 2)


def test_uneven_batches_have_a_call_of_accelerate_s_own() -> None:
    check_uneven_batches(load_config(), "ZeroAccelerator")
    with pytest.raises(ValueError, match=r"uneven_batches is 'join' \[user: keyword\].*join_uneven_inputs\(\[model\]"):
        check_uneven_batches(load_config(uneven_batches="join"), "ZeroAccelerator")


def test_processes_that_would_train_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE is 2"):
        check_processes(1, {"WORLD_SIZE": "2"})
    check_processes(2, {"WORLD_SIZE": "2"})
    check_processes(1, {})
    assert not needs_cpu({})


def test_tasks_of_srun_that_would_train_alone_are_refused() -> None:
    tasks = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"}
    with pytest.raises(ValueError, match=r"srun started 4 processes.*zero_strategy.init_distributed\(\)"):
        check_processes(1, tasks)
    check_processes(4, tasks)
    check_processes(1, {**tasks, "SLURM_STEP_NUM_TASKS": "1"})
    check_processes(1, {**tasks, "WORLD_SIZE": "1"})
