"""Meaning of a framework's `precision=` flag for a sharded module. Shared by Trainer and Fabric.

| precision     | parameters | optimizer works on      | steps run                 | loss scale |
| ------------- | ---------- | ----------------------- | ------------------------- | ---------- |
| `32-true`     | as they are| the parameters          | plain                     | no         |
| `bf16-true`   | bf16       | fp32 master weights     | default dtype bf16        | no         |
| `16-true`     | fp16       | fp32 master weights     | default dtype fp16        | yes        |
| `bf16-mixed`  | as they are| the parameters          | under autocast to bf16    | no         |
| `16-mixed`    | as they are| the parameters          | under autocast to fp16    | yes        |
| `64-true`     | fp64       | the parameters          | default dtype fp64        | no         |

Beside each of these, `float8` lets linear layers cast what they multiply to float8.

The plugins of Fabric and of the Trainer scale the loss, clip, and step optimizers through the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.config import LossScaleConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.casts import tell_casts
from zero_strategy.integrations.float8 import Choice, Float8Layers
from zero_strategy.integrations.lightning.module_engine import engine_of
from zero_strategy.integrations.takeover import take_over

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object
from zero_strategy.optim import LossScaler
from zero_strategy.runtime.torch_private import tree_map_only


@dataclass(frozen=True)
class PrecisionPlan:
    """One row of the table above.

    Attributes:
        compute_dtype: Dtype that the engine gives parameters, beside fp32 master weights; None keeps theirs.
        default_dtype: Default dtype inside steps, and dtype that floating-point inputs are cast to; None leaves both.
        autocast_dtype: Dtype of autocast inside steps; None for no autocast.
        scales_loss: Whether losses are scaled.
    """

    compute_dtype: torch.dtype | None = None
    default_dtype: torch.dtype | None = None
    autocast_dtype: torch.dtype | None = None
    scales_loss: bool = False


PLANS = {
    "32-true": PrecisionPlan(),
    "bf16-true": PrecisionPlan(compute_dtype=torch.bfloat16, default_dtype=torch.bfloat16),
    "16-true": PrecisionPlan(compute_dtype=torch.float16, default_dtype=torch.float16, scales_loss=True),
    "bf16-mixed": PrecisionPlan(autocast_dtype=torch.bfloat16),
    "16-mixed": PrecisionPlan(autocast_dtype=torch.float16, scales_loss=True),
    "64-true": PrecisionPlan(default_dtype=torch.float64),
}

_CONVERTED = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""Lightning's own plugins for the flags above, by class name: their settings are taken over."""


