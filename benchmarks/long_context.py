"""Long sequences: how long they can be in given memory, what of it they take, and what dividing them costs in time.

    python -m benchmarks.long_context memory        # longest in --limit bytes: plain, tiles, two ranks, both
    python -m benchmarks.long_context activations   # peak of a step's activations at 1, 2 and 4 ranks, --tokens
    python -m benchmarks.long_context time          # one process, Ulysses, a ring; waiting, and messages by themselves

A GPT of 46M parameters in fp32 without position embeddings, with attention and tiles of `zero_strategy.sequence`, AdamW
at stage 1. Bytes are those of the process beyond what a small model's steps left. Each case has fresh processes.
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
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpt import SIZES, GPTSize
from benchmarks.memory_plan import MMAP_THRESHOLD_BYTES, Meter, give_back_freed
from tests.launcher import RankPool
from zero_strategy.cli.plan_largest import longest_sequences
from zero_strategy.config import load_config, resolve
from zero_strategy.engine import ZeroEngine
from zero_strategy.planning.gpt_shape import gpt_shape
from zero_strategy.planning.memory_plan import MemoryPlan
from zero_strategy.planning.room import Budget
from zero_strategy.runtime.terminal import size, table
from zero_strategy.sequence import SequenceGroup, attention, linear_cross_entropy, tiled
from zero_strategy.sequence.tiling import loss_tile

MODEL = "transformer-46m"
TILE = 2048
CASES = (
    (1, "none", 0), (1, "full", 0), (1, "none", TILE), (1, "full", TILE), (2, "none", 0), (2, "none", TILE),
    (2, "full", TILE),
)  # fmt: skip
"""Ranks of a sequence, activation checkpointing, tokens of a tile."""


class Block(nn.Module):
    def __init__(self, shape: GPTSize) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, group: SequenceGroup, tile: int) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(attention(q, k, v, group, causal=True).transpose(1, 2).flatten(2))
        inner = self.norm2(x)
        found: Tensor = x + (tiled(self.mlp, inner, tile) if tile else self.mlp(inner))
        return found


class LongGPT(nn.Module):
    def __init__(self, shape: GPTSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # else the softmax is of subnormal numbers, which are slow
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, labels: Tensor, group: SequenceGroup, tile: int) -> Tensor:
        """The sum of the losses of tokens here."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, group, tile)
        x, weight = self.norm(x), self.embedding.weight
        if tile:
            chunk = loss_tile(tile, len(weight))
            return linear_cross_entropy(x, weight, labels, reduction="sum", chunk_size=chunk)
        return F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")


