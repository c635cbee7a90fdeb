"""Bytes of published changes at several learning rates, and the time that publishing adds to a step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.publishing [--part payload|step] [--out published.json]

payload   A Llama of 10M parameters learns the bytes of Python's standard library for 300 steps at 1e-3; then at each
          learning rate it takes three steps unseen, and five that are published in bfloat16. Bytes of files over the
          bytes of all values.
step      A GPT of 46M parameters at 1e-5: steps with and without publishing (compared, coded and flushed to disk before
          the step is over) take turns as A B B A. The median of ratios of neighbours, and a reader's digest check.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpt import build, loss_fn
from benchmarks.ratios import slowest, tell
from zero_strategy import ZeroEngine, subscribe
from zero_strategy.publish.publisher import Publisher

RATES = (1e-6, 1e-5, 1e-4)


def text() -> Tensor:
    """Bytes of modules of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def payloads(folder: str, stage: int, warm: int) -> dict[str, Any]:
    """Shares of the dense bytes by learning rate."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=320, intermediate_size=864, num_hidden_layers=8,
                         num_attention_heads=5, max_position_embeddings=128)  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    engine = ZeroEngine(model, {"stage": stage})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    engine.attach(optimizer)
    data, chance = text(), torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []

    def step() -> None:
        starts = torch.randint(len(data) - 129, (8,), generator=chance).tolist()
        rows = torch.stack([data[start : start + 129] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for _ in range(warm):
        step()
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": [round(losses[0], 3), round(losses[-1], 3)],
    }
    published: Publisher | None = None
    for rate in RATES:
        optimizer.param_groups[0]["lr"] = rate
        for _ in range(3):
            step()
        if published is None:
            published = engine.publish(folder, dtype=torch.bfloat16)
        published.update()
        each = []
        for _ in range(5):
            step()
            each.append(published.update())
        found[f"{rate:g}"] = {
            "changed": statistics.mean(one.changed / one.elements for one in each),
            "payload over dense": statistics.mean(one.nbytes / one.dense for one in each),
        }
    found["reader has the trainer's digests"] = dist.get_rank() > 0 or subscribe(folder).update()
    return found


def timed(folder: str, stage: int, rounds: int) -> dict[str, Any]:
    """Step time with publishing over without."""
    model: nn.Module = build("transformer-46m", 128)
    engine = ZeroEngine(model, {"stage": stage})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine.attach(optimizer)
    published = engine.publish(folder, dtype=torch.bfloat16)
    rows = torch.randint(16384, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(publishes: bool) -> None:
        loss_fn(model(rows[:, :-1]), rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if publishes:
            published.update()

    for publishes in (False, True):
        step(publishes)
    ratios, seconds = [], []
    for _ in range(rounds):
        a, b, c, d = (slowest(partial(step, publishes)) for publishes in (False, True, True, False))
        ratios.append((b + c) / (a + d))
        seconds.append(a)
    return {
        "seconds of a step": statistics.median(seconds),
        "with publishing over without": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "payload over dense": published.last.nbytes / published.last.dense,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("payload", "step"))
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--warm", type=int, default=300, help="steps before the first version")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        folder, found = everyone[0], dict[str, Any]()
        if options.part != "step":
            found["payload"] = payloads(f"{folder}/payload", options.stage, options.warm)
        if options.part != "payload":
            found["step"] = timed(f"{folder}/step", options.stage, options.rounds)
        dist.barrier()
    tell(found, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
