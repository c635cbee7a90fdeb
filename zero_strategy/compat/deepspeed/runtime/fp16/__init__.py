"""`deepspeed.runtime.fp16`."""

from __future__ import annotations



