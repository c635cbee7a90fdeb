"""A training of some steps that saves, publishes and loads; prints a digest of its weights, or the error's text."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import warnings

import torch
from torch import nn

from zero_strategy import ZeroEngine, subscribe


def run(folder: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    engine = ZeroEngine(model, {"stage": 3, "units": {"min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.attach(optimizer)
    published = engine.publish(f"{folder}/published")
    for step in range(4):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        published.update()
        if step == 1:
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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if leave := os.environ.get("WORKING_DIRECTORY_THAT_GOES"):  # after the imports: torch's libraries need one
        importlib.import_module("torch._dynamo")  # which the first optimizer loads
        os.makedirs(leave)
        os.chdir(leave)
        os.rmdir(leave)
    try:
        print("digest", run(sys.argv[1]))
    except Exception as error:
        print("error", type(error).__name__, str(error).replace("\n", " "))
