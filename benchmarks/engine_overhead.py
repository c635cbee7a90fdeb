"""Overhead of the engine in a step: the step, against its parts by themselves.

The parts, on the same ranks and one after the other, with nothing of the engine between them:

    compute      forward and backward of the plain model, without any wrapper
    transport    as many collectives of as many bytes as the engine's counters tell of a step, on plain buffers, all
                 begun at once and then waited for, by the engine's own transport; control messages are its own cost
    gloo         the same by torch's own collectives
    kernels      the norm of the owned gradients and AdamW on the owned elements, bucket by bucket

Engine (A) and parts (B) take turns as A B B A; the overhead is 1 - parts / step, once with the engine's transport (the
stricter one: what a faster transport saves is no merit of the engine's) and once with gloo. It is negative where the
engine hides more of the transport behind the computation than it adds.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import Contender, Workload, make
from benchmarks.gpt import build, loss_fn
from benchmarks.ratios import TURNS, bootstrap, round_ratio, slowest

_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_HYPER = [1e-4, 0.9, 0.999, 1e-8, 0.1, 10, 1.0]


@dataclass
class PartTimes:
    """Seconds of the slowest rank.

    Attributes:
        rounds: By round, block (A B B A) and step.
        parts: Of each part, one per step.
    """

    rounds: list[list[list[float]]] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


class Parts:
    """The same work as an engine's step, without the engine."""

    def __init__(self, contender: Contender, workload: Workload, transport: str) -> None:
        self.workload, self.engine = workload, contender.engine
        self.model: nn.Module = build(workload.model, workload.length).to(workload.dtype)
        self.number = 0
        self.engine.counters.reset()
        contender.step(workload)
        self.transfers = self._transfers()
        self.totals = [torch.zeros_like(flat.chunk(dist.get_world_size())[0]) for *_, flat in self.transfers]
        self.shares = [self._share(bucket) for bucket in self.engine.model.buckets if bucket.trainable]
        self.named: dict[str, Callable[[], None]] = {
            "compute": self.compute,
            transport: {"transport": self.transport, "gloo": self.gloo}[transport],
            "kernels": self.kernels,
        }

    def _transfers(self) -> list[tuple[str, int, Tensor]]:
        """Kind, how many, and a buffer of the whole for each; zeros stay zeros when they are summed."""
        counters, world = self.engine.counters, dist.get_world_size()
        found = []
        for kind in ("reduce_scatter", "all_gather"):
            calls, elements = counters.calls[kind], counters.elements[kind]
            if not elements:
                continue
            dtype = {2: torch.bfloat16, 4: torch.float32}[counters.bytes[kind] // elements]
            found.append((kind, calls, torch.zeros(elements // calls // (world - 1) * world, dtype=dtype)))
        return found

    def _share(self, bucket: Any) -> dict[str, list[Tensor]]:
        numel = bucket.owned.stop - bucket.owned.start
        weights = torch.float32 if bucket.has_master else bucket.dtype
        gradients = self.engine.model.gradient_of(bucket).dtype
        return {
            "params": [torch.ones(numel, dtype=weights)],
            "grads": [torch.full((numel,), 1e-3, dtype=gradients)],
            "exp_avgs": [torch.zeros(numel, dtype=weights)],
            "exp_avg_sqs": [torch.zeros(numel, dtype=weights)],
            "copies": [torch.ones(numel, dtype=bucket.dtype)] if bucket.has_master else [],
        }

    def compute(self) -> None:
        batches = self.workload.data(self.number)
        for inputs, targets in batches:
            loss = loss_fn(self.model(inputs).float(), targets) / len(batches)
            loss.backward()
            loss.item()
        self.model.zero_grad()
        self.number += 1

    def transport(self) -> None:
        mesh, begun = self.engine.mesh, []
        for kind, calls, flat in self.transfers:
            start = mesh.reduce.reduce_scatter if kind == "reduce_scatter" else mesh.gather.all_gather
            begun += [start(flat) for _ in range(calls)]
        for pending in begun:
            pending.wait()

    def gloo(self) -> None:
        begun = []
        for (kind, calls, flat), total in zip(self.transfers, self.totals, strict=True):
            own = flat.chunk(dist.get_world_size())[dist.get_rank()]
            for _ in range(calls):
                if kind == "reduce_scatter":
                    begun.append(_REDUCE_SCATTER(total, flat, async_op=True))
                else:
                    begun.append(_ALL_GATHER(flat, own, async_op=True))
        for work in begun:
            work.wait()

    def kernels(self) -> None:
        from zero_strategy import ops

        if self.workload.clip_norm is not None:
            sums, _ = ops.grad_stats([one["grads"][0] for one in self.shares])
            float(sums.sum())
        hyper = torch.tensor([_HYPER], dtype=torch.float64)
        for one in self.shares:
            ops.adam_(
                one["params"], one["grads"], one["exp_avgs"], one["exp_avg_sqs"], hyper, decoupled=True,
                copies=one["copies"],
            )  # fmt: skip


def measure(
    stage: int, workload: Workload, rounds: int, block_steps: int, warmup: int, threads: int, transport: str
) -> PartTimes:
    """On every rank; the times are the same on all. Each transport in processes of its own: gloo changes the heap."""
    torch.set_num_threads(threads)
    contender = make(f"zero{stage}", workload)
    for _ in range(2):
        contender.step(workload)
    parts = Parts(contender, workload, transport)
    times = PartTimes(parts={name: [] for name in parts.named})
    for _ in range(warmup):
        _parts_block(parts, 1)
        _step_block(contender, workload, 1)
    for _ in range(rounds):
        blocks = []
        for turn in TURNS:
            if turn == "A":
                blocks.append(_step_block(contender, workload, block_steps))
                continue
            found = _parts_block(parts, block_steps)
            for name, seconds in found.items():
                times.parts[name] += seconds
            blocks.append([sum(each) for each in zip(*found.values(), strict=True)])
        times.rounds.append(blocks)
    return times


def _step_block(contender: Contender, workload: Workload, steps: int) -> list[float]:
    return [_slowest(lambda: contender.step(workload)) for _ in range(steps)]


def _parts_block(parts: Parts, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in parts.named}
    for _ in range(steps):
        for name, part in parts.named.items():
            found[name].append(_slowest(part))
    return found


def _slowest(action: Callable[[], Any]) -> float:
    """Seconds of the slowest rank, without garbage of what ran before."""
    gc.collect()
    return slowest(action)


def summarize(stage: int, times: PartTimes, beside_gloo: PartTimes) -> dict[str, Any]:
    """The overhead as a fraction of the step, and the seconds of everything."""
    shares, gloo = ([1 / round_ratio(blocks) for blocks in each.rounds] for each in (times, beside_gloo))
    steps = [second for blocks in times.rounds for block in (blocks[0], blocks[3]) for second in block]
    return {
        "stage": stage,
        "overhead": asdict(bootstrap([1 - share for share in shares])),
        "overhead_beside_gloo": asdict(bootstrap([1 - share for share in gloo])),
        "parts_over_step": asdict(bootstrap(shares)),
        "step": statistics.median(steps),
        "parts": {name: statistics.median(seconds) for name, seconds in times.parts.items()},
        "gloo": statistics.median(beside_gloo.parts["gloo"]),
        "rounds": times.rounds,
        "rounds_beside_gloo": beside_gloo.rounds,
    }


def show(found: dict[str, Any]) -> str:
    ratio, gloo = found["overhead"], found["overhead_beside_gloo"]
    parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found["parts"].items())
    return (
        f"zero{found['stage']}: engine overhead {100 * ratio['median']:.1f} % of a step "
        f"({100 * ratio['low']:.1f} - {100 * ratio['high']:.1f}), with gloo's collectives {100 * gloo['median']:.1f} % "
        f"({100 * gloo['low']:.1f} - {100 * gloo['high']:.1f}); step {found['step']:.3f} s, {parts}"
    )
