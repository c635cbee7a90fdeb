"""`deepspeed.runtime.fp16.loss_scaler`: not here, see `names.py`."""

from zero_strategy.integrations.deepspeed.names import named

__getattr__ = named(__name__)
