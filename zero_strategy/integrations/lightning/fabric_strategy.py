"""Fabric's strategy: which engine call each of Fabric's is. Shared by both Fabric namespaces.

Every module that is set up has an engine of its own; an optimizer belongs to the engine of its parameters.

A state with one sharded module, its optimizers and anything else becomes a directory that all ranks write at once. It
becomes one whole file, gathered and written by a `CheckpointIO`, where the user passed such a plugin or a `filter`,
where `checkpoint.format` is `file`, or where the state holds several modules. Both kinds load at any stage and world
size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from zero_strategy.auto.decide import check_batches_come, decide
from zero_strategy.auto.example import Example
from zero_strategy.checkpoint import StateReader
from zero_strategy.config import (
    Fact,
    ResolvedConfig,
    ZeroConfig,
    ZeroSettings,
    check_owned,
    resolve,
)
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.materialize import parameters_on_meta
from zero_strategy.integrations.huggingface.sequence_models import tiles_of
from zero_strategy.integrations.huggingface.tensor_models import use_replaced
from zero_strategy.integrations.lightning.checkpoint_dict import (
    FABRIC_FILE,
    StateOnDemand,
    StoredWeights,
    check_options,
    is_directory_checkpoint,
    load_own,
    own_file,
    pack,
    read_checkpoint,
    unpack,
    weights_on_demand,
    whole,
    whole_optimizer_state,
)
from zero_strategy.integrations.lightning.module_engine import engine_for, engine_of, move_to
from zero_strategy.integrations.lightning.precision import PLANS, FabricPrecision, ScaledFabricPrecision, precision_of
from zero_strategy.integrations.lightning.setup import (
    TensorMesh,
    check_device,
    check_world_size,
    count_processes,
    read_settings,
    shows_settings,
)
from zero_strategy.integrations.lightning.slot_loaders import SlotLoaders
from zero_strategy.integrations.takeover import hold

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.verify.compare import VerifyReport
else:
    _Base = object


_USER = "fabric"
"""Key in the manifest's user metadata: which key of the state is the module, and which are the optimizers."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module, with or without the wrapper that Fabric was given for it."""
    inner = getattr(module, "module", None)
    return inner if engine_of(module) is None and isinstance(inner, nn.Module) else module


class ShardedForward(nn.Module):
    """Stand-in for a sharded module that Fabric calls: root parameters are whole also in methods other than forward.

    Args:
        module: The user's.
        engine: Of it.
        loaders: They are asked in a training whether the batch is one of a slot.
    """

    def __init__(self, module: nn.Module, engine: ZeroEngine, loaders: SlotLoaders) -> None:
        super().__init__()
        self.module = module
        self.engine = engine
        self._loaders = loaders

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self.module.training and torch.is_grad_enabled():
            self._loaders.check_batch()
        with self.engine.forward_scope((args, kwargs)):
            return self.module(*args, **kwargs)


class BackwardSync:
    """Context that `fabric.no_backward_sync` uses."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Backwards of accumulated micro-batches: gradients may stay on this rank."""
        engine = engine_of(unwrapped(module))
        return engine.no_sync() if enabled and engine is not None else nullcontext()