class ShardedPrecision:
    """The part of a precision plugin that does not depend on the framework; a base class of each `ZeroPrecision`.

    Args:
        precision: One of `32-true`, `bf16-true`, `16-true`, `bf16-mixed`, `16-mixed`, `64-true`.
        float8: Linear layers multiply in float8 by this: the name of a recipe of torchao, or a `Float8LinearConfig`.
        float8_layers: Torchao's `module_filter_fn`, which says by a layer and its name whether it does; by default
            layers do whose sizes are multiples of 16.

    Attributes:
        precision: The same.
        plan: What it means.
        device_type: Where steps run; set by the strategy.
        scaler: The loss scaler of all engines in use with this plugin, or None.
        float8: The layers that multiply in float8, or None.

    Raises:
        ValueError: If there is no such precision or recipe, or layers are chosen without one.
        ImportError: If float8 is asked for, and torchao is not installed.
    """

    precision: Any

    def __init__(self, precision: str = "32-true", *, float8: Any = None, float8_layers: Choice | None = None) -> None:
        if precision not in PLANS:
            raise ValueError(f"precision {precision!r} is not supported; accepted: {', '.join(map(repr, PLANS))}")
        if float8 is None and float8_layers is not None:
            raise ValueError('float8_layers chooses layers for float8, which is not given: add float8="tensorwise"')
        self.float8 = None if float8 is None else Float8Layers(float8, float8_layers, "ZeroPrecision(float8=...)")
        self.precision = precision
        self.plan = PLANS[precision]
        self.device_type = "cpu"
        self.scaler: LossScaler | None = None

    def adopt(self, engine: ZeroEngine, loss_scale: LossScaleConfig) -> None:
        """Share one loss scaler with an engine."""
        # A later run goes on with the scale that an earlier one has found.
        if self.plan.scales_loss and self.scaler is None:
            self.scaler = LossScaler(loss_scale)
        engine.use_loss_scaler(self.scaler)
        if (dtype := self.plan.autocast_dtype) is not None:
            true = "bf16-true" if dtype == torch.bfloat16 else "16-true"
            tell_casts(engine, dtype, f"precision={self.precision!r}", f"precision={true!r}")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """`64-true` casts, and float8 replaces layers, before the module is sharded.

        Other dtypes are the engine's business.
        """
        module = self.convert_layers(module)
        if self.plan.default_dtype == torch.float64 and engine_of(module) is None:
            return module.double()
        return module

    def convert_layers(self, module: nn.Module) -> nn.Module:
        """Let the chosen layers multiply in float8. An engine whose layers do not yet ends, which is a collective."""
        if self.float8 is None or not self.float8.lacking(module):
            return module
        take_over(module, f"linear layers of {type(module).__name__} were converted to float8")
        return self.float8.convert(module)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Low-precision models are built in fp32, so that master weights start from unrounded values."""
        return self._default_dtype() if self.plan.default_dtype == torch.float64 else nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """See `tensor_init_context`."""
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Context that steps run in."""
        if self.plan.autocast_dtype is not None:
            # No cache: it would hold casts of parameters that have been released since.
            return torch.autocast(self.device_type, dtype=self.plan.autocast_dtype, cache_enabled=False)
        return self._default_dtype() if self.plan.default_dtype is not None else nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors where parameters have been cast; autocast does this by itself."""
        return data if self.plan.default_dtype is None else _cast(data, self.plan.default_dtype)

    @contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        assert self.plan.default_dtype is not None
        torch.set_default_dtype(self.plan.default_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, if there is one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a loss scale; also that of a torch GradScaler."""
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def convert_output(data: Any) -> Any:
    """Cast floating-point outputs of low precision back to the default dtype."""
    return _cast(data, torch.get_default_dtype())


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, data)


