"""The engine of a module under Lightning, which outlives the Trainer or Fabric that made it.

A module keeps its engine through Trainers and runs of the same settings; with others it gets a new one (`takeover`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.comm.store import together
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.released import ANOTHER_STRATEGY
from zero_strategy.integrations.huggingface.sequence_models import divide_sequences
from zero_strategy.integrations.huggingface.tensor_models import divide_if_asked
from zero_strategy.integrations.lightning.setup import TENSOR
from zero_strategy.integrations.takeover import take_over
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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


def _forget_engine(module: nn.Module) -> None:
    module.__dict__.pop(_SLOT, None)


def engine_for(
    module: nn.Module,
    config: ResolvedConfig,
    compute_dtype: torch.dtype | None,
    device: torch.device | None = None,
    make: Callable[..., ZeroEngine] = ZeroEngine,
    mesh: DeviceMesh | None = None,
    replaced: dict[nn.Parameter, nn.Parameter] | None = None,
) -> ZeroEngine:
    """The module's engine, made now if it has none.

    Args:
        module: The module; it is moved to `device` before it is sharded.
        config: The settings that are asked for.
        compute_dtype: See `ZeroEngine`.
        device: Where to; None leaves it where it is.
        make: Called as `ZeroEngine` is.

    Raises:
        RuntimeError: If the module is sharded with other settings already, and in use; names them.
    """
    # Fabric comes here at once; a Trainer's strategy has done it before it converts the module.
    end_other_engines(module, config, compute_dtype)
    if (engine := engine_of(module)) is not None:
        return engine
    if device is not None:
        move_to(module, device)
    # Before the engine, which shards what each rank has of divided layers.
    if mesh is not None:
        made = divide_if_asked(module, config.config, lambda: mesh[TENSOR])
        # An optimizer that was made before holds the former parameters.
        if replaced is not None:
            replaced.update(made)
    engine = make(module, config, compute_dtype=compute_dtype, device=device)

    def finish() -> None:
        divide_sequences(engine)
        install_diagnostics(engine)
        _tell_dtype(module, compute_dtype)

    try:
        # All ranks go on, or all give the module back, which takes all of them.
        together(engine.mesh.world_group.control, finish)
    except Exception:
        # Nobody would hold it, so that the next set-up would take it for one that a script has made.
        _give_up(engine)
        raise
    module.__dict__[_SLOT] = _EngineSlot(engine, compute_dtype, config)
    engine.when_plain(partial(_forget_engine, module))
    return engine


def _give_up(engine: ZeroEngine) -> None:
    """End an engine whose set-up has failed; that error is the one to see, not another one in ending."""
    with suppress(Exception):
        engine.close(gather=True, reason="its set-up failed")
    # What cannot be whole again (ranks divide its sequences) keeps its slices, and no threads or groups.
    with suppress(Exception):
        engine.close()


def end_other_engines(module: nn.Module, config: ResolvedConfig, compute_dtype: torch.dtype | None) -> None:
    """End the engines of a module but one with these settings, which can go on. A collective if one ends.

    Raises:
        RuntimeError: If one is in use, or cannot give its module back; names the settings that differ.
        ValueError: If one is a script's own.
    """
    engine, name = engine_of(module), type(module).__name__
    if engine is None:
        take_over(module, f"another strategy has set {name} up")
        return
    changes = _differences(module.__dict__[_SLOT], config, compute_dtype)
    if not changes and not engine.strangers():
        return
    if engine.is_part or engine.sequence.size > 1:
        raise RuntimeError(
            f"{name} is sharded already, with other settings: {'; '.join(changes)}. Its ranks divide layers or "
            "sequences, so that no rank can have it whole: use the same settings, or build the module anew and load a "
            "checkpoint."
        )
    settings = "; ".join(changes) or f"parameters {engine.strangers()[:5]} are new"
    take_over(module, f"{name} was set up again, with other settings ({settings})")


def _differences(slot: _EngineSlot, config: ResolvedConfig, compute_dtype: torch.dtype | None) -> list[str]:
    """Settings in which an engine differs from those that are asked for, in words."""
    assert slot.config is not None and slot.engine is not None  # an engine may have derived more settings from it
    before, now = dict(slot.config.config.settings()), dict(config.config.settings())
    found = [
        f"{key} was {before[key].value} and is {now[key].value} [{now[key].origin}]"
        for key in now
        if before[key].value != now[key].value
    ]
    if slot.compute_dtype != compute_dtype:
        found.append(f"the parameters' dtype was {slot.compute_dtype} and is {compute_dtype}")
    if slot.engine.config.world_size != config.world_size:
        found.append(f"the world size was {slot.engine.config.world_size} and is {config.world_size}")
    return found


class OtherStrategy(EphemeralHook):
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
