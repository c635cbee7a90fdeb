"""Work of `prepare` besides sharding: compiling, and telling how often a schedule steps; what cannot be adopted."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin
from torch import nn

from tests.integrations.accelerate.training import Job, Run, _reset, difference, fresh_state, make, train
from tests.launcher import Launcher
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.accelerate.models import compile_in_place

# ---- torch.compile ----


def compiled(stage: int, regions: bool) -> tuple[Run, list[str]]:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="EAGER", use_regional_compilation=regions)
    with fresh_state():
        torch.manual_seed(100 + dist.get_rank())
        job, run = Job.of(make(stage, dynamo_plugin=plugin)), Run()
        for _ in range(2):
            job.epoch(run)
        names = [name for name, part in job.model.named_modules() if part._compiled_call_impl is not None]
        return job.finish(run), names


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_by_region(ranks: Launcher, stage: int) -> None:
    run, names = ranks(2, timeout=200)(compiled, stage, True)[0]
    assert names == ["first", "blocks.0", "blocks.1", "last"]
    assert difference(ranks(2)(train, stage)[0], run) < 2e-6


def test_compiled_as_a_whole(ranks: Launcher) -> None:
    run, names = ranks(2, timeout=200)(compiled, 2, False)[0]
    assert names == [""] and difference(ranks(2)(train, 2)[0], run) < 2e-6


def test_regions_are_members_of_lists_of_one_class() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    lists = {"layers": nn.ModuleList([block, nn.Sequential()]), "heads": nn.ModuleList([nn.ReLU(), block])}
    mixed = nn.ModuleDict(lists)
    compile_in_place(mixed, {"backend": "eager"}, regions=True)
    assert [name for name, part in mixed.named_modules() if part._compiled_call_impl is not None] == [
        "layers.0",
        "layers.1",
        "heads",
    ]


# ---- the schedule ----


def told(**keywords: Any) -> list[str]:
    with fresh_state(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = Job.of(make(1, **keywords))
        job.accelerator.prepare(torch.optim.lr_scheduler.StepLR(job.optimizer.optimizer, 1))
        return [str(warning.message) for warning in caught if "optimizer step" in str(warning.message)]


def test_the_factor_of_a_schedule_is_told_once(ranks: Launcher) -> None:
    first, *others = ranks(2)(told)
    assert len(first) == 1 and not any(others), "once, by one process of a host"
    assert "StepLR 2 times per optimizer step" in first[0]
    assert "split_batches=True" in first[0] and "step_scheduler_with_optimizer=False" in first[0]
    assert ranks(2)(told, dataloader_config=DataLoaderConfiguration(split_batches=True)) == [[], []]
    assert ranks(2)(told, step_scheduler_with_optimizer=False) == [[], []]


# ---- adopting ----


def test_an_accelerator_with_other_axes_is_not_adopted() -> None:
    _reset()
    try:
        theirs = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
        with pytest.raises(ValueError, match=r"made with a parallelism_config.*give that to the ZeroAccelerator"):
            ZeroAccelerator.adopt(theirs)
    finally:
        _reset()


# ---- what DistributedDataParallel's wrapper has ----


def without_sync(stage: int) -> list[Any]:
    with fresh_state():
        torch.manual_seed(0)
        accelerator = make(stage)
        net = nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True)
        with pytest.raises(RuntimeError, match=r"LocalSGD lets .* accelerator\.accumulate\(model\)"), local:
            raise AssertionError
        x = torch.full((1, 4), 1.0 + dist.get_rank())
        with model.no_sync():
            accelerator.backward(model(x).sum())
        accelerator.backward(model(x).sum())
        optimizer.step()
        state = accelerator.get_state_dict(model)
        return [state.get("weight"), state.get("bias"), pickle.loads(pickle.dumps(model.no_sync))() is not None]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_sync_of_a_prepared_model(ranks: Launcher, stage: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 2)
    for x in (1.0, 1.0, 2.0, 2.0):
        (plain(torch.full((1, 4), x)).sum() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    weight, bias, copied = ranks(2)(without_sync, stage)[0]
    torch.testing.assert_close([weight, bias], [plain.weight.data, plain.bias.data])
    assert copied
