"""`deepspeed.runtime.pipe.schedule`: not part of this version."""

from zero_strategy.integrations.deepspeed.absent import absent

__getattr__ = absent(__name__)
