"""Expert parallelism: ranks hold some experts of each layer, and tokens travel to them and back."""

from zero_strategy.experts.layers import DivisibleExperts
from zero_strategy.experts.products import grouped_linear
from zero_strategy.experts.routing import ExpertGroup, Route

__all__ = ["DivisibleExperts", "ExpertGroup", "Route", "grouped_linear"]
