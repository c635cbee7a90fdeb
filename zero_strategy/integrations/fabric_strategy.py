"""Fabric's strategy: which engine call each of Fabric's is. Shared by both Fabric namespaces.

Every module that is set up has an engine of its own; an optimizer belongs to the engine of its parameters.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from zero_strategy.config import (
    Fact,
    ResolvedConfig,
    ZeroConfig,
    ZeroSettings,
    check_owned,
    resolve,
)
from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.model import parameters_on_meta
from zero_strategy.integrations.engines import engine_for, engine_of, move_to
from zero_strategy.integrations.fabric_checkpoint import FabricCheckpoints, unwrapped
from zero_strategy.integrations.fabric_precision import FabricPrecision, ScaledFabricPrecision
from zero_strategy.integrations.precision import PLANS, precision_of
from zero_strategy.integrations.settings import check_device, check_world_size, read_settings, shows_settings
from zero_strategy.integrations.tensor_mesh import TensorMesh
from zero_strategy.integrations.verifying import verify_settings

if TYPE_CHECKING:
    from typing import Any as _Base

    from zero_strategy.verify.compare import VerifyReport
else:
    _Base = object


class ShardedForward(nn.Module):
    """Stand-in for a sharded module that Fabric calls: root parameters are whole also in methods other than forward."""

    def __init__(self, module: nn.Module, engine: ZeroEngine) -> None:
        super().__init__()
        self.module = module
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        with self.engine.forward_scope((args, kwargs)):
            return self.module(*args, **kwargs)


class BackwardSync:
    """Context that `fabric.no_backward_sync` uses."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Backwards of accumulated micro-batches: gradients may stay on this rank."""
        engine = engine_of(unwrapped(module))
        return engine.no_sync() if enabled and engine is not None else nullcontext()


class FabricStrategy(FabricCheckpoints, TensorMesh, _Base):
    """Common base of `ZeroStrategy` of both Fabric namespaces.

    Attributes:
        config: The settings, as given.
        engines: The engines of the modules that were set up.
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
        self.engines: list[ZeroEngine] = []
        self._whole_files = checkpoint_io is not None
        self._backward_sync_control: Any = BackwardSync()

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
        if isinstance(plugin, ScaledFabricPrecision):
            plugin.engine_of_optimizer = self.engine_of_optimizer
        self._precision = plugin

    def explain(self) -> str:
        """A table of every setting in effect: key, value, where it was set; Fabric's, too, once it has this."""
        return self._resolve().explain() if self.num_processes else self.config.explain()

    def verify(self, factory: Any, **keywords: Any) -> VerifyReport:
        """Prove on a model of yours that these settings train it as one plain process does.

        Args:
            factory: Makes the model, its optimizer, batches and loss; see `diagnostics.verify_subject`.
            **keywords: `ranks`, `steps`, `accumulation`, `clip_norm` and the rest: see `diagnostics.verify.verify`.

        Returns:
            What was compared, and the first tensor that differs.
        """
        return verify_settings(self.config, factory, keywords)

    def __repr__(self) -> str:
        # Lightning shows this where it is handed a strategy of another namespace.
        name = f"{type(self).__module__}.{type(self).__name__}"
        return f"{name}(stage={self.config.stage}), for Fabric; a Trainer takes zero_strategy.ZeroStrategy"

    def _resolve(self) -> ResolvedConfig:
        devices, nodes = self.num_processes, self.num_nodes
        world_size = dist.get_world_size() if dist.is_initialized() else nodes * devices
        flag = self.precision.precision
        facts = {"training_precision": Fact(flag, f"Fabric(precision={flag!r})")}
        if devices * nodes == world_size:
            facts["world_size"] = Fact(world_size, f"Fabric(devices={devices}, num_nodes={nodes})")
        return resolve(self.config, world_size, facts)

    def setup_environment(self) -> None:
        """Process group, and the checks that need no model."""
        check_device(self.root_device, "Fabric")
        super().setup_environment()
        check_world_size(self.num_nodes, self.num_processes, "Fabric")
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
        resolved = self._resolve()
        check_owned(self.config, resolved.facts)
        engine = engine_for(module, resolved, self.precision.plan.compute_dtype)
        self.precision.adopt(engine, self.config.loss_scale)
        if engine not in self.engines:
            self.engines.append(engine)
        return ShardedForward(module, engine)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer update shards.

        Raises:
            ValueError: If its parameters are not those of one module that was set up.
        """
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
        raise ValueError(f"{type(optimizer).__name__} was not set up: call fabric.setup_optimizers(optimizer)")

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
        self.precision.unscale_gradients(optimizer)
        engine = self.engine_of_optimizer(optimizer)
        return engine.clip_grad_norm_(max_norm, norm_type, optimizer, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each element of the gradients."""
        self.precision.unscale_gradients(optimizer)
        self.engine_of_optimizer(optimizer).clip_grad_value_(clip_val, optimizer)
