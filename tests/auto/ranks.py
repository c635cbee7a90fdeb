"""Parts of ranks in tests of choices; each function is called on every rank."""

from __future__ import annotations

import hashlib
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpt import GPT, GPTSize, loss_fn
from zero_strategy import ZeroEngine
from zero_strategy.auto.decide import decide
from zero_strategy.auto.example import Example
from zero_strategy.config import load_config

SIZE, LENGTH = GPTSize(width=64, depth=3, heads=2, vocabulary=512), 32


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return loss_fn(model(batch), batch)


EXAMPLE = Example(torch.zeros(2, LENGTH, dtype=torch.long), loss)


def model() -> GPT:
    torch.manual_seed(3)
    return GPT(SIZE, LENGTH)


def limit(nbytes: int) -> None:
    """Let this process take so much more, beside stacks of threads and what an engine takes for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    used = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (
            used + nbytes + (32 << 20) + 12 * resource.getrlimit(resource.RLIMIT_STACK)[0],
            resource.RLIM_INFINITY,
        ),
    )


def with_caps(caps: dict[int, int], settings: dict[str, Any]) -> Any:
    """(settings, figures) of a decision where some ranks may take less than others, or its error."""
    if (most := caps.get(dist.get_rank())) is not None:
        limit(most)
    try:
        found = decide(load_config(settings), model(), world_size=dist.get_world_size(), example=EXAMPLE)
    except ValueError as error:
        return str(error)
    finally:  # the process serves other tests
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {key: setting.value for key, setting in found.config.settings()}, found.figures


def digest_of_training(settings: dict[str, Any], example: bool) -> tuple[str, int, str]:
    """(digest of the weights, stage, origin of the stage) after some steps."""
    rank, module = dist.get_rank(), model()
    engine = ZeroEngine(module, settings, example=EXAMPLE if example else None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for step in range(4):
        batch = torch.randint(0, 512, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    text = b"".join(state[name].numpy().tobytes() for name in sorted(state))
    config = engine.config.config
    return hashlib.sha256(text).hexdigest(), config.stage, config.origin_of("stage")


def tried(settings: dict[str, Any], steps: int) -> tuple[str, dict[str, Any], int]:
    """(digest, what gathers are like at the end, choices that were tried) of a training."""
    rank, module = dist.get_rank(), model()
    engine = ZeroEngine(module, settings, example=EXAMPLE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine.attach(optimizer)
    for step in range(steps):
        batch = torch.randint(0, 512, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        loss(module, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, gathers, config = engine.full_state_dict(), engine.model.unsharder, engine.config.config
    assert gathers is not None
    found = {"prefetch": gathers.prefetch, "reshard_after_forward": gathers.reshard_after_forward}
    assert found == {name: getattr(config, name) for name in found}
    text = b"".join(state[name].numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(text).hexdigest(), found, len((config.chosen or {"tried": []})["tried"])


def error_of(settings: dict[str, Any], example: Example) -> str:
    try:
        decide(load_config(settings), model(), world_size=dist.get_world_size(), example=example)
    except ValueError as error:
        return str(error)
    return "decided"


def broken_example(settings: dict[str, Any]) -> str:
    """The error of a model that keeps tensors of the run without memory; rank 0 alone runs it."""
    kept: list[Tensor] = []

    def keeps(module: nn.Module, batch: Tensor) -> Tensor:
        kept.append(batch)
        return loss(module, batch)

    return error_of(settings, Example(EXAMPLE.batch, keeps))


def without_a_place(settings: dict[str, Any]) -> str:
    """The error where rank 1 alone cannot make the directory of a drive."""
    if dist.get_rank() == 0:
        settings = {**settings, "offload": {"nvme_path": [tempfile.mkdtemp()]}}
    return error_of(settings, EXAMPLE)