def precision_of(plugin: Any, owner: str) -> str:
    """The precision flag that one of the framework's own plugins stands for.

    Args:
        plugin: A precision plugin that is not ours.
        owner: `Trainer` or `Fabric`, for the error.

    Raises:
        TypeError: If it is another plugin, whose behaviour we would have to guess; names it.
        ValueError: If it carries a gradient scaler with settings of its own.
    """
    cls = type(plugin)
    # By name: classes of the four namespaces do not know one another.
    own = cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
    if not own or cls.__name__ not in _CONVERTED:
        raise TypeError(
            f"precision plugin {cls.__qualname__} cannot run on sharded parameters. Use {owner}(precision=...) "
            f"with one of {', '.join(map(repr, PLANS))}, or a subclass of this strategy's ZeroPrecision."
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():  # torch disables one for CUDA where there is none
        rates = scaler.get_growth_factor(), scaler.get_backoff_factor()
        given = (scaler.get_scale(), *rates, scaler.get_growth_interval())
        # torch's defaults, which the flag alone gives.
        if given != (65536.0, 2.0, 0.5, 2000):
            raise ValueError(
                f"{cls.__qualname__} has a gradient scaler with settings of its own (initial scale, growth, backoff, "
                f"interval: {given}), which knows nothing of other ranks' gradients. Set "
                'ZeroStrategy(loss_scale={"initial": ..., "growth_interval": ...}) instead.'
            )
    return str(plugin.precision)


class FabricPrecision(ShardedPrecision, _Base):
    """Common base of `ZeroPrecision` of both Fabric namespaces; see `ShardedPrecision`.

    It leaves `backward` and `pre_backward` alone: Fabric forbids a plain `loss.backward()` where either is overridden.
    """

    def convert_output(self, data: Any) -> Any:
        """Cast low-precision outputs back, as Lightning's own plugins do."""
        is_plain = self.plan.default_dtype is None and self.plan.autocast_dtype is None
        return data if is_plain else convert_output(data)


class ScaledFabricPrecision(FabricPrecision):
    """Fabric's precision with loss scaling; `fabric.backward(loss)` is the only way to backward, as Fabric enforces.

    Attributes:
        engine_of_optimizer: Gives the engine that an optimizer is attached to, once a strategy has taken the plugin.
    """

    engine_of_optimizer: Callable[[Optimizer], ZeroEngine]

    def __init__(self, precision: str = "16-mixed", *, float8: Any = None, float8_layers: Choice | None = None) -> None:
        super().__init__(precision, float8=float8, float8_layers=float8_layers)
        self._unscaled: dict[int, bool] = {}
        self._finite: bool | None = None

    def use_engines(self, engine_of_optimizer: Callable[[Optimizer], ZeroEngine]) -> None:
        """Step through the engines of a strategy, which a user may have made after this plugin."""
        self.engine_of_optimizer = engine_of_optimizer

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Backward of the scaled loss."""
        assert self.scaler is not None
        if self._finite is not None:  # only now: another optimizer's gradients may have been of the old scale
            self.scaler.update(finite=self._finite)
            self._finite = None
        super().backward(tensor * self.scaler.scale, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Undo the scale in an optimizer's gradients, once per step."""
        if id(optimizer) not in self._unscaled:
            self._unscaled[id(optimizer)] = self.engine_of_optimizer(optimizer).unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, unless the gradients of any rank are not finite.

        Raises:
            ValueError: If a closure is given.
        """
        if kwargs.get("closure") is not None:
            raise ValueError(
                "optimizer.step(closure) cannot be combined with loss scaling (fp16): run the closure's forward and "
                "fabric.backward(loss) first, then optimizer.step()"
            )
        self.unscale_gradients(optimizer)
        finite = self._unscaled.pop(id(optimizer))
        # Optimizers share the scale, so one that overflows lowers it.
        self._finite = finite and self._finite is not False
        # The engine leaves the step out, on all ranks, if gradients are not finite.
        return optimizer.step(**kwargs)


class TrainerPrecision(ShardedPrecision, _Base):
    """Common base of `ZeroPrecision` of both Trainer namespaces; see `ShardedPrecision`.

    Attributes:
        engine: That of the module.
        loss_weight: What the loss of this training batch is multiplied by, behind the hooks that see it.
    """

    def __init__(self, precision: str = "32-true", *, float8: Any = None, float8_layers: Choice | None = None) -> None:
        super().__init__(precision, float8=float8, float8_layers=float8_layers)
        self.engine: ZeroEngine | None = None
        self.loss_weight = 1.0
        self._finite: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a Trainer get an engine of their own."""
        return {**vars(self), "engine": None, "_finite": None}

    def adopt(self, engine: ZeroEngine, loss_scale: LossScaleConfig) -> None:
        """Take an engine; steps and clipping go through this engine from now on."""
        super().adopt(engine, loss_scale)
        self.engine = engine

    def weigh(self, weight: float) -> None:
        """Multiply the loss of this training batch by a weight, behind the hooks that see it."""
        self.loss_weight = weight

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss, then call the user's hooks; then weigh it."""
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale
        # As without sharding, hooks see the scaled loss of the rank's own batch.
        hooked: Tensor = super().pre_backward(tensor, module)
        # A backward in another loop has no weight of a training batch.
        return hooked * self.loss_weight if self.loss_weight != 1.0 and module.trainer.training else hooked

    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Run the closure, unscale, call the user's hooks, clip, step."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        # A training_step that returned None ran no backward: there is nothing to unscale.
        skipped = result is None and model.automatic_optimization
        if not skipped:
            assert self.engine is not None
            finite = self.engine.unscale_gradients(optimizer)
            self._finite = finite and self._finite is not False
        # Hooks and clipping want gradients without the scale.
        self._after_closure(model, optimizer)
        return result if skipped else optimizer.step(**kwargs)

    def update_scale(self) -> None:
        """Follow the steps taken since the last call.

        Once per batch, not per optimizer: backwards of a second optimizer may have run under the old scale.
        """
        if self.scaler is not None and self._finite is not None:
            self.scaler.update(finite=self._finite)
        self._finite = None

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp each element of the gradients."""
        assert self.engine is not None
        self.engine.clip_grad_value_(float(clip_val), optimizer=optimizer)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm over all ranks' shards."""
        assert self.engine is not None
        self.engine.clip_grad_norm_(float(clip_val), optimizer=optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, if there is one."""
        # A checkpoint has the scale that the next batch uses.
        self.update_scale()
        return super().state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the loss scale from a checkpoint that was saved under plain DDP."""
        if "MixedPrecision" in checkpoint and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint["MixedPrecision"])
