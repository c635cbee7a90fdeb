"""What optimizers keep per element and per parameter, by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

_SCALAR_BYTES = 4
"""Step counts and the like are 0-d float32 tensors on the CPU."""


@dataclass(frozen=True)
class OptimizerState:
    """State of an elementwise optimizer.

    Attributes:
        name: Class name.
        moments: Tensors per parameter with an entry per element.
        scalars: 0-d tensors per parameter, or per piece of one.
        dtype: Of the moments; None: that of what the optimizer updates (fp32 where there are master weights).
    """

    name: str
    moments: int
    scalars: int
    dtype: torch.dtype | None = None

    def moment_bytes(self, updated: torch.dtype) -> int:
        """Bytes per element of all moments, for an optimizer that updates elements of dtype `updated`."""
        return self.moments * (self.dtype or updated).itemsize

    @property
    def scalar_bytes(self) -> int:
        """Bytes of the 0-d tensors of one piece."""
        return self.scalars * _SCALAR_BYTES


_STATES: dict[str, tuple[int, int]] = {
    "adadelta": (2, 1),
    "adagrad": (1, 1),
    "adam": (2, 1),
    "adamax": (2, 1),
    "adamw": (2, 1),
    "asgd": (1, 3),
    "lamb": (2, 1),
    "lion": (1, 0),
    "nadam": (2, 2),
    "radam": (2, 1),
    "rmsprop": (1, 1),
    "rprop": (2, 1),
    "sgd": (0, 0),
}
"""(moments, scalars) of a class with its default options."""


def optimizer_state(name: str, **options: Any) -> OptimizerState:
    """The state of an optimizer by class name.

    Args:
        name: Such as "AdamW", "sgd", "FusedLion"; upper and lower case are alike.
        **options: Hyper-parameters that change the state: `momentum`, `amsgrad`, `centered`, `moment_dtype`.

    Raises:
        ValueError: If the name is not known; names those that are.
    """
    key = name.lower().removeprefix("fused")
    if key not in _STATES:
        known = ", ".join(sorted(_STATES))
        raise ValueError(
            f"optimizer {name!r} is not known to the planner; known: {known}. For another one give "
            "OptimizerState(name, moments, scalars), on the command line --optimizer-bytes PER_ELEMENT"
        )
    moments, scalars = _STATES[key]
    if key == "sgd" and options.get("momentum"):
        moments += 1
    if key == "rmsprop":
        moments += bool(options.get("momentum")) + bool(options.get("centered"))
    if key in ("adam", "adamw") and options.get("amsgrad"):
        moments += 1
    dtype = options.get("moment_dtype")
    return OptimizerState(name, moments, scalars, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def state_of(optimizer: Optimizer) -> OptimizerState:
    """The state that a torch optimizer will keep, all its groups having the options of the first.

    Raises:
        ValueError: If its class is not known, or the groups' options lead to different states.
    """
    name = type(optimizer).__name__
    found = {optimizer_state(name, **{**optimizer.defaults, **_plain(group)}) for group in optimizer.param_groups}
    if len(found) != 1:
        raise ValueError(
            f"the param groups of this {name} keep different states ({sorted(map(str, found))}); plan them one by one"
        )
    return found.pop()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
