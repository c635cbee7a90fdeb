"""What a rank holds at a moment, by category of its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zero_strategy.diagnostics.step_record import MemorySample
from zero_strategy.memory.reconcile import resident

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


def sample_memory(engine: ZeroEngine) -> MemorySample:
    """The ledger's sums, and what the process and the device's allocator say."""
    tiers: dict[str, dict[str, int]] = {}
    for (tier, category), total in engine.ledger().sums("tier", "category").items():
        tiers.setdefault(tier, {})[category] = total.taken
    now, peak = resident()
    device = engine.model.device
    if device.type != "cuda":
        return MemorySample(tiers, now, peak)
    allocated, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return MemorySample(tiers, now, peak, allocated, most)
