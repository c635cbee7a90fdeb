"""The models that a `ZeroAccelerator` has prepared: an engine for each, to which optimizers attach."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from zero_strategy.aliases import moved
from zero_strategy.config import Fact, batch_fact
from zero_strategy.diagnostics.norms import NormLog, NormSettings
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate.uneven import Followers
from zero_strategy.pipeline.module import PipelineModule


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
        # A method of the model's own stays.
        if not isinstance(model, PipelineModule) and not hasattr(model, "no_sync"):
            object.__setattr__(model, "no_sync", NoSync(engine))
            engine.when_plain(partial(_remove_no_sync, model))
        if self._measured is not None:
            self._norm_logs[id(engine)] = NormLog(engine, self._measured)
        # `attach` takes back those of which the model is yet to come.
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

    def before_step(self, optimizer: Optimizer, unscale: Callable[[], None]) -> None:
        """Look at gradients where this step is measured, once `unscale` has undone their loss scale."""
        if self._norm_logs and self.followers is None:
            log = self._norm_logs[id(self.engine_of_optimizer(optimizer))]
            if log.due:
                unscale()
            log.before_step(optimizer)

    def after_step(self, engine: ZeroEngine) -> dict[str, float]:
        """The norms that were measured of a step."""
        log = self._norm_logs.get(id(engine))
        if log is None:
            return {}
        if self.followers is not None:
            log.drop()  # ranks without a batch would not measure
            return {}
        return log.after_step()


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


def forget_prepared(model: nn.Module, before: Any, wrapped: Any) -> None:
    """Take off what Accelerate's `prepare` has put on a model: its marks, and the forward under autocast.

    Args:
        model: The model, which is plain again.
        before: The `forward` among its attributes before; None: that of its class.
        wrapped: The one afterwards. Where somebody has put another one over it since, that stays.
    """
    for name in ("_is_accelerate_prepared", "_original_forward"):
        vars(model).pop(name, None)
    if wrapped is not before and vars(model).get("forward") is wrapped:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before


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
        # LocalSGD calls it as any code does, and only the name of its module tells.
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


if not TYPE_CHECKING:
    __getattr__ = moved(
        {
            "AgreedGradScaler": "integrations.accelerate.scaler",
            "GroupedScheduler": "integrations.accelerate.optimizers",
            "ZeroOptimizer": "integrations.accelerate.optimizers",
            "loss_scale_rule": "integrations.accelerate.scaler",
        }
    )
