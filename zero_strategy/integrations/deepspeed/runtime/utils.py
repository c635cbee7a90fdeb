"""`deepspeed.runtime.utils`: what is here of it."""

from zero_strategy.activation.seeds import set_random_seed
from zero_strategy.integrations.deepspeed.absent import absent

__all__ = ["set_random_seed"]

__getattr__ = absent(__name__)
