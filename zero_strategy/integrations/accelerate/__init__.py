"""ZeRO for scripts written for Hugging Face Accelerate: `ZeroAccelerator` in place of `Accelerator`."""

from zero_strategy.integrations.accelerate.accelerator import ZeroAccelerator

__all__ = ["ZeroAccelerator"]
