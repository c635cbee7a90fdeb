"""Reading `p.grad` where no rank holds it: what plain data parallelism would show there.

After a reduction that is the mean over ranks, put together from the parts that they own (a collective, so all ranks
read; a rank that reads alone is told within `rendezvous_seconds`). What `no_sync` keeps back is this rank's own sum, to
which no other rank is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from zero_strategy.runtime.torch_private import in_backward
from zero_strategy.sharding.assemble import assemble_segment
from zero_strategy.sharding.dtensors import whole_of
from zero_strategy.sharding.parameters import ParameterBucket


class ReadableGradients(Protocol):
    """The gradients of a bucket as a reader of one sees them; see `GradientBucket`."""

    bucket: ParameterBucket
    dtype: torch.dtype
    live: set[int]

    def finish(self) -> None: ...

    def sync_handles(self) -> None: ...

    def local_sum(self, index: int) -> Tensor | None: ...

    def reduced_part(self, index: int) -> Tensor | None: ...


def reader_of(gradients: ReadableGradients, index: int) -> Callable[[], Tensor]:
    """What reads one gradient for as long as its bucket lives; it does not keep the bucket alive."""
    known, name = ref(gradients), gradients.bucket.names[index]

    def read() -> Tensor:
        bucket = known()
        if bucket is None:
            raise RuntimeError(f"the gradient of parameter {name!r} went away with its engine")
        return read_gradient(bucket, index)

    return read


@torch.no_grad()
def read_gradient(gradients: ReadableGradients, index: int) -> Tensor:
    """The gradient that `p.grad` stands for, in the parameter's dtype and shape, in memory of its own.

    A collective where the parameter holds a reduced gradient and gradients are sharded, or is a tensor-parallel one.

    Raises:
        RuntimeError: If it was removed since, or a backward is running.
        RendezvousError: If another rank does not read it.
    """
    bucket, name = gradients.bucket, gradients.bucket.names[index]
    if in_backward():
        raise RuntimeError(
            f"the gradient of parameter {name!r} is not complete while a backward is running: read p.grad after it"
        )
    gradients.finish()
    gradients.sync_handles()
    local = gradients.local_sum(index)
    reduced = index in gradients.live
    if not reduced and local is None:
        raise RuntimeError(f"the gradient of parameter {name!r} was removed (zero_grad) before it was read")
    segment = bucket.layout.segments[index]
    total = torch.zeros(segment.numel, dtype=gradients.dtype, device=bucket.device)
    if reduced:
        if bucket.placement.shard_optimizer:
            bucket.mesh.rendezvous.meet(f"reading p.grad of {name!r}")
        total = assemble_segment(bucket, index, gradients.reduced_part(index), gradients.dtype)
    if local is not None:
        total.add_(local.reshape(-1))
    return whole_of(bucket.parameters[index], total.to(bucket.dtype).view(segment.shape))
