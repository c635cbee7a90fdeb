"""`deepspeed.runtime.swap_tensor`: not part of this version."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.absent import absent

__getattr__ = absent(__name__)
