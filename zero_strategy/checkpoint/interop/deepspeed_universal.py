"""Universal checkpoints of DeepSpeed, in and out; see `universal_read` and `universal_write`."""

from __future__ import annotations

from zero_strategy.checkpoint.interop.universal_read import detect, read
from zero_strategy.checkpoint.interop.universal_write import write

__all__ = ["detect", "read", "write"]
