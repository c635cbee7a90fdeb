"""Ranks that share one device: over gloo, whose messages go by the host, and over NCCL where it lets them.

From 2.30 on NCCL gives several ranks one device if NCCL_MULTI_RANK_GPU_ENABLE is 1. Functions here run in ranks; on the
CPU, too, where a test of their own shows that they are right.
"""

from __future__ import annotations

import copy
import ctypes
import os
import time
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.activation.unit_nets import Transformer, seeded
from tests.engine.nets import loss_of
from tests.faulty import Fault, Faulty
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
STEPS, MICRO, WIDTH = 3, 2, 32


class Trained(NamedTuple):
    """End of a training."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def shares_a_device() -> bool:
    """True if NCCL connects ranks of one device here."""
    if not torch.cuda.is_available() or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return False
    version = ctypes.c_int()  # of the library that is loaded; torch's own figure is of the one it was built with
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= 23000


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    """float64, which shows most, but for optimizer states on the host, which are of fewer bits."""
    return torch.float32 if "optimizer" in settings.get("offload", ()) else torch.float64


def model(dtype: torch.dtype) -> Any:
    return seeded(Transformer, 4, WIDTH, 0.0).to(DEVICE, dtype)


def rows(step: int, micro: int, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(2, 16, WIDTH, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def plain(world: int, dtype: torch.dtype = torch.float64) -> Trained:
    """One process, without an engine: the mean over ranks and micro-batches."""
    net = model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for micro in range(MICRO):
            for rank in range(world):
                loss = loss_of(net(rows(step, micro, rank, dtype))) / (MICRO * world)
                loss.backward()
                total += loss.detach()
        losses.append(float(total))
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: value.detach().cpu() for name, value in net.state_dict().items()})


def train(settings: dict[str, Any], folder: str | None = None) -> Trained:
    """The same under an engine, by all ranks."""
    dtype = dtype_of(settings)
    net = model(dtype)
    world, rank = dist.get_world_size(), dist.get_rank()
    engine = ZeroEngine(net, load_config({"units": {"min_numel": 0}} | settings))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    engine.attach(optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for micro in range(MICRO):
            loss = loss_of(net(rows(step, micro, rank, dtype))) / MICRO
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total := total.cpu() if dist.get_backend() == "gloo" else total)
        losses.append(float(total) / world)
        norms.append(float(engine.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
        if folder is not None and step == 1:  # taken in the background, while the next step overwrites what it reads
            engine.save(folder, asynchronous=True)
    weights = engine.full_state_dict()
    engine.close()
    return Trained(losses, norms, weights)


def resume(settings: dict[str, Any], folder: str) -> Trained:
    """The last step once more, from what was saved before it."""
    dtype = dtype_of(settings)
    net = model(dtype)
    engine = ZeroEngine(net, load_config({"units": {"min_numel": 0}} | settings))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    engine.attach(optimizer)
    engine.load(folder)
    for micro in range(MICRO):
        (loss_of(net(rows(STEPS - 1, micro, dist.get_rank(), dtype))) / MICRO).backward()
    norms = [float(engine.clip_grad_norm_(0.5))]
    optimizer.step()
    weights = engine.full_state_dict()
    engine.close()
    return Trained([], norms, weights)


def train_all(cases: list[dict[str, Any]]) -> list[Trained | str]:
    """Several trainings; one that fails says so, and the next goes on."""
    found: list[Trained | str] = []
    for settings in cases:
        try:
            found.append(train(copy.deepcopy(settings)))
        except Exception as error:  # the same on all ranks, or the test's own time is over
            found.append(f"{type(error).__name__}: {error}")
    return found


def put(into: Tensor, values: Tensor) -> None:
    into.copy_(values)


def collectives() -> dict[str, bool]:
    """Every collective of a `Communicator`, on tensors of the device, beside what it has to give."""
    rank, world = dist.get_rank(), dist.get_world_size()
    by = Communicator(dist.group.WORLD, CommunicationCounters())
    found: dict[str, bool] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        values = [
            torch.randn(64, generator=torch.Generator().manual_seed(each)).to(DEVICE, dtype) for each in range(world)
        ]
        flat = torch.zeros(64 * world, dtype=dtype, device=DEVICE)
        by.all_gather(flat, partial(put, flat[64 * rank : 64 * (rank + 1)], values[rank])).wait()
        found[f"all_gather {dtype}"] = bool((flat == torch.cat(values)).all())
        for factor in (1.0, 1.0 / world, 0.375):
            parts = [torch.cat([value.roll(each) for each in range(world)]) for value in values]
            wanted = sum(part.double() for part in parts)[64 * rank : 64 * (rank + 1)] * factor  # type: ignore[index]
            into = torch.empty(64, dtype=dtype, device=DEVICE)
            by.reduce_scatter(parts[rank], factor=factor, into=into).wait()
            bound = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-14}[dtype]
            found[f"reduce_scatter {dtype} {factor}"] = bool(
                ((into - wanted).abs() <= bound * (1 + wanted.abs())).all()
            )
    for dtype in (torch.int16, torch.bool, torch.uint8, torch.int64, torch.float16):
        flat = torch.zeros(4 * world, dtype=dtype, device=DEVICE)
        flat[4 * rank : 4 * rank + 4] = torch.tensor([1, 0, 1, rank], device=DEVICE).to(dtype)
        try:
            by.all_gather(flat).wait()
            wanted = torch.tensor([value for each in range(world) for value in (1, 0, 1, each)]).to(dtype)
            found[f"all_gather {dtype}"] = bool((flat.cpu() == wanted).all())
        except Exception as error:
            found[f"all_gather {dtype}: {type(error).__name__}: {error}"] = False
        one = torch.full((3,), rank, device=DEVICE).to(dtype)
        by.broadcast(one, world - 1)
        found[f"broadcast {dtype}"] = bool((one.cpu() == torch.full((3,), world - 1).to(dtype)).all())
    outgoing = [torch.full((1 + rank + each,), 10 * rank + each, device=DEVICE) for each in range(world)]
    incoming = [torch.zeros(1 + each + rank, dtype=torch.int64, device=DEVICE) for each in range(world)]
    by.all_to_all(outgoing, incoming, 2 * world).wait()
    found["all_to_all"] = all(bool((incoming[each] == 10 * each + rank).all()) for each in range(world) if each != rank)
    small = by.all_gather_small(torch.tensor([rank, 7.5]))
    found["all_gather_small"] = [value.tolist() for value in small] == [[each, 7.5] for each in range(world)]
    found["all_gather_objects"] = by.all_gather_objects({"rank": rank}) == [{"rank": each} for each in range(world)]
    by.close()
    return found


def late_values() -> bool:
    """A gather and a reduction of values that the device has not computed yet when they start."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 1 << 20
    by = Communicator(dist.group.WORLD, CommunicationCounters())
    right = True
    for _ in range(3):
        flat = torch.zeros(count * world, device=DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda._sleep(50_000_000)
        flat[rank * count : (rank + 1) * count] = rank + 1.0
        by.all_gather(flat).wait()
        doubled = flat * 2
        flat.zero_()
        total = torch.empty(count, device=DEVICE)
        by.reduce_scatter(doubled, factor=1.0 / world, into=total).wait()
        right &= bool((total == 2.0 * (rank + 1)).all())
    by.close()
    return right


def lose_a_rank(settings: dict[str, Any], fault: Fault) -> None:
    """Two healthy steps, then the last rank meets a fault in its forward; the others raise what they were told."""
    net = model(torch.float32)
    watchdog = {"mode": "default", "wait_seconds": 1.0, "silence_seconds": 2.0}
    faulty = net.blocks[1] = Faulty(net.blocks[1])
    engine = ZeroEngine(net, load_config({"units": {"min_numel": 0}, "watchdog": watchdog} | settings))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    engine.attach(optimizer)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    started = time.monotonic()
    try:
        for step in range(6):
            if step == 2:
                started = time.monotonic()
                faulty.fault = fault if rank == last else None
            loss_of(net(rows(step, 0, rank, torch.float32))).backward()
            optimizer.step()
            optimizer.zero_grad()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()  # as a loop that reads its loss
    except FloatingPointError:
        time.sleep(15.0)  # whatever it does instead, it does not come back
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}") from error
