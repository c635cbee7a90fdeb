"""The same training in plain torch, in one process, for the ranks one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from tests.compat.scripts.old_script import data, net


def train(
    steps: int,
    *,
    world: int,
    micro: int,
    accumulation: int = 1,
    clip: float = 0.0,
    schedule: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """`steps` optimizer steps of AdamW.

    Args:
        steps: Optimizer steps.
        world: Ranks whose samples are taken.
        micro: Samples per rank and micro-batch.
        accumulation: Micro-batches per step.
        clip: Bound on the norm.
        schedule: Makes a scheduler of the optimizer.
        options: AdamW's.

    Returns:
        "losses": a list of micro-batches for each rank; "weights"; "norms" before clipping.
    """
    model, dataset = net(), data()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **options)
    scheduler = None if schedule is None else schedule(optimizer)
    orders = [list(DistributedSampler(dataset, num_replicas=world, rank=rank)) for rank in range(world)]
    losses: list[list[float]] = [[] for _ in range(world)]
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulation):
            first = (step * accumulation + part) * micro
            for rank, order in enumerate(orders):
                x, y = dataset[order[first : first + micro]]
                loss = model(x, y)
                losses[rank].append(loss.item())
                (loss / (accumulation * world)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    weights: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights, "norms": norms}
