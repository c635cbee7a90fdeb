"""A training whose ranks divide experts or layers, of which a process kills itself.

    python -m zero_strategy.cli run --nproc-per-node 2 -m tests.survive.divided_deaths FOLDER CONFIG STEPS DEATHS

With `mesh.expert` in CONFIG ranks divide experts, with `mesh.tensor` the layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.slots import digest_of
from tests.experts.model import batch, make
from tests.survive.deaths import Deaths, main
from zero_strategy.comm.mesh import make_device_mesh
from zero_strategy.engine import ZeroEngine
from zero_strategy.survive import Run


def model_of(config: dict[str, Any]) -> nn.Module:
    """The model of experts, whose dense layers are divided for `mesh.tensor`."""
    model = make()
    if ways := config["mesh"].get("tensor"):
        mesh = make_device_mesh("cpu", tensor=ways)["tp"]
        for block in model.blocks:
            block.dense = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
            parallelize_module(block.dense, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def train(run: Run | None, config: dict[str, Any], steps: int, deaths: Deaths, told: Callable[..., None]) -> str:
    """Train, and return the digest of weights and states."""
    torch.set_num_threads(1)
    if run is not None:
        deaths.rank = run.rank
        config = {**config, "survive": True}
    model = model_of(config)
    engine = ZeroEngine(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    model.head.register_forward_pre_hook(partial(deaths.at, "forward"))
    model.head.register_full_backward_hook(partial(deaths.at, "backward"))
    optimizer.register_step_pre_hook(partial(deaths.at, "before the step"))
    state = {"step": 0} if run is None else run.restore(engine, {"step": 0})
    for step in range(state["step"], steps):
        deaths.step = step
        model(batch(engine.mesh.rank, step)).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        told(step=step, rank=engine.mesh.rank)
        if run is not None:
            run.commit(engine, {"step": step + 1})
    return digest_of(engine, optimizer)


if __name__ == "__main__":
    main(train, *sys.argv[1:])
