"""`deepspeed.utils.tensor_fragment`: whole and local parameters, gradients and optimizer states."""

from zero_strategy.integrations.deepspeed.names import named

__getattr__ = named(__name__)
