"""`deepspeed.runtime.config_utils`."""

DeepSpeedConfigError = ValueError
"""What is raised here where a config is wrong."""

__all__ = ["DeepSpeedConfigError"]
