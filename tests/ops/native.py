"""Common helpers of the tests of native ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from zero_strategy import ops
from zero_strategy.ops.build import recipe
from zero_strategy.ops.library import NATIVE_VARIABLE

Result = TypeVar("Result")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def need_native() -> None:
    """Build and load the CPU kernels; a machine without a compiler, or told to do without, has nothing to compare."""
    status = ops.ensure("cpu")
    if status.path is None:
        wanted = os.environ.get(NATIVE_VARIABLE, "1") == "1" and recipe("cpu").compiler is not None
        (pytest.fail if wanted else pytest.skip)(f"no native ops: {status.reason}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal everywhere, NaN wherever the other is NaN."""
    nan = a.isnan() & b.isnan()
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | nan).all())


def spread(generator: torch.Generator, numel: int, dtype: torch.dtype, *, wild: bool = False) -> Tensor:
    """Normal numbers over ten orders of magnitude; `wild` adds infinite, NaN and signed zero elements."""
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-6, 4, (numel,), generator=generator)
    if wild:
        special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e-42])
        places = torch.randint(0, max(1, numel), (min(6, numel),), generator=generator)
        values[places] = special[: len(places)]
    return values.to(dtype)


def normal(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers."""
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def at_every_thread_count(call: Callable[[], Result]) -> list[Result]:
    """Results of a call with one, two and five threads."""
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(call())
        return found
    finally:
        torch.set_num_threads(before)
