"""Meaning of a framework's `precision=` flag for a sharded module. Shared by Trainer and Fabric.

| precision     | parameters | optimizer works on      | steps run                 | loss scale |
| ------------- | ---------- | ----------------------- | ------------------------- | ---------- |
| `32-true`     | as they are| the parameters          | plain                     | no         |
| `bf16-true`   | bf16       | fp32 master weights     | default dtype bf16        | no         |
| `16-true`     | fp16       | fp32 master weights     | default dtype fp16        | yes        |
| `bf16-mixed`  | as they are| the parameters          | under autocast to bf16    | no         |
| `16-mixed`    | as they are| the parameters          | under autocast to fp16    | yes        |
| `64-true`     | fp64       | the parameters          | default dtype fp64        | no         |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.config import LossScaleConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.engines import engine_of
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

    Attributes:
        precision: The same.
        plan: What it means.
        device_type: Where steps run; set by the strategy.
        scaler: The loss scaler of all engines in use with this plugin, or None.

    Raises:
        ValueError: If there is no such precision.
    """

    precision: Any

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in PLANS:
            raise ValueError(f"precision {precision!r} is not supported; accepted: {', '.join(map(repr, PLANS))}")
        self.precision = precision
        self.plan = PLANS[precision]
        self.device_type = "cpu"
        self.scaler: LossScaler | None = None

    def adopt(self, engine: ZeroEngine, loss_scale: LossScaleConfig) -> None:
        """Share one loss scaler with an engine."""
        if self.plan.scales_loss and self.scaler is None:
            self.scaler = LossScaler(loss_scale)
        engine.scaler = self.scaler

    def convert_module(self, module: nn.Module) -> nn.Module:
        """`64-true` casts before the module is sharded; other dtypes are the engine's business."""
        if self.plan.default_dtype == torch.float64 and engine_of(module) is None:
            return module.double()
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Low-precision models are built in fp32, so that master weights start from unrounded values."""
        return self._default_dtype() if self.plan.default_dtype == torch.float64 else nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """As `tensor_init_context`."""
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
        if given != (65536.0, 2.0, 0.5, 2000):
            raise ValueError(
                f"{cls.__qualname__} has a gradient scaler with settings of its own (initial scale, growth, backoff, "
                f"interval: {given}), which knows nothing of other ranks' gradients. Set "
                'ZeroStrategy(loss_scale={"initial": ..., "growth_interval": ...}) instead.'
            )
    return str(plugin.precision)
