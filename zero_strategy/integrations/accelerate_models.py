"""Models, optimizers and the fp16 scaler of a `ZeroAccelerator`: an engine for each model, to which optimizers attach.

The scaler has the calls of torch's GradScaler, and all ranks share its decisions.

Plain GradScaler looks at the gradients that a rank has. Over shards every rank would decide for itself, so looking at
them, undoing the scale and skipping a step are the engine's business; this class keeps the order of the calls.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from zero_strategy.config import Fact, LossScaleConfig, ZeroConfig, batch_fact
from zero_strategy.diagnostics.norms import NormLog, NormSettings
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate_uneven import Followers
from zero_strategy.optim import LossScaler
from zero_strategy.pipeline.module import PipelineModule
from zero_strategy.runtime.torch_private import tree_map_only


class PreparedModels:
    """The engines of prepared models, the optimizers that wait for one, and what is measured of their steps.

    A copy in another process is empty: engines hold process groups.

    Args:
        measured: What is measured of parameters from time to time; None: nothing.

    Attributes:
        followers: In `join_uneven_inputs`: what ranks without a batch do.
    """

    def __init__(self, measured: NormSettings | None = None) -> None:
        self._engines: dict[int, ZeroEngine] = {}
        self.followers: Followers | None = None
        self._for_training: dict[int, bool] = {}
        self._unattached: list[Optimizer] = []
        self._measured = measured
        self._norm_logs: dict[int, NormLog] = {}  # by the engines' ids

    def __reduce__(self) -> tuple[type[PreparedModels], tuple[NormSettings | None]]:
        return PreparedModels, (self._measured,)

    # ---- models ----

    @property
    def engines(self) -> dict[int, ZeroEngine]:
        """The engines that have not ended, by the models' ids."""
        return {model: engine for model, engine in self._engines.items() if not engine.ended}

    def add(self, model: nn.Module, engine: ZeroEngine, *, training: bool) -> list[Optimizer]:
        """Keep the engine of a model that was sharded now.

        Returns:
            The optimizers that waited for some model, for `attach`.
        """
        self._engines[id(model)], self._for_training[id(model)] = engine, training
        if not isinstance(model, PipelineModule) and not hasattr(model, "no_sync"):
            object.__setattr__(model, "no_sync", NoSync(engine))
            engine.when_plain(partial(_remove_no_sync, model))
        if self._measured is not None:
            self._norm_logs[id(engine)] = NormLog(engine, self._measured)
        waiting, self._unattached = self._unattached, []
        return waiting

    def add_again(self, model: nn.Module, *, listed: bool, training: bool) -> None:
        """A model that was evaluated first is then trained; one that `free_memory` let go of is prepared anew.

        Raises:
            ValueError: If it is prepared for training as it is.
        """
        trained = listed and self._for_training[id(model)]
        if trained and training:
            raise ValueError(
                f"this {type(model).__name__} was prepared by this ZeroAccelerator already, in place: drop it from the "
                "second accelerator.prepare(...), and give that the other objects alone"
            )
        self._for_training[id(model)] = training or trained

    def end(self, model: Any) -> None:
        """Close the engine of a model, if it has one."""
        self._for_training.pop(id(model), None)
        if (engine := self._engines.pop(id(model), None)) is not None:
            self._norm_logs.pop(id(engine), None)
            engine.close()

    def engine(self, model: nn.Module) -> ZeroEngine:
        """The engine of a prepared model.

        Raises:
            ValueError: If it was not prepared.
        """
        engine = self._engines.get(id(model))
        if engine is None:
            raise ValueError(
                f"{type(model).__name__} was not prepared by this accelerator: model = accelerator.prepare(model)"
            )
        if engine.ended:
            raise ValueError(
                f"the engine of this {type(model).__name__} has ended: {engine.ended_by}. Prepare the model again: "
                "model = accelerator.prepare(model)"
            )
        return engine

    # ---- optimizers ----

    def attach(self, optimizer: Optimizer, live: Sequence[Optimizer]) -> None:
        """Let an optimizer update the shards of its model, now or when that comes.

        Args:
            optimizer: The user's.
            live: Those that are prepared and not freed.

        Raises:
            ValueError: If it holds parameters of several models.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        engines = [e for e in self.engines.values() if held & {id(p) for _, p in e.model.names()}]
        if not engines:
            self._unattached.append(optimizer)
            optimizer.register_step_pre_hook(self._check_attached)
            return
        if len(engines) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters of {len(engines)} models; give each model an optimizer "
                "of its own"
            )
        if engines[0].optimizers and not any(sharded.optimizer in live for sharded in engines[0].optimizers):
            engines[0].detach()  # of a training before, which `free_memory` ended
        engines[0].attach(optimizer)

    def _check_attached(self, optimizer: Optimizer, *_: Any) -> None:
        if any(waiting is optimizer for waiting in self._unattached):
            raise ValueError(
                f"the parameters of {type(optimizer).__name__} are not those of a model that was prepared: prepare the "
                "model too, and make the optimizer from model.parameters() of that very object"
            )

    def engine_of_optimizer(self, optimizer: Optimizer) -> ZeroEngine:
        """The engine that an optimizer is attached to.

        Raises:
            ValueError: If it is attached to none.
        """
        for engine in self.engines.values():
            if any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                return engine
        ended = [f"that of {type(one.module).__name__} has ended: {one.ended_by}" for one in self._ended()]
        raise ValueError(
            f"{type(optimizer).__name__} belongs to no engine: prepare its model too"
            + (f" ({'; '.join(ended)}; prepare model and a new optimizer again)" if ended else "")
        )

    def _ended(self) -> list[ZeroEngine]:
        return [engine for engine in self._engines.values() if engine.ended]

    def is_attached(self, optimizer: Optimizer) -> bool:
        """True if an engine updates shards by an optimizer, or will when its model is prepared."""
        attached = (sharded.optimizer for engine in self.engines.values() for sharded in engine.optimizers)
        return any(optimizer is one for one in (*attached, *self._unattached))

    def engines_of_parameters(self, parameters: list[Any]) -> list[tuple[ZeroEngine, list[Any]]]:
        """The engines of parameters, each with its own of them, in the order in which models were prepared.

        Raises:
            ValueError: If one is of no prepared model.
        """
        left = {id(parameter): parameter for parameter in parameters}
        found = []
        for engine in self.engines.values():
            own = [left.pop(id(parameter)) for _, parameter in engine.model.names() if id(parameter) in left]
            if own:
                found.append((engine, own))
        if left or not found:
            ended = "; ".join(f"that of {type(one.module).__name__} has ended: {one.ended_by}" for one in self._ended())
            raise ValueError(
                "the parameters to clip are not all of prepared models: take them from the objects that were prepared"
                + (f" (engines: {ended})" if ended else "")
            )
        return found

    # ---- calls that ranks without a batch follow ----

    def together(self, name: str, prepared: Any, *arguments: Any) -> AbstractContextManager[None]:
        """Around what an optimizer does; in `join_uneven_inputs` ranks without a batch do it as well."""
        if self.followers is None:
            return nullcontext()
        return self.followers.training.together(name, self.followers.optimizer(prepared), *arguments)

    def clipping(
        self, name: str, parts: Sequence[tuple[ZeroEngine, list[Any]]], *numbers: float
    ) -> AbstractContextManager[None]:
        """Around a clip; as `together`.

        Raises:
            ValueError: If it is one over several models.
        """
        if self.followers is None:
            return nullcontext()
        if len(parts) > 1:
            raise ValueError(f"{name} over several models in join_uneven_inputs: clip each model's by itself")
        engine, parameters = parts[0]
        return self.followers.training.together(name, self.followers.places(engine, parameters), *numbers)

    # ---- what is measured of steps ----

    def measure(self, settings: NormSettings) -> None:
        """Measure this from now on, of the models that are there and of later ones."""
        for log in self._norm_logs.values():
            log.close()
        self._measured = settings
        self._norm_logs = {id(engine): NormLog(engine, settings) for engine in self.engines.values()}

    def before_step(self, prepared: ZeroOptimizer, unscale: Callable[[Any], None]) -> None:
        """Look at gradients, without their loss scale, where this step is measured."""
        if self._norm_logs and self.followers is None:
            log = self._norm_logs[id(self.engine_of_optimizer(prepared.optimizer))]
            if log.due:
                unscale(prepared)
            log.before_step(prepared.optimizer)

    def after_step(self, engine: ZeroEngine) -> dict[str, float]:
        """The norms that were measured of a step."""
        log = self._norm_logs.get(id(engine))
        if log is None:
            return {}
        if self.followers is not None:
            log.drop()  # ranks without a batch would not measure
            return {}
        return log.after_step()


class ZeroOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper around a torch optimizer that updates shards.

    It steps when gradients are synchronised, as Accelerate's does. The optimizer inside stays the user's object with
    the module's own parameters in its groups, so schedulers work.

    Args:
        optimizer: The user's.
        models: Those that were prepared.
        scaler: Of the losses, in fp16.
        stepping: Called before a step without a closure.
        stepped: Called after every step.
    """

    def __init__(
        self,
        optimizer: Any,
        models: PreparedModels,
        scaler: AgreedGradScaler | None,
        stepping: Callable[[ZeroOptimizer], None],
        stepped: Callable[[ZeroOptimizer], None],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._models, self._agreed, self._stepping, self._stepped = models, scaler, stepping, stepped

    def belongs_to(self, models: PreparedModels) -> bool:
        """True if it was prepared with these; another accelerator wraps the optimizer inside anew."""
        return self._models is models

    @property
    def engine(self) -> ZeroEngine:
        """The engine of its model.

        Raises:
            ValueError: If that is not prepared.
        """
        return self._models.engine_of_optimizer(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step where gradients are synchronised; all ranks skip it, or none (`step_was_skipped`).

        Raises:
            FloatingPointError: If fp16 gradients overflow at the smallest loss scale, or gradients are not finite and
                `nonfinite_gradients` is `raise`.
        """
        if self.gradient_state.sync_gradients:
            if closure is None:
                self._stepping(self)
            with self._models.together("optimizer.step with a closure" if closure else "optimizer.step", self):
                self.take_step(closure)
            self._stepped(self)

    def take_step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step, whether gradients are synchronised or not."""
        if self._agreed is None:
            self.optimizer.step(closure)
        else:
            self._agreed.step(self.optimizer, closure)
        self._is_overflow = self.engine.sharded(self.optimizer).skipped
        if self._agreed is not None:
            self._agreed.update()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients, or zero them in place, where they are synchronised."""
        if self.gradient_state.sync_gradients:
            with self._models.together("optimizer.zero_grad", self, set_to_none is not False):
                super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, on every rank; all ranks call it. `ZeroAccelerator.save_state` does without."""
        return self.engine.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a whole state."""
        self.engine.load_optimizer_state_dict(self.optimizer, state_dict)


class GroupedScheduler(AcceleratedScheduler):
    """Accelerate's wrapper around a schedule, where some processes have the same data.

    Args:
        prepared: Accelerate's.
        copies: Processes that have data of their own: steps of the schedule per optimizer step.
    """

    def __init__(self, prepared: AcceleratedScheduler, copies: int) -> None:
        super().__init__(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches)
        self._copies = copies

    def step(self, *arguments: Any, **keywords: Any) -> None:
        """See Accelerate's, so many times."""
        stepped = self.gradient_state.sync_gradients and not any(one.step_was_skipped for one in self.optimizers)
        if not stepped:
            super().step(*arguments, **keywords)
            return
        for _ in range(self._copies):
            total = getattr(self.scheduler, "total_steps", None)  # of OneCycle: no further than that
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*arguments, **keywords)


def facts_of_prepared(
    facts: Mapping[str, Fact], loaders: Sequence[Any], optimizers: Sequence[Any], copies: int, accumulation: int
) -> dict[str, Fact]:
    """Settings that the prepared objects add to these facts.

    Args:
        facts: What is known of the launch.
        loaders: The first one is that of the training.
        optimizers: A single one is that of the config.
        copies: Ranks that get different data.
        accumulation: Micro-batches of a step.
    """
    found = dict(facts)
    total = getattr(loaders[0], "total_batch_size", None) if loaders else None
    if isinstance(total, int) and "train_batch_size" not in found:
        micro = total // copies
        found["micro_batch_per_rank"] = Fact(micro, "the first prepared DataLoader")
        found["samples_per_step"] = batch_fact(copies, micro, accumulation)
    if len(optimizers) == 1:
        found["optimizer"] = Fact(optimizers[0].optimizer, "accelerator.prepare(...)")
    return found


def compile_in_place(module: nn.Module, settings: Mapping[str, Any], *, regions: bool) -> None:
    """Compile a module, keeping its object and hooks.

    Args:
        module: The module.
        settings: Keywords of `torch.compile`.
        regions: Compile the members of every ModuleList of one class each by itself, which is quicker to begin with;
            so are the parts beside them.
    """
    if regions and _repeats(module):
        for block in module.children():
            block.compile(**settings)
    elif regions and any(_repeats(part) for part in module.modules()):
        for child in module.children():
            compile_in_place(child, settings, regions=True)
    else:
        module.compile(**settings)


def _repeats(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1


def _remove_no_sync(model: nn.Module) -> None:
    if isinstance(vars(model).get("no_sync"), NoSync):
        object.__delattr__(model, "no_sync")


class NoSync:
    """`model.no_sync()` of a prepared model, as `DistributedDataParallel` has it; a copy of the model syncs nothing.

    Args:
        engine: It is held weakly, as it holds the model.
    """

    def __init__(self, engine: ZeroEngine | None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self) -> AbstractContextManager[None]:
        """Keep gradients on this rank.

        Raises:
            RuntimeError: For Accelerate's `LocalSGD`, which averages parameters that differ between ranks.
        """
        if sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            raise RuntimeError(
                "LocalSGD lets each rank's parameters go their own way between averages; ranks that share parameters "
                "or optimizer state have one value of each. Use accelerator.accumulate(model), which sends gradients "
                "once in so many batches, or prepare the model by a plain Accelerator"
            )
        engine = None if self._engine is None else self._engine()
        return nullcontext() if engine is None else engine.no_sync()

    def __deepcopy__(self, memo: object) -> NoSync:
        return NoSync(None)

    def __reduce__(self) -> tuple[type[NoSync], tuple[None]]:
        return NoSync, (None,)


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
        self._finite: dict[Optimizer, bool] = {}  # of those whose gradients are unscaled
        self._unscaled_after: dict[Optimizer, int] = {}  # after which backward
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
        return inner in self._finite and self._unscaled_after[inner] == self._backwards

    def unscale_(self, optimizer: Optimizer) -> None:
        """Undo the scale in an optimizer's gradients; its next step is skipped if one of any rank is not finite.

        All ranks call it.

        Raises:
            RuntimeError: If that was done already since its last step, or no loss was scaled.
        """
        if self.rule is None:
            return
        inner = _inner(optimizer)
        if inner in self._finite:
            raise RuntimeError(
                f"the gradients of {type(inner).__name__} are unscaled already, and a backward has run since: unscale "
                "and clip only before a step (`if accelerator.sync_gradients:`), or call zero_grad()"
            )
        if not self._in_gradients:
            raise RuntimeError("no loss was scaled: call accelerator.backward(loss) in place of loss.backward()")
        self._unscaled_after[inner] = self._backwards
        with self._together("unscale_gradients", inner):
            self._finite[inner] = self._engine_of(inner).unscale_gradients(inner, scale=self._in_gradients)

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
            if inner not in self._finite:
                self.unscale_(inner)
            self._stepped.append(self._finite.pop(inner))
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
        if position[0] != self._backwards:
            self._drop_without_gradients()
        self._backwards, self._in_gradients, self._before, self._all_finite = position

    def _drop_without_gradients(self) -> None:
        for optimizer in [other for other in self._finite if not _has_gradients(other)]:
            del self._finite[optimizer]  # they were dropped without a step

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
