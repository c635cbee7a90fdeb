"""`deepspeed.runtime.config_utils`."""

DeepSpeedConfigError = ValueError
"""The error of a config that is wrong."""

__all__ = ["DeepSpeedConfigError"]
