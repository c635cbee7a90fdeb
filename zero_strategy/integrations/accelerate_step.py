"""The part of `ZeroAccelerator` that a training step calls: backward, synchronisation, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate_models import ShardingAccelerator


class SteppingAccelerator(ShardingAccelerator):
    """What works on gradients asks the engine that has them."""

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """As Accelerate's.

        Raises:
            RuntimeError: If the loss uses released parameters outside of their module's forward (stage 3), naming them.
        """
        for engine in self._engines.values():
            engine.check_loss(loss)
        super().backward(loss, **keywords)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards inside may keep gradients on this rank."""
        engine = self._engines.get(id(model))
        with contextlib.nullcontext() if engine is None else engine.no_sync():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Nothing to do: a backward outside of `no_sync` synchronises, wherever its forward was."""
        yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scale in the gradients of one optimizer, of several, or of all, where that is yet to be done.

        All ranks call it; nothing to do but in fp16.
        """
        if self.scaler is None or not self.scaler.is_enabled():
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            if not self.scaler.is_unscaled(one):
                self.scaler.unscale_(one)

    def _unscale_those_of(self, parameters: list[Any]) -> None:
        """Accelerate's unscales all optimizers, those that are between their own backwards, too."""
        ids = {id(parameter) for parameter in parameters}
        for prepared in self._optimizers:
            if any(id(p) in ids for group in prepared.param_groups for p in group["params"]):
                self.unscale_gradients(prepared)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients of exactly these parameters so that their norm over all ranks is at most `max_norm`.

        In fp16 the loss scale is undone first, in all gradients of the optimizers that hold them.

        Returns:
            The norm before, without the loss scale, the same on all ranks.

        Raises:
            ValueError: If they belong to no prepared model, or to several.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_parameters(chosen)
        self._unscale_those_of(chosen)
        return engine.clip_grad_norm_(max_norm, norm_type, parameters=chosen)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element of these parameters to [-clip_value, clip_value]."""
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_parameters(chosen)
        self._unscale_those_of(chosen)
        engine.clip_grad_value_(clip_value, parameters=chosen)

    def _engine_of_parameters(self, parameters: list[Any]) -> ZeroEngine:
        ids = {id(parameter) for parameter in parameters}
        for engine in self._engines.values():
            if ids <= {id(parameter) for _, parameter in engine.model.names()}:
                return engine
        raise ValueError(
            "the parameters to clip are not all of one prepared model: clip each model's by itself, and take them from "
            "the object that was prepared"
        )

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Accelerate's, where no rank can run out of batches before another.

        Raises:
            ValueError: With several processes and `even_batches=False`.
        """
        if self.num_processes > 1 and not (self.even_batches if even_batches is None else even_batches):
            raise ValueError(
                "join_uneven_inputs(even_batches=False) is not supported under ZeRO: a rank without a batch would "
                "leave the others waiting. Leave even_batches=True, which repeats samples at the end"
            )
        yield
