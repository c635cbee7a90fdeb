"""The methods of taking steps, and which of them is an optimizer's."""

from __future__ import annotations

from zero_strategy.optim.elementwise_step import ElementwiseStep, MatrixStep
from zero_strategy.optim.lbfgs import LbfgsStep
from zero_strategy.optim.muon_step import MuonStep
from zero_strategy.optim.offloaded import OffloadedStep
from zero_strategy.optim.step_method import StepMethod, SteppedOptimizer

METHODS: tuple[type[StepMethod], ...] = (LbfgsStep, OffloadedStep, MuonStep, MatrixStep, ElementwiseStep)
"""In the order in which they are asked; the last takes everything."""


def step_method(sharded: SteppedOptimizer) -> StepMethod:
    """The method of an optimizer.

    Raises:
        TypeError, ValueError: If it cannot step on what this rank has.
    """
    return next(method for method in METHODS if method.takes(sharded.optimizer, sharded.model))(sharded)
