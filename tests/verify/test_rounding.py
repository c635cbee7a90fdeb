"""Differences that `verify` takes for rounding: sums in another order pass by tolerance, bits show them; formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero_strategy.config import load_config
from zero_strategy.optim.fused import AdamRule, Segment
from zero_strategy.verify import verify_here
from zero_strategy.verify.reference_run import engine_rule, take_step
from zero_strategy.verify.session import ShardedRun
from zero_strategy.verify.subject import Subject, VerifySettings
from zero_strategy.verify.whole_run import WholeRun


class Shifted(nn.Module):
    """The true gradient of `shift` and of `key` is zero, so that Adam's steps along them are all rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12)) for _ in range(3))
        self.key = nn.Parameter(torch.zeros(12))
        self.head = nn.Linear(12, 7)
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores = x @ (x + self.key).transpose(-1, -2)
        out: Tensor = self.head(torch.softmax(scores.transpose(-1, -2), 0) @ x) + self.shift
        return out


def shifted() -> Any:
    batches = [(torch.randn(32, 12), torch.randint(0, 7, (32,))) for _ in range(10)]
    return Shifted(), optimizer_of, batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Reordered(ShardedRun):
    """Rows come the other way round: the same sums, in another order."""

    def micro_batch(self, step: int, micro: int) -> Tensor:
        inputs, targets = self.subject.batch(self.settings.number(step, micro, 0, 1), self.settings.device)
        loss = self.subject.loss(self.model, (inputs.flip(0), targets.flip(0)))
        (loss / self.settings.accumulation).backward()
        return loss.detach().clone()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_another_order_is_rounding(dtype: torch.dtype | None) -> None:
    config = load_config(stage=3, units={"min_numel": 0})
    cast = {} if dtype is None else {"autocast": dtype}
    settings = VerifySettings(steps=4, accumulation=2, clip_norm=0.5, tolerance=8.0, **cast)  # type: ignore[arg-type]
    report = verify_here(shifted, config, settings, Reordered)
    assert report.passed, report
    by_name = {phase.phase: phase for phase in report.phases}
    assert by_name["gradient"].equal < by_name["gradient"].compared
    worst = by_name["parameter"].worst
    assert worst is not None and 0 < worst < 8
    strict = verify_here(shifted, config, VerifySettings(steps=4, accumulation=2, **cast), Reordered)  # type: ignore[arg-type]
    assert strict.first is not None and strict.first.step == 0 and strict.first.times is not None
    assert strict.first.times < 8, "it says that this may be rounding"


# ------------------------------------------------------------------------------------------------ the step's formula


class WrongDecay(AdamRule):
    """Decays twice as much."""

    def _update(self, segments: Sequence[Segment], scale: float, combine: Any) -> None:
        for segment in segments:
            segment.param.mul_(1.0 - segment.group["lr"] * segment.group["weight_decay"])
        super()._update(segments, scale, combine)


def test_the_engines_formula_is_held_against_torchs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 5), nn.Linear(5, 3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    makers: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr_decay": 0.1}),
    ]
    for maker, options in makers:
        optimizer = maker(model.parameters(), **options)
        rule = engine_rule(optimizer, load_config(), model.parameters())
        assert rule is not None
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            assert take_step(optimizer, rule, names) == {}
    assert engine_rule(torch.optim.Adam(model.parameters(), foreach=True), load_config(), model.parameters()) is None
    found = take_step(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), WrongDecay(), names)
    assert set(found) == set(names.values())
    assert "the fused step and the optimizer's own differ by up to" in found["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_disturbed_run_is_off_by_units_of_its_own_dtype(dtype: torch.dtype) -> None:
    settings = VerifySettings(steps=1)
    plain = WholeRun(cast_subject(dtype), settings, 2).step().phases["gradient"]
    disturbed = WholeRun(cast_subject(dtype), settings, 2, jitter=1).step().phases["gradient"]
    for name in ("head.weight", "layers.0.0.weight"):
        one, other = plain[name], disturbed[name]
        assert one is not None and other is not None
        gap = float((one.double() - other.double()).abs().max() / one.double().abs().max())
        assert 0.1 * torch.finfo(dtype).eps < gap < 1000 * torch.finfo(dtype).eps


def cast_subject(dtype: torch.dtype) -> Subject:
    torch.manual_seed(0)
    model, optimizer, batches, _ = shifted()
    batches = [(inputs.to(dtype), targets) for inputs, targets in batches]
    return Subject(model.to(dtype), optimizer, batches, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
