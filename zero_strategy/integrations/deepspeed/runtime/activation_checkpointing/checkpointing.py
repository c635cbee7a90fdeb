"""`deepspeed.runtime.activation_checkpointing.checkpointing`: what `deepspeed.checkpointing` has."""

from zero_strategy.integrations.deepspeed.checkpointing import *  # noqa: F403
from zero_strategy.integrations.deepspeed.checkpointing import __all__ as __all__
