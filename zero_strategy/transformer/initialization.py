"""How weights of a transformer begin: `init_method_normal`, `scaled_init_method_normal`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

InitMethod = Callable[[Tensor], Tensor]


def init_method_normal(sigma: float) -> InitMethod:
    """A function that fills a tensor from N(0, sigma).

    Args:
        sigma: The standard deviation.

    Raises:
        ValueError: If it is negative.
    """
    if not sigma >= 0:
        raise ValueError(f"sigma must not be negative, not {sigma}")
    return partial(nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> InitMethod:
    """A function that fills a tensor from N(0, sigma / sqrt(multiplier x num_layers)).

    For the projections whose outputs are added to the residual stream, `multiplier` times per layer: their sum then has
    the variance of one.

    Args:
        sigma: The standard deviation of other weights.
        num_layers: Layers of the model.
        multiplier: Additions per layer.

    Raises:
        ValueError: If `sigma` is negative, or one of the others not positive.
    """
    if not num_layers > 0 or not multiplier > 0:
        raise ValueError(f"num_layers {num_layers} and multiplier {multiplier} must be positive")
    return init_method_normal(sigma / math.sqrt(multiplier * num_layers))
