"""The fp16 scaler of a `ZeroAccelerator`: the calls of torch's GradScaler, whose decisions all ranks share.

Plain GradScaler looks at the gradients that a rank has. Over shards every rank would decide for itself, so looking at
them, undoing the scale and skipping a step are the engine's business; this class keeps the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from zero_strategy.config import LossScaleConfig, ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import LossScaler
from zero_strategy.runtime.torch_private import tree_map_only

_SETTINGS = {
    "init_scale": "initial",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
}
"""Settings of GradScalerKwargs, and ours of the same meaning."""


class AgreedGradScaler(GradScaler):
    """A GradScaler over shards: all ranks skip a step, or none does.

    Several optimizers may step after one backward: all undo the scale under which it ran, and the scale moves once,
    down if any of them overflowed.

    Args:
        rule: When the scale grows and falls; None switches scaling off (`GradScalerKwargs(enabled=False)`).
        engine_of: Gives the engine that an optimizer is attached to.
        device: Type of the device that losses are on.
        together: Makes what is around a call that ranks without a batch follow, from its name and the optimizer.
    """

    def __init__(
        self,
        rule: LossScaler | None,
        engine_of: Callable[[Optimizer], ZeroEngine],
        device: str,
        together: Callable[[str, Optimizer], AbstractContextManager[None]],
    ) -> None:
        super().__init__(device, enabled=rule is not None)
        self.rule, self._engine_of, self._together = rule, engine_of, together
        self._in_gradients = 0.0  # the scale of the last backward
        self._backwards = 0
        # Of those whose gradients are unscaled: all finite, and after which backward. Entries go with the step.
        self._unscaled: dict[Optimizer, tuple[bool, int]] = {}
        self._stepped: list[bool] = []  # outcomes that `update` is yet to follow
        self._before: dict[str, Any] | None = None  # the rule before it followed a step after this backward
        self._all_finite = True

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor in a list or tuple of them, by the scale."""
        if self.rule is None:
            return outputs
        self._in_gradients, self._before, self._all_finite = self.rule.scale, None, True
        self._backwards += 1
        self._drop_without_gradients()
        return tree_map_only(Tensor, lambda tensor: tensor * self._in_gradients, outputs)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """True if the scale was undone in an optimizer's gradients already, since the last backward."""
        inner = _inner(optimizer)
        return inner in self._unscaled and self._unscaled[inner][1] == self._backwards

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undo the scale in an optimizer's gradients; its next step is skipped if one of any rank is not finite.

        All ranks call it.

        Raises:
            RuntimeError: If that was done already since its last step, or no loss was scaled.
        """
        if self.rule is None:
            return
        inner = _inner(optimizer)
        if inner in self._unscaled:
            raise RuntimeError(
                f"the gradients of {type(inner).__name__} are unscaled already, and a backward has run since: unscale "
                "and clip only before a step (`if accelerator.sync_gradients:`), or call zero_grad()"
            )
        if not self._in_gradients:
            raise RuntimeError("no loss was scaled: call accelerator.backward(loss) in place of loss.backward()")
        # Not by the rule's scale, which may have moved after another optimizer's step.
        with self._together("unscale_gradients", inner):
            finite = self._engine_of(inner).unscale_gradients(inner, scale=self._in_gradients)
            self._unscaled[inner] = finite, self._backwards

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Undo the scale unless that is done, and step; the engine leaves all as it is if gradients overflowed.

        Raises:
            RuntimeError: If there is a closure: its gradients could not be looked at before the step.
        """
        inner = _inner(optimizer)
        if self.rule is None:
            inner.step(*args, **kwargs)
            return
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise RuntimeError("a step with a closure cannot be scaled in fp16: call it without, after the backward")
        with self._together("optimizer.step", inner):
            if inner not in self._unscaled:
                self.unscale_(inner)
            self._stepped.append(self._unscaled.pop(inner)[0])
            inner.step()

    @property
    def last_step_finite(self) -> bool:
        """True if the last step was taken."""
        return self._stepped[-1] if self._stepped else True

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale follow the steps since the last backward, or set it.

        Raises:
            RuntimeError: If nothing was stepped.
            FloatingPointError: If gradients overflow at the smallest scale.
        """
        if self.rule is None:
            return
        if new_scale is not None:
            self.rule.scale = float(new_scale)
            self._stepped.clear()
            return
        if not self._stepped:
            raise RuntimeError("scaler.update() without a scaler.step(optimizer) before it")
        if self._before is None:
            self._before = self.rule.state_dict()
        else:
            self.rule.load_state_dict(self._before)  # another optimizer after the same backward: not twice
        self._all_finite = self._all_finite and all(self._stepped)
        self._stepped.clear()
        self.rule.update(finite=self._all_finite)

    def position(self) -> tuple[Any, ...]:
        """Position of this rank between backwards and steps, for `take_position` on a rank without a batch."""
        return self._backwards, self._in_gradients, self._before, self._all_finite

    def take_position(self, position: tuple[Any, ...]) -> None:
        """Be where another rank is."""
        # The others have run a backward since.
        if position[0] != self._backwards:
            self._drop_without_gradients()
        self._backwards, self._in_gradients, self._before, self._all_finite = position

    def forget(self, optimizers: Iterable[Optimizer]) -> None:
        """Let go of optimizers whose engine ends; they take no step any more."""
        for optimizer in optimizers:
            self._unscaled.pop(optimizer, None)

    def _drop_without_gradients(self) -> None:
        for optimizer in [other for other in self._unscaled if not _has_gradients(other)]:
            del self._unscaled[optimizer]  # they were dropped without a step

    # ---- settings and state, in torch's form ----

    def get_scale(self) -> float:
        """Factor of losses; 1 where scaling is off."""
        return 1.0 if self.rule is None else self.rule.scale

    def get_growth_factor(self) -> float:
        """Growth factor of the scale."""
        return self._config().growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change it."""
        self._set(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Backoff factor of the scale."""
        return self._config().backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change it."""
        self._set(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Steps without overflow after which the scale grows."""
        return self._config().growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change it."""
        self._set(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters under torch's names, and what ours counts besides."""
        if self.rule is None:
            return {}
        config, state = self.rule.config, self.rule.state_dict()
        return {
            "growth_factor": config.growth_factor,
            "backoff_factor": config.backoff_factor,
            "growth_interval": config.growth_interval,
            "_growth_tracker": state["good_steps"],
            **state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over scale and counters, also a plain GradScaler's; settings stay those of this run.

        Raises:
            RuntimeError: If the state is that of a scaler that was switched off.
        """
        if self.rule is None:
            return
        if not state_dict:
            raise RuntimeError("the state of the scaler is empty: it was saved with GradScalerKwargs(enabled=False)")
        self.rule.load_state_dict(state_dict)

    def _config(self) -> LossScaleConfig:
        return LossScaleConfig() if self.rule is None else self.rule.config

    def _set(self, **values: Any) -> None:
        if self.rule is not None:
            self.rule.config = replace(self.rule.config, **values)


def loss_scale_rule(config: ZeroConfig, handler: Any) -> LossScaler | None:
    """The rule of the scale: `loss_scale` of the config, with what a GradScalerKwargs says in place of defaults.

    Args:
        config: The settings.
        handler: The GradScalerKwargs, or None.

    Returns:
        None where the handler switches scaling off.

    Raises:
        ValueError: If both set a value, and differently; names both.
    """
    given = {} if handler is None else dict(handler.to_kwargs())
    if not given.pop("enabled", True):
        return None
    found: dict[str, Any] = {}
    for theirs, value in given.items():
        ours = _SETTINGS[theirs]
        there, origin = getattr(config.loss_scale, ours), config.origin_of(f"loss_scale.{ours}")
        if there != value and not origin.startswith("default"):
            raise ValueError(
                f"GradScalerKwargs({theirs}={value}) and loss_scale.{ours} = {there} [{origin}] differ; set one of them"
            )
        found[ours] = float(value) if theirs != "growth_interval" else value
    # A small first scale that was asked for must not lie below our own default of the least one.
    initial = found.get("initial", config.loss_scale.initial)
    if initial < config.loss_scale.minimum and config.origin_of("loss_scale.minimum").startswith("default"):
        found["minimum"] = initial
    return LossScaler(replace(config.loss_scale, **found))


def _inner(optimizer: Any) -> Optimizer:
    """The torch optimizer inside of Accelerate's wrappers."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    found: Optimizer = optimizer
    return found


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
