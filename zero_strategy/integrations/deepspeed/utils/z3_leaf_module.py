"""`deepspeed.utils.z3_leaf_module`: modules that are gathered as one."""

from zero_strategy.integrations.deepspeed.names import named

__getattr__ = named(__name__)
