"""The frameworks' integrations: thin translations onto the engine. Nothing is imported before it is asked for."""

from zero_strategy.integrations.lightning.namespaces import strategy_class

__all__ = ["strategy_class"]
