"""Engines that are closed leave nothing behind; later calls say so."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch

from tests.engine.nets import loss_of, net
from tests.launcher import Launcher
from tests.pipeline.test_engine import Case, batches, config_of, module_of
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.pipeline.engine import PipelineEngine


def train(stage: int, watchdog: str) -> str:
    model = net()
    with ZeroEngine(model, load_config(stage=stage, watchdog=watchdog)) as engine:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.attach(optimizer)
        loss_of(model(torch.ones(2, 6))).backward()
        optimizer.step()
        engine.close()
        engine.close()
    try:
        engine.full_state_dict()
        engine.grad_norm()
    except RuntimeError as error:
        return str(error)
    return ""


def train_pipeline(module: Any, case: Case) -> None:
    engine = PipelineEngine(module, config_of(case))
    engine.attach(torch.optim.SGD(module.parameters(), lr=0.01))
    engine.forward_backward(batches(0, case.micro_batches, 0))
    engine.close()


def held() -> tuple[int, list[str]]:
    """Descriptors, and the names of threads, when those that end have ended."""
    found: tuple[int, list[str]] = (0, [])
    end = time.monotonic() + 10
    gc.collect()
    while time.monotonic() < end:
        names = sorted(thread.name for thread in threading.enumerate())
        before, found = found, (len(os.listdir("/proc/self/fd")), names)
        if before == found:
            break
        time.sleep(0.3)
    return found


def leaks(pipelines: bool) -> list[tuple[int, list[str]]]:
    """Memory that is held before and after each of several engines."""
    found = [held()]
    for number in range(2):
        if pipelines:
            case = Case(2, 1, 1, tied=False)
            module = module_of(case)
            found.append(held())
            train_pipeline(module, case)
        else:
            for watchdog in ("default", "strict", "off"):
                message = train(3 * (number % 2), watchdog)
                assert "after the engine was closed" in message, message
        found.append(held())
    return found


@pytest.mark.parametrize("pipelines", [False, True])
def test_nothing_is_left_of_closed_engines(fresh_ranks: Launcher, pipelines: bool) -> None:
    for rank in fresh_ranks(2, timeout=120)(leaks, pipelines):
        if pipelines:  # what the module has made is the module's
            for before, after in zip(rank[1::2], rank[2::2]):
                assert after[0] <= before[0] and len(after[1]) <= len(before[1]), rank
        else:
            for after in rank[1:]:
                assert after[0] <= rank[0][0] and len(after[1]) <= len(rank[0][1]), rank
