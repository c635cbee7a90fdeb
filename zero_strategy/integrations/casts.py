"""Copies that autocast makes of parameters at stage 3, where a user may think that sharding divides them."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.quantized.float8 import is_float8_layer
from zero_strategy.runtime.terminal import size

_MULTIPLIES = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)
"""Modules whose parameters autocast casts."""

CASTS_TOLD = 1 << 26
"""Bytes of copies from which on they are worth a warning."""


def cast_bytes(engine: ZeroEngine, dtype: torch.dtype) -> tuple[int, str]:
    """Bytes of the copies that autocast to `dtype` makes of parameters in a forward, and the largest one's name.

    Those of modules that multiply matrices; what is in `dtype` already is not copied, nor what is cast to float8.
    """
    copied: dict[nn.Parameter, str] = {}
    for name, module in engine.model.module.named_modules():
        if isinstance(module, _MULTIPLIES) and not is_float8_layer(module):
            for key, parameter in module.named_parameters(name, recurse=False):
                place = engine.model.place(parameter)
                if place is not None and place[0].codes is not None:  # gathered as autocast would cast it
                    continue
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    copied.setdefault(parameter, key)
    largest = max(copied, key=lambda parameter: parameter.numel(), default=None)
    total = sum(parameter.numel() for parameter in copied) * dtype.itemsize
    return total, "" if largest is None else copied[largest]


def tell_casts(engine: ZeroEngine, dtype: torch.dtype, asked: str, instead: str) -> None:
    """Warn of whole copies of sharded parameters, where these take much memory.

    Args:
        engine: Of the module.
        dtype: Of autocast.
        asked: The setting that asks for autocast.
        instead: The setting that does without.
    """
    mesh = engine.mesh
    if not engine.model.placement.shard_parameters or mesh.shard_size == 1 or mesh.world_group.rank != 0:
        return
    nbytes, largest = cast_bytes(engine, dtype)
    # Under full recomputation copies of one unit at a time are there.
    if nbytes < CASTS_TOLD or engine.model.config.activation_checkpointing.mode == "full":
        return
    warnings.warn(
        f"{asked} at stage 3: parameters are gathered in float32, and autograd keeps a {str(dtype).rpartition('.')[2]} "
        f"copy of each matrix ({largest!r} and others, {size(nbytes)}) on every rank from forward to backward, "
        "which sharding does not divide. With communication.parameters: autocast weights of linear and convolutional "
        f"layers are gathered in 16 bits without such a copy, and the same bits; with {instead} all parameters are, "
        "and the optimizer works on float32 master weights; activation_checkpointing: full keeps copies of one unit at "
        "a time",
        stacklevel=2,
    )
