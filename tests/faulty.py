"""Faults of a model: functions of what a module returns, and a module that calls one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Fault = Callable[[Any], Any]


class Faulty(nn.Module):
    """A module with a fault.

    Args:
        inner: The module.
        fault: Is given what the module returns, and returns what this one does; None: there is none.
        at: The call of the fault, from 1; None: every one.
    """

    def __init__(self, inner: nn.Module, fault: Fault | None = None, at: int | None = None) -> None:
        super().__init__()
        self.inner, self.fault, self.at, self.calls = inner, fault, at, 0

    def forward(self, given: Any) -> Any:
        self.calls += 1
        found = self.inner(given)
        return found if self.fault is None or self.at not in (None, self.calls) else self.fault(found)


class Torn(torch.autograd.Function):
    """Has a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")


def no_number(*_: Any) -> Any:
    """An exception in a forward."""
    raise FloatingPointError("no number today")


def die(*_: Any) -> Any:
    """The process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
