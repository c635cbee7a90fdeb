"""`zero-strategy plan`: will it fit, what change would make it fit, how large can a model be."""

from zero_strategy.planning.command import add_plan_command, run_plan_command

__all__ = ["add_plan_command", "run_plan_command"]
