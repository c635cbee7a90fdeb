"""Times at which full gradients are kept: from the first that has to wait for others, on each rank by itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.engine.nets import loss_of, net
from tests.engine.trainings import PlainTraining, Setting, play
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate.uneven import UnevenTraining

COPIES = {"mesh": {"replicate": 2}}


def one_rank_waits(training: PlainTraining) -> None:
    """Rank 0 has two micro-batches, the others one."""
    model = net()
    training.shard(model)
    training.attach(torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False))
    for step in range(4):
        if training.rank == 0 and step > 0:
            training.backward(loss_of(model(training.data(10 + step, 2, 6))), sync=False)
        training.backward(loss_of(model(training.data(step, 2, 6))))
        training.clip(0.5)
        training.step()
        training.zero_grad()


@pytest.mark.parametrize(("world", "config"), [(2, {}), (3, {}), (4, COPIES)], ids=["2", "3", "copies"])
def test_ranks_may_differ(ranks: Launcher, world: int, config: dict[str, dict[str, int]]) -> None:
    """With copies each reduction is one along the row and one along the column: the same order on all ranks."""
    settings = [Setting(1, "per_step", config), Setting(2, "per_step", config)]
    for wrong in ranks(world)(play, one_rank_waits, settings, tolerance=2e-5):
        assert not wrong


def uneven(config: dict[str, dict[str, int]], without: list[int]) -> dict[str, Tensor]:
    """Two steps of two micro-batches; some ranks have no data at all, and so never wait."""
    module, rank = net(), torch.distributed.get_rank()
    engine = ZeroEngine(module, load_config(stage=1, units={"min_numel": 0}, barrier_seconds=5.0, **config))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    uneven = UnevenTraining([engine.model], {"step": optimizer.step, "zero": optimizer.zero_grad})
    generator = torch.Generator().manual_seed(rank)
    with uneven.loop():
        for _ in range(0 if rank in without else 2):
            for micro in range(2):
                with nullcontext() if micro else engine.no_sync():
                    loss_of(module(torch.randn(2, 6, generator=generator))).backward()
            with uneven.together("step"):
                optimizer.step()
            with uneven.together("zero"):
                optimizer.zero_grad()
    return engine.full_state_dict()


@pytest.mark.parametrize("without", [[3], [2, 3], [0]], ids=str)
def test_ranks_without_data_follow(ranks: Launcher, without: list[int]) -> None:
    expected = ranks(4)(uneven, {}, without)[0]
    for found in ranks(4)(uneven, COPIES, without):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def kept(first: str) -> tuple[int, int]:
    """Bytes of gradients after a step, before and behind what may call for whole ones."""
    module = net()
    engine = ZeroEngine(module, load_config(stage=1, units={"min_numel": 0}))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine.attach(optimizer)
    found = []
    for step in range(2):
        if step:
            loss = loss_of(module(torch.ones(2, 6)))
            with engine.no_sync():
                if first == "backward":
                    loss.backward()
                else:
                    torch.autograd.grad(loss, list(module.parameters()))
        loss_of(module(torch.ones(2, 6))).backward()
        optimizer.step()
        found.append(engine.state_bytes()["gradients"])
        optimizer.zero_grad()
    return found[0], found[1]


def test_what_calls_for_whole_gradients(ranks: Launcher) -> None:
    for before, behind in ranks(2)(kept, "backward"):
        assert behind == 2 * before
    for before, behind in ranks(2)(kept, "grad"):  # nothing of it stays
        assert behind == before
