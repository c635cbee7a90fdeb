"""Lightning's callbacks that average weights, on shards.

`WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging` copy the module before it is sharded and change
parameters in place. Here a callback of the user's keeps all that it is, subclasses and their hooks included, and its
copy of the module is a `ShardedAverage`: the engine's average, with the interface of torch's `AveragedModel`.

    Trainer(callbacks=[EMAWeightAveraging(decay=0.99)])
      setup_environment    the callback in the Trainer's list becomes one of a subclass, with the same attributes
      setup                makes a `ShardedAverage` in place of a copy of the module
      strategy.setup       connects it with the engine
      on_train_batch_end   Lightning's own code: `_average_model.update_parameters(...)` when `should_update` says so

A directory checkpoint holds both: the model's weights and the averages beside the optimizer's state. Whole files have
Lightning's own keys, so that a run with DDP goes on with them, and the other way round.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.lightning.checkpoint_dict import AVERAGING_STATE, take_part, untouched, whole
from zero_strategy.optim.averaging import Blend, ExponentialBlend, WeightAverage, equal_blend

_NAMESPACES = ("lightning.", "pytorch_lightning.")
_CURRENT = "current_model_state"
_PREFIX = "module."


class ShardedAverage:
    """The engine's average, as the callbacks see torch's `AveragedModel`.

    Args:
        avg_fn, multi_avg_fn: As of `AveragedModel`.
        buffers: See `WeightAverage`.
        device: Where the average is kept.
    """

    def __init__(
        self,
        avg_fn: Any = None,
        multi_avg_fn: Any = None,
        *,
        buffers: bool | None = True,
        device: torch.device | int | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ValueError("give one of avg_fn and multi_avg_fn")
        self._avg_fn, self._multi, self._buffers, self._device = avg_fn, multi_avg_fn, buffers, device
        self._average: WeightAverage | None = None

    def connect(self, engine: ZeroEngine, device: torch.device) -> None:
        """Let the engine keep the average, from its present weights on. A collective."""
        if engine.average is not None and engine.average.shown:  # a validation of an earlier fit has failed
            engine.average.swap()
        where = None if self._device is None else torch.device(self._device)
        # The callback alone decides when there is an update.
        self._average = engine.average_weights(
            every_n_steps=0, blend=self._blend(device if where is None else where), buffers=self._buffers, device=where
        )

    def _blend(self, device: torch.device) -> Blend:
        """The function of `AveragedModel`; its own differs between devices."""
        multi = self._multi
        if multi is None and self._avg_fn is not None:
            return _exponential(self._avg_fn) or (
                lambda average, weights, updates: self._avg_fn(average, weights, updates)
            )
        if multi is None and device.type == "cpu":
            return equal_blend
        multi = multi or get_swa_multi_avg_fn()

        def blend(average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
            # torch's function writes to what it is given, and a blend gives a new tensor.
            found = average.clone()
            multi([found], [weights], updates)
            return found

        return blend

    @property
    def average(self) -> WeightAverage:
        """The engine's average."""
        assert self._average is not None, "the strategy connects it in its set-up"
        return self._average

    @property
    def n_averaged(self) -> Tensor:
        """The number of updates, 0-d int64."""
        return torch.tensor(self.average.updates)

    def update_parameters(self, model: object) -> None:
        """Blend in the weights of the engine's module."""
        self.average.update()

    def to(self, *args: object, **keywords: object) -> ShardedAverage:
        """Itself: it lies where it was made."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A copied Trainer's next fit makes its own.
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _exponential(avg_fn: Any) -> ExponentialBlend | None:
    """The blend of `torch.optim.swa_utils.get_ema_avg_fn`, which a fused op carries out; None: it is another."""
    decay = inspect.getclosurevars(avg_fn).nonlocals.get("decay") if inspect.isfunction(avg_fn) else None
    if not isinstance(decay, float) or not 0 <= decay < 1:
        return None
    # A variable's name proves nothing, so results are compared.
    random, found = torch.Generator().manual_seed(0), ExponentialBlend(decay)
    arguments = (torch.randn(1000, generator=random), torch.randn(1000, generator=random), torch.tensor(3))
    return found if torch.equal(found(*arguments), avg_fn(*arguments)) else None


class OnShards:
    """Put before a callback's own class: what is left of it works on a `ShardedAverage`."""

    _average_model: Any
    own_class: type[Any]
    needs: frozenset[str] = frozenset()
    """Methods that a subclass must not have of its own."""

    def __reduce__(self) -> Any:
        """A copy is one of the callback's own class, which the next fit changes as this one was."""
        return _restored, (self.own_class, {**vars(self), "_average_model": None})


def _restored(cls: type[Any], attributes: dict[str, Any]) -> Any:
    made = object.__new__(cls)
    made.__dict__.update(attributes)
    return made


