"""Optimizers and schedulers by DeepSpeed's names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from zero_strategy.compat.deepspeed.optimizers import make_optimizer, make_scheduler
from zero_strategy.compat.deepspeed.schedules import SCHEDULES
from zero_strategy.config.deepspeed.settings import Named
from zero_strategy.optim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedLion, FusedSGD


def make(name: str, **params: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make_optimizer(Named(name, params), [nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Adam", FusedAdamW), ("adam", FusedAdamW), ("AdamW", FusedAdamW), ("FusedAdam", FusedAdamW),
        ("CPUAdam", FusedAdamW), ("DeepSpeedCPUAdam", FusedAdamW), ("Lamb", FusedLamb), ("Lion", FusedLion),
        ("SGD", FusedSGD), ("Adagrad", FusedAdagrad), ("RMSprop", torch.optim.RMSprop), ("NAdam", torch.optim.NAdam),
    ],
)  # fmt: skip
def test_named_optimizers_names(name: str, kind: type[torch.optim.Optimizer]) -> None:
    assert type(make(name, lr=0.25)) is kind and make(name, lr=0.25).param_groups[0]["lr"] == 0.25


def test_adam_is_adamw_without_decay_unless_told_otherwise() -> None:
    assert make("Adam").defaults["weight_decay"] == make("AdamW").defaults["weight_decay"] == 0.0
    assert type(make("Adam", adam_w_mode=False)) is FusedAdam and type(make("AdamW", adam_w_mode=False)) is FusedAdamW
    assert type(make("Adam", torch_adam=True)) is torch.optim.AdamW
    assert type(make("Adam", torch_adam=True, adam_w_mode=False)) is torch.optim.Adam
    found = make("Adam", betas=[0.8, 0.95], bias_correction=True, eps=1e-6)
    assert found.defaults["betas"] == (0.8, 0.95) and found.defaults["eps"] == 1e-6


def test_lamb_says_that_its_trust_ratio_is_not_bounded() -> None:
    with pytest.warns(UserWarning, match=r"not bounded here \(DeepSpeed: 0.01 to 5.0\)"):
        made = make_optimizer(Named("Lamb", {"max_coeff": 5.0}), [nn.Parameter(torch.ones(3))])
    assert made.defaults["eps"] == 1e-8 and made.defaults["weight_decay"] == 0.0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Adamm", {}, "optimizer.type 'Adamm' is not known; did you mean 'Adam'"),
        ("Lmab", {}, "did you mean 'Lamb'"),
        ("OneBitAdam", {}, "'OneBitAdam' is not done by this package"),
        ("Muon", {}, "'Muon' is not done by this package"),
        ("Optimizer", {}, "is not known"),
        ("Adam", {"learning_rate": 1}, "optimizer.params.learning_rate: FusedAdamW has no such argument"),
        ("Adam", {"weight_deca": 1}, "did you mean 'weight_decay'"),
        ("Adam", {"amsgrad": True}, "amsgrad=True of 'Adam' is not done here"),
        ("Adam", {"max_grad_norm": 1.0}, "set gradient_clipping"),
    ],
)
def test_named_optimizers_mistakes_are_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **params)


def test_schedulers() -> None:
    optimizer = make("SGD", lr=0.1)
    params: dict[str, dict[str, Any]] = {
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False},
        "WarmupDecayLR": {"total_num_steps": 2000},
        "WarmupCosineLR": {"total_num_steps": 2000},
    }
    for name, kind in SCHEDULES.items():
        assert type(make_scheduler(Named(name, params.get(name, {})), optimizer)) is kind
    step = make_scheduler(Named("StepLR", {"step_size": 3}), optimizer)
    assert isinstance(step, torch.optim.lr_scheduler.StepLR)
    for name, message in (("WarmupLr", "mean 'WarmupLR'"), ("LRScheduler", "not known"), ("Tensor", "not known")):
        with pytest.raises(ValueError, match=message):
            make_scheduler(Named(name, {}), optimizer)
    with pytest.raises(ValueError, match=r"scheduler\.params.warmup_steps: WarmupLR has no such argument"):
        make_scheduler(Named("WarmupLR", {"warmup_steps": 3}), optimizer)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lr": "0.1"}, r"optimizer.params.lr is '0.1' \(str\); expected a number"),
        ({"betas": 0.9}, r"optimizer.params.betas is 0\.9; expected two numbers"),
    ],
)
def test_numbers_are_numbers(params: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_optimizer(Named("Adam", params), [nn.Parameter(torch.ones(3))])
