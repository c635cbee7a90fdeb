"""Two hosts under torchrun lose one: the other one ends its step, and goes on from the last checkpoint by itself."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cluster.hosts import INTERFACE, Host, two_hosts, why_not
from tests.launcher import Launcher

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "cluster_gpt.py")
STEPS, LOST_AFTER = 12, 4
OPTIONS = (
    "--stage=2", "--save-every=1", "--batch-size=4", "--timeout-seconds=20",
    "--block-size=16", "--n-layer=2", "--n-head=2", "--d-model=16",
)  # fmt: skip


def write_text(folder: Path) -> Path:
    """Enough files that some are held out."""
    folder.mkdir()
    for number in range(60):
        (folder / f"module{number}.py").write_text(f"value_{number} = [{number}] * {number}\n" * 20)
    return folder


def losses(folder: Path) -> list[dict[str, float]]:
    path = folder / "losses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def undisturbed(folder: str, text: str) -> list[float]:
    import cluster_gpt

    cluster_gpt.main([f"--folder={folder}", f"--text={text}", f"--steps={STEPS}", *OPTIONS])
    dist.barrier()
    return [line["loss"] for line in losses(Path(folder))]


def start(host: Host, meets_here: bool, endpoint: str, options: list[str], log: Path) -> None:
    """torchrun, one process, elastic between one and two hosts."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
    env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    soon = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2",
        "--monitor-interval=0.2", "--rdzv-id=two-hosts", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={int(meets_here)},{soon}", f"--local-addr={host.address}", SCRIPT, *options,
    ]  # fmt: skip
    host.start(words, env, log)


def wait_for_step(folder: Path, step: int, logs: list[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not any(line["step"] >= step for line in losses(folder)):
        assert time.monotonic() < end, "\n".join(log.read_text() for log in logs)
        time.sleep(0.02)


def test_one_of_two_hosts_is_lost(ranks: Launcher, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    text, folder = write_text(tmp_path / "text"), tmp_path / "run"
    expected = ranks(2)(undisturbed, str(tmp_path / "whole"), str(text))[0]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    options = [f"--folder={folder}", f"--text={text}", f"--steps={STEPS}", *OPTIONS]
    with two_hosts() as (first, second):
        endpoint = f"{first.address}:29400"
        for host, log in zip((first, second), logs):
            start(host, host is first, endpoint, options, log)
        wait_for_step(folder, LOST_AFTER, logs, 40)
        second.lose()
        status = first.processes[0].wait(45)
    said = logs[0].read_text()
    assert status == 0, said
    found = losses(folder)
    together = [line for line in found if line["ranks"] == 2]
    alone = [line for line in found if line["ranks"] == 1]
    assert [line["loss"] for line in together] == expected[: len(together)], "until then: the same bits"
    assert len(together) >= LOST_AFTER and alone[-1]["step"] == STEPS, "it went on to the end"
    assert alone[0]["step"] <= together[-1]["step"] + 1, "from the last checkpoint"
    for line in alone:
        assert line["loss"] == pytest.approx(expected[int(line["step"]) - 1], rel=1e-6)
    assert "DesyncError" in said and "rank 1" in said, said
