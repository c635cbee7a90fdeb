"""`join_uneven_inputs`: training of sharded models by ranks with different numbers of batches.

A rank that has run out goes on taking part in what the others do, without data: it sends zeros, follows their gathers,
clips, steps its slices and drops gradients as they do. A gradient is still the sum over ranks divided by all of them,
as under torch's `Join` and DistributedDataParallel with its default `divide_by_initial_world_size=True`.

Before every forward ranks tell each other whether they have a batch. While all do, nothing else changes. From the
first forward that some rank lacks on, those with a batch announce whatever the others must follow, one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.runtime.module_hooks import EphemeralHook
from zero_strategy.runtime.torch_private import uncompiled


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
        # The scaler tells torch's optimizer, other calls Accelerate's wrapper around it.
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


class _Announced(NamedTuple):
    """Next action of a rank with a batch; `what` and `where` are the same on all such ranks."""

    what: str
    where: tuple[Any, ...]
    value: Any


class UnevenTraining:
    """One loop over batches, of which ranks may have different numbers.

    Args:
        models: Every model that the loop calls, in the same order on all ranks.
        calls: What ranks without a batch do where the others are in `together(name, *arguments)`.

    Attributes:
        followed: Whether this rank has run out of batches before another.
    """

    def __init__(self, models: Sequence[ShardedModel], calls: Mapping[str, Callable[..., object]]) -> None:
        self._models, self._calls = list(models), calls
        self._control = models[0].mesh.control
        self._some_idle = False
        self._inside = 0
        self.followed = False

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Around the loop; returns when no rank has a batch left.

        Raises:
            RuntimeError: On all ranks, if those with a batch do different things.
        """
        # First of all hooks, since the engine's own gathers what must be announced before.
        hooks = [
            model.module.register_forward_pre_hook(_BeforeForward(self, number), prepend=True)
            for number, model in enumerate(self._models)
        ]
        try:
            yield
            self._follow()
        finally:
            for hook in hooks:
                hook.remove()
            for model in self._models:
                model.reducer.announce_to(None)
                if model.unsharder is not None and self._some_idle:
                    model.unsharder.announce_to(None)
                    model.unsharder.release_idle()
                    model.unsharder.forget_order()  # which ranks that followed have not seen

    @contextmanager
    def together(self, name: str, *arguments: Any) -> Iterator[None]:
        """Around code with collectives of its own; ranks without a batch do `calls[name](*arguments)` meanwhile.

        The arguments may be anything that can be pickled; those of one rank count.

        Raises:
            ValueError: If there is no such call.
        """
        if name not in self._calls:
            raise ValueError(f"{name} cannot be followed by ranks that have no batch left; do without in such a loop")
        if not self._some_idle or self._inside:
            yield
            return
        # A script may have changed gradients since the last call.
        self._exchange(_Announced("gradients", (name,), [model.reducer.shown() for model in self._models]))
        for model in self._models:
            model.reducer.settle()  # announces by itself what `no_sync` kept back
        self._exchange(_Announced(name, (), arguments))
        # Followers do the whole call, so nothing inside of it is announced by itself.
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    # ---- ranks with a batch ----

    def before_forward(self, number: int) -> None:
        """A forward of model `number` begins."""
        if self._inside:
            return
        if self._some_idle:
            self._exchange(_Announced("forward", (number,), None))
        elif not all(self._have_batches(True)):
            self._begin_announcing()

    def _begin_announcing(self) -> None:
        self._some_idle = True
        for number, model in enumerate(self._models):
            model.reducer.announce_to(partial(self._announce_reduction, number))
            if model.unsharder is not None:
                model.unsharder.release_idle()  # nothing is gathered on any rank now
                model.unsharder.announce_to(partial(self._announce_gather, number))

    def _announce_reduction(self, number: int, what: str, value: Any) -> None:
        if not self._inside:
            where = (number,) if what == "backward" else (number, value)
            self._exchange(_Announced(what, where, value))

    def _announce_gather(self, number: int, unit: int) -> None:
        if not self._inside:
            self._exchange(_Announced("gather", (number, unit), None))

    # ---- ranks without one ----

    def _follow(self) -> None:
        if not self._some_idle:
            if not any(self._have_batches(False)):
                return
            self._begin_announcing()
        while (announced := self._exchange(None)) is not None:
            self.followed = True
            self._inside += 1
            try:
                self._do(announced)
            finally:
                self._inside -= 1

    def _do(self, announced: _Announced) -> None:
        if announced.what in self._calls:
            self._calls[announced.what](*announced.value)
        elif announced.what == "gather":
            number, index = announced.where
            unsharder = self._models[number].unsharder
            assert unsharder is not None
            unsharder.units[index].gather()
            unsharder.units[index].release()
        elif announced.what == "gradients":
            for model, shown in zip(self._models, announced.value, strict=True):
                model.reducer.follow_shown(shown)
        # A forward itself sends nothing; its gathers are announced.
        elif announced.what != "forward":
            self._models[announced.where[0]].reducer.follow(announced.what, announced.value)

    # ---- messages ----

    def _have_batches(self, mine: bool) -> list[bool]:
        everyone = self._control.all_gather_small(torch.tensor([mine], dtype=torch.int8))
        found: list[bool] = torch.cat(everyone).bool().tolist()
        return found

    def _exchange(self, mine: _Announced | None) -> _Announced | None:
        """Next action of the ranks with a batch; None if there are none left."""
        everyone: list[_Announced | None] = self._control.all_gather_objects(mine)
        told = {rank: one for rank, one in enumerate(everyone) if one is not None}
        if len({(one.what, one.where) for one in told.values()}) > 1:
            shown = {rank: f"{one.what} {one.where or ''}".strip() for rank, one in told.items()}
            raise RuntimeError(
                f"ranks with a batch left do different things while others have none: {shown}. Every rank must do the "
                "same for each of its batches; let even_batches=True repeat samples where that cannot be"
            )
        return next(iter(told.values()), None)


class _BeforeForward(EphemeralHook):
    """The hook of one model."""

    def __init__(self, training: UnevenTraining, number: int) -> None:
        self._training, self._number = training, number

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell the others."""
        self._training.before_forward(self._number)
