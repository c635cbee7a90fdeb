"""Collectives that a device's own library does in place, without holding the caller: NCCL.

Its streams are ordered against the current one by `torch.distributed` itself: what was put into a buffer before is
seen, and a wait makes the current stream wait, not the host. The order of summation is the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.comm import sealed
from zero_strategy.comm.transport import Collectives, Job, Run, Work, transport_errors

_native_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class DeviceCollectives(Collectives):
    """See `Collectives`; on tensors of a GPU."""

    device = "cuda"

    def start(self, run: Run) -> Work | None:
        """Run it now: it only queues what the device does."""
        return run()

    def all_gather(self, flat: Tensor) -> Job:
        """See `Collectives`."""
        own = flat.chunk(self.size)[self.rank]
        return Job(partial(_native_all_gather, flat, own, group=self.group, async_op=True))

    def reduce_scatter(self, flat: Tensor, into: Tensor | None, factor: float) -> Job:
        """See `Collectives`; whoever has waited for the sum multiplies it, on the stream of its own."""
        total = flat.chunk(self.size)[self.rank] if into is None else into
        run = partial(_native_reduce_scatter, total, flat, group=self.group, async_op=True)
        return Job(run, None if factor == 1.0 else partial(total.mul_, factor))

    def all_gather_small(self, value: Tensor) -> list[Tensor]:
        """See `Collectives`; by way of the device, for groups that have no other."""
        device = torch.device("cuda", torch.cuda.current_device())
        values = [torch.empty_like(value, device=device) for _ in range(self.size)]
        with transport_errors():
            dist.all_gather(values, value.to(device), group=self.group)
        return list(torch.stack(values).cpu())

    def all_gather_objects(self, value: Any) -> list[Any]:
        """See `Collectives`."""
        assert self.group is not None
        with transport_errors():
            return sealed.all_gather_objects(value, self.group, torch.device("cuda"))
