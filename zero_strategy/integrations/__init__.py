"""The frameworks' integrations: thin translations onto the engine. Nothing is imported before it is asked for."""

from zero_strategy.integrations.namespaces import strategy_class

__all__ = ["strategy_class"]
