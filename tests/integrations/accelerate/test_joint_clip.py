"""One norm over several prepared models, against float64 and against Accelerate's own with DistributedDataParallel."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import GradScalerKwargs
from torch import nn

from tests.integrations.accelerate.training import fresh_state, make
from tests.launcher import Launcher
from zero_strategy.integrations.accelerate.joint_clip import joined
from zero_strategy.optim.grad_norm import GradientNorm


def train(stage: int | None, norm_type: float, steps: int, again: bool, **keywords: Any) -> dict[str, list[Any]]:
    """Norms that clipping returned, and in float64 those of the gradients before, and the weights."""
    with fresh_state():
        torch.manual_seed(0)
        accelerator: Any = make(stage, gradient_accumulation_steps=steps, **keywords)
        one = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        two = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        first, second = torch.optim.AdamW(one.parameters(), lr=0.02), torch.optim.SGD(two.parameters(), lr=0.1)
        one, two, first, second = accelerator.prepare(one, two, first, second)
        norms, exact = [], []
        for step in range(4 * steps):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with accelerator.accumulate(one, two):
                accelerator.backward((one(two(x)) - x).square().sum())
                if accelerator.sync_gradients:
                    both = list(itertools.chain(one.parameters(), two.parameters()))
                    if keywords.get("mixed_precision") != "fp16":
                        whole = torch.cat([p.grad.double().reshape(-1) for p in both])
                        exact.append(float(torch.linalg.vector_norm(whole, norm_type)))
                    chained = itertools.chain(one.parameters(), two.parameters())
                    norms.append(float(accelerator.clip_grad_norm_(chained, 0.7, norm_type)))
                    if again:  # once more, of what was scaled; the factor of before waits for the step
                        norms.append(float(accelerator.clip_grad_norm_(both, 0.3, norm_type)))
                first.step(), second.step()
                first.zero_grad(), second.zero_grad()
        weights = [accelerator.get_state_dict(model) for model in (one, two)]
        values = [value.reshape(-1).clone() for state in weights for value in state.values()]
        return {"norms": norms, "exact": exact, "weights": [torch.cat(values)]}


@functools.cache
def plainly(ranks: Launcher, norm_type: float, steps: int, again: bool) -> dict[str, list[Any]]:
    return ranks(2)(train, None, norm_type, steps, again)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("norm_type", "steps", "again"), [(2.0, 1, False), (2.0, 2, True), (math.inf, 2, False)])
def test_one_norm_over_two_models(ranks: Launcher, stage: int, norm_type: float, steps: int, again: bool) -> None:
    plain = plainly(ranks, norm_type, steps, again)
    for ours in ranks(2)(train, stage, norm_type, steps, again):
        assert ours["norms"] == pytest.approx(plain["norms"], rel=2e-5) and len(ours["norms"]) == 4 * (1 + again)
        assert ours["norms"][:: 1 + again] == pytest.approx(ours["exact"], rel=1e-6)
        assert torch.allclose(ours["weights"][0], plain["weights"][0], atol=2e-6)
        if again:
            assert all(norm == pytest.approx(0.7, rel=1e-4) for norm in ours["norms"][1::2])


def test_one_norm_of_unscaled_gradients_in_fp16(ranks: Launcher) -> None:
    full = ranks(2)(train, 3, 2.0, 1, False)[0]
    scale = GradScalerKwargs(init_scale=64.0)
    for ours in ranks(2)(train, 3, 2.0, 1, False, mixed_precision="fp16", kwargs_handlers=[scale]):
        assert ours["norms"] == pytest.approx(full["norms"], rel=2e-2) and len(ours["norms"]) == 4


def test_the_norm_of_norms() -> None:
    norms = [GradientNorm(3e200, True), GradientNorm(4e200, True), GradientNorm(0.0, True)]
    assert joined(norms, 2.0).value == pytest.approx(5e200, rel=1e-15) and joined(norms, math.inf).value == 4e200
    assert joined([GradientNorm(0.0, True)], 2.0).value == 0.0
    assert math.isnan(joined([*norms, GradientNorm(math.nan, False)], 2.0).value)
    assert not joined([*norms, GradientNorm(math.inf, False)], 2.0).finite
