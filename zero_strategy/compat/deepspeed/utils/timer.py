"""`deepspeed.utils.timer`: not here, see `names.py`."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.names import named

__getattr__ = named(__name__)
