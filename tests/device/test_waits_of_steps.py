"""Waits of the host for a device, counted on tensors that say they are on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.device.gpu_tensor import GpuTensor, waits_in
from zero_strategy.ops import stats_to_host
from zero_strategy.optim.fused import Segment, adam_rows

GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def test_sums_and_counts_come_in_one_copy() -> None:
    """Of tensors that the op does not take; counts beyond float32 are exact."""
    found: list[tuple[Tensor, Tensor]] = []
    sums, counts = torch.tensor([0.5, math.inf], dtype=torch.float64), torch.tensor([0, 2**24 + 1])
    assert waits_in(lambda: found.append(stats_to_host(GpuTensor(sums), GpuTensor(counts)))) == ["aten::_to_copy"]
    assert found[0][0].tolist() == sums.tolist() and found[0][1].tolist() == counts.tolist()


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
