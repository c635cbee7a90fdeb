"""One engine per module for its whole life, however many Trainers and runs the module goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import ANOTHER_STRATEGY
from zero_strategy.fsdp.unshard import InertHook
from zero_strategy.runtime.torch_private import map_tensors

_SLOT = "_zero_strategy_engine"


class _EngineSlot:
    """Keeps a module's engine alive with the module; a copy of the module is not sharded and gets an empty one."""

    def __init__(
        self,
        engine: ZeroEngine | None = None,
        compute_dtype: torch.dtype | None = None,
        config: ResolvedConfig | None = None,
    ) -> None:
        self.engine, self.compute_dtype, self.config = engine, compute_dtype, config

    def __deepcopy__(self, memo: dict[int, Any]) -> _EngineSlot:
        return _EngineSlot()

    def __reduce__(self) -> tuple[type[_EngineSlot], tuple[()]]:
        return _EngineSlot, ()


def engine_of(module: nn.Module) -> ZeroEngine | None:
    """The engine that shards `module`, or None."""
    slot = module.__dict__.get(_SLOT)
    return slot.engine if isinstance(slot, _EngineSlot) else None


def engine_for(
    module: nn.Module,
    config: ResolvedConfig,
    compute_dtype: torch.dtype | None,
    device: torch.device | None = None,
    make: Callable[..., ZeroEngine] = ZeroEngine,
) -> ZeroEngine:
    """The module's engine, made now if it has none.

    Args:
        module: The module; it is moved to `device` before it is sharded.
        config: The settings that are asked for.
        compute_dtype: See `ZeroEngine`.
        device: Where to; None leaves it where it is.
        make: Called as `ZeroEngine` is.

    Raises:
        RuntimeError: If the module is sharded with other settings already; names them.
    """
    engine = engine_of(module)
    if engine is None:
        if device is not None:
            move_to(module, device)
        engine = make(module, config, compute_dtype=compute_dtype, device=device)
        install_diagnostics(engine)
        _tell_dtype(module, compute_dtype)
        module.__dict__[_SLOT] = _EngineSlot(engine, compute_dtype, config)
        return engine
    slot: _EngineSlot = module.__dict__[_SLOT]
    assert slot.config is not None  # an engine may have derived more settings from it
    before, now = dict(slot.config.config.settings()), dict(config.config.settings())
    differences = [
        f"{key} was {before[key].value} and is {now[key].value} [{now[key].origin}]"
        for key in now
        if before[key].value != now[key].value
    ]
    if slot.compute_dtype != compute_dtype:
        differences.append(f"the parameters' dtype was {slot.compute_dtype} and is {compute_dtype}")
    if engine.config.world_size != config.world_size:
        differences.append(f"the world size was {engine.config.world_size} and is {config.world_size}")
    if differences:
        raise RuntimeError(
            f"{type(module).__name__} is sharded already, with other settings: {'; '.join(differences)}. A module "
            "keeps its sharding for life: use the same settings, or build the module anew and load a checkpoint."
        )
    return engine


class OtherStrategy:
    """A forward pre-hook of a LightningModule that an engine shards: another strategy is told before it trains it."""

    def __call__(self, module: Any, args: Any) -> None:
        """Raise where a strategy without an engine wraps the module.

        Raises:
            RuntimeError: Naming both, and the way out.
        """
        strategy = None if module._trainer is None else module._trainer.strategy
        if strategy is not None and not hasattr(strategy, "engine") and strategy.model is not module:
            raise RuntimeError(
                f"{type(module).__name__} is sharded by ZeroStrategy, so {type(strategy).__name__} cannot train it. "
                f"{ANOTHER_STRATEGY}"
            )

    def __deepcopy__(self, memo: Any) -> InertHook:
        return InertHook()

    def __reduce__(self) -> Any:
        return InertHook, ()


def _tell_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Let `LightningModule.dtype` say what parameters are now, as `module.to(dtype)` would."""
    for child in module.modules():
        if dtype is not None and "_dtype" in child.__dict__:
            child.__dict__["_dtype"] = dtype


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move a module that is not sharded yet; what is on the meta device, or not read yet, has nothing to move."""
    if is_deferred(module):  # the engine reads it there
        return
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device not in (device, torch.device("meta")) for tensor in tensors):
        map_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
