"""Fabric's precision plugins: loss scale and optimizer steps through the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.precision import ShardedPrecision, convert_output

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class FabricPrecision(ShardedPrecision, _Base):
    """Common base of `ZeroPrecision` of both Fabric namespaces; see `ShardedPrecision`.

    It leaves `backward` and `pre_backward` alone: Fabric forbids a plain `loss.backward()` where either is overridden.
    """

    def convert_output(self, data: Any) -> Any:
        """Cast low-precision outputs back, as Lightning's own plugins do."""
        is_plain = self.plan.default_dtype is None and self.plan.autocast_dtype is None
        return data if is_plain else convert_output(data)


class ScaledFabricPrecision(FabricPrecision):
    """With loss scaling; `fabric.backward(loss)` is then the only way to backward, as Fabric enforces.

    Attributes:
        engine_of_optimizer: Gives the engine that an optimizer is attached to; set by the strategy.
    """

    engine_of_optimizer: Callable[[Optimizer], ZeroEngine]

    def __init__(self, precision: str = "16-mixed") -> None:
        super().__init__(precision)
        self._unscaled: dict[int, bool] = {}
        self._finite: bool | None = None

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
        self._finite = finite and self._finite is not False
        return optimizer.step(**kwargs)
