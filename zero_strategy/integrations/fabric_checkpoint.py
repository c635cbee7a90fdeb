"""Saving and loading of Fabric's strategy.

A state with one sharded module, its optimizers and anything else becomes a directory that all ranks write at once. It
becomes one whole file, gathered and written by a `CheckpointIO`, where the user passed such a plugin or a `filter`,
where `checkpoint.format` is `file`, or where the state holds several modules. Both kinds load at any stage and world
size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zero_strategy.checkpoint import StateReader
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.checkpoint_dict import (
    FABRIC_FILE,
    StoredWeights,
    check_options,
    is_directory_checkpoint,
    pack,
    read_checkpoint,
    unpack,
    weights_on_demand,
    whole_optimizer_state,
)
from zero_strategy.integrations.engines import engine_of
from zero_strategy.integrations.on_demand import StateOnDemand, whole
from zero_strategy.integrations.rank_states import load_own, own_file

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object

_USER = "fabric"
"""Key in the manifest's user metadata: which key of the state is the module, and which are the optimizers."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, with or without the wrapper that Fabric was given for it."""
    inner = getattr(module, "module", None)
    return inner if engine_of(module) is None and isinstance(inner, nn.Module) else module


class FabricCheckpoints(_Base):
    """The saving and loading half of `FabricStrategy`."""

    engines: list[ZeroEngine]
    _whole_files: bool

    def engine_of_optimizer(self, optimizer: Optimizer) -> ZeroEngine:
        raise NotImplementedError

    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes checkpoints that are one file."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io, self._whole_files = io, io is not None

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state dict; all ranks call it."""
        return dict(unwrapped(module).state_dict())

    def load_module_state_dict(self, module: nn.Module, state_dict: Any, strict: bool = True) -> None:
        """Load weights into the live shards."""
        module = unwrapped(module)
        engine, source = engine_of(module), getattr(state_dict, "source", None)
        if engine is not None and isinstance(source, StoredWeights):
            source.load_into(engine, strict)
        else:
            module.load_state_dict(whole(state_dict), strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's whole state; all ranks call it."""
        return self.engine_of_optimizer(optimizer).optimizer_state_dict(optimizer)

    # ---- saving ----

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save; all ranks call it."""
        if self.engines:  # names the ranks that do not come, where a broadcast would wait for them
            self.engines[0].mesh.barrier.wait_for_all("Fabric.save()")
        place = str(self.broadcast(os.fspath(path)))
        modules = {key: unwrapped(value) for key, value in state.items() if isinstance(value, nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
        engine = engine_of(next(iter(modules.values()))) if len(modules) == 1 else None
        foreign = any(self.engine_of_optimizer(value) is not engine for value in optimizers.values())
        whole_file = self._whole_files or self.config.checkpoint.format == "file"
        if whole_file or filter or engine is None or foreign:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        check_options(place, storage_options)
        names = {id(value): key for key, value in optimizers.items()}
        rest = {key: value for key, value in state.items() if key not in modules and key not in optimizers}
        converted = self._convert_stateful_objects_in_state(rest, filter={})
        content = pack(converted, engine.module)
        engine.save(
            place,
            user={
                _USER: {
                    "module": next(iter(modules)),
                    "optimizers": [names.get(id(sharded.optimizer)) for sharded in engine.optimizers],
                }
            },
            extra_files={FABRIC_FILE: content} if self.is_global_zero else {},
            own_files=own_file({key: converted[key] for key in rest if _is_stateful(rest[key])}, engine.mesh),
            optimizers=bool(optimizers),
        )

    # ---- loading ----

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into the objects of `state` and return what is left; all ranks call it.

        Raises:
            KeyError: If `strict` and the checkpoint lacks a key of `state`; names them.
        """
        if is_directory_checkpoint(path):
            checkpoint = _read(path, weights_only, self.config.checkpoint.verify)
        else:
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if not state:
            return dict(whole(checkpoint))
        if isinstance(state, (nn.Module, Optimizer)):
            raw = checkpoint.get("state_dict", checkpoint) if is_directory_checkpoint(path) else checkpoint
            self._restore(state, raw, strict)
            return {}
        missing = [key for key in state if key not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"{os.fspath(path)} holds {sorted(checkpoint)} and lacks {missing} of the state to load into; remove "
                "these keys from the state, or load with strict=False"
            )
        reader = _reader_of(checkpoint)
        if reader is not None and self.engines and any(map(_is_stateful_object, state.values())):
            own = load_own(reader, self.engines[0].mesh, weights_only, "such as data loaders") or {}
            checkpoint.update({key: own[key] for key in state if key in own})
        resumed = [
            value for key, value in state.items() if isinstance(value, Optimizer) and _reads_shards(checkpoint.get(key))
        ]
        # Weights first: they set master weights too, which optimizer states then set to more digits.
        for key, value in sorted(state.items(), key=lambda item: not isinstance(item[1], nn.Module)):
            if key in checkpoint:
                loaded = checkpoint.pop(key)
                if isinstance(value, (nn.Module, Optimizer)) or _is_stateful(value):
                    self._restore(value, loaded, strict)
                else:
                    state[key] = loaded
        if reader is not None and resumed:
            engine = self.engine_of_optimizer(resumed[0])
            engine.steps.load_counters(reader.manifest.counters)
            engine.load_random_state(reader)
        return checkpoint

    def _restore(self, target: Any, loaded: Any, strict: bool) -> None:
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, loaded, strict)
        elif isinstance(target, Optimizer):
            engine, source = self.engine_of_optimizer(target), getattr(loaded, "source", None)
            # One optimizer, as is usual: its shards are read where they belong, master weights included.
            if isinstance(source, StateReader) and len(source.manifest.optimizers) == len(engine.optimizers) == 1:
                engine.load_optimizers(source)
            else:
                engine.load_optimizer_state_dict(target, whole(loaded))
        else:
            target.load_state_dict(loaded)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_stateful_object(value: Any) -> bool:
    return _is_stateful(value) and not isinstance(value, (nn.Module, Optimizer))


def _reads_shards(loaded: Any) -> bool:
    return isinstance(getattr(loaded, "source", None), StateReader)


def _reader_of(checkpoint: dict[str, Any]) -> StateReader | None:
    """The directory that a checkpoint dict stands for."""
    sources = (getattr(value, "source", None) for value in checkpoint.values())
    return next((source.reader for source in sources if isinstance(source, StoredWeights)), None)


def _read(path: str | os.PathLike[str], weights_only: bool | None, verify: bool) -> dict[str, Any]:
    reader = open_any(path, verify=verify)
    names = reader.manifest.user.get(_USER) if reader.has_manifest else None
    if names is None:  # plain weights, or the Trainer's
        return read_checkpoint(path, weights_only, verify=verify)
    found = unpack(reader.extra(FABRIC_FILE), f"{reader.directory}/{FABRIC_FILE}", weights_only)
    found[names["module"]] = weights_on_demand(reader, found)
    for number in reader.manifest.optimizers:
        name = names["optimizers"][int(number)]
        if name is not None:
            found[name] = StateOnDemand(
                lambda number=number: whole_optimizer_state(reader, number),  # type: ignore[misc]
                nested=True,
                source=reader,
            )
    return found
