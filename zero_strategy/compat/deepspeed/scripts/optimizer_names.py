"""Names of DeepSpeed's optimizer wrappers that scripts read on `engine.optimizer`, put on the script's own optimizer.

    engine.step()
    if engine.optimizer.overflow:
        ...

DeepSpeed hands a script a wrapper in place of its optimizer. Here the optimizer stays the script's object, and the
engine gives it these as plain attributes, which it sets after each step and takes away at its end:

    overflow           the last step was left out since gradients were not finite
    cur_scale          the loss scale, 1 where losses are not scaled; also `loss_scale`
    skip_step          a script sets it to True on all ranks: the next step is left out, at an unchanged loss scale
    check_overflow()   whether gradients are finite, before the step; all ranks call it
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from zero_strategy.engine import ZeroEngine

_FLAGS: dict[str, Any] = {"overflow": False, "skip_step": False, "cur_scale": 1.0, "loss_scale": 1.0}
_CHECK = "check_overflow"


class OptimizerNames:
    """The names on one optimizer; those that its class has already are left alone.

    Args:
        optimizer: The script's optimizer.
        zero: The engine that it is attached to.
    """

    def __init__(self, optimizer: Optimizer, zero: ZeroEngine) -> None:
        self._optimizer = optimizer
        self._own = [name for name in (*_FLAGS, _CHECK) if not hasattr(optimizer, name)]
        self._set(dict(_FLAGS))
        # The optimizer outlives the engine, and must not keep it alive.
        engine, names = weakref.ref(zero), weakref.ref(self)
        self._set({_CHECK: lambda *arguments, **keywords: _check_overflow(engine(), names())})
        self.tell(overflow=False, scale=_scale_of(zero))

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in self._own:
                setattr(self._optimizer, name, value)

    def tell(self, *, overflow: bool, scale: float) -> None:
        """Note what a step has found, and the loss scale of the next."""
        self._set({"overflow": overflow, "cur_scale": scale, "loss_scale": scale})

    def takes_skip(self) -> bool:
        """True if the script has asked to leave the step that begins out; asks for one step alone."""
        if "skip_step" not in self._own:
            return False
        asked = bool(getattr(self._optimizer, "skip_step", False))
        self._set({"skip_step": False})
        return asked

    def found(self, engine: ZeroEngine) -> bool:
        """Look at the gradients of the step to come, and tell whether one is not finite. A collective."""
        finite = engine.sharded(self._optimizer).gradients.norm(float("inf")).finite
        self._set({"overflow": not finite})
        return not finite

    def remove(self) -> None:
        """Take the names away."""
        for name in self._own:
            vars(self._optimizer).pop(name, None)
        self._own = []


def _scale_of(zero: ZeroEngine) -> float:
    return 1.0 if zero.scaler is None else zero.scaler.scale


def _check_overflow(engine: ZeroEngine | None, names: OptimizerNames | None) -> bool:
    if engine is None or names is None:
        raise RuntimeError("check_overflow() of an optimizer whose engine has ended; initialize() makes another")
    return names.found(engine)
