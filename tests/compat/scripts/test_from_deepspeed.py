"""A script goes on from a checkpoint that the real DeepSpeed wrote for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_strategy.compat.deepspeed as deepspeed
from tests.convert.interop.test_deepspeed_engine import net, optimizer_of
from tests.convert.interop.written import unpack
from zero_strategy.convert.pickles import load_restricted

PRECISION: dict[str, dict[str, Any]] = {"z2_round_robin": {}, "z2_fp16": {"fp16": {"enabled": True}}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", PRECISION)
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_counters_and_client_state_are_there(written: Path, case: str, stage: int) -> None:
    live = load_restricted(written / case / "live.pt")
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}, **PRECISION[case]}
    model = net(case)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(case, model), config=config)
    path, client = engine.load_checkpoint(written / case / "checkpoint")
    assert path is not None and client["epoch"] == 3
    mine = engine.state_dict()
    for name, value in live["weights"].items():
        assert torch.equal(mine[name], value.to(mine[name].dtype)), name  # buffers are cast, too
    counters = live["counters"]
    assert (engine.global_steps, engine.skipped_steps) == (counters["global_steps"], counters["skipped_steps"])
    assert engine.micro_steps == engine.global_steps and engine.loss_scale == (live["loss_scale"] or 1.0)
    for _ in range(3):
        engine.backward(engine(torch.arange(6).view(1, 6)))
        engine.step()
    assert engine.global_steps == counters["global_steps"] + 3
