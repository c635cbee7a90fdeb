"""Waits of the host for a device, counted on tensors that say they are on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.device.gpu_tensor import GpuTensor, waits_in
from zero_strategy.ops import grad_stats
from zero_strategy.optim import grad_norm
from zero_strategy.optim.fused import Segment, adam_rows
from zero_strategy.optim.grad_norm import GradientNorm, global_norm

GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_a_norm_waits_once(monkeypatch: pytest.MonkeyPatch, norm_type: float) -> None:
    """Sums and counts come in one copy."""

    def stats_there(tensors: Sequence[GpuTensor], order: float) -> tuple[Tensor, Tensor]:
        sums, counts = grad_stats([tensor.values for tensor in tensors], order)
        return GpuTensor(sums), GpuTensor(counts)

    monkeypatch.setattr(grad_norm.ops, "grad_stats", stats_there)
    values = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    values[1][0, 0] = math.nan
    found: list[GradientNorm] = []
    waits = waits_in(lambda: found.append(global_norm([GpuTensor(value) for value in values], norm_type, [])))
    assert waits == ["aten::_to_copy"]
    monkeypatch.undo()
    assert repr(found) == repr([global_norm(values, norm_type, [])]) and not found[0].finite


def segments(steps: Sequence[Tensor]) -> list[Segment]:
    """Parameters with these step counts."""
    return [Segment(GROUP, torch.zeros(2), torch.zeros(2), {"step": step}, like=torch.zeros(2)) for step in steps]


def test_step_counts_of_fused_state_come_to_the_host_once() -> None:
    """Beside fresh ones; torch's own state has them on the device if it is `fused` or `capturable`."""
    steps = [GpuTensor(torch.tensor(7.0)), torch.tensor(0.0), GpuTensor(torch.tensor(9.0))]
    found = segments(steps)
    rows: list[list[list[float]]] = []
    assert waits_in(lambda: rows.append(adam_rows(found, 1.0))) == ["aten::_to_copy"]
    assert waits_in(lambda: rows.append(adam_rows(found, 1.0))) == []
    assert [[row[5] for row in each] for each in rows] == [[8.0, 1.0, 10.0], [9.0, 2.0, 11.0]]
    assert all(one.state["step"].is_cpu and one.state["step"].dim() == 0 for one in found)


def test_tensors_of_two_devices_do_not_meet() -> None:
    """As in torch, which the stand-in has to refuse for the test above to tell anything."""
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([GpuTensor(torch.tensor(1.0)), torch.tensor(1.0)])
