"""Collectives of a group that a script has made, whose backend may have no side for tensors of the host (NCCL)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.distributed.collectives import Communicator
from zero_strategy.distributed.counters import CommunicationCounters
from zero_strategy.distributed.tracks import Subject


class ScriptCommunicator(Communicator):
    """A `Communicator` of it. The engine's own flags and norms have gloo groups; scripts have what they have.

    Args:
        group: The script's; None: this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group, CommunicationCounters())

    def exchange_small(self, value: Tensor, of: Subject = "") -> list[Tensor]:
        """Every rank's `value` (same shape everywhere, on the CPU), in rank order."""
        if self.size == 1 or dist.get_backend(self.group) != "nccl":
            return super().exchange_small(value, of)
        device = torch.device("cuda", torch.cuda.current_device())
        values = [torch.empty_like(value, device=device) for _ in range(self.size)]
        dist.all_gather(values, value.to(device), group=self.group)
        return list(torch.stack(values).cpu())
