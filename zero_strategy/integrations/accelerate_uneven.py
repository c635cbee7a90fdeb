"""`join_uneven_inputs`: what ranks without a batch do where the others clip, step or drop gradients, and at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher

from zero_strategy.engine import ZeroEngine
from zero_strategy.uneven import UnevenTraining


class Followers:
    """The calls of a `ZeroAccelerator` that ranks without a batch follow, by the names that `together` gives.

    Engines, parameters and optimizers are told by their numbers, which are the same on all ranks.

    Args:
        accelerator: The ZeroAccelerator, for its optimizers, schedulers, loss scale and counter of steps.
        engines: Of its models.
    """

    def __init__(self, accelerator: Any, engines: Iterable[ZeroEngine]) -> None:
        self._accelerator = accelerator
        self._engines = list(engines)
        self.training = UnevenTraining(
            [engine.model for engine in self._engines],
            {
                "clip_grad_norm_": self._clip_norm,
                "clip_grad_value_": self._clip_value,
                "unscale_gradients": self._unscale,
                "optimizer.step": self._step,
                "optimizer.zero_grad": self._zero_grad,
            },
        )

    # ---- what is told ----

    def places(self, engine: ZeroEngine, parameters: Sequence[Any]) -> tuple[int, list[int]]:
        """Numbers of an engine and of parameters of its model."""
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(engine.model.names())}
        number = next(number for number, other in enumerate(self._engines) if other is engine)
        return number, [numbers[id(parameter)] for parameter in parameters]

    def optimizer(self, prepared: Any) -> tuple[int, list[dict[str, Any]], Any]:
        """Number, hyper-parameters and position of the loss scale of a prepared optimizer."""
        optimizers, scaler = self._accelerator._optimizers, self._accelerator.scaler
        number = next(number for number, other in enumerate(optimizers) if prepared in (other, other.optimizer))
        return number, _hyper_parameters(prepared), None if scaler is None else scaler.position()

    # ---- what ranks without a batch do ----

    def _clip_norm(self, place: tuple[int, list[int]], max_norm: float, norm_type: float) -> None:
        engine, chosen = self._found(place)
        engine.clip_grad_norm_(max_norm, norm_type, parameters=chosen)

    def _clip_value(self, place: tuple[int, list[int]], clip_value: float) -> None:
        engine, chosen = self._found(place)
        engine.clip_grad_value_(clip_value, parameters=chosen)

    def _found(self, place: tuple[int, list[int]]) -> tuple[ZeroEngine, list[Any]]:
        engine = self._engines[place[0]]
        parameters = [parameter for _, parameter in engine.model.names()]
        return engine, [parameters[number] for number in place[1]]

    def _unscale(self, told: tuple[int, list[dict[str, Any]], Any]) -> None:
        self._accelerator.scaler.unscale_(self._catch_up(told))

    def _step(self, told: tuple[int, list[dict[str, Any]], Any]) -> None:
        self._catch_up(told).take_step()

    def _zero_grad(self, told: tuple[int, list[dict[str, Any]], Any], set_to_none: bool) -> None:
        self._catch_up(told).optimizer.zero_grad(set_to_none=set_to_none)

    def _catch_up(self, told: tuple[int, list[dict[str, Any]], Any]) -> Any:
        """The optimizer, with the learning rate that the others' schedules have come to."""
        number, hyper_parameters, position = told
        prepared = self._accelerator._optimizers[number]
        _take_hyper_parameters(prepared, hyper_parameters)
        if position is not None:
            self._accelerator.scaler.take_position(position)
        return prepared

    # ---- around the loop ----

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The loop over batches; all ranks leave it with the same schedules and hyper-parameters."""
        with self.training.loop():
            yield
        accelerator = self._accelerator
        mine = None
        if not self.training.followed:
            schedules = [scheduler.state_dict() for scheduler in accelerator._schedulers]
            mine = schedules, [_hyper_parameters(prepared) for prepared in accelerator._optimizers], accelerator.step
        everyone = self._engines[0].mesh.control.all_gather_objects(mine)
        if self.training.followed:  # some rank was the last, and has not
            schedules, hyper_parameters, accelerator.step = next(theirs for theirs in everyone if theirs is not None)
            for scheduler, state in zip(accelerator._schedulers, schedules, strict=True):
                scheduler.load_state_dict(state)
            for prepared, values in zip(accelerator._optimizers, hyper_parameters, strict=True):
                _take_hyper_parameters(prepared, values)


@contextmanager
def batches_as_they_are(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    """Let prepared loaders give ranks even or uneven numbers of batches inside; None leaves them."""
    if even_batches is None:
        yield
        return
    samplers = [loader.batch_sampler for loader in loaders if not isinstance(loader, DataLoaderDispatcher)]
    samplers = [sampler for sampler in samplers if hasattr(sampler, "even_batches")]
    if len(samplers) < len(loaders):
        problem = "overriding even_batches is only supported for map-style datasets that are not dispatched"
        warnings.warn(problem, stacklevel=4)
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, value in zip(samplers, before, strict=True):
            sampler.even_batches = value


def check_joinable(accelerator: Any, engines: Iterable[ZeroEngine]) -> None:
    """Raise if ranks without a batch could not follow the others.

    Raises:
        ValueError: If a model is a pipeline, or accumulation would end at different batches on different ranks.
    """
    if any(engine.is_part for engine in engines):
        raise ValueError(
            "join_uneven_inputs(even_batches=False) is not for pipelines, whose ranks all take part in "
            "every batch: let the loader end evenly (even_batches=True)"
        )
    if accelerator.gradient_accumulation_steps > 1 and accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            f"with gradient_accumulation_steps={accelerator.gradient_accumulation_steps} a rank steps at its last "
            "batch, and in join_uneven_inputs(even_batches=False) ranks have different ones: take "
            "GradientAccumulationPlugin(num_steps=..., sync_with_dataloader=False), or even_batches=True"
        )


def _hyper_parameters(prepared: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in prepared.param_groups]


def _take_hyper_parameters(prepared: Any, values: Sequence[dict[str, Any]]) -> None:
    for group, theirs in zip(prepared.param_groups, values, strict=True):
        group.update(theirs)
