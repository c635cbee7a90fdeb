"""A script as users have it, for launchers on several hosts: `python faces.py FACE FOLDER [WORD ...]`.

Each rank leaves what it trained in `FOLDER/RANK.json`: losses, and where it was.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_strategy

NODES = int(os.environ.get("SLURM_NNODES", os.environ.get("GROUP_WORLD_SIZE", "1")))
LONG = 50
"""Batches of an interrupted training."""


def lightning(folder: Path, *words: str) -> dict[str, Any]:
    """A Trainer that goes on from the checkpoint of a requeued job, if there is one.

    Args:
        folder: For its checkpoints.
        *words: `long`: more batches; `slowly`: and in a time in which it can be interrupted.
    """
    import lightning.pytorch as pl

    from tests.integrations.lightning.stateful import Dropping, Stateful, rows
    from tests.integrations.lightning.trainers import PLAIN

    class Slow(Dropping):
        def train_dataloader(self) -> Any:
            # Here there is a process group, and so each rank's own rows.
            return Stateful(rows(LONG if words else 20), 1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if "slowly" in words:
                # Ranks apart: a signal finds them at different places.
                time.sleep(0.15 * dist.get_rank())
            with open(folder / f"batches-{self.global_rank}", "a") as file:
                file.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {self.global_step}\n")

    devices = int(os.environ.get("SLURM_NTASKS_PER_NODE", os.environ.get("LOCAL_WORLD_SIZE", "1")))
    flags: dict[str, Any] = {**PLAIN, "max_epochs": 1, "enable_checkpointing": False, "default_root_dir": folder}
    strategy = zero_strategy.ZeroStrategy(stage=3, units={"min_numel": 0})
    trainer = pl.Trainer(strategy=strategy, num_nodes=NODES, devices=devices, use_distributed_sampler=False, **flags)
    torch.manual_seed(3)
    random.seed(3)  # the loader draws from it
    module = Slow()
    trainer.fit(module)
    return {"losses": list(module.seen.values()), "first": min(module.seen), "group": trainer.world_size}


def accelerate(folder: Path, *_: str) -> dict[str, Any]:
    """A loop under Accelerate."""
    from tests.integrations.accelerate.training import Job, Run

    accelerator = zero_strategy.ZeroAccelerator(zero_config={"stage": 2, "units": {"min_numel": 0}})
    job, run = Job.of(accelerator), Run()
    job.epoch(run)
    return {"losses": run.losses, "norms": run.norms, "group": accelerator.num_processes}


def transformers(folder: Path, *_: str) -> dict[str, Any]:
    """The Trainer of transformers."""
    from tests.integrations.huggingface.training import history, trainer_of

    trainer = trainer_of(3, "gpt2", folder / "trainer", num_train_epochs=1)
    trainer.train()
    return {"losses": history(trainer), "group": trainer.args.world_size}


def loop(folder: Path, *_: str) -> dict[str, Any]:
    """A loop of its own, which begins when each of two jobs has its ranks together."""
    zero_strategy.init_distributed()
    job, rank = os.environ.get("SLURM_JOB_ID", ""), dist.get_rank()
    (folder / f"up-{job}-{rank}").touch()
    wanted, end = int(os.environ.get("TOGETHER", "0")), time.monotonic() + 60
    while len(list(folder.glob("up-*"))) < wanted:
        assert time.monotonic() < end, "the other job is not there"
        time.sleep(0.05)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    engine = zero_strategy.ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    losses = []
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "group": dist.get_world_size()}


def main(face: str, folder: str, *words: str) -> None:
    """Train.

    Args:
        face: One of the functions above.
        folder: For the result.
        *words: `tasks`: tasks of srun, whose variables Accelerate does not read; else the face's own.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if "tasks" in words:
        zero_strategy.init_distributed()
    result = {"lightning": lightning, "accelerate": accelerate, "transformers": transformers, "loop": loop}[face](
        place, *words
    )
    names = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID")
    result["environment"] = {name: os.environ[name] for name in names if name in os.environ}
    job = f"-{os.environ['SLURM_JOB_ID']}" if face == "loop" and "SLURM_JOB_ID" in os.environ else ""
    (place / f"{dist.get_rank()}{job}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
