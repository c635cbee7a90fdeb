"""`deepspeed.runtime.activation_checkpointing.checkpointing`: what `deepspeed.checkpointing` has."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.checkpointing import *  # noqa: F403
from zero_strategy.compat.deepspeed.checkpointing import __all__ as __all__

