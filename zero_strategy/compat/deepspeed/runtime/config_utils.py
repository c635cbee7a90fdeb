"""`deepspeed.runtime.config_utils`."""

from __future__ import annotations

DeepSpeedConfigError = ValueError
"""The error of a config that is wrong."""

__all__ = ["DeepSpeedConfigError"]
