"""Engines that nobody holds any more go at the next collection, with their threads and groups, whatever goes on."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.nets import Net, loss_of, net
from tests.faulty import Torn, no_number
from tests.launcher import Launcher
from tests.pipeline.test_engine import Case, batches, config_of, module_of
from tests.watchdog.faults import PATIENCE
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.engine import PipelineEngine
from zero_strategy.watchdog.peers import own_card
from zero_strategy.watchdog.watchdog import Watchdog

BUSY = {"mode": "default", "wait_seconds": 0.02, "silence_seconds": 60.0}
"""The threads look all the time."""
UNITS = {"min_numel": 0, "patterns": ["blocks.[0-9]"]}


class _Connections:
    """Breaks something on failure; in a cycle, as communicators are."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.itself = self
        self.track = watchdog.track("all", [0, 1], self.end)

    def end(self) -> None:
        raise AssertionError


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_what_the_threads_of_a_guard_hold(tmp_path: Path) -> None:
    """A look goes on, and a call to the store, while everything is dropped."""
    began, called, go = threading.Event(), threading.Event(), threading.Event()

    class Training:
        def left_unfinished(self, phases: Collection[str]) -> str:
            began.set()
            go.wait(PATIENCE)
            return ""

    def connect() -> Any:
        called.set()
        go.wait(PATIENCE)
        return dist.FileStore(str(tmp_path / "store"), 1)

    before = set(threading.enumerate())
    training = Training()
    watchdog = Watchdog(0, [own_card()] * 2, connect, "dropped", wait_seconds=0.02, silence_seconds=9.0)
    watchdog.add_unfinished(training.left_unfinished)
    connections, known = _Connections(watchdog), weakref.ref(watchdog)
    assert began.wait(PATIENCE)
    watchdog._store_client.exchange(None)
    assert called.wait(PATIENCE)
    kept = weakref.ref(connections)
    gc.disable()
    try:
        del connections, watchdog
        gc.collect()
        assert kept() is None
        assert known() is not None  # the thread is in it
        go.set()
        assert eventually(lambda: known() is None)  # without another collection
        assert eventually(lambda: set(threading.enumerate()) <= before)
    finally:
        gc.enable()


def groups() -> int:
    """Process groups that torch knows."""
    return len(dist.distributed_c10d._world.pg_map)


def train(fault: str, stage: int, watchdog: Any) -> weakref.ref[Any]:
    """A step, and something that leaves a graph without its backward."""
    model: Any = net()
    engine = ZeroEngine(model, load_config(stage=stage, watchdog=watchdog, units=UNITS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine.attach(optimizer)
    loss_of(model(torch.ones(2, 6))).backward()
    optimizer.step()
    if fault == "kept":
        model.loss = loss_of(model(torch.ones(2, 6)))  # held by the module, which its graph leads to
    elif fault:
        leave(model, no_number if fault == "forward" else Torn.apply)
    if engine.mesh.watchdog is not None:
        engine.mesh.watchdog.note("has done its part")  # a report: there is a thread that talks to the store
    return weakref.ref(engine)


def leave(model: Net, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: fault(output))
    try:
        loss_of(model(torch.ones(2, 6))).backward()
    except ArithmeticError:  # what either of them raises
        return
    raise AssertionError("nothing happened")


def train_pipeline(case: Case, module: Any) -> weakref.ref[Any]:
    engine = PipelineEngine(module, {**config_of(case), "watchdog": BUSY})
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.01))
    engine.forward_backward(batches(0, case.micro_batches, 0))
    return weakref.ref(engine)


def drop(make: Callable[[], weakref.ref[Any]]) -> list[str]:
    """Remains of an engine after one collection."""
    before, known, found = set(threading.enumerate()), groups(), list[str]()
    gc.collect()
    gc.disable()
    try:
        engine = make()
        assert groups() > known
        gc.collect()
        if engine() is not None:
            found.append("the engine")
        if groups() > known:
            found.append(f"{groups() - known} groups")
        if not eventually(lambda: set(threading.enumerate()) <= before):
            found.append(f"threads {set(threading.enumerate()) - before}")
    finally:
        gc.enable()
    return found


def drop_all() -> dict[str, list[str]]:
    """Remains of engines of all kinds, by kind."""
    found = {}
    for watchdog in (BUSY, "off"):
        for stage in (0, 3):
            for fault in ("", "kept", "forward", "backward"):
                name = f"{'off' if watchdog == 'off' else 'busy'} {stage} {fault}"
                found[name] = drop(lambda: train(fault, stage, watchdog))  # noqa: B023
                dist.barrier()
    case = Case(2, 1, 1, tied=False)
    made = [module_of(case)]  # its groups are its own
    found["pipeline"] = drop(lambda: train_pipeline(case, made.pop()))
    descriptors = [len(os.listdir("/proc/self/fd"))]
    for _ in range(2):
        drop(lambda: train("", 3, BUSY))
        dist.barrier()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    found["descriptors"] = [] if descriptors[-1] <= descriptors[0] else [str(descriptors)]
    return found


def test_nothing_is_left_of_engines_that_are_dropped(fresh_ranks: Launcher) -> None:
    for found in fresh_ranks(2, timeout=120)(drop_all):
        assert not any(found.values()), {name: left for name, left in found.items() if left}


def make_several() -> list[int]:
    """Groups after each of some engines whose garbage nobody collects: their modules hold them in a cycle."""
    gc.collect()
    gc.disable()
    counts = []
    try:
        for _ in range(4):
            train("kept", 3, BUSY)
            counts.append(groups())
    finally:
        gc.enable()
    return counts


def test_an_engine_ends_those_that_nobody_can_reach(fresh_ranks: Launcher) -> None:
    for counts in fresh_ranks(2)(make_several):
        assert len(set(counts)) == 1, counts
