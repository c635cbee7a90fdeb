"""Clipping multiplies each gradient as `mul_` by the coefficient does, in every dtype; not at all below the limit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zero_strategy.config import load_config
from zero_strategy.engine import ZeroEngine

DTYPES = [torch.float32, torch.bfloat16]


def _engine(stage: int, dtype: torch.dtype) -> tuple[nn.Module, ZeroEngine]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
    precision = {"gradient_dtype": "parameter", "reduce_dtype": "gradient"}
    return module, ZeroEngine(module, load_config(stage=stage, precision=precision), compute_dtype=dtype)


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_times_the_coefficient(stage: int, dtype: torch.dtype) -> None:
    module, engine = _engine(stage, dtype)
    module(torch.ones(3, 24, dtype=dtype)).float().square().mean().backward()
    limit = 0.0123
    coefficient = engine.grad_norm().coefficient(limit)
    assert 0 < coefficient < 1
    expected = [gradient.mul_(coefficient) for gradient in _gradients(module)]
    engine.clip_grad_norm_(limit)
    found = _gradients(module)
    assert len(found) == 4 and all(map(torch.equal, found, expected))
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_below_the_limit_leaves_them_alone(dtype: torch.dtype) -> None:
    module, engine = _engine(0, dtype)
    module(torch.ones(3, 24, dtype=dtype)).float().square().mean().backward()
    before, versions = _gradients(module), [p.grad._version for p in module.parameters() if p.grad is not None]
    engine.clip_grad_norm_(1e4)
    assert all(map(torch.equal, _gradients(module), before))
    assert versions == [p.grad._version for p in module.parameters() if p.grad is not None]
    engine.close()
