"""What the tests of native ops share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zero_strategy import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def need_native() -> None:
    """Build and load the CPU kernels; a machine without a compiler has nothing to compare."""
    status = ops.ensure("cpu")
    if status.path is None:
        pytest.skip(f"no native ops: {status.reason}")


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
