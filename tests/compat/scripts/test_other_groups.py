"""A checkpoint whose optimizer had its parameters in other groups, or in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy.compat.deepspeed as deepspeed
from tests.launcher import Launcher


def start(order: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    parameters: list[Any] = list(model.parameters())
    if order == "reversed":
        parameters = parameters[::-1]
    elif order == "grouped":
        parameters = [{"params": parameters[2:]}, {"params": parameters[:2]}]
    elif order == "swapped":
        parameters = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    }
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]


def train(engine: Any, steps: range) -> list[Tensor]:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + engine.global_rank))
        engine.backward((engine(x) - 1).square().mean())
        engine.step()
    return [value.clone() for value in engine.state_dict().values()]


def resumed(folder: str) -> tuple[bool, list[str]]:
    saved = start("same")
    train(saved, range(2))
    saved.save_checkpoint(folder, tag="one group")
    want = train(saved, range(2, 4))
    other = start("reversed")
    other.load_checkpoint(folder, tag="one group")
    equal = all(map(torch.equal, want, train(other, range(2, 4))))
    errors = []
    grouped = start("grouped")
    with pytest.raises(ValueError) as error:
        grouped.load_checkpoint(folder, tag="one group")
    errors.append(str(error.value))
    grouped.save_checkpoint(folder, tag="two groups")
    with pytest.raises(ValueError) as error:
        start("swapped").load_checkpoint(folder, tag="two groups")
    return equal, [*errors, str(error.value)]


def test_moments_follow_names_and_other_groups_are_told_by_what_has_moved(ranks: Launcher, tmp_path: Path) -> None:
    for equal, (one_to_two, swapped) in ranks(2)(resumed, str(tmp_path)):
        assert equal
        assert (
            "the same parameters, divided otherwise (1 group(s) there, 2 here; '0.weight' is in group 0" in one_to_two
        )
        assert "'0.weight' is in group 1 there and in group 0 here, with 3 more" in swapped
        assert "load weights only" in swapped
