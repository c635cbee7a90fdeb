"""`deepspeed.utils.tensor_fragment`: whole and local parameters, gradients and optimizer states."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.names import named

__getattr__ = named(__name__)
