"""Step time of Muon over AdamW's, and over the arithmetic of Newton-Schulz; beside Muon under DDP.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.matrix_optimizers --out muon.json

In one run take turns, as A B C C B A: ours with AdamW alone, ours with `MuonAdamW`, and DDP with the same class, where
each rank steps on everything. Newton-Schulz is timed by itself on the matrices that a rank owns, and on all of them.
Seconds are those of the slowest rank. It runs in float32 on all sides: many CPUs have no fast bfloat16 products, and
torch's Muon takes those.

    overhead    Muon's step beyond AdamW's and Newton-Schulz's own time on the owned matrices, over Muon's step
    ddp         DDP's step over ours, both with Muon
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.gpt import build, loss_fn
from benchmarks.ratios import slowest, tell
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import MuonAdamW, split_matrices
from zero_strategy.optim.muon import muon_groups, newton_schulz
from zero_strategy.optim.orthogonaliser import Matrix, orthogonalisers

_VOCABULARY = 16384


def muon_and_adamw(module: nn.Module) -> MuonAdamW:
    return MuonAdamW(split_matrices(module), muon={"lr": 1e-3}, adamw={"lr": 1e-4}, ns_dtype="float32")


def ours(stage: int, muon: bool, length: int, model: str) -> tuple[nn.Module, Optimizer, ZeroEngine]:
    """The module, its optimizer and its engine."""
    module = build(model, length)
    engine = ZeroEngine(module, {"stage": stage})
    optimizer = muon_and_adamw(module) if muon else AdamW(module.parameters(), lr=1e-4)
    engine.attach(optimizer)
    return module, optimizer, engine


def owned_by(engine: ZeroEngine, optimizer: Optimizer) -> list[Matrix]:
    """The matrices that this rank orthogonalises, of those that have gradients now."""
    orthogonaliser, groups = orthogonalisers(engine.model)[0], muon_groups(optimizer)
    return orthogonaliser.owned(orthogonaliser.matrices(groups, [group["params"] for group in groups]))


class DeepSpeedMuon:
    """DeepSpeed's engine with its Muon, whose Newton-Schulz is given float32, too; it zeroes gradients itself."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "TORCH_COMPILE_DISABLE": "1"}
        import deepspeed
        from deepspeed.runtime.zero.muon import original_muon

        original_muon.ns_compute_dtype = lambda ns_method="gram": torch.float32
        muon = {"lr": 1e-3, "momentum": 0.95, "ns_method": "standard"}
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=list(module.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "Muon", "params": muon},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
            dist_init_required=False,
        )

    def step(self, rows: torch.Tensor) -> None:
        self.engine.backward(loss_fn(self.engine(rows[:, :-1]), rows[:, 1:]))
        self.engine.step()


def alone(shapes: Iterable[Sequence[int]], group: dict[str, Any]) -> Callable[[], None]:
    """Newton-Schulz on matrices of these shapes, with nothing around it."""
    matrices = [torch.randn(*shape) for shape in shapes]

    def run() -> None:
        for matrix in matrices:
            newton_schulz(matrix.clone(), group)

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="transformer-46m")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--deepspeed", action="store_true", help="beside DeepSpeed's Muon (from pip)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    shape = (options.length, options.model)
    module, muon, engine = ours(options.stage, True, *shape)
    plain = build(options.model, options.length)
    made: dict[str, tuple[nn.Module, Optimizer]] = {
        "adamw": ours(options.stage, False, *shape)[:2],
        "muon": (module, muon),
        "ddp": (DistributedDataParallel(plain), muon_and_adamw(plain)),
    }
    deepspeed = DeepSpeedMuon(build(options.model, options.length), options.stage) if options.deepspeed else None
    names = [*made, *(["deepspeed"] if deepspeed is not None else [])]
    group: dict[str, Any] = {}
    shapes: dict[str, list[tuple[int, ...]]] = {}
    rows = torch.randint(_VOCABULARY, (options.batch, options.length + 1))

    def step(name: str) -> None:
        if deepspeed is not None and name == "deepspeed":
            deepspeed.step(rows)
            return
        module, optimizer = made[name]
        loss_fn(module(rows[:, :-1]), rows[:, 1:]).backward()
        optimizer.step()
        if name == "muon" and not shapes:
            group.update(muon_groups(muon)[0])
            shapes["muon"] = [matrix.shape for matrix in owned_by(engine, muon)]
            shapes["ddp"] = [tuple(parameter.shape) for parameter in split_matrices(plain).matrices]
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        step(name)
    for _ in range(options.rounds):
        for name in (*names, *reversed(names)):
            seconds[name].append(slowest(lambda name=name: step(name)))  # type: ignore[misc]
    kernels = {}
    for name in ("muon", "ddp"):
        arithmetic = alone(shapes[name], group)
        arithmetic()
        kernels[name] = statistics.median(slowest(arithmetic) for _ in range(3))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    found = {
        **{f"{name} seconds": value for name, value in median.items()},
        **{f"{name} Newton-Schulz seconds": value for name, value in kernels.items()},
        "overhead": (median["muon"] - median["adamw"] - kernels["muon"]) / median["muon"],
        "ddp over ours": median["ddp"] / median["muon"],
        "ranks": dist.get_world_size(),
    }
    tell(found, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
