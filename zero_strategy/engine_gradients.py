"""What an engine does with gradients between a backward and a step: their norm, clipping, the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.ops.arguments import norm_order
from zero_strategy.optim import GradientNorm, LossScaler, ShardedOptimizer
from zero_strategy.optim.nonfinite_steps import IGNORE
from zero_strategy.optim.norm import GradientStats, global_norm
from zero_strategy.optim.own_gradients import OwnGradients
from zero_strategy.sharding import ShardedModel

if TYPE_CHECKING:
    from zero_strategy.engine import ZeroEngine


class EngineGradients:
    """The part of `ZeroEngine` that works on gradients."""

    model: ShardedModel
    optimizers: list[ShardedOptimizer]
    scaler: LossScaler | None
    gradient_watchers: list[Callable[[GradientStats], None]]

    @property
    def _engine(self) -> ZeroEngine:
        return cast("ZeroEngine", self)

    def add_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that no backward of this engine gave: this rank's, of which the mean over ranks is taken.

        It counts as one more micro-batch: the sum over ranks is added to that of the micro-batches. All ranks call it,
        for the same parameters, after the last backward and before the norm or the step.

        Args:
            parameter: A trainable parameter of the module.
            gradient: Of its shape.

        Raises:
            ValueError: If the parameter is not the module's, is frozen, or has another shape.
        """
        if self.model.place(parameter) is None or not parameter.requires_grad:
            raise ValueError("add_gradient takes a trainable parameter of the engine's module")
        if gradient.shape != parameter.shape:
            raise ValueError(f"a gradient of shape {tuple(gradient.shape)} for a parameter of {tuple(parameter.shape)}")
        self.model.reducer.add(parameter, gradient)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float | str = 2.0,
        optimizer: Optimizer | None = None,
        error_if_nonfinite: bool = False,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`. A collective.

        Args:
            max_norm: The bound.
            norm_type: Any positive p, or inf, also as the string "inf".
            optimizer: Whose gradients; default: those of all attached optimizers together, or of all parameters if
                none is attached.
            error_if_nonfinite: Raise, on every rank, instead of multiplying by nan.
            parameters: Those whose gradients count and are scaled, the same on all ranks; default: all.

        Returns:
            The norm before clipping, 0-d float32.

        Raises:
            ValueError: If max_norm is negative.
            RuntimeError: If the norm is not finite and `error_if_nonfinite`.
        """
        if max_norm < 0:
            raise ValueError(f"max_norm must not be negative, not {max_norm}")
        only = None if parameters is None else {id(parameter) for parameter in parameters}
        with self._engine.observed.span("clip"):
            norm = self._norm(norm_type, optimizer, only)
            if error_if_nonfinite and not norm.finite:
                problem = f"the gradient norm of order {norm_type} is {norm.value}"
                raise RuntimeError(f"{problem}; gradients were not clipped")
            coefficient = norm.coefficient(max_norm)
            for gradients in self._chosen(optimizer):
                gradients.scale(coefficient, only)
        return torch.tensor(norm.value, dtype=torch.float32)

    def clip_grad_value_(
        self,
        clip_value: float,
        optimizer: Optimizer | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> None:
        """Clamp every gradient element, or those of `parameters`, to [-clip_value, clip_value].

        Raises:
            ValueError: If clip_value is negative.
        """
        if clip_value < 0:
            raise ValueError(f"clip_value must not be negative, not {clip_value}")
        only = None if parameters is None else {id(parameter) for parameter in parameters}
        for gradients in self._chosen(optimizer):
            gradients.clip_values(clip_value, only)

    def grad_norm(self, norm_type: float | str = 2.0, optimizer: Optimizer | None = None) -> GradientNorm:
        """Norm of the mean gradients over all ranks. A collective.

        Args:
            norm_type: Any positive p, or inf, also as the string "inf".
            optimizer: Whose gradients; default: those of all attached optimizers, of all parameters if there is none.
        """
        return self._norm(norm_type, optimizer, None)

    def _norm(self, norm_type: float | str, optimizer: Optimizer | None, only: set[int] | None) -> GradientNorm:
        norm_type = norm_order(norm_type)
        self.model.reducer.settle()
        parts = [gradients.shards(norm_type, only) for gradients in self._chosen(optimizer)]
        shards = [shard for found, _, _ in parts for shard in found]
        factors = [factor for _, found, _ in parts for factor in found]
        seen: list[tuple[Tensor, Tensor]] = []
        norm = global_norm(shards, norm_type, self.model.norm_groups, factors, lambda *stats: seen.append(stats))
        told = self._engine.nonfinite.choice != IGNORE and self.optimizers and self.scaler is None
        if told and not (optimizer is None and self._shared()):
            chosen = self.optimizers if optimizer is None else [self._engine.sharded(optimizer)]
            each = seen[0][1].split([len(names) for _, _, names in parts])
            looked_at = [(one, (names, counts)) for one, (_, _, names), counts in zip(chosen, parts, each, strict=True)]
            self._engine.nonfinite.note(looked_at, only, finite=norm.finite)
        for watch in list(self.gradient_watchers):
            watch(GradientStats([name for _, _, found in parts for name in found], norm_type, *seen[0], norm))
        return norm

    def _chosen(self, optimizer: Optimizer | None) -> list[OwnGradients]:
        """Those of an optimizer, or of each; of the whole module where none is attached; each gradient once."""
        if optimizer is None and not self.optimizers:
            return [OwnGradients(self.model, lambda: (parameter for _, parameter in self.model.names()))]
        if optimizer is None and self._shared():
            held = {id(p): p for sharded in self.optimizers for p in sharded.parameters()}
            return [OwnGradients(self.model, lambda: iter(held.values()))]
        chosen = self.optimizers if optimizer is None else [self._engine.sharded(optimizer)]
        return [sharded.gradients for sharded in chosen]

    def _shared(self) -> bool:
        """Whether a parameter is in two optimizers."""
        if len(self.optimizers) < 2:
            return False
        held = [id(parameter) for sharded in self.optimizers for parameter in sharded.parameters()]
        return len(set(held)) < len(held)

    # ---- fp16 ----

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call backward on: scaled in fp16, unchanged otherwise."""
        return loss if self.scaler is None else loss * self.scaler.scale

    def unscale_gradients(self, optimizer: Optimizer, scale: float | None = None) -> bool:
        """Undo the loss scale in an optimizer's gradients; the next step is skipped if one is not finite.

        A collective: all ranks decide alike. Call once per step, before clipping.

        Args:
            optimizer: Whose gradients.
            scale: What the losses were multiplied by; default: the scaler's present scale.

        Returns:
            Whether the step will be taken.
        """
        if self.scaler is None:
            return True
        sharded = self._engine.sharded(optimizer)
        finite = sharded.gradients.norm(float("inf")).finite
        sharded.gradients.scale(1.0 / (scale or self.scaler.scale))
        sharded.skip_next = not finite
        return finite
