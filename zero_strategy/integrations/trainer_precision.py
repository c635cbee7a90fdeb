"""The Trainer's precision plugin: loss scale, clipping and optimizer steps through the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.precision import ShardedPrecision

if TYPE_CHECKING:
    from typing import Any as _Base
else:
    _Base = object


class TrainerPrecision(ShardedPrecision, _Base):
    """Common base of `ZeroPrecision` of both Trainer namespaces; see `ShardedPrecision`.

    Attributes:
        engine: That of the module.
        loss_weight: What the loss of this training batch is multiplied by, behind the hooks that see it.
    """

    def __init__(self, precision: str = "32-true") -> None:
        super().__init__(precision)
        self.engine: ZeroEngine | None = None
        self.loss_weight = 1.0
        self._finite: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies of a Trainer get an engine of their own."""
        return {**vars(self), "engine": None, "_finite": None}

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss, then call the user's hooks; then weigh it."""
        if self.scaler is not None:
            tensor = tensor * self.scaler.scale
        hooked: Tensor = super().pre_backward(tensor, module)
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
        self.update_scale()
        return super().state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the loss scale from a checkpoint that was saved under plain DDP."""
        if "MixedPrecision" in checkpoint and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(checkpoint["MixedPrecision"])
