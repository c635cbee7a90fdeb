"""The example for clusters: a signal to one rank lets all save and leave, and the next start goes on from there."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import cluster_gpt
from tests.launcher import Launcher

SMALL = ("--batch-size=4", "--block-size=16", "--n-layer=1", "--n-head=2", "--d-model=16", "--log-every=2")


def told_to_go(folder: str) -> tuple[object, list[int]]:
    """Rank 1 gets the signal while training is under way; then all start again for some steps."""
    path = Path(folder) / cluster_gpt.LOSSES

    def tell() -> None:
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if dist.get_rank() == 1:
        threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(SystemExit) as left:
        cluster_gpt.main([f"--folder={folder}", "--steps=100000", *SMALL])
    saved = int((Path(folder) / "latest").read_text().strip().removeprefix("global_step"))
    dist.barrier()
    cluster_gpt.main([f"--folder={folder}", f"--steps={saved + 2}", *SMALL])
    dist.barrier()
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    return left.value.code, [saved + 1 - step for step in steps[-2:]]


def test_one_rank_is_told_to_go(ranks: Launcher, tmp_path: Path) -> None:
    for code, resumed in ranks(2)(told_to_go, str(tmp_path / "run")):
        assert code == 143
        assert resumed == [0, -1], "the two steps behind the one that was saved"
