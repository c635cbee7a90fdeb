"""`zero-strategy accelerate-config`: files that `accelerate launch` takes, and that start the processes they name."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from tests.integrations.accelerate.warm_launch import run_warm_launch
from tests.warm import plain_environment, run_warm_script
from zero_strategy.cli import main
from zero_strategy.cli.config import launch_file

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import torch
from zero_strategy.integrations.accelerate import ZeroAccelerator

accelerator = ZeroAccelerator(zero_config={"stage": 2})
model = torch.nn.Linear(4, 2)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(3, 4)).sum())
optimizer.step()
open(f"rank{accelerator.process_index}of{accelerator.num_processes}", "x").close()
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cpu2", lambda path: launch_file(2, cpu=True, path=path)),
        ("one_node", lambda path: launch_file(8, precision="bf16", path=path)),
        ("several_nodes", lambda path: launch_file(16, 2, "bf16", path=path)),
    ],
)
def test_the_files_of_the_repository_are_its_output(name, text):
    path = f"configs/accelerate/{name}.yaml"
    assert (ROOT / path).read_text() == text(path)


@pytest.mark.parametrize("count", [1, 2])
def test_a_written_file_starts_its_processes(count, tmp_path, capsys):
    file, script = tmp_path / "launch.yaml", tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["accelerate-config", str(file), "--cpu", "--processes", str(count)]) == 0
    assert f"accelerate launch --config_file {file} SCRIPT" in capsys.readouterr().out
    words = ["--config_file", str(file), str(script)]
    if count == 1:  # by the launcher, whose libraries are loaded; those of the process that it starts are not
        done = [run_warm_script("-m", "accelerate.commands.accelerate_cli", "launch", *words, cwd=tmp_path)]
    else:
        done = run_warm_launch(*words, cwd=tmp_path, env=plain_environment())
    assert all(each.returncode == 0 for each in done), "".join(each.stderr for each in done)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == [f"rank{rank}of{count}" for rank in range(count)]


def test_what_is_asked_for_is_in_the_file(tmp_path):
    file = tmp_path / "launch.yaml"
    arguments = [str(file), "--nodes", "3", "--processes", "12", "--mixed-precision", "fp16", "--address", "first"]
    assert main(["accelerate-config", *arguments]) == 0
    config = load_config_from_file(str(file))
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (3, 12, "fp16")
    assert (config.main_process_ip, config.main_process_port) == ("first", 29500)


def test_a_file_that_exists_stays(tmp_path, capsys):
    file = tmp_path / "launch.yaml"
    file.write_text("mine")
    assert main(["accelerate-config", str(file), "--cpu"]) == 1
    assert file.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(["accelerate-config", str(file), "--cpu", "--force"]) == 0
    assert file.read_text().startswith("# accelerate launch")


@pytest.mark.parametrize(("processes", "nodes"), [("8", "3"), ("0", "1"), ("-2", "1"), ("2", "0")])
def test_counts_that_do_not_divide(processes, nodes, capsys):
    assert main(["accelerate-config", "-", "--processes", processes, "--nodes", nodes]) == 2
    assert f"{processes} processes on {nodes} nodes" in capsys.readouterr().err