class FabricStrategy(TensorMesh, _Base):
    """Common base of `ZeroStrategy` of both Fabric namespaces.

    Attributes:
        config: The settings, as given.
    """

    plain_precision: ClassVar[type[FabricPrecision]]
    scaled_precision: ClassVar[type[ScaledFabricPrecision]]

    @shows_settings
    def __init__(
        self,
        config: ZeroConfig | dict[str, Any] | str | os.PathLike[str] | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Unpack[ZeroSettings],
    ) -> None:
        """Takes a config, or its settings as keywords; keywords win. See `ZeroConfig` for each.

        Args:
            config: A `ZeroConfig`, a mapping, or the path of a YAML file.
            accelerator: As in Fabric's strategies.
            parallel_devices: As in Fabric's strategies.
            cluster_environment: As in Fabric's strategies.
            checkpoint_io: Writes checkpoints as whole files, from rank 0; by default they are sharded directories.
            precision_plugin: A `ZeroPrecision`; by default made from `Fabric(precision=...)`.
            process_group_backend: As in Fabric's strategies.
            timeout: `timeout_seconds` under the name that Fabric's strategies have.
            start_method: How processes are started: `popen`, `spawn`, `fork` or `forkserver`.
        """
        self.config = read_settings(config, timeout, settings)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.config.timeout_seconds),
            start_method=start_method,
        )
        self._made: list[ZeroEngine] = []
        self.example: Example | None = None
        self._loaders = SlotLoaders(self.config.reproducible.slots)
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}
        self._whole_files = checkpoint_io is not None
        self._backward_sync_control: Any = BackwardSync()

    @property
    def engines(self) -> list[ZeroEngine]:
        """The engines of the modules that were set up, but those that have ended."""
        return [engine for engine in self._made if not engine.ended]

    @property
    def busy(self) -> str:
        """See `takeover.Holder`: Fabric's loops are the user's own, between whose calls nothing is under way."""
        return ""

    # ---- plugins and settings ----

    @property
    def precision(self) -> Any:
        """The precision plugin, always a `ZeroPrecision` once Fabric is made."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None and not isinstance(plugin, (self.plain_precision, self.scaled_precision)):
            flag = precision_of(plugin, "Fabric")
            plugin = (self.scaled_precision if PLANS[flag].scales_loss else self.plain_precision)(flag)
        if isinstance(plugin, self.plain_precision) and plugin.plan.scales_loss:
            raise ValueError(
                f"{type(plugin).__name__}({plugin.precision!r}) does not scale the loss, which fp16 needs: take "
                f"{self.scaled_precision.__name__}"
            )
        if isinstance(plugin, ScaledFabricPrecision):
            plugin.use_engines(self.engine_of_optimizer)
        self._precision = plugin

    def explain(self) -> str:
        """A table of every setting in effect: key, value, where it was set; Fabric's, too, once it has this."""
        known = self.num_processes and not self.config.auto.enabled
        return self._resolve().explain() if known else self.config.explain()

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """Prove on a model of yours that these settings train it as one plain process does.

        Args:
            factory: Makes the model, its optimizer, batches and loss; see `verify.subject`.
            **keywords: `ranks`, `steps`, `accumulation`, `clip_norm` and the rest: see `zero_strategy.verify`.

        Returns:
            What was compared, and the first tensor that differs.
        """
        from zero_strategy.verify import verify

        return verify(factory, self.config, **keywords)

    def __repr__(self) -> str:
        # Lightning shows this where it is handed a strategy of another namespace.
        name = f"{type(self).__module__}.{type(self).__name__}"
        return f"{name}(stage={self.config.stage}), for Fabric; a Trainer takes zero_strategy.ZeroStrategy"

    def _resolve(self) -> ResolvedConfig:
        devices, nodes = self.num_processes, self.num_nodes
        world_size = count_processes(self)
        flag = self.precision.precision
        facts = {"training_precision": Fact(flag, f"Fabric(precision={flag!r})")}
        if devices * nodes == world_size:
            facts["world_size"] = Fact(world_size, f"Fabric(devices={devices}, num_nodes={nodes})")
        return resolve(self.config, world_size, facts)

    def setup_environment(self) -> None:
        """Process group, and the checks that need no model."""
        # First, as there may be no device for this rank; and once more for the group.
        check_world_size(self, "Fabric")
        check_device(self.root_device, "Fabric")
        super().setup_environment()
        check_world_size(self, "Fabric")
        self.make_tensor_mesh()
        self.precision.device_type = self.root_device.type

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Modules built inside; with `empty_init` their parameters are on the meta device until they are sharded.

        Under stage 3 they are built on the host, as the whole model may not fit a device.
        """
        stack = ExitStack()
        stack.enter_context(torch.device("cpu") if self.config.stage == 3 else self.root_device)
        if empty_init:
            stack.enter_context(parameters_on_meta())
        stack.enter_context(self.precision.module_init_context())
        return stack

    # ---- set-up ----

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module before it is sharded."""
        if engine_of(module) is None:
            move_to(module, self.root_device)

    def setup_module(self, module: nn.Module) -> Any:
        """Shard a module.

        Raises:
            RuntimeError: If it is sharded already, with other settings.
        """
        if self.config.auto.enabled:
            check_batches_come(self.config, "the loaders")
            self.config = decide(
                self.config, module, world_size=count_processes(self), device=self.root_device,
                compute_dtype=self.precision.plan.compute_dtype, example=self.example,
                tiles=tiles_of(module),
            ).config  # fmt: skip
        resolved = self._resolve()
        check_owned(self.config, resolved.facts)
        engine = engine_for(
            module, resolved, self.precision.plan.compute_dtype, mesh=self._device_mesh, replaced=self._replaced
        )
        self.precision.adopt(engine, self.config.loss_scale)
        hold(engine, self)
        if engine not in self._made:
            self._made.append(engine)
        return ShardedForward(module, engine, self._loaders)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer update shards.

        Raises:
            ValueError: If its parameters are not those of one module that was set up.
        """
        # First, for the engine knows divided parameters alone.
        use_replaced(optimizer, self._replaced)
        self._owner(optimizer).attach(optimizer)
        return optimizer

    def engine_of_optimizer(self, optimizer: Optimizer) -> ZeroEngine:
        """The engine that an optimizer is attached to.

        Raises:
            ValueError: If it was not set up.
        """
        for engine in self.engines:
            if any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                return engine
        ended = [f"that of {type(one.module).__name__} has ended: {one.ended_by}" for one in self._made if one.ended]
        raise ValueError(
            f"{type(optimizer).__name__} belongs to no engine: call fabric.setup_optimizers(optimizer)"
            + (f" ({'; '.join(ended)})" if ended else "")
        )

    def _owner(self, optimizer: Optimizer) -> ZeroEngine:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = [engine for engine in self.engines if any(engine.model.place(p) is not None for p in parameters)]
        if len(owners) == 1:
            return owners[0]
        if not owners:
            raise ValueError(
                f"the parameters of {type(optimizer).__name__} belong to no module that was set up: call "
                "fabric.setup_module(model) first, and build the optimizer from that model's parameters()"
            )
        names = [type(engine.module).__name__ for engine in owners]
        raise ValueError(
            f"{type(optimizer).__name__} holds parameters of {len(owners)} modules ({', '.join(names)}): give each "
            "module an optimizer of its own, or set up one module that holds them"
        )

    def step_metrics(self) -> dict[str, float]:
        """For `fabric.log_dict`: where time and memory of the last recorded step went; see `ZeroEngine.step_metrics`.

        Of the first module that has any.
        """
        return next((metrics for engine in self.engines if (metrics := engine.step_metrics())), {})

    # ---- slots ----

    def process_dataloader(self, dataloader: Any) -> Any:
        """See Fabric's; with `reproducible.slots` a loader that shuffles gives this rank the samples of its slots.

        Raises:
            ValueError: If samples cannot be divided so; says why.
        """
        found = super().process_dataloader(dataloader)
        return self._loaders.take(found, self._resolve(), self.global_rank) if self._loaders.slots else found

    # ---- gradients ----

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float | str = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over all ranks' shards; returns the norm before."""
        # The norm is that of gradients without the loss scale.
        self.precision.unscale_gradients(optimizer)
        engine = self.engine_of_optimizer(optimizer)
        return engine.clip_grad_norm_(max_norm, norm_type, optimizer, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        self.engine_of_optimizer(optimizer).clip_grad_value_(clip_val, optimizer)

    # ---- state dicts ----

    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes checkpoints that are one file."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io, self._whole_files = io, io is not None

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The full state dict; all ranks call it."""
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
        # Names that ranks have made may differ, and they write into one directory.
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
        # Before the loop, which takes these entries out of the checkpoint.
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
        # Weights alone are no training that goes on.
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
