"""Ranks that would update their parts of the parameters by different rules are told so before they do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.nets import seeded
from tests.launcher import Launcher
from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

STAGES = [0, 1, 2, 3]
Optimizers = Callable[[nn.Module, int], list[torch.optim.Optimizer]]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def adam(module: nn.Module, rank: int) -> list[torch.optim.Optimizer]:
    first, *rest = module.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "weight_decay": 0.1}, {"params": rest}]
    return [torch.optim.AdamW(groups, lr=1e-3)]


def other_rate(module: nn.Module, rank: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(module.parameters(), lr=[1e-3, 1e-2][rank])]


def other_class(module: nn.Module, rank: int) -> list[torch.optim.Optimizer]:
    return [[torch.optim.AdamW, torch.optim.SGD][rank](module.parameters(), lr=1e-3)]


def second_of_two(module: nn.Module, rank: int) -> list[torch.optim.Optimizer]:
    first, *rest = module.parameters()
    return [torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(rest, betas=(0.9, [0.99, 0.999][rank]))]


def nothing(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
    return True


def decay_in_group(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
    if step == 2 and rank == 1:
        optimizer.param_groups[0]["weight_decay"] = 0.2
    return True


def skip_step(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
    return not (step == 2 and rank == 1)


def rate_for_one_step(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
    if rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5 if step == 2 else 1e-3
    return True


def play(stage: int, make: Optimizers, meddle: Callable[..., bool]) -> tuple[int, str]:
    """The steps that were taken, and the error that ended them."""
    module, rank = seeded(model), dist.get_rank()
    engine = ZeroEngine(module, load_config(stage=stage, units={"min_numel": 0}))
    optimizers = make(module, rank)
    engine.attach(*optimizers)
    taken = 0
    for step in range(5):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        try:
            module(x).square().mean().backward()
        except RuntimeError as error:
            return taken, str(error)
        if meddle(step, rank, optimizers[0]):
            for optimizer in optimizers:
                optimizer.step()
            taken += 1
        for optimizer in optimizers:
            optimizer.zero_grad()
    engine.close()
    return taken, ""


def play_stages(stages: list[int], make: Optimizers, meddle: Callable[..., bool]) -> list[tuple[int, str]]:
    return [play(stage, make, meddle) for stage in stages]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (other_rate, "AdamW: lr of group 0 is 0.001 on rank(s) [0], 0.01 on rank(s) [1]"),
        (other_class, "class is AdamW on rank(s) [0], SGD on rank(s) [1]"),
        (second_of_two, "AdamW (optimizer 1): betas of group 0 is (0.9, 0.99) on rank(s) [0], (0.9, 0.999) on"),
    ],
)
def test_other_rules_from_the_start(ranks: Launcher, make: Optimizers, words: str) -> None:
    for found in ranks(2)(play_stages, STAGES, make, nothing):
        for taken, error in found:
            assert taken == 0
            assert words in error
            assert "Every rank must build the same optimizers" in error


@pytest.mark.parametrize(
    ("meddle", "stages", "words"),
    [
        (decay_in_group, STAGES, "weight_decay of group 0 is 0.1 on rank(s) [0], 0.2 on rank(s) [1]"),
        (skip_step, [0, 3], "number of steps is 3 on rank(s) [0], 2 on rank(s) [1]"),  # else ranks wait: the watchdog's
        (rate_for_one_step, STAGES, "lr of group 0 is 0.001 on rank(s) [0], 0.5 on rank(s) [1]"),
    ],
)
def test_rules_that_come_to_differ(ranks: Launcher, meddle: Callable[..., bool], stages: list[int], words: str) -> None:
    for rank, found in enumerate(ranks(2)(play_stages, stages, adam, meddle)):
        for taken, error in found:
            assert taken == 3 - (meddle is skip_step and rank == 1), error
            assert words in error


def changed_back() -> tuple[int, str]:
    def meddle(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.param_groups[0]["lr"] = 0.5 if step == 2 and rank == 1 else 1e-3
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-3
        return False

    return play(3, adam, meddle)


def test_a_rate_that_is_changed_back(ranks: Launcher) -> None:
    for _, error in ranks(2)(changed_back):
        assert "changed for the last step, and changed back since" in error


def tensors_and_schedules() -> tuple[int, str]:
    """Rates as tensors, not a number, and None; a schedule that all ranks follow."""

    def make(module: nn.Module, rank: int) -> list[torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-3), foreach=False)
        optimizer.param_groups[0]["note"] = {"rank": rank}
        optimizer.param_groups[0]["empty"] = float("nan")
        return [optimizer]

    def meddle(step: int, rank: int, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3 / (1 + step))
        return True

    return play(2, make, meddle)


def test_equal_rules(ranks: Launcher) -> None:
    assert ranks(2)(tensors_and_schedules) == [(5, "")] * 2


# ------------------------------------------------------------------------------------------------- settings


def build(config: list[dict[str, Any]]) -> str:
    try:
        ZeroEngine(seeded(model), config[dist.get_rank()]).close()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([{"stage": 1}, {"stage": 3}], "stage is 1 on rank(s) [0], 3 on rank(s) [1]"),
        ([{"stage": 3}, {"stage": 3, "prefetch": 4}], "prefetch is 1 on rank(s) [0], 4 on rank(s) [1]"),
        ([{"mesh": {"replicate": 2}}, {}], "mesh.replicate is 2 on rank(s) [0], 1 on rank(s) [1]"),
        ([{"offload": {"nvme_path": ["/a"]}}, {"offload": {"nvme_path": ["/b"]}}], ""),
    ],
)
def test_settings_are_compared(ranks: Launcher, configs: list[dict[str, Any]], words: str) -> None:
    for error in ranks(2)(build, configs):
        assert words in error
        assert ("ranks were given different settings" in error) == bool(words)


def build_on_one_rank() -> str:
    if dist.get_rank() == 1:
        return ""
    try:
        ZeroEngine(seeded(model), {"stage": 1, "timeout_seconds": 1})
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_engine_on_one_rank(ranks: Launcher) -> None:
    assert "rank 0 waited 1 s, and rank(s) [1] did not come" in ranks(2)(build_on_one_rank)[0]


def groups_made_again(store: Path) -> list[int]:
    """Steps in a group that is made after one in which rank 1 alone had an engine."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        play(2, adam, nothing)
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    return [play(stage, adam, nothing)[0] for stage in STAGES]


def test_engines_are_numbered_anew_in_every_group(ranks: Launcher, tmp_path: Path) -> None:
    assert ranks(2)(groups_made_again, tmp_path / "store") == [[5] * 4] * 2
