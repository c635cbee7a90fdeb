"""A run that is preempted and goes on at other numbers of ranks, again and again: the bits of the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.launcher import Launcher
from tests.reproducible.training import LENGTH, VOCABULARY, build, digest_of
from zero_strategy.checkpoint.preemption import Preempted
from zero_strategy.engine import ZeroEngine

SLOTS, ROWS, BATCH = 12, 60, 2


def batches(engine: ZeroEngine, steps: int) -> Iterator[Tensor]:
    """Of all steps that are left, epoch after epoch."""
    generator = torch.Generator().manual_seed(3)
    dataset = TensorDataset(torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator))
    sampler = engine.slots.sampler(dataset, BATCH, seed=4)
    loader = DataLoader(dataset, BATCH, sampler=sampler)
    while engine.steps.taken < steps:
        epoch, inside = divmod(engine.steps.taken, sampler.steps)
        sampler.set_epoch(epoch)
        sampler.start_at(inside)
        for (tokens,) in loader:
            yield tokens


def run(folder: str, steps: int, stage: int, kill: tuple[int, int, int] | None) -> tuple[str, int]:
    """Train on from the checkpoint that is there.

    `kill`: Before the end of this step, in this micro-batch, this rank is told that its machine goes.
    """
    torch.set_num_threads(1)
    torch.manual_seed(1000 + dist.get_rank())  # what a restarted process has
    model = build()
    checkpoint = Path(folder) / "checkpoint"
    with ZeroEngine(model, {"stage": stage, "reproducible": {"slots": SLOTS, "seed": 7}}) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        engine.attach(optimizer)
        if checkpoint.exists():
            client: Any = engine.load_checkpoint(folder, "checkpoint", lr_scheduler=schedule)
            assert client[0] is not None

        def save() -> None:
            engine.save_checkpoint(folder, "checkpoint", lr_scheduler=schedule)

        taken, micro = engine.steps.taken, 0
        try:
            with engine.save_on_signal(checkpoint, save=save, at_call=True) as boundary:
                for tokens in batches(engine, steps):
                    if kill == (engine.steps.taken - taken, micro, dist.get_rank()):
                        os.kill(os.getpid(), signal.SIGTERM)
                    with engine.micro_batch():
                        model(tokens).backward()
                    micro += 1
                    if engine.slots.complete:
                        micro = 0
                        engine.clip_grad_norm_(0.5)
                        optimizer.step()
                        schedule.step()
                        optimizer.zero_grad()
                        boundary()
                        if engine.steps.taken == steps:
                            break
        except Preempted:
            return "", engine.steps.taken
        return digest_of(engine), engine.steps.taken


def test_a_run_that_is_resized_again_and_again_has_the_bits_of_an_undisturbed_one(
    ranks: Launcher, tmp_path: Path
) -> None:
    """A hundred times: `benchmarks.resizes`."""
    resizes, steps = 5, 7
    (tmp_path / "whole").mkdir()
    expected, _ = ranks(1)(run, str(tmp_path / "whole"), steps, 3, None)[0]
    chosen = random.Random(resizes)
    folder = tmp_path / "resized"
    folder.mkdir()
    taken, count, world = 0, 0, 2
    while True:
        world = chosen.choice([one for one in (1, 2, 3, 4) if one != world])
        stage, ahead = chosen.randrange(4), chosen.randrange(2)
        left = resizes - count
        kill = (ahead, chosen.randrange(SLOTS // world), chosen.randrange(world)) if left else None
        if kill is not None and steps - taken - 2 < left:
            kill = (0, *kill[1:])
        digest, now = ranks(world)(run, str(folder), steps, stage, kill)[0]
        if digest:
            break
        assert now == taken + (kill or (0,))[0] + 1
        taken, count = now, count + 1
    assert count == resizes and digest == expected
