"""Norms of every parameter's gradient and update, every so many steps, for a framework's logger."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from torch.optim import Optimizer

from zero_strategy.diagnostics.gradient_norms import ParameterNorms
from zero_strategy.engine import ZeroEngine


@dataclass(frozen=True)
class NormSettings:
    """What is measured, and how often.

    Attributes:
        every_n_steps: Optimizer steps from one that is measured to the next; the first one is.
        gradients: The norms of gradients, before clipping.
        updates: By how much parameters move: a copy of what each rank owns, and a pass over it.

    Raises:
        ValueError: If there is nothing to measure, or the number of steps is less than 1.
    """

    every_n_steps: int = 50
    gradients: bool = True
    updates: bool = False

    def __post_init__(self) -> None:
        if self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; accepted: 1 or more")
        if not (self.gradients or self.updates):
            raise ValueError("neither gradients nor updates are to be measured: set one of them")


class NormLog:
    """Measures around the steps whose turn it is; the others cost next to nothing. All ranks call it alike.

    Args:
        engine: Of the model.
        settings: What is measured.
    """

    def __init__(self, engine: ZeroEngine, settings: NormSettings) -> None:
        self.engine, self.settings = engine, settings
        self._norms = ParameterNorms(engine)
        self._found: dict[str, float] = {}
        self._moved: dict[str, float] = {}
        self._moving = ExitStack()
        self._is_moving = False

    @property
    def due(self) -> bool:
        """Whether the next step is to be measured."""
        return self.engine.steps.taken % self.settings.every_n_steps == 0

    def before_step(self, optimizer: Optimizer | None = None) -> None:
        """Measure gradients and where parameters are. A collective.

        The norms are those of the pass that clipping has taken, before it; else a pass is taken here. Nothing is
        measured of a step that fp16 skips.

        Args:
            optimizer: That is about to step; None: all.
        """
        if not self.due or any(sharded.skip_next for sharded in self.engine.optimizers):
            self._norms.forget()
            return
        if self.settings.gradients:
            if not self._norms.taken:
                self.engine.grad_norm(optimizer=optimizer)
            self._found |= self._norms.gradients()
        self._norms.forget()
        if self.settings.updates and not self._is_moving:
            self._moved = self._moving.enter_context(self._norms.updates())
            self._is_moving = True

    def after_step(self) -> dict[str, float]:
        """What was measured, by name, on every rank; empty where no step was. A collective if updates are measured."""
        self._moving.close()
        self._is_moving = False
        self._norms.forget()  # clipping may come after `before_step`
        found, self._found, self._moved = {**self._found, **self._moved}, {}, {}
        return found

    def drop(self) -> None:
        """Forget what was begun: a step ended with an exception. No collective."""
        self._moving.pop_all()
        self._is_moving, self._found, self._moved = False, {}, {}
        self._norms.forget()

    def close(self) -> None:
        """Measure no more. No collective."""
        self.drop()
        self._norms.close()
