"""ZeRO for scripts written for Hugging Face Accelerate: a subclass in place of `Accelerator`, started as before.

    from zero_strategy.integrations.accelerate import ZeroAccelerator
    accelerator = ZeroAccelerator(zero_config={"stage": 3})      # or ZERO_STRATEGY_CONFIG=config.yaml
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The model that `prepare` returns is the user's own, sharded in place; there is no wrapper. Accelerate's distributed type
stays MULTI_GPU or MULTI_CPU, so all that it does beside sharding (loaders, gathering, trackers) is its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.save_writer import unlisted
from zero_strategy.config import LATER_KEYS, Fact, ZeroConfig, batch_fact, check_owned, load_config, resolve
from zero_strategy.deferred import is_deferred
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations import accelerate_states
from zero_strategy.integrations.accelerate_launch import (
    check_processes,
    check_single_owner,
    configured,
    needs_cpu,
)
from zero_strategy.integrations.accelerate_optimizer import ZeroOptimizer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ZeroAccelerator"]

_KEY = "accelerate"
"""Of the Accelerator's own entry in a checkpoint's user metadata."""


class ZeroAccelerator(Accelerator):
    """Accelerate's `Accelerator` with ZeRO sharding.

    Args:
        zero_config: Anything `load_config` takes; default: the file that `ZERO_STRATEGY_CONFIG` names, else stage 3.
        **keywords: Everything that `Accelerator` takes, but other ways of sharding.

    Attributes:
        zero_config: The settings.

    Raises:
        ValueError: If the launch or an argument asks for DeepSpeed, FSDP, Megatron or a parallelism config as well, or
            each of several processes would train alone; names what to change.
    """

    def __init__(self, *arguments: Any, zero_config: Any = None, **keywords: Any) -> None:
        check_single_owner(keywords, os.environ)
        if needs_cpu(os.environ) and len(arguments) < 5:  # `cpu` is the fifth
            keywords.setdefault("cpu", True)
        super().__init__(*arguments, **keywords)
        self._set_up(zero_config)

    @classmethod
    def adopt(
        cls, accelerator: Accelerator, zero_config: Any = None, facts: Mapping[str, Fact] | None = None
    ) -> Self:
        """Ours in the place of an Accelerator that somebody else has made and that has prepared nothing yet.

        Args:
            accelerator: Theirs.
            zero_config: As for making one.
            facts: What its owner decides, to be held against a DeepSpeed JSON.

        Raises:
            ValueError: As making one; or if it has prepared something.
        """
        check_single_owner({}, os.environ)
        if accelerator._models or accelerator._optimizers:
            raise ValueError("this Accelerator has prepared models or optimizers already, which cannot be undone")
        adopted = cls.__new__(cls)
        adopted.__dict__.update(accelerator.__dict__)
        adopted._set_up(zero_config, facts)
        return adopted

    def _set_up(self, zero_config: Any, facts: Mapping[str, Fact] | None = None) -> None:
        check_processes(self.num_processes, os.environ)
        if self.scaler is not None:
            raise ValueError("mixed_precision='fp16' is not supported by ZeroAccelerator yet; use 'bf16' or 'no'")
        self.zero_config: ZeroConfig = load_config(configured() if zero_config is None else zero_config)
        self._engines: dict[int, ZeroEngine] = {}
        self._unattached: list[Optimizer] = []
        steps, precision = self.gradient_accumulation_steps, self.mixed_precision
        self._facts = facts or {
            "gradient_accumulation_steps": Fact(steps, f"ZeroAccelerator(gradient_accumulation_steps={steps})"),
            "training_precision": Fact(precision, f"ZeroAccelerator(mixed_precision={precision!r})"),
        }
        check_owned(self.zero_config, self._facts, later=LATER_KEYS)

    # ---- prepare ----

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; models come first, in whatever order they are given, for optimizers update their shards."""
        models = [index for index, item in enumerate(objects) if isinstance(item, nn.Module)]
        order = models + [index for index in range(len(objects)) if index not in models]
        placement = None if device_placement is None else [device_placement[index] for index in order]
        prepared = super().prepare(*(objects[index] for index in order), device_placement=placement)
        check_owned(self.zero_config, self._facts_of_prepared(), later=LATER_KEYS)
        if len(objects) == 1:
            return prepared
        by_place = dict(zip(order, prepared, strict=True))
        return tuple(by_place[index] for index in range(len(objects)))

    def _facts_of_prepared(self) -> dict[str, Fact]:
        """The first loader is the one of the training; a single optimizer is that of the config."""
        found = dict(self._facts)
        total = getattr(self._dataloaders[0], "total_batch_size", None) if self._dataloaders else None
        if isinstance(total, int) and "train_batch_size" not in found:
            micro = total // self.num_processes
            found["micro_batch_per_rank"] = Fact(micro, "the first prepared DataLoader")
            found["samples_per_step"] = batch_fact(self.num_processes, micro, self.gradient_accumulation_steps)
        if len(self._optimizers) == 1:
            found["optimizer"] = Fact(self._optimizers[0].optimizer, "accelerator.prepare(...)")
        return found

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model in place; also one that is only evaluated, for it may not fit otherwise."""
        if id(model) in self._engines:
            super().prepare_model(model, device_placement, evaluation_mode=True)  # lists it again
            return model
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO  # compiling in a wrapper would leave hooks out
        try:
            whole = self.zero_config.stage < 3 and not is_deferred(model)  # else it may not fit
            placed = device_placement if whole else False
            prepared = super().prepare_model(model, placed, evaluation_mode=True)  # without DistributedDataParallel
        finally:
            plugin.backend = backend
        assert id(prepared) == id(model)  # with no wrapper wanted, Accelerate changes it in place
        engine = ZeroEngine(model, resolve(self.zero_config, self.num_processes), device=self.device)
        self._engines[id(model)] = engine
        if backend != DynamoBackend.NO:
            model.compile(**plugin.to_kwargs())
        waiting, self._unattached = self._unattached, []
        for optimizer in waiting:
            self._attach(optimizer)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> ZeroOptimizer:
        """Let an optimizer update shards; its model may be prepared later."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            known: ZeroOptimizer = super().prepare_optimizer(optimizer)
            return known
        self._attach(optimizer)
        prepared = ZeroOptimizer(
            optimizer,
            lambda: self._engine_of_optimizer(optimizer).optimizer_state_dict(optimizer),
            lambda state: self._engine_of_optimizer(optimizer).load_optimizer_state_dict(optimizer, state),
        )
        self._optimizers.append(prepared)
        return prepared

    def _attach(self, optimizer: Optimizer) -> None:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        engines = [e for e in self._engines.values() if held & {id(p) for _, p in e.model.names()}]
        if not engines:
            self._unattached.append(optimizer)
            optimizer.register_step_pre_hook(self._check_attached)
            return
        if len(engines) > 1:
            raise ValueError(
                f"{type(optimizer).__name__} holds parameters of {len(engines)} models; give each model an optimizer "
                "of its own"
            )
        live = [prepared.optimizer for prepared in self._optimizers]
        if engines[0].optimizers and not any(sharded.optimizer in live for sharded in engines[0].optimizers):
            engines[0].detach()  # of a training before, which `free_memory` ended
        engines[0].attach(optimizer)

    def _check_attached(self, optimizer: Optimizer, *_: Any) -> None:
        if any(waiting is optimizer for waiting in self._unattached):
            raise ValueError(
                f"the parameters of {type(optimizer).__name__} are not those of a model that was prepared: prepare the "
                "model too, and make the optimizer from model.parameters() of that very object"
            )

    def engine(self, model: nn.Module) -> ZeroEngine:
        """The engine of a prepared model.

        Raises:
            ValueError: If it was not prepared.
        """
        if id(model) not in self._engines:
            raise ValueError(
                f"{type(model).__name__} was not prepared by this accelerator: model = accelerator.prepare(model)"
            )
        return self._engines[id(model)]

    def _engine_of_optimizer(self, optimizer: Optimizer) -> ZeroEngine:
        for engine in self._engines.values():
            if any(sharded.optimizer is optimizer for sharded in engine.optimizers):
                return engine
        raise ValueError(f"{type(optimizer).__name__} is not attached: prepare its model too")

    # ---- the step ----

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

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale the gradients of exactly these parameters so that their norm over all ranks is at most `max_norm`.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            ValueError: If they belong to no prepared model, or to several.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return self._engine_of_parameters(chosen).clip_grad_norm_(max_norm, norm_type, parameters=chosen)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element of these parameters to [-clip_value, clip_value]."""
        chosen: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._engine_of_parameters(chosen).clip_grad_value_(clip_value, parameters=chosen)

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

    # ---- whole weights ----

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """The model itself: there is no wrapper."""
        if id(model) in self._engines:
            return model
        plain: nn.Module = super().unwrap_model(model)
        return plain

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole state dict on the host of rank 0, an empty one elsewhere; all ranks call it."""
        if id(model) not in self._engines:
            return dict(super().get_state_dict(model, unwrap))
        state = self._engines[id(model)].full_state_dict()
        return state if self.process_index == 0 else {}

    # ---- checkpoints ----

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Save everything that was prepared or registered; all ranks call it.

        The directory is a checkpoint of this package: of one model itself, of several one each in `model_0`,
        `model_1`... It is written in the background where `checkpoint.asynchronous` says so and no hook waits for it.

        Returns:
            The directory.

        Raises:
            ValueError: If no model is prepared, or the directory holds what is not of the checkpoint it would replace.
        """
        engines = [self.engine(model) for model in self._models]
        if not engines:
            raise ValueError("save_state saves prepared models, and none is: call accelerator.prepare(model) first")
        directory, stale = self._next_directory(output_dir)
        self._check_replaceable(engines, directory)
        token = engines[0].mesh.control.gather_objects(uuid.uuid4().hex)[0]
        shared, own = accelerate_states.capture(self)
        hooks: list[Callable[..., None]] = list(self._save_model_state_pre_hook.values())
        saves = []
        for number, engine in enumerate(engines):
            saves.append(
                engine.save(
                    directory if len(engines) == 1 else directory / f"model_{number}",
                    user={_KEY: {"step": self.step, "models": len(engines), "save": token}},
                    extra_files=shared if number == 0 else {},
                    own_files=own if number == 0 else {},
                    update_latest=False,  # Accelerate takes whatever lies in its folder for a checkpoint
                    asynchronous=self.zero_config.checkpoint.asynchronous and not hooks,
                )
            )
        for old in stale if self.is_main_process else ():
            saves[-1].then(partial(_remove, old))  # not before there is another
        for hook in hooks:  # they may write into the directory, which was replaced as a whole
            hook(self._models, [], str(directory))
        self.project_configuration.iteration += 1
        return str(directory)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load what `save_state` saved at any number of processes and stage, or what Accelerate's own saved.

        All ranks call it.

        Raises:
            ValueError: If there is no checkpoint, or it does not fit what is prepared; names what differs.
        """
        for engine in self._engines.values():
            engine.saver.wait()
        directory = self._saved_directory(input_dir)
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(directory))
        engines = [self.engine(model) for model in self._models]
        saves: list[tuple[Any, Any]] = []
        for number, engine in enumerate(engines):
            reader = engine.load(directory if len(engines) == 1 else directory / f"model_{number}", **options)
            ours = reader.manifest.user.get(_KEY, {}) if reader.has_manifest else {}
            saves.append((ours.get("save"), ours.get("models", len(engines))))
            if len(set(saves)) > 1 or saves[0][1] != len(engines):
                raise ValueError(
                    f"{directory} holds models of several saves, or {saves[-1][1]} models where {len(engines)} are "
                    "prepared: a save was interrupted between two models, or others were prepared; take an earlier one"
                )
            if number == 0 and ours:
                accelerate_states.restore(self, reader, load_kwargs)
                self.step = reader.manifest.user[_KEY]["step"]
                engine.load_random_state(reader)  # once more: restoring may have drawn
            elif number == 0:
                accelerate_states.restore_plain(self, directory, load_kwargs)

    def _check_replaceable(self, engines: list[ZeroEngine], directory: Path) -> None:
        """A save replaces its directory as a whole, with all that somebody else has put there."""
        places = [directory] if len(engines) == 1 else [directory / f"model_{n}" for n in range(len(engines))]
        foreign = [str(path) for place in places for path in unlisted(place)]
        if self._save_model_state_pre_hook:  # which write there
            foreign = [path for path in foreign if (Path(path) / MANIFEST_NAME).is_file()]
        found = engines[0].mesh.control.gather_objects(foreign)
        if any(found):
            raise ValueError(
                f"{directory} holds {sorted({path for paths in found for path in paths})[:5]}, which are not of the "
                "checkpoint there and would be removed with it; save to another directory"
            )

    def _next_directory(self, output_dir: str | os.PathLike[str] | None) -> tuple[Path, list[Path]]:
        """Where to save, and which checkpoints are too many then."""
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return Path(output_dir).expanduser(), []
        self.wait_for_saves()  # one that is on its way counts
        folder = Path(self.project_dir) / "checkpoints"
        directory = folder / f"checkpoint_{self.save_iteration}"
        if directory.exists():
            raise ValueError(
                f"{directory} exists already; set accelerator.project_configuration.iteration to where to go on"
            )
        self.wait_for_everyone()  # all have looked
        found = _numbered(folder)
        many = 0 if project.total_limit is None else max(0, len(found) + 1 - project.total_limit)
        return directory, found[:many]

    def _saved_directory(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            directory = Path(input_dir).expanduser()
            if not directory.is_dir():
                raise ValueError(f"{directory}: there is no such checkpoint directory")
            return directory
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        folder = Path(self.project_dir) / "checkpoints"
        found = _numbered(folder)
        if not found:
            raise ValueError(f"{folder}: there is no checkpoint")
        return found[-1]

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's; the models that are given are let go of, others stay sharded for a next training."""
        for item in objects:
            self._engines.pop(id(item), None)
        return super().free_memory(*objects)

    def wait_for_saves(self) -> None:
        """Return when the checkpoints that are being written are there.

        Raises:
            OSError, ValueError, RuntimeError: Why one is not.
        """
        for engine in self._engines.values():
            engine.saver.finish()

    def end_training(self) -> None:
        """Finish saves and trackers; all ranks leave together."""
        self.wait_for_saves()
        self.wait_for_everyone()
        super().end_training()

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process has no engines: they hold process groups."""
        return {**self.__dict__, "_engines": {}, "_unattached": []}


def _remove(directory: Path) -> None:
    """A checkpoint too many is no reason to fail, and none to be silent."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        warnings.warn(f"{directory}: an old checkpoint could not be removed: {error}", stacklevel=2)


def _numbered(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if re.fullmatch(r"checkpoint_\d+", path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))
