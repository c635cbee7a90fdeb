"""Parts of ranks in tests of guarded first steps; each function is called on every rank."""

from __future__ import annotations

import hashlib
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy import ZeroEngine
from zero_strategy.auto.example import Example

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    """A layer that draws random numbers and changes a buffer, and fails once where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU(), nn.Dropout(0.2))
        self.out = nn.Linear(4 * WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers(x)
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("no room, says the test")
        return x + self.out(inner)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, WIDTH), *[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 1))


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    return (module(batch) - batch.sum(1, keepdim=True)).square().mean()


def digest(engine: ZeroEngine) -> str:
    state = engine.full_state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def batch_of(step: int, rank: int, rows: int = 32) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(settings: dict[str, Any], short: str = "", steps: int = 4, rows: int = 32) -> dict[str, Any]:
    """A training whose settings are chosen, or pinned; what runs short on rank 1, or on the only one.

    Args:
        settings: Of the engine.
        short: "fails": an allocation, in a block; "no room": what is there is less than what is to come;
            "limited": the process may take hardly more than it has.
        steps: How many.
        rows: Of a batch.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module = net()
    example = Example(batch_of(0, 0, rows), loss) if "auto" in settings else None
    engine = ZeroEngine(module, settings, example=example)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)
    guarded = engine.activations.guard is not None
    if rank == ranks - 1 and guarded:
        if short == "fails":
            next(
                each for number, each in enumerate(b for b in module if isinstance(b, Block)) if number == 3
            ).fails = True
        elif short == "no room":
            engine.activations.guard._room = lambda: 1 if engine.steps.taken else None  # type: ignore[union-attr]
        elif short == "limited":
            lines = Path("/proc/self/status").read_text().splitlines()
            used = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
            resource.setrlimit(resource.RLIMIT_DATA, (used + (100 << 20), resource.RLIM_INFINITY))
    torch.manual_seed(5 + rank)
    losses = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for step in range(steps):
                value = loss(module, batch_of(step, rank, rows))
                value.backward()
                losses.append(value.item())
                del value
                optimizer.step()
                optimizer.zero_grad()
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    config = engine.config.config
    return {
        "digest": digest(engine), "losses": losses, "guarded": guarded, "again": len(engine.activations.recomputed),
        "mode": (config.activation_checkpointing.mode, config.origin_of("activation_checkpointing.mode")),
        "measured": dict((config.chosen or {}).get("measured", {})), "stage": config.stage,
        "said": [str(each.message) for each in said if "memory ran short" in str(each.message)],
    }  # fmt: skip
