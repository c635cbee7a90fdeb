"""What stands where code wants an optimizer and there is none to step: `DummyOptim`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class DummyOptim:
    """Shows parameters as one group, and keeps and steps nothing.

    For code that walks `param_groups`: an engine itself needs no optimizer, and trains without one if it is None.

    Args:
        params: The parameters.

    Attributes:
        param_groups: One group: `{"params": params}`.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        chosen = params if isinstance(params, list) else list(params)  # a generator is to be read more than once
        self.param_groups: list[dict[str, Any]] = [{"params": chosen}]
