"""`deepspeed.runtime.zero.partition_parameters`."""

from __future__ import annotations

from enum import Enum

from zero_strategy.compat.deepspeed.names import named


class ZeroParamStatus(Enum):
    """States of a parameter under DeepSpeed; nothing here has an attribute of this kind (`ds_status`)."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


__getattr__ = named(__name__)