def made(name: str, sequence: int, ulysses: int, mode: str = "none") -> tuple[ZeroEngine, Callable[[int, int], float]]:
    """An engine, and what takes a step of so many tokens and such a tile."""
    torch.manual_seed(0)
    model = LongGPT(SIZES[name])
    mesh = {"sequence": sequence, "ulysses": ulysses}
    engine = ZeroEngine(model, {"stage": 1, "mesh": mesh, "activation_checkpointing": mode})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine.attach(optimizer)

    def step(length: int, tile: int) -> float:
        whole = torch.randint(SIZES[name].vocabulary, (1, length + 1), generator=torch.Generator().manual_seed(length))
        tokens, labels = (engine.sequence.split(each) for each in (whole[:, :-1], whole[:, 1:]))
        loss = engine.token_mean(model(tokens, labels, engine.sequence, tile), labels.numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return engine, step


def measured(
    sequence: int, ulysses: int, length: int, tile: int, mode: str = "none", threads: int = 1
) -> tuple[int, int]:
    """Bytes that the process has grown by, at the peak of a step, and between steps."""
    torch.set_num_threads(threads)
    give_back_freed(MMAP_THRESHOLD_BYTES)
    meter = Meter("cpu")
    small, small_step = made("transformer-tiny", sequence, 1)
    small_step(4 * sequence, tile)
    small.close()
    empty = meter.now()
    engine, step = made(MODEL, sequence, ulysses, mode)
    step(16 * sequence, tile)
    held = meter.now() - empty
    meter.reset_peak()
    step(length, tile)
    peak = meter.peak() - empty
    engine.close()
    return peak, held


def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """In fresh processes."""
    pool = RankPool(ranks)
    try:
        return pool.run(function, arguments, timeout=3600)
    finally:
        pool.close()


def shape_plan(sequence: int) -> MemoryPlan:
    shape = SIZES[MODEL]
    model = gpt_shape(shape.width, shape.depth, shape.vocabulary)
    settings = resolve(load_config(stage=1, mesh={"sequence": sequence}), sequence)
    return MemoryPlan(model, settings, ranks_per_host=sequence)


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The plan's longest sequences, measured; the longest by measurement, from two lengths."""
    found = []
    for sequence, mode, tile in CASES if options.case is None else [CASES[options.case]]:
        budget = Budget(device=options.limit, host=options.limit * sequence, disk=None, margin=0.0)
        planned = next(
            entry.tokens
            for entry in longest_sequences(shape_plan(sequence), budget)
            if (entry.mode, entry.sequence, entry.tile_tokens) == (mode, sequence, tile)
        )
        half = planned // 2 // (2 * sequence) * 2 * sequence
        peak, other = (
            max(each[0] for each in run(sequence, measured, sequence, 1, length, tile, mode, options.threads))
            for length in (planned, half)
        )
        longest = int(planned + (options.limit - peak) / ((peak - other) / (planned - half)))
        found.append({"ranks": sequence, "mode": mode, "tile": tile, "planned": planned, "peak": peak})
        found[-1] |= {"longest": longest, "plan_over_peak": options.limit / peak}
        print(found[-1], flush=True)
    plain = found[0]["longest"]
    rows = [
        (e["ranks"], e["mode"], e["tile"] or "-", f"{e['planned']:,}", size(e["peak"]), f"{e['plan_over_peak']:.3f}",
         f"{e['longest']:,}", f"{e['longest'] / plain:.2f}")
        for e in found
    ]  # fmt: skip
    header = ("ranks", "recomputed", "tile", "planned tokens", "peak there", "plan / peak", "longest", "of plain")
    print(table(rows, header, right=range(2, 8)))
    return found


def activations(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for ranks, ulysses in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        each = [
            peak - held
            for peak, held in run(ranks, measured, ranks, ulysses, options.tokens, 0, "none", options.threads)
        ]
        first = found[0]["bytes"] if found else max(each)
        found.append({"ranks": ranks, "ulysses": ulysses, "bytes": max(each), "times_n": max(each) * ranks / first})
        print(found[-1], flush=True)
    rows = [(e["ranks"], e["ulysses"], size(e["bytes"]), f"{e['times_n']:.3f}") for e in found]
    print(table(rows, ("ranks", "of them Ulysses", "peak activations", "x ranks / one"), right=range(4)))
    return found


def timed(sequence: int, ulysses: int, length: int, steps: int) -> tuple[float, float, float, float]:
    """Seconds of a step; of them waiting for messages of attention; what these take with nothing beside them.

    And seconds of a step that waits for each message as soon as it is sent; both kinds take turns.
    """
    torch.set_num_threads(1)
    engine, step = made(MODEL, sequence, ulysses)
    ranks = engine.sequence.ranks
    waits, sizes, at_once = [0.0], list[int](), [False]
    plain = ranks.all_to_all

    def watched(outgoing: list[Tensor], incoming: list[Tensor], *rest: Any) -> Any:
        work = plain(outgoing, incoming, *rest)
        sizes.append(max(part.numel() for part in outgoing))

        class Work:
            def wait(self) -> None:
                begun = time.perf_counter()
                work.wait()
                waits[0] += time.perf_counter() - begun

        if at_once[0]:
            work.wait()
        return Work()

    ranks.all_to_all = watched  # type: ignore[method-assign, assignment]
    step(length, 0)
    times, waited, blocked = [], [], []
    for _ in range(steps):
        at_once[0], begun = True, time.perf_counter()
        step(length, 0)
        blocked.append(time.perf_counter() - begun)
        at_once[0] = False
        waits[0], begun = 0.0, time.perf_counter()
        sizes.clear()
        step(length, 0)
        times.append(time.perf_counter() - begun)
        waited.append(waits[0])
    alone, nothing = 0.0, torch.empty(0)
    for numel in sizes:
        outgoing, incoming = [nothing] * sequence, [nothing] * sequence
        outgoing[(ranks.rank + 1) % sequence] = torch.ones(numel)
        incoming[(ranks.rank - 1) % sequence] = torch.empty(numel)
        ranks.all_gather_small(torch.zeros(1))
        begun = time.perf_counter()
        plain(outgoing, incoming, numel, "alone").wait()
        alone += time.perf_counter() - begun
    engine.close()
    return statistics.median(times), statistics.median(waited), alone, statistics.median(blocked)


def times(options: argparse.Namespace) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, ranks, ulysses in (("one process", 1, 1), ("Ulysses", 2, 2), ("ring", 2, 1)):
        step, waited, alone, blocked = (max(each) for each in zip(*run(
            ranks, timed, ranks, ulysses, options.tokens, options.steps), strict=True))  # fmt: skip
        first = found[0]["step"] if found else step
        found.append({"case": name, "step": step, "of_one": step / first, "waited": waited, "alone": alone})
        found[-1] |= {"blocked": blocked}
        print(found[-1], flush=True)
    rows = [
        (e["case"], f"{e['step']:.2f} s", f"{e['of_one']:.3f}", f"{e['waited'] / e['step']:.1%}",
         f"{e['alone'] / e['step']:.1%}", f"{e['blocked'] / e['step']:.3f}")
        for e in found
    ]  # fmt: skip
    header = ("case", "step", "of one process", "waiting for ranks and messages", "messages by themselves", "in turn")
    print(table(rows, header, right=range(1, 6)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description="Long sequences: memory and time.")
    parser.add_argument("what", choices=("memory", "activations", "time"))
    parser.add_argument("--limit", type=int, default=2**31, help="bytes of a rank (default: 2 GiB)")
    parser.add_argument("--tokens", type=int, default=16384, help="of the sequence (default: %(default)s)")
    parser.add_argument("--case", type=int, help=f"of memory, only this of {len(CASES)}, from 0")
    parser.add_argument("--threads", type=int, default=1, help="of a rank (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args(arguments)
    found = {"memory": memory, "activations": activations, "time": times}[options.what](options)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
