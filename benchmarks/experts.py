"""Divided experts against plain stage 3 on the same mixture of experts: bytes sent and step time, in one run.

    torchrun --nproc-per-node 2 -m benchmarks.experts --rounds 15

Both train in the same processes, in turns, so that what else the machine does meets both. Bytes are those of a step, of
rank 0, as the engines count them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy import ZeroEngine


class Experts(nn.Module):
    """Gated experts, stacked."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)
        self.count = experts

    def expert_parameters(self) -> list[str]:
        """See `DivisibleExperts`."""
        return ["gate_up", "down"]

    def number_of_experts(self) -> int:
        """See `DivisibleExperts`."""
        return len(self.gate_up)

    def hold_experts(self, count: int) -> None:
        """See `DivisibleExperts`."""
        self.count = count

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sums over the experts of each token."""
        order = chosen.reshape(-1).argsort(stable=True)
        sizes = chosen.reshape(-1).bincount(minlength=self.count).tolist()
        rows = tokens[order // chosen.shape[1]]
        results = []
        for number, part in enumerate(rows.split(sizes)):
            gate, up = (part @ self.gate_up[number]).chunk(2, dim=-1)
            results.append((nn.functional.silu(gate) * up) @ self.down[number])
        found = torch.cat(results) * weights.reshape(-1)[order, None]
        return torch.zeros_like(tokens).index_add(0, order // chosen.shape[1], found)


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.router = nn.Linear(options.width, options.experts, bias=False)
        self.experts, self.choices = Experts(options.experts, options.width, options.hidden), options.choices

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        flat = self.norm(x).reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(dim=-1).topk(self.choices, dim=-1)
        mixed: Tensor = self.experts(flat, chosen, weights)
        return x + mixed.view(x.shape)


class Contender:
    """One engine with a model and an optimizer of its own."""

    def __init__(self, options: argparse.Namespace, mesh: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(options) for _ in range(options.layers)))
        self.engine = ZeroEngine(self.model, {"stage": 3, "mesh": mesh})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.engine.attach(self.optimizer)

    def step(self, batch: Tensor) -> tuple[float, float]:
        """Seconds and loss of one step."""
        dist.barrier()
        begun = time.perf_counter()
        loss = (self.model(batch) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begun, float(loss.detach())


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of both."""
    world, rank = dist.get_world_size(), dist.get_rank()
    both = {"experts": Contender(options, {"expert": world}), "plain": Contender(options, {})}
    chance = torch.Generator().manual_seed(rank)
    batch = torch.randn(1, options.tokens, options.width, generator=chance)
    sent, losses = dict[str, int](), dict[str, float]()
    for name, contender in both.items():
        contender.step(batch)
        before = sum(contender.engine.counters.bytes.values())
        losses[name] = contender.step(batch)[1]
        sent[name] = sum(contender.engine.counters.bytes.values()) - before
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(options.rounds):
        for name, contender in both.items():
            seconds[name].append(contender.step(batch)[0])
    ratios = [b / a for a, b in zip(seconds["experts"], seconds["plain"], strict=True)]
    for contender in both.values():
        contender.engine.close()
    return {
        "ranks": world,
        "bytes": sent,
        "bytes ratio": sent["experts"] / sent["plain"],
        "median seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "times faster": statistics.median(ratios),
        "losses differ by": abs(losses["experts"] - losses["plain"]) / abs(losses["plain"]),
    }


def main() -> None:
    """Print the figures as JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--choices", type=int, default=4, help="experts of a token")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512, help="of an expert")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = compare(options)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
