"""Costs of a running average of the weights (EMA): step time with one over without, and its bytes.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.averages --out averages.json

Ours at every stage, and DDP with torch's `AveragedModel`. Within one run, steps with and without an update of the
average take turns as A B B A; a figure is the median over rounds of B over A, each step at its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.gpt import build, loss_fn
from zero_strategy.engine import ZeroEngine

_VOCABULARY = 16384


def ours(stage: int, dtype: torch.dtype, length: int, model: str) -> tuple[Any, Any, Callable[[], object], int]:
    """The module, its optimizer, an update of the average, and the average's bytes on this rank."""
    engine = ZeroEngine(build(model, length), {"stage": stage}, compute_dtype=None if dtype.itemsize == 4 else dtype)
    optimizer = torch.optim.AdamW(engine.module.parameters(), lr=1e-4)
    engine.attach(optimizer)
    average = engine.average_weights(0.999, every_n_steps=0)
    return engine.module, optimizer, average.update, engine.state_bytes()["average"]


def ddp(dtype: torch.dtype, length: int, model: str) -> tuple[Any, Any, Callable[[], object], int]:
    """The same of DDP and torch's class."""
    module = DistributedDataParallel(build(model, length).to(dtype))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    average = AveragedModel(module.module, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    nbytes = sum(parameter.nbytes for parameter in average.parameters())
    return module, optimizer, lambda: average.update_parameters(module.module), nbytes


def measure(made: tuple[Any, Any, Callable[[], object], int], rounds: int, batch: int, length: int) -> dict[str, Any]:
    """Ratios by round, the median, seconds of a step without."""
    module, optimizer, update, nbytes = made
    rows = torch.randint(_VOCABULARY, (batch, length + 1))

    def step(averaged: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        loss_fn(module(rows[:, :-1]), rows[:, 1:]).backward()
        optimizer.step()
        if averaged:
            update()
        optimizer.zero_grad()
        taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    for averaged in (False, True, True):
        step(averaged)
    ratios, without = [], []
    for _ in range(rounds):
        a, b, c, d = (step(averaged) for averaged in (False, True, True, False))
        ratios.append((b + c) / (a + d))
        without += [a, d]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": statistics.median(without),
        "bytes": nbytes,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="transformer-46m")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--contenders", default="stage 0,stage 1,stage 2,stage 3,ddp", help="of these")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    dtype, shape = getattr(torch, options.dtype), (options.length, options.model)
    found = {}
    for name in options.contenders.split(","):
        made = ddp(dtype, *shape) if name == "ddp" else ours(int(name[-1]), dtype, *shape)
        found[name] = measure(made, options.rounds, options.batch, options.length)
        del made
        if dist.get_rank() == 0:
            line = found[name]
            print(f"{name}: {line['ratio']:.3f} of {line['seconds']:.3f} s, {line['bytes'] / 1e6:.1f} MB", flush=True)
    if dist.get_rank() == 0 and options.out is not None:
        options.out.write_text(json.dumps({"arguments": vars(options) | {"out": str(options.out)}, **found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
