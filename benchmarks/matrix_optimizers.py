"""Step time of Muon over AdamW's, and over the arithmetic of Newton-Schulz; beside Muon under DDP.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.matrix_optimizers --out muon.json

In one run take turns, as A B C C B A: ours with AdamW alone, ours with Muon for the matrices (each on its owner)
and AdamW for the rest, and DDP with the same two of torch, where each rank steps on everything. Newton-Schulz is timed
by itself on this rank's matrices, and on all of them. Seconds are those of the slowest rank. It runs in float32 on all
sides: many CPUs have no fast bfloat16 products, and torch's Muon takes those.

    overhead    Muon's step beyond AdamW's and Newton-Schulz's own time on the owned matrices, over Muon's step
    ddp         DDP's step over ours, both with Muon
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.gpt import build, loss_fn
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import split_matrices

_VOCABULARY = 16384


class Float32Muon(Optimizer):
    """Muon (Jordan et al. 2024) with Nesterov momentum and Newton-Schulz in float32."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                kept.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(kept, group["momentum"])
                x = x.T if x.shape[0] > x.shape[1] else x
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
                p.sub_(x.T if p.shape[0] > p.shape[1] else x, alpha=group["lr"])


def ours(stage: int, muon: bool, length: int, model: str) -> tuple[nn.Module, list[Any], list[torch.Tensor]]:
    """The module, its optimizers, and the matrices that this rank steps on."""
    module = build(model, length)
    engine = ZeroEngine(module, {"stage": stage, "matrix_optimizers": ["Float32Muon"] if muon else []})
    if not muon:
        adamw = AdamW(module.parameters(), lr=1e-4)
        engine.attach(adamw)
        return module, [adamw], []
    split = split_matrices(module)
    optimizers = [Float32Muon(split.matrices, lr=1e-3), AdamW(split.others, lr=1e-4)]
    engine.attach(*optimizers)
    sharded = engine.sharded(optimizers[0])
    pieces = (sharded.piece(parameter) for parameter in split.matrices)
    return module, optimizers, [piece.detach() for piece in pieces if piece is not None]


def ddp(length: int, model: str) -> tuple[nn.Module, list[Any], list[torch.Tensor]]:
    """The same of DDP: all matrices."""
    module = build(model, length)
    split = split_matrices(module)
    wrapped = DistributedDataParallel(module)
    optimizers = [Float32Muon(split.matrices, lr=1e-3), AdamW(split.others, lr=1e-4, fused=True)]
    return wrapped, optimizers, [parameter.detach() for parameter in split.matrices]


def slowest(call: Callable[[], object]) -> float:
    """Seconds of a call on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def newton_schulz(matrices: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Muon's own steps on copies of matrices, with nothing around them."""
    parameters = [nn.Parameter(matrix.clone()) for matrix in matrices]
    optimizer = Float32Muon(parameters, lr=1e-3) if parameters else None
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def step() -> None:
        if optimizer is not None:
            optimizer.step()

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="transformer-46m")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    shape = (options.length, options.model)
    made = {
        "adamw": ours(options.stage, False, *shape),
        "muon": ours(options.stage, True, *shape),
        "ddp": ddp(*shape),
    }
    rows = torch.randint(_VOCABULARY, (options.batch, options.length + 1))

    def step(name: str) -> None:
        module, optimizers, _ = made[name]
        loss_fn(module(rows[:, :-1]), rows[:, 1:]).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    seconds: dict[str, list[float]] = {name: [] for name in made}
    for name in made:
        step(name)
    for _ in range(options.rounds):
        for name in (*made, *reversed(made)):
            seconds[name].append(slowest(lambda name=name: step(name)))  # type: ignore[misc]
    kernels = {}
    for name in ("muon", "ddp"):
        alone = newton_schulz(made[name][2])
        alone()
        kernels[name] = statistics.median(slowest(alone) for _ in range(3))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    found = {
        **{f"{name} seconds": value for name, value in median.items()},
        **{f"{name} Newton-Schulz seconds": value for name, value in kernels.items()},
        "overhead": (median["muon"] - median["adamw"] - kernels["muon"]) / median["muon"],
        "ddp over ours": median["ddp"] / median["muon"],
        "ranks": dist.get_world_size(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
