"""Modules that CUDA graphs are captured of (`torch.compile(mode="reduce-overhead")`), which stage 3 does not suit.

A graph has the addresses of parameters in it. Stage 3 gives a unit's memory back after its use, so the next gather may
put the parameters elsewhere; then inductor records the graph anew, in every step, for more time than it ever spares.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from zero_strategy.runtime.torch_private import compiled_call_of

_GRAPHS = "triton.cudagraphs"
_SHOWN = 3  # names in a message: there may be one per block


def captured_modules(module: nn.Module) -> list[str]:
    """Names of modules that are compiled with CUDA graphs, in place or as a module of torch's around them."""
    found = []
    for name, part in module.named_modules():
        # Functions and modules that `torch.compile` has made tell their settings.
        tell = getattr(compiled_call_of(part), "get_compiler_config", None) or vars(part).get("get_compiler_config")
        config: Any = tell() if callable(tell) else None
        if isinstance(config, dict) and config.get(_GRAPHS):
            found.append(name.removesuffix("._orig_mod") or "the module")
    return found


def warn_of_captures(module: nn.Module) -> None:
    """Name the modules that would record a CUDA graph in each step, and the modes that do not."""
    names = captured_modules(module)
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        warnings.warn(
            f'{", ".join(names[:_SHOWN])}{more}: compiled with CUDA graphs (mode="reduce-overhead" or "max-autotune"), '
            "whose parameters have other addresses after each gather of stage 3, so each step records the graphs anew; "
            'compile with the default mode or "max-autotune-no-cudagraphs", or take stage 2',
            stacklevel=2,
        )
