"""Rounds of an engine that is made, trains, saves, publishes and is closed, and what a process holds after each."""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.attack.forked import Forked, Job
from tests.attack.rows import Attempt
from zero_strategy import ZeroEngine, subscribe

_ROUNDS = 100
_MOST_BYTES = 8 << 20
"""Growth of resident memory from the first half of the rounds to the last that is an allocator's: 160 KB a round.

A round's model, moments and gradients are 200 KB on one rank and 3 MB on two.
"""
_KINDS: tuple[dict[str, object], ...] = (
    {"stage": 3},
    {"stage": 1},
    {"stage": 2},
    {"stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
)


def _held() -> dict[str, int]:
    gc.collect()
    shared = [name for name in os.listdir("/proc/self/fd") if _is_shared(name)]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "threads of Python": threading.active_count(),
        "mappings of memory that ranks share": Path("/proc/self/maps").read_text().count("zero_strategy exchange"),
        "descriptors of such memory": len(shared),
        "files in /dev/shm": len(os.listdir("/dev/shm")),
        "engines": sum(type(each) is ZeroEngine for each in gc.get_objects()),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize(),
    }


def _is_shared(descriptor: str) -> bool:
    try:
        return "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing
        return False


def _round(folder: Path, number: int) -> None:
    width = 64 if not dist.is_initialized() else 256
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    engine = ZeroEngine(model, {**_KINDS[number % len(_KINDS)], "units": {"min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters())
    engine.attach(optimizer)
    published = engine.publish(folder / "published")
    for step in range(2):
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        published.update()
        engine.save(folder / "saved", asynchronous=step == 0)
    engine.saver.finish()
    reader = subscribe(folder / "published")
    assert reader.update()
    engine.load(folder / "saved")
    engine.close()
    if engine.mesh.world_group.rank == 0:
        shutil.rmtree(folder / "published")


def rounds(folder: str) -> str:
    """A line of what is held after each kind of engine has been there once more."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    found = []
    for number in range(_ROUNDS):
        _round(Path(folder), number)
        if number % len(_KINDS) == len(_KINDS) - 1:  # a collection of garbage takes longer than a round
            if dist.is_initialized():
                dist.barrier()
            found.append(_held())
    if dist.is_initialized():
        dist.destroy_process_group()
    return f"held {json.dumps(found[1:])}"


def leaks(folder: Path, draw: random.Random, number: int) -> Iterator[Attempt]:
    """After 100 rounds a process has as many descriptors, threads, engines and shared memories as after the first."""
    with Forked() as forked:
        for ranks in (1, 2):
            job = Job(str(folder / f"of {ranks}"), "tests.attack.leaks:rounds", ranks, seconds=1800.0)
            lines = forked.lines(job)
            for rank, line in enumerate(lines):
                kind, _, text = line.partition(" ")
                where = f"rank {rank} of {ranks}"
                if kind != "held":
                    yield Attempt(where, line)
                    continue
                found = json.loads(text)
                half = len(found) // 2
                for what in found[0]:
                    first, last = max(each[what] for each in found[:half]), min(each[what] for each in found[half:])
                    most = first + (_MOST_BYTES if what == "bytes" else 0)
                    grew = f"{[each[what] for each in found]}" if found[-1][what] > most or last > most else ""
                    yield Attempt(f"{where}: {what}", grew)
