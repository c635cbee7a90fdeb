"""Every way in which the host waits for a device is noted, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.recorder import Recorder
from zero_strategy.offload.tier import DeviceCopies, HostMemory

CPU = torch.device("cpu")
Call = Callable[[Tensor], object]


def _values() -> Tensor:
    """Of the device: made by naming it."""
    return torch.ones(64, dtype=torch.uint8, device=CPU)


def _syncs(call: Call) -> list[str]:
    recorder = Recorder()
    with recorder:
        call(_values())
    assert not recorder.races
    return recorder.syncs


def _pinned() -> Tensor:
    return HostMemory(64).bytes[:64]


WAITS: dict[str, tuple[Call, str]] = {
    "item": (lambda x: x[0].item(), "_local_scalar_dense"),
    "float": (lambda x: float(x[0]), "_local_scalar_dense"),
    "bool": (lambda x: bool(x[0] > 0), "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "tolist()"),
    "cpu": (lambda x: x.cpu(), "cpu()"),
    "numpy": (lambda x: x.numpy(), "numpy()"),
    "to_cpu": (lambda x: x.to("cpu"), 'to("cpu")'),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 0], "index.Tensor"),
    "equal": (lambda x: torch.equal(x, x + 1), "equal"),
    "header_from_pageable_memory": (lambda x: x[:4].copy_(torch.zeros(4, dtype=torch.uint8)), "a blocking copy"),
    "into_pinned_memory": (lambda x: _pinned().copy_(x), "a blocking copy"),
    "into_pageable_memory": (
        lambda x: torch.empty(64, dtype=torch.uint8).copy_(x, non_blocking=True),
        "a blocking copy",
    ),
    "sum_of_both": (lambda x: _pinned().add_(x), "both the host's memory and the device's"),
    "in_a_backward": (lambda x: _read_in_backward(x), "cpu()"),
}


def _read_in_backward(x: Tensor) -> None:
    leaf = x.float().requires_grad_()
    leaf.register_hook(lambda gradient: gradient.cpu())
    (leaf * 2).sum().backward()


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_of_the_host_is_noted(name: str) -> None:
    call, words = WAITS[name]
    (found,) = _syncs(call)
    assert words in found


GOES_ON: dict[str, Call] = {
    "compute": lambda x: (x + 1).sum() * x,
    "read_of_the_host": lambda x: torch.tensor([1, 2]).sum().item(),
    "list_of_the_host": lambda x: torch.stack([torch.zeros(3), torch.ones(3)]).amax(0).tolist(),
    "message_of_the_host": lambda x: torch.cat([torch.tensor([1]), torch.zeros(1, dtype=torch.int64)]).tolist(),
    "number_of_the_host": lambda x: x.float() * torch.tensor(2.0),
    "down": lambda x: DeviceCopies(CPU, _current()).down(x, _pinned()),
    "up": lambda x: DeviceCopies(CPU, _current()).up(_pinned(), x),
    "pageable_upwards": lambda x: x.copy_(torch.zeros(64, dtype=torch.uint8), non_blocking=True),
}


def _current() -> Any:
    """The recorder that takes notes."""
    return torch.utils._python_dispatch._get_current_dispatch_mode()


@pytest.mark.parametrize("name", GOES_ON)
def test_what_makes_nobody_wait_is_not(name: str) -> None:
    assert _syncs(GOES_ON[name]) == []


def test_what_has_come_to_the_host_is_read_freely() -> None:
    def read(x: Tensor) -> None:
        there = x.cpu()
        assert there.tolist() == there.numpy().tolist() == [1] * 64 and int(there[0]) == 1

    assert _syncs(read) == ["cpu()"]
