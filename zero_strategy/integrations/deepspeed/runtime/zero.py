"""`deepspeed.runtime.zero`."""

from zero_strategy.integrations.deepspeed.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
