"""One parameter's values, put together from the parts that the ranks own."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_strategy.sharding.parameters import ParameterBucket


@torch.no_grad()
def assemble_segment(bucket: ParameterBucket, index: int, value: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One parameter's values, whole on every rank, from the flat part that each rank owns. A collective.

    Args:
        bucket: The parameter's bucket.
        index: The parameter's place there.
        value: This rank's part, None for zeros.
        dtype: Of the result.

    Returns:
        Shape (numel,); zeros where no rank has a value.
    """
    segment, layout = bucket.layout.segments[index], bucket.layout
    communicator = bucket.mesh.gather
    if not bucket.placement.shard_optimizer or communicator.size == 1:
        whole = torch.zeros(segment.numel, dtype=dtype, device=bucket.device)
        return whole if value is None else whole.copy_(value)
    chunk = min(layout.slice_numel, segment.numel)
    parts = torch.zeros(communicator.size * chunk, dtype=dtype, device=bucket.device)
    if value is not None:
        parts[communicator.rank * chunk :][: value.numel()] = value
    communicator.all_gather(parts).wait()
    found = []
    for rank in range(communicator.size):
        low, high = layout.slice_bounds(rank)
        numel = max(0, min(high, segment.stop) - max(low, segment.offset))
        found.append(parts[rank * chunk :][:numel])
    return torch.cat(found)
