"""`deepspeed.utils.z3_leaf_module`: modules that are gathered as one."""

from __future__ import annotations

from zero_strategy.compat.deepspeed.names import named

__getattr__ = named(__name__)
