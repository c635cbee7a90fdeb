"""Models of transformers are told that all ranks must run all of their layers (stage 3 without `units.may_skip`).

LayerDrop lets a rank skip layers at random. Where gathers take all ranks, encoders of transformers run a skipped layer
all the same, if they find themselves marked as sharded; a module is asked, not the model, so each one is marked. What
can generate is not: for it the mark means that all ranks call `generate` together, which `ZeroTrainer` alone knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_MARK = "_is_fsdp_managed_module"
"""Attribute that transformers reads."""
_RATES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Probabilities of skipping a layer, in configurations of transformers."""


def run_all_layers(root: nn.Module) -> Callable[[], None]:
    """Mark the modules of transformers below `root`, and warn if they would skip layers.

    Returns:
        Takes the marks away.
    """
    marked = [module for module in root.modules() if _is_of_transformers(module) and not hasattr(module, "generate")]
    # Those that somebody else has marked keep their marks when these are taken away.
    marked = [module for module in marked if not hasattr(module, _MARK)]
    for module in marked:
        vars(module)[_MARK] = True
    rates = dict(_rates_in(root))
    if rates:
        told = ", ".join(f"{name}={rate:g}" for name, rate in rates.items())
        warnings.warn(
            f"LayerDrop ({told}) at stage 3: ranks must run the same layers, so models of transformers that know this "
            "skip none, and others fail once ranks differ; units.may_skip: true lets ranks skip layers as under DDP",
            stacklevel=3,
        )

    def unmark() -> None:
        for module in marked:
            vars(module).pop(_MARK, None)

    return unmark


def _is_of_transformers(module: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def _rates_in(root: nn.Module) -> Iterator[tuple[str, float]]:
    for module in root.modules():
        config: Any = getattr(module, "config", None) if _is_of_transformers(module) else None
        for name in _RATES:
            rate = getattr(config, name, 0.0)
            if isinstance(rate, float) and rate > 0:
                yield name, rate
