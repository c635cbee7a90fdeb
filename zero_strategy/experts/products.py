"""Products of rows with the matrix of their expert, for layers of experts of one's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert.

    One grouped product of torch on a GPU in bfloat16 (`torch.nn.functional.grouped_mm`), elsewhere a product for each
    expert, in the order of experts, so that results do not depend on the rows of others.

    Args:
        rows: (rows, inputs).
        experts: Number of each row's expert, (rows,) integers.
        weights: (experts, inputs, outputs), of the dtype of the rows.

    Returns:
        (rows, outputs), in the order of the rows.
    """
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=len(weights))
    by_expert = rows[order]
    if _takes_groups(by_expert, weights):
        found: Tensor = F.grouped_mm(by_expert, weights, offs=counts.cumsum(0).to(torch.int32))
    else:
        parts = by_expert.split(counts.tolist())
        found = torch.cat([part @ weights[number] for number, part in enumerate(parts)])
    return found[order.argsort()]


def _takes_groups(rows: Tensor, weights: Tensor) -> bool:
    """True if torch's grouped product takes these: rows of memory have to begin at multiples of 16 bytes."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    return rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")
