"""Costs of the engine on the host, per unit: models so small that their arithmetic is nothing, of growing depth.

    python -m benchmarks.host_time --depths 12,48,144 --out host_time.json
    python -m benchmarks.host_time --depths 48 --ranks 8 --stages 1,2,3 --fsdp2

One process, blocks of twelve parameters, each a unit; microseconds of the calling thread's CPU time per unit, for
each part of a step, ours at every stage and plain torch (AdamW(fused=True), clip_grad_norm_), who take turns from
step to step. Of each part the least of all steps, which other work on the machine disturbs least; "all" is the sum of
these. On a GPU this is what has to be hidden behind its work. It is flat where nothing looks at all units for each of
them. Nothing is sent: collectives have their own figures. With `--ranks` the process is one of a pretended world:
collectives are called, of torch's backend "fake", and `--fsdp2` has torch's `fully_shard` beside it, on the same
blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpt import GPT, GPTSize, loss_fn
from tests.device.fake_ranks import silent_world
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

PARTS = ("forward", "backward", "clipping", "step", "zero_grad")
PLAIN, FSDP2 = "plain torch", "fsdp2"
_LENGTH, _VOCABULARY = 16, 64


def measure(
    contenders: Sequence[str], depth: int, ranks: int, steps: int, warmup: int = 4
) -> dict[str, dict[str, float]]:
    """The least of each contender's parts, in microseconds per unit; they take turns from step to step.

    Args:
        contenders: Stages of ours ("stage 3"), `PLAIN`, `FSDP2`.
        depth: Number of blocks.
        ranks: Of the pretended world; 1: no process group.
        steps: That count.
        warmup: Steps before.
    """
    found: dict[str, dict[str, float]] = {one: dict.fromkeys(PARTS, math.inf) for one in contenders}
    rows = torch.randint(_VOCABULARY, (2, _LENGTH + 1))
    with nullcontext() if ranks == 1 else silent_world(1, ranks):
        made = {contender: _make(contender, depth) for contender in contenders}
        for step in range(warmup + steps):
            for contender, (model, optimizer, clip) in made.items():
                at = [time.thread_time()]
                loss = loss_fn(model(rows[:, :-1]), rows[:, 1:])
                for what in (lambda: None, loss.backward, clip, optimizer.step, optimizer.zero_grad):
                    what()
                    at.append(time.thread_time())
                if step >= warmup:
                    least = found[contender]
                    for part, begin, end in zip(PARTS, at, at[1:]):
                        least[part] = min(least[part], 1e6 * (end - begin) / depth)
    return found


def _make(contender: str, depth: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Any]]:
    torch.manual_seed(0)
    model = GPT(GPTSize(width=32, depth=depth, heads=2, vocabulary=_VOCABULARY), _LENGTH)
    if contender == PLAIN:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return model, optimizer, partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    if contender == FSDP2:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return model, optimizer, partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    engine = ZeroEngine(model, load_config(stage=int(contender.removeprefix("stage ")), units={"min_numel": 0}))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine.attach(optimizer)
    return model, optimizer, partial(engine.clip_grad_norm_, 1.0)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print a table, write JSON."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__, formatter_class=raw)
    parser.add_argument("--depths", default="12,48,144", help="numbers of units (default: %(default)s)")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--ranks", type=int, default=1, help="of the pretended world; 1: no process group")
    parser.add_argument("--fsdp2", action="store_true", help="measure torch's fully_shard as well; needs --ranks")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.fsdp2 and options.ranks == 1:
        parser.error("--fsdp2 needs --ranks of at least 2")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'us per unit':<12}{'units':>6}" + "".join(f"{part:>11}" for part in (*PARTS, "all")))
    ours = [f"stage {stage}" for stage in options.stages.split(",")]
    contenders = [PLAIN, *ours, *([FSDP2] if options.fsdp2 else [])]
    for depth in map(int, options.depths.split(",")):
        for contender, parts in measure(contenders, depth, options.ranks, options.steps).items():
            ranks = 1 if contender == PLAIN else options.ranks
            rows.append({"contender": contender, "units": depth, "ranks": ranks, **parts})
            every = sum(parts.values())
            print(f"{contender:<12}{depth:>6}" + "".join(f"{us:>11.0f}" for us in (*parts.values(), every)), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return rows


if __name__ == "__main__":
    main()
