"""`deepspeed.utils.nvtx`: functions as ranges of NVIDIA's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def instrument_w_nvtx(func: F) -> F:
    """The function, a range of its name around each call where there is a GPU."""

    @functools.wraps(func)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            return func(*args, **kwargs)
        with torch.cuda.nvtx.range(getattr(func, "__qualname__", type(func).__name__)):
            return func(*args, **kwargs)

    return ranged  # type: ignore[return-value]
