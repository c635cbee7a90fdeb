"""A script of Accelerate whose training goes on when a process dies: `python -m ... FOLDER PLACE STEP`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from tests.integrations.surviving import die
from tests.reproducible.samples import Masked, Samples, collate
from tests.reproducible.training import ROWS, build, digest_of
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.survive import Run, survive

SLOTS, EPOCHS, STEPS = 12, 2, 3
CONFIG: dict[str, Any] = {"stage": 3, "reproducible": {"slots": SLOTS, "seed": 11}}


def train(run: Run | None, victim: int = -1, last: int = -1) -> dict[str, Any]:
    """Train; the process of place `victim` dies in its step `last`.

    Returns:
        The digest, losses and learning rates, and how often the function was called.
    """
    torch.set_num_threads(1)
    accelerator = ZeroAccelerator(zero_config={**CONFIG, "survive": run is not None})
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = Masked(Subset(Samples(SLOTS, STEPS), range(3, SLOTS * STEPS * ROWS)))
    loader: Any = DataLoader(data, batch_size=ROWS, shuffle=True, collate_fn=collate)
    scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    engine = accelerator.engine(model)
    state: dict[str, Any] = {"step": 0, "losses": [], "rates": []}
    if run is not None:
        state = accelerator.restore(run, state)
    while state["step"] < EPOCHS * STEPS:
        epoch, done = divmod(state["step"], STEPS)
        loader.set_epoch(epoch)
        own: list[torch.Tensor] = []
        for tokens in accelerator.skip_first_batches(loader, done * accelerator.gradient_accumulation_steps):
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                own.append(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    if run is not None and run.world.me.place == victim and state["step"] == last:
                        die()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state["step"] += 1
                state["losses"].append(float(engine.slots.mean(own)))
                state["rates"].append(scheduler.get_last_lr()[0])
                own = []
                if run is not None:
                    accelerator.commit(run, state)
    beginnings = 1 if run is None else run.beginnings
    ranks = accelerator.num_processes
    return {**state, "digest": digest_of(engine), "beginnings": beginnings, "ranks": ranks}


if __name__ == "__main__":
    found = survive(train, int(sys.argv[2]), int(sys.argv[3]))
    Path(sys.argv[1], f"{os.environ['ZERO_STRATEGY_PLACE']}.json").write_text(json.dumps(found))
