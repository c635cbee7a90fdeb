"""Threads of an optimizer step on the host under torchrun, which leaves each of several ranks one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zero_strategy.runtime import host_threads

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from zero_strategy import ZeroEngine
from zero_strategy.config import load_config
from zero_strategy.optim.fused import AdamRule

os.sched_getaffinity = lambda process: set(range(8))  # of a larger machine
seen = []
update = AdamRule._update
def counted(self, *arguments):
    seen.append(torch.get_num_threads())
    update(self, *arguments)
AdamRule._update = counted
dist.init_process_group("gloo")
model = nn.Linear(8, 8)
engine = ZeroEngine(model, load_config(stage=2, offload="cpu", units={"min_numel": 0}, watchdog="off"))
optimizer = torch.optim.AdamW(model.parameters())
engine.attach(optimizer)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
with open(os.path.join(sys.argv[1], f"rank{dist.get_rank()}"), "w") as file:
    print(os.environ["OMP_NUM_THREADS"], *sorted(set(seen)), torch.get_num_threads(), file=file)
engine.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("told", "threads"), [(None, 4), ("1", 1)])
def test_a_step_on_the_host_has_a_share_of_the_cores(tmp_path: Path, told: str | None, threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), **({} if told is None else {"OMP_NUM_THREADS": told})}
    (tmp_path / "train.py").write_text(TRAIN)
    two_ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*two_ranks, str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # torchrun's number, that of the step, that of what comes after
        assert (tmp_path / f"rank{rank}").read_text().split() == ["1", str(threads), "1"]


@pytest.mark.parametrize(
    ("present", "changed", "threads"),
    [
        (1, {}, 4),
        (1, {"LOCAL_WORLD_SIZE": "16"}, 1),
        (1, {"LOCAL_WORLD_SIZE": "1"}, 1),  # torchrun sets nothing for one
        (3, {}, 3),  # torch.set_num_threads by hand
        (1, {"OMP_NUM_THREADS": "2"}, 1),
        (1, {"TORCHELASTIC_RUN_ID": None}, 1),
        (1, {"OMP_NUM_THREADS": None}, 1),
    ],
)
def test_only_a_launchers_own_number_is_changed(
    present: int, changed: dict[str, str | None], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(host_threads, "_launcher_was_told", lambda launcher: False)
    environment = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    found = {name: value for name, value in {**environment, **changed}.items() if value is not None}
    assert host_threads._threads(present, found) == threads


def test_a_launcher_that_cannot_be_asked_counts_as_told() -> None:
    assert host_threads._launcher_was_told(2**22 + 1)


def test_the_number_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(host_threads, "_threads", lambda present, environment: present + 1)
    with pytest.raises(ArithmeticError), host_threads.share_of_cores():
        assert torch.get_num_threads() == before + 1
        raise ArithmeticError
    assert torch.get_num_threads() == before
