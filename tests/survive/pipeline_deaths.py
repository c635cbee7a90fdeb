"""The training of `deaths` as a pipeline, of which a process kills itself.

    python -m zero_strategy.cli run --nproc-per-node 4 -m tests.survive.pipeline_deaths FOLDER CONFIG STEPS DEATHS

With `reproducible` in CONFIG samples go by slots, else by the copy and its micro-batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.slots import digest_of
from tests.survive.deaths import Deaths, main, sample
from zero_strategy.pipeline.building import LayerSpec
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.survive import Run

SEED = 7


def layers() -> list[LayerSpec]:
    """Units with dropout, of other sizes on each stage."""
    sizes = [16, 24, 32, 8, 16]
    return [
        LayerSpec(nn.Sequential, nn.Linear(one, other), nn.Tanh(), nn.Dropout(0.1)) for one, other in pairwise(sizes)
    ]


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def train(run: Run | None, config: dict[str, Any], steps: int, deaths: Deaths, told: Callable[..., None]) -> str:
    """Train, and return the digest of weights and states of all stages."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    if run is not None:
        deaths.rank = run.rank
        config = {**config, "survive": {"enabled": True, **config.get("survive", {})}}
    stages = config["pipeline"]["stages"]
    deaths.at("begin")
    model = PipelineModule(layers(), stages, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    deaths.at("made")
    engine = PipelineEngine(model, config)
    engine.attach(optimizer)
    first = next(child for child in model.children() if isinstance(child, nn.Sequential))
    first.register_forward_pre_hook(partial(deaths.at, "forward"))
    first.register_full_backward_hook(partial(deaths.at, "backward"))
    optimizer.register_step_pre_hook(partial(deaths.at, "before the step"))
    optimizer.register_step_post_hook(partial(deaths.at, "after the step"))
    state = {"step": 0} if run is None else run.restore(engine, {"step": 0})
    grid = model.mpu()
    torch.manual_seed(SEED + grid.global_rank) if state["step"] == 0 else None
    for step in range(state["step"], steps):
        deaths.step = step
        micro = range(engine.micro_batches)
        own = engine.slots.own if engine.slots.slots else [grid.pipeline_id() * len(micro) + each for each in micro]
        loss = engine.forward_backward((sample(step, slot), sample(step, slot + 50)) for slot in own)
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        told(step=step, rank=grid.global_rank, ranks=grid.world_size, loss=float(loss))
        if run is not None:
            run.commit(engine, {"step": step + 1})
    return digest_of(engine, optimizer)


if __name__ == "__main__":
    main(train, *sys.argv[1:])
