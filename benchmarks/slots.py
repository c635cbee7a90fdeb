"""Training in slots (`reproducible.slots`): its cost beside the default order of sums; a run that is often resized.

    torchrun --nproc-per-node 2 -m benchmarks.slots cost --slots 4 --rounds 15
    python -m benchmarks.slots resizes --count 100
    python -m benchmarks.slots grid --steps 50

`cost`: both train in the same processes, in turns, at each stage; bytes are those of a step, of rank 0, as the engines
count them. `resizes`: a run of a small model is told at random steps that a machine goes, saves, and goes on at another
number of ranks and another stage; its weights and states are compared with those of a run that nothing disturbs.
Goodput is the share of time that steps took, starts of processes left out. `grid`: a GPT of 10M parameters with
dropout, clipping, Muon for matrices and AdamW for the rest, at 1 to 4 ranks, stages 0 to 3, in tiers and pipelines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import Block, build, loss_fn
from zero_strategy import ZeroEngine
from zero_strategy.checkpoint.preemption import Preempted
from zero_strategy.comm.local_ranks import run_local_ranks
from zero_strategy.optim.muon import MuonAdamW, split_matrices
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.pipeline.module import PipelineModule


class Contender:
    """One engine with a model and an optimizer of its own."""

    def __init__(self, options: argparse.Namespace, stage: int, slots: int) -> None:
        self.model = build(options.model, 128)
        self.engine = ZeroEngine(self.model, {"stage": stage, "reproducible": slots})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)
        self.in_slots, self.micro = bool(slots), options.slots // dist.get_world_size()

    def step(self, batch: Tensor) -> float:
        """Seconds of one step, with its clip."""
        dist.barrier()
        begun = time.perf_counter()
        for micro in range(self.micro):
            loss = loss_fn(self.model(batch[:, :-1]), batch[:, 1:])
            if self.in_slots:
                loss.backward()
            elif micro == self.micro - 1:
                (loss / self.micro).backward()
            else:
                with self.engine.no_sync():
                    (loss / self.micro).backward()
        self.engine.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun


def cost(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of all stages."""
    found = []
    for stage in options.stages:
        both = {"slots": Contender(options, stage, options.slots), "default": Contender(options, stage, 0)}
        batch = torch.randint(0, 1000, (options.rows, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
        sent = {}
        for name, contender in both.items():
            contender.step(batch)
            before = sum(contender.engine.counters.bytes.values())
            contender.step(batch)
            sent[name] = sum(contender.engine.counters.bytes.values()) - before
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(options.rounds):
            for name, contender in list(both.items())[:: 1 if turn % 2 else -1]:
                seconds[name].append(contender.step(batch))
        ratios = [a / b for a, b in zip(seconds["slots"], seconds["default"], strict=True)]
        for contender in both.values():
            contender.engine.close()
        found.append(
            {
                "stage": stage,
                "bytes ratio": sent["slots"] / sent["default"],
                "step ratio": statistics.median(ratios),
                "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            }
        )
    return found


# ---------------------------------------------------------------------------------------------------------- resizes

SLOTS = 12


def batch_of(step: int, slot: int) -> Tensor:
    """Samples of a slot."""
    return torch.randint(0, 256, (1, 33), generator=torch.Generator().manual_seed(1000 * step + slot))


def train_on(folder: str, steps: int, stage: int, kill: tuple[int, int, int] | None) -> tuple[str, int, float, float]:
    """Train on from the checkpoint that is there; digest, steps taken, seconds of steps, seconds of all."""
    begun, in_steps = time.perf_counter(), 0.0
    torch.set_num_threads(1)
    model = build("transformer-tiny", 32)
    for block in model.blocks:
        cast(Any, block).mlp.append(nn.Dropout(0.1))
    checkpoint = Path(folder) / "checkpoint"
    with ZeroEngine(model, {"stage": stage, "reproducible": {"slots": SLOTS, "seed": 7}}) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine.attach(optimizer)
        if checkpoint.exists():
            engine.load(checkpoint)
        first = engine.steps.taken
        try:
            with engine.save_on_signal(checkpoint):
                while engine.steps.taken < steps:
                    at, since = engine.steps.taken, time.perf_counter()
                    for micro in range(engine.slots.count):
                        if kill == (at - first, micro, engine.mesh.rank):
                            os.kill(os.getpid(), signal.SIGTERM)
                        with engine.micro_batch() as slot:
                            tokens = batch_of(at, slot)
                            loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
                    engine.clip_grad_norm_(0.5)
                    in_steps += time.perf_counter() - since
                    optimizer.step()
                    optimizer.zero_grad()
        except Preempted:
            return "", engine.steps.taken, in_steps, time.perf_counter() - begun
        return digest_of(engine, optimizer), engine.steps.taken, in_steps, time.perf_counter() - begun


def digest_of(engine: ZeroEngine, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of weights and states, by name."""
    found = hashlib.sha256()
    for name, value in sorted(engine.full_state_dict().items()):
        found.update(name.encode() + bytes(value.contiguous().view(torch.uint8).numpy()))
    for name, states in sorted(engine.full_optimizer_state(optimizer).items()):
        for key in sorted(states):
            values = torch.as_tensor(states[key]).reshape(-1).contiguous()
            found.update(f"{name} {key}".encode() + bytes(values.view(torch.uint8).numpy()))
    return found.hexdigest()


def resizes(options: argparse.Namespace) -> dict[str, Any]:
    """The often disturbed run against the undisturbed one."""
    chosen, steps = random.Random(options.seed), options.count + options.count // 2
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as resized:
        expected = run_local_ranks("benchmarks.slots:train_on", (whole, steps, 3, None), 1)[0][0]
        taken, world, used, total, counts = 0, 2, 0.0, 0.0, 0
        while True:
            world = chosen.choice([one for one in (1, 2, 3, 4) if one != world])
            left = options.count - counts
            ahead = chosen.randrange(3) if steps - taken - 3 > left else 0
            kill = (ahead, chosen.randrange(SLOTS // world), chosen.randrange(world)) if left else None
            call = (resized, steps, chosen.randrange(4), kill)
            digest, now, in_steps, seconds = run_local_ranks("benchmarks.slots:train_on", call, world)[0]
            used, total = used + in_steps, total + seconds
            if digest:
                break
            taken, counts = now, counts + 1
    return {
        "resizes": counts,
        "steps": steps,
        "same bits": digest == expected,
        "goodput without starts of processes": used / total,
    }


# ------------------------------------------------------------------------------------------------------------- grid

LENGTH = 16


class Embed(nn.Module):
    """Tokens and places."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Of shape (rows, length, width)."""
        found: Tensor = self.tokens(tokens) + self.places.weight
        return found


def layers_of(width: int = 320, blocks: int = 7) -> list[nn.Module]:
    """Layers of a GPT of 10 million parameters, with dropout."""
    torch.manual_seed(0)
    made: list[nn.Module] = [Embed(2048, width)]
    for _ in range(blocks):
        block = Block(width, 5)
        block.mlp.append(nn.Dropout(0.1))
        made.append(block)
    return [*made, nn.LayerNorm(width), nn.Linear(width, 2048, bias=False)]


def pair_of(step: int, slot: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a slot."""
    chance = torch.Generator().manual_seed(1000 * step + slot)
    tokens = torch.randint(0, 2048, (1, LENGTH + 1), generator=chance)
    return tokens[:, :-1], tokens[:, 1:]


def grid_run(config: dict[str, Any], steps: int, stages: int) -> str:
    """Train with Muon for matrices, AdamW for all else, dropout and clipping; the digest."""
    torch.set_num_threads(1)
    module = PipelineModule(layers_of(), num_stages=stages, loss_fn=loss_fn)
    settings = {**config, "reproducible": {"slots": SLOTS, "seed": 7}}
    made = PipelineEngine(module, settings) if stages > 1 else ZeroEngine(module, settings)
    with made as engine:
        split = split_matrices(module)
        optimizer = MuonAdamW(split, muon={"lr": 0.01}, adamw={"lr": 0.001})
        engine.attach(optimizer)
        for step in range(steps):
            if isinstance(engine, PipelineEngine):
                engine.forward_backward([pair_of(step, slot) for slot in engine.slots.own])
            else:
                for slot in engine.slots.own:
                    inputs, labels = pair_of(step, slot)
                    loss_fn(module(inputs), labels).backward()
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(engine, optimizer)


def cells(folder: str) -> list[tuple[int, int, dict[str, Any]]]:
    """Ranks, pipeline stages and settings of each run; the first ones have each value of each factor."""
    memory: dict[str, Any] = {}
    host = {"offload": {"optimizer": "cpu"}}
    files = {"offload": {"optimizer": "nvme", "nvme_path": [folder], "probe_seconds": 0.0}}
    first: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, {"stage": 3}), (2, 1, {"stage": 0}), (3, 1, {"stage": 1, **host}), (4, 1, {"stage": 2, **files}),
        (2, 2, {"stage": 1}), (4, 2, {"stage": 3}), (2, 1, {"stage": 3, **files}), (3, 1, {"stage": 3}),
        (4, 1, {"stage": 3, **host}), (4, 2, {"stage": 2, **host}),
    ]  # fmt: skip
    rest = [
        (ranks, stages, {"stage": stage, **tier})
        for stages in (1, 2)
        for ranks in ((1, 2, 3, 4) if stages == 1 else (2, 4))
        for stage in range(4)
        for tier in ((memory, host, files) if stage else (memory,))
    ]
    return first + [cell for cell in rest if cell not in first]


def grid(options: argparse.Namespace) -> dict[str, Any]:
    """The digest of every run."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, stages, config in cells(folder)[: options.count]:
            call = (config, options.steps, stages)
            digest = run_local_ranks("benchmarks.slots:grid_run", call, ranks, timeout=3600.0)[0]
            tier = config.get("offload", {}).get("optimizer", "memory")
            name = f"ranks {ranks}, stage {config['stage']}, {tier}, pipeline {stages}"
            found.setdefault(digest, []).append(name)
            print(f"{digest[:16]} {name}", flush=True)
    return {"digests": len(found), "runs": sum(map(len, found.values())), "steps": options.steps}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "resizes", "grid"))
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--model", default="transformer-small")
    parser.add_argument("--rows", type=int, default=2, help="sequences of 128 tokens in a micro-batch")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--count", type=int, default=100, help="of resizes, or of the grid's runs")
    parser.add_argument("--steps", type=int, default=50, help="of the grid's runs")
    parser.add_argument("--seed", type=int, default=0, help="of resizes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.what != "cost":
        print(json.dumps((resizes if options.what == "resizes" else grid)(options), indent=2))
        return
    dist.init_process_group("gloo")
    found = cost(options)
    if dist.get_rank() == 0:
        print(json.dumps({"ranks": dist.get_world_size(), "slots": options.slots, "stages": found}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
