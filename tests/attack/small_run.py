"""A training of some steps that saves, publishes and loads; prints a digest of its weights, or the error's text.

With `RANK` and `WORLD_SIZE` it is one rank of several.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy import ZeroEngine, subscribe


def run(folder: str) -> str:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    width = 64 if world == 1 else 256  # so that slices of several ranks are large enough for memory that they share
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    published = engine.publish(f"{folder}/published")
    for step in range(4):
        model(torch.randn(4, width, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        published.update()
        if step in (1, 2):  # the second one takes the first one's place
            engine.save(f"{folder}/saved", asynchronous=True)
    engine.saver.finish()
    reader = subscribe(f"{folder}/published")
    reader.update()
    state = engine.full_state_dict()
    assert all(torch.equal(tensor, reader.tensors[name]) for name, tensor in state.items())
    engine.load(f"{folder}/saved")
    digest = hashlib.sha256()
    for tensors in (state, engine.full_state_dict()):
        for name in sorted(tensors):
            digest.update(tensors[name].numpy().tobytes())
    engine.close()
    return digest.hexdigest()


def said(folder: str) -> str:
    """The line that a run prints."""
    try:
        return f"digest {run(folder)}"
    except Exception as error:
        text = str(error).replace("\n", " ")
        return f"error {type(error).__name__} {text}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(said(sys.argv[1]))
