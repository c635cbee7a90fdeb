"""The part of `ZeroAccelerator` that a training step calls: backward, synchronisation, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate_models import ShardingAccelerator
from zero_strategy.integrations.accelerate_uneven import Followers, batches_as_they_are
from zero_strategy.ops.library import norm_order


class SteppingAccelerator(ShardingAccelerator):
    """What works on gradients asks the engine that has them.

    Attributes:
        loss_weight: That losses are multiplied by before `backward` gets them, by somebody who accumulates by himself.
    """

    loss_weight: float = 1.0

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """As Accelerate's.

        Raises:
            RuntimeError: If the loss uses released parameters outside of their module's forward (stage 3), naming them.
        """
        for engine in self._engines.values():
            engine.check_loss(loss, self.loss_weight)
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
        for prepared in [] if self.scaler is None else self._optimizers:
            if any(id(p) in ids for group in prepared.param_groups for p in group["params"]):
                self.unscale_gradients(prepared)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float | str = 2.0
    ) -> Tensor:
        """Scale the gradients of exactly these parameters so that their norm over all ranks is at most `max_norm`.

        In fp16 the loss scale is undone first, in all gradients of the optimizers that hold them.

        Returns:
            The norm before, without the loss scale, the same on all ranks.

        Raises:
            ValueError: If they belong to no prepared model, or to several.
        """
        norm_type = norm_order(norm_type)
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_parameters(chosen)
        self._unscale_those_of(chosen)
        with self._clipping("clip_grad_norm_", engine, chosen, max_norm, norm_type):
            return engine.clip_grad_norm_(max_norm, norm_type, parameters=chosen)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element of these parameters to [-clip_value, clip_value]."""
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_parameters(chosen)
        self._unscale_those_of(chosen)
        with self._clipping("clip_grad_value_", engine, chosen, clip_value):
            engine.clip_grad_value_(clip_value, parameters=chosen)

    def _clipping(
        self, name: str, engine: ZeroEngine, parameters: list[Any], *numbers: float
    ) -> AbstractContextManager[None]:
        """Around a clip, which ranks without a batch must follow."""
        if self._followers is None:
            return contextlib.nullcontext()
        return self._followers.training.together(name, self._followers.places(engine, parameters), *numbers)

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
        """A loop over batches of which ranks have different numbers (with `even_batches=False`).

        Ranks that have run out take part with zero gradients until no rank has a batch left: a gradient is the sum over
        ranks divided by all of them, as in Accelerate with DistributedDataParallel; also on the CPU, where Accelerate's
        does nothing. Ranks that followed take over the others' schedules.

        Inside, call the prepared objects: models as a whole, the clipping of the accelerator, prepared optimizers and
        schedulers; other calls that need all ranks (`gather`, `save_state`) would wait for those that are not there.

        Args:
            joinables: The models that are trained.
            even_batches: Whether prepared loaders repeat samples at the end instead; None: as the accelerator was made.

        Raises:
            ValueError: If a model is not prepared, or accumulation would end at different batches on different ranks.
            RuntimeError: If ranks with a batch left do different things.
        """
        even = self.even_batches if even_batches is None else even_batches
        with batches_as_they_are(self._dataloaders, even_batches if self.num_processes > 1 else None):
            if even or self.num_processes == 1:
                yield
                return
            for model in joinables:
                if self.engine(model).is_part:
                    raise ValueError(
                        "join_uneven_inputs(even_batches=False) is not for pipelines, whose ranks all take part in "
                        "every batch: let the loader end evenly (even_batches=True)"
                    )
            self._check_accumulation()
            self._followers = Followers(self)
            try:
                with self._followers.loop():
                    yield
            finally:
                self._followers = None

    def _check_accumulation(self) -> None:
        if self.gradient_accumulation_steps > 1 and self.gradient_state.sync_with_dataloader:
            raise ValueError(
                f"with gradient_accumulation_steps={self.gradient_accumulation_steps} a rank steps at its last batch, "
                "and in join_uneven_inputs(even_batches=False) ranks have different ones: take "
                "GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), or even_batches=True"
            )
