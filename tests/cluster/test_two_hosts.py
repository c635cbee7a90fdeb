"""Two hosts under torchrun lose one: the other ends by itself with the reason, and goes on from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cluster.hosts import INTERFACE, Host, two_hosts, why_not
from tests.cluster.one_host import FACES, on_one_host, read_results, trained
from tests.launcher import Launcher
from zero_strategy.checkpoint import LATEST_NAME

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "cluster_gpt.py")
STEPS, SAVE_EVERY = 60, 30
OPTIONS = (
    "--stage=2", f"--save-every={SAVE_EVERY}", f"--log-every={SAVE_EVERY}", "--batch-size=4", "--timeout-seconds=20",
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


def start(
    host: Host, hosts: int, meets_here: bool, endpoint: str, options: list[str], log: Path, script: str = SCRIPT
) -> None:
    """torchrun with one process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC"))}
    env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", "--nproc-per-node=1", "--max-restarts=0",
        "--monitor-interval=0.2", f"--rdzv-id=of-{hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={int(meets_here)}", f"--local-addr={host.address}", script, *options,
    ]  # fmt: skip
    host.start(words, env, log)


def wait_for_checkpoint(folder: Path, logs: list[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not (folder / LATEST_NAME).exists():
        assert time.monotonic() < end, "\n".join(log.read_text() for log in logs)
        time.sleep(0.01)


def test_one_of_two_hosts_is_lost(ranks: Launcher, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    text, folder = write_text(tmp_path / "text"), tmp_path / "run"
    expected = ranks(2)(undisturbed, str(tmp_path / "whole"), str(text))[0]
    logs = [tmp_path / f"{name}.log" for name in ("first", "second", "alone")]
    options = [f"--folder={folder}", f"--text={text}", f"--steps={STEPS}", *OPTIONS]
    with two_hosts() as (first, second):
        endpoint = f"{first.address}:29400"
        for host, log in zip((first, second), logs):
            start(host, 2, host is first, endpoint, options, log)
        wait_for_checkpoint(folder, logs[:2], 240)
        second.lose()
        assert first.processes[0].wait(60) != 0, "the other one ends by itself"
        assert re.search(r"DesyncError: .*rank 1", logs[0].read_text()), logs[0].read_text()
        start(first, 1, True, endpoint, options, logs[2])
        assert first.processes[1].wait(90) == 0, logs[2].read_text()
    found = losses(folder)
    together = [line["loss"] for line in found if line["ranks"] == 2]
    alone = [line for line in found if line["ranks"] == 1]
    assert together == expected[:SAVE_EVERY], "until then: the same bits"
    assert [line["step"] for line in alone] == list(range(SAVE_EVERY + 1, STEPS + 1)), "from the checkpoint to the end"
    assert [line["loss"] for line in alone] == pytest.approx(expected[SAVE_EVERY:], rel=1e-6)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("face", ["lightning", "accelerate", "transformers"])
def test_faces_under_torchrun_on_two_hosts(tmp_path: Path, face: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    folder, logs = tmp_path / "run", [tmp_path / f"{name}.log" for name in ("first", "second")]
    with two_hosts() as hosts:
        for host, log in zip(hosts, logs, strict=True):
            endpoint = f"{hosts[0].address}:29400"
            start(host, 2, host is hosts[0], endpoint, [face, str(folder)], log, script=str(FACES))
        for host, log in zip(hosts, logs, strict=True):
            assert host.processes[0].wait(400) == 0, log.read_text()
    assert trained(read_results(folder)) == trained(on_one_host(tmp_path, face, 2))