class AveragingOnShards(OnShards):
    """Averages of `WeightAveraging` and `EMAWeightAveraging`."""

    needs = frozenset({"setup", "_swap_models", "_copy_average_to_current", "on_save_checkpoint", "on_load_checkpoint"})
    _use_buffers: bool
    _device: Any
    _kwargs: dict[str, Any]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A stand-in for a copy of the module."""
        if stage == "fit":
            self._average_model = ShardedAverage(**self._kwargs, buffers=self._use_buffers, device=self._device)

    def _swap_models(self, pl_module: Any) -> None:
        self._average_model.average.swap()

    def _copy_average_to_current(self, pl_module: Any) -> None:
        self._average_model.average.copy_to_model()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A directory gets the averages from the engine; a whole file has them in place of the weights."""
        if self._average_model is None or trainer.strategy.engine is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]
            return
        average = self._average_model.average
        checkpoint[AVERAGING_STATE] = {"n_averaged": self._average_model.n_averaged}
        if trainer.strategy.saves_whole_files(checkpoint):
            checkpoint[_CURRENT] = checkpoint["state_dict"]
            checkpoint["state_dict"] = _whole_average(average, trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take averages from a file of Lightning's; the engine reads those of a directory, with optimizer states."""
        weights = checkpoint["state_dict"]
        if self._average_model is None or trainer.strategy.engine is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)  # type: ignore[misc]
        elif not untouched(weights):
            average = self._average_model.average
            # Lightning has loaded `state_dict`, which has the averages here, into the model by now.
            if _CURRENT in checkpoint and AVERAGING_STATE in checkpoint:
                pl_module.load_state_dict(whole(checkpoint[_CURRENT]))
                average.set_values(whole(weights), int(checkpoint[AVERAGING_STATE]["n_averaged"]))
            else:
                average.restart()


class StochasticOnShards(OnShards):
    """Averages of `StochasticWeightAveraging`."""

    needs = frozenset({"setup", "transfer_weights", "update_parameters", "state_dict", "_load_average_model_state"})
    _avg_fn: Any
    _init_n_averaged: int
    _scheduler_state: Any
    _clear_schedulers: Any
    _trainer: Any

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A stand-in for a copy of the module."""
        self._trainer = trainer
        self._average_model = ShardedAverage(self._avg_fn, buffers=None) if stage == "fit" else None

    def update_parameters(self, average_model: ShardedAverage, model: Any, n_averaged: Tensor, avg_fn: Any) -> None:
        """Blend in the weights of the engine's module."""
        # Lightning counts, and saves its count.
        average_model.average.updates = int(n_averaged)
        average_model.update_parameters(model)
        n_averaged += 1

    def transfer_weights(self, src_pl_module: ShardedAverage, dst_pl_module: Any) -> None:
        """Let the model become its average."""
        src_pl_module.average.copy_to_model()

    def state_dict(self) -> dict[str, Any]:
        """Lightning's, with the averages where a whole file is saved; a directory gets them from the engine."""
        # Lightning's would ask a whole copy of the module for its state.
        model, self._average_model = self._average_model, None
        try:
            state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        finally:
            self._average_model = model
        strategy = self._trainer.strategy
        if model is not None and strategy.engine is not None and strategy.saves_whole_files({}):
            state["average_model_state"] = _whole_average(model.average, self._trainer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's, and what its `on_fit_start` does with it, which has come before."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        if self._scheduler_state is not None:
            self._clear_schedulers(self._trainer)

    def _load_average_model_state(self, model_state: Any) -> None:
        if self._average_model is not None and model_state:
            self._average_model.average.set_values(model_state, self._init_n_averaged)


def _whole_average(average: WeightAverage, trainer: Any) -> dict[str, Any]:
    """All values by name, on rank 0; a collective."""
    with average.applied():
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            found: dict[str, Any] = dict(whole(state))
            return found
        take_part(state)
        return {}


_BASES: Mapping[str, type[OnShards]] = {
    "WeightAveraging": AveragingOnShards,
    "StochasticWeightAveraging": StochasticOnShards,
}


def average_on_shards(callbacks: list[Any]) -> None:
    """Let the callbacks of a list that average weights do so on shards; those that do already stay as they are.

    Raises:
        ValueError: If there are two, or a subclass has its own way with the copy of the module; names it.
    """
    found = []
    for number, callback in enumerate(callbacks):
        base = _averaging_base(type(callback))
        if base is None:
            continue
        found.append(type(callback).__name__)
        if not isinstance(callback, OnShards):
            callbacks[number] = _on_shards(callback, base)
    if len(found) > 1:
        raise ValueError(f"callbacks {found[0]} and {found[1]} would both average the weights: leave one of them out")


def connect_averages(callbacks: Iterable[Any], engine: ZeroEngine, device: torch.device) -> None:
    """After the engine is made: let it keep the average that a callback asks for, or none any more."""
    for callback in callbacks:
        if isinstance(callback, OnShards):
            callback._average_model.connect(engine, device)
            return
    if engine.average is not None:
        engine.drop_average()


def _averaging_base(cls: type[Any]) -> type[Any] | None:
    # By name: the two namespaces' classes do not know one another.
    known = (c for c in cls.__mro__ if c.__name__ in _BASES and c.__module__.startswith(_NAMESPACES))
    return next(known, None)


def _on_shards(callback: Any, base: type[Any]) -> Any:
    cls, mixin = type(callback), _BASES[base.__name__]
    own = sorted(name for name in mixin.needs if getattr(cls, name) is not getattr(base, name))
    if own:
        raise ValueError(
            f"callback {cls.__name__} has a {own[0]}() of its own, which works on a copy of the whole module, and "
            f"shards have none: leave it to {base.__name__}, use engine.average_weights(...), or strategy='ddp'"
        )
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "own_class": cls}
    made: Any = object.__new__(type(cls.__name__, (mixin, cls), names))
    made.__dict__ = callback.__dict__  # one state, whichever of the two the user looks at
    return made
