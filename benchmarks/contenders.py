"""Contenders of the step benchmark: our engine at each stage, PyTorch's own wrappers, and DeepSpeed.

Each is set up as its own documentation recommends, with the same model, optimizer, data and clipping:

- ``ddp``: DistributedDataParallel with ``gradient_as_bucket_view=True`` and ``no_sync`` while accumulating.
- ``zero_redundancy``: the same with torch's ZeroRedundancyOptimizer, which divides the optimizer's state.
- ``fsdp2``: ``fully_shard`` on every block and on the root, parameters released after forward, and gradients
  reduced after every micro-batch, so that no rank holds more than its slice of them.
- ``fsdp2-kept``: parameters stay whole from the first forward of a step to its last backward.
- ``deepspeed1`` ... ``deepspeed3``: see `deepspeed_contender`.
- ``zero0`` ... ``zero3``: ZeroEngine with the defaults of its config but for precision.
- ``zero3-kept``: the same with ``reshard_after_backward: false``.

In bf16 everybody computes and gathers in bf16 and reduces in ``Workload.reduce``; DeepSpeed, FSDP2 and ours keep fp32
master weights and fp32 state of the optimizer. DDP and ZeroRedundancyOptimizer have neither.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpt import GPT, SIZES, build, loss_fn

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"foreach": False},
    "adamw-foreach": {"foreach": True},
    "adamw-fused": {"fused": True},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REDUCE = ("parameter", "float32")
PEERS = ("ddp", "zero_redundancy", "fsdp2", "deepspeed")
_PACKAGES = {"deepspeed": "deepspeed"}
"""What a peer needs beside torch: its module, and the name that pip knows it by."""
REGIMES: dict[str, dict[str, Any]] = {
    "communication": {"model": "transformer-46m", "batch": 1, "length": 32},
    "balanced": {"model": "transformer-34m", "batch": 2, "length": 64},
    "compute": {"model": "transformer-34m", "batch": 4, "length": 128},
}
"""What a step is bound by, on a CPU with two cores."""


@dataclass(frozen=True)
class Workload:
    """Batches that every contender trains on."""

    model: str = "transformer-small"
    batch: int = 4
    """Rows per rank and micro-batch."""
    length: int = 128
    accumulation: int = 1
    clip_norm: float | None = 1.0
    optimizer: str = "adamw-fused"
    precision: str = "fp32"
    reduce: str = "parameter"
    """What gradients are summed in across ranks: the parameters' dtype, or float32."""
    master: bool = True
    """Whether ours keeps fp32 master weights in bf16; the others do what they do."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    def data(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a step, the same for all contenders."""
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        shape = (self.accumulation, self.batch, self.length + 1)
        rows = torch.randint(SIZES[self.model].vocabulary, shape, generator=generator)
        return [(micro[:, :-1], micro[:, 1:]) for micro in rows]


@dataclass
class Contender:
    """A model ready to train: the parts of a step that differ between contenders."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Any]
    no_sync: Callable[[], AbstractContextManager[Any]]
    steps: int = 0
    engine: Any = None
    """Ours."""

    def step(self, workload: Workload) -> float:
        """One optimizer step on the contender's next data; returns the mean loss of this rank."""
        total = 0.0
        batches = workload.data(self.steps)
        for index, (inputs, targets) in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else self.no_sync():
                loss = loss_fn(self.forward(inputs).float(), targets) / len(batches)
                loss.backward()
            total += loss.item()
        if workload.clip_norm is not None:
            self.clip(workload.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return total


def make(name: str, workload: Workload) -> Contender:
    """Builds a contender; on every rank. All start from the same weights."""
    model = build(workload.model, workload.length)
    if name in {"ddp", "zero_redundancy"}:
        return _ddp(model, workload, divided=name == "zero_redundancy")
    if name in {"fsdp2", "fsdp2-kept"}:
        return _fsdp2(model, workload, keeps=name == "fsdp2-kept")
    if name in {"deepspeed1", "deepspeed2", "deepspeed3"}:
        from benchmarks.deepspeed_contender import DeepSpeedContender

        return DeepSpeedContender.make(model, optimizer_of(model, workload), workload, int(name[-1]))
    if name in {"zero0", "zero1", "zero2", "zero3", "zero3-kept"}:
        return _zero(model, workload, int(name[4]), keeps=name == "zero3-kept")
    raise ValueError(
        f"{name!r} is no contender; there are ddp, zero_redundancy, fsdp2, fsdp2-kept, deepspeed1 to deepspeed3, zero0 "
        "to zero3 and zero3-kept"
    )


def missing(peer: str) -> str | None:
    """Command that installs a peer's requirements; None if it is there."""
    package = _PACKAGES.get(peer.rstrip("0123456789"))
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed: DS_BUILD_OPS=0 pip install {package}, or pip install -e '.[bench]'"


def note(name: str, workload: Workload) -> str:
    """In what a contender differs from the others in precision; "": in nothing."""
    if workload.precision == "fp32":
        return ""
    if name in {"ddp", "zero_redundancy"}:
        return f"{name}: no master weights, state of the optimizer and reduction in {workload.precision}"
    if name.startswith("zero") and not workload.master:
        return f"{name}: no master weights"
    return ""


def optimizer_of(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **_settings(workload))


def _settings(workload: Workload) -> dict[str, Any]:
    return {"lr": 1e-4, "weight_decay": 0.1, **OPTIMIZERS[workload.optimizer]}


def _ddp(model: GPT, workload: Workload, divided: bool) -> Contender:
    parallel = DistributedDataParallel(model.to(workload.dtype), gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if divided:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_settings(workload))
    else:
        optimizer = optimizer_of(model, workload)
    return Contender(
        parallel,
        optimizer,
        lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        parallel.no_sync,
    )


def _fsdp2(model: GPT, workload: Workload, keeps: bool) -> Contender:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    settings: dict[str, Any] = {"mesh": mesh} | ({"reshard_after_forward": False} if keeps else {})
    if workload.precision != "fp32":
        reduced = torch.float32 if workload.reduce == "float32" else workload.dtype
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=workload.dtype, reduce_dtype=reduced)
    for block in model.blocks:
        fully_shard(block, **settings)
    sharded: Any = fully_shard(model, **settings)

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        sharded.set_reshard_after_backward(False)
        try:
            yield
        finally:
            sharded.set_reshard_after_backward(True)

    return Contender(
        model,
        optimizer_of(model, workload),
        lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm),
        kept if keeps else contextlib.nullcontext,
    )


def _zero(model: GPT, workload: Workload, stage: int, keeps: bool) -> Contender:
    # Imported late: DDP and FSDP2 can be compared with each other without it.
    from zero_strategy.config import load_config
    from zero_strategy.engine import ZeroEngine

    low = workload.precision != "fp32"
    kept = "parameter" if workload.reduce == "parameter" else "float32"
    summed = "gradient" if workload.reduce == "parameter" else "float32"
    precision = {"gradient_dtype": kept, "reduce_dtype": summed, "master_weights": workload.master} if low else {}
    config = load_config(stage=stage, precision=precision, reshard_after_backward=not keeps)
    engine = ZeroEngine(model, config, compute_dtype=workload.dtype if low else None)
    optimizer = optimizer_of(model, workload)
    engine.attach(optimizer)
    return Contender(model, optimizer, engine.clip_grad_norm_, engine.no_sync, engine=engine)
