"""ZeRO for scripts written for the transformers Trainer: a subclass in place of `Trainer`, started as before.

    from zero_strategy.integrations.transformers import ZeroTrainer
    trainer = ZeroTrainer(model, args, zero_config={"stage": 3}, train_dataset=...)

A checkpoint of the Trainer (`checkpoint-500`) is one of this package: Hugging Face weights that `from_pretrained`
reads, optimizer state in safetensors, at any number of processes and stage; the Trainer's own files lie in it, too.

PEFT picks an adapter's tensors out of a state dict by their names. It is shown one without memory first, which tells
the few that it wants; those alone are gathered, so that no rank holds the frozen weights.

The Trainer writes its own files into a checkpoint that is already there, and removes the oldest by their modification
times. A kill in the first leaves a checkpoint that cannot be resumed, a kill in the second one that looks the newest:
both are mended here when a run begins.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from zero_strategy.checkpoint.agreement import state_dict_entries
from zero_strategy.checkpoint.deferred import is_deferred
from zero_strategy.checkpoint.exports import config_files, export_weights
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.writer import unlisted
from zero_strategy.config import Fact, ZeroConfig, batch_fact
from zero_strategy.config.load import ConfigSource
from zero_strategy.config.section import DEFAULT
from zero_strategy.convert.averages import averages_of, has_averages
from zero_strategy.convert.convert import open_any
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate import ZeroAccelerator
from zero_strategy.integrations.accelerate.launch import asked_parallelism, without_parallelism
from zero_strategy.integrations.huggingface.chosen import choose_for_trainer
from zero_strategy.integrations.huggingface.sequence_batches import gathered
from zero_strategy.integrations.huggingface.slots import SlotSteps, fit_arguments
from zero_strategy.integrations.huggingface.survival import SurvivingSteps, alone_yet, check_survivable
from zero_strategy.integrations.takeover import engines_over
from zero_strategy.optim.averaging import WeightAverage

__all__ = [
    "WeightAveragingCallback",
    "ZeroTrainer",
    "ZeroTrainerMixin",
    "make_zero_trainer",
]

_SCHEDULER = "scheduler.pt"
_ARGUMENTS = "training_args.bin"
_OWN = re.compile(
    r"training_args\.bin|trainer_state\.json|scheduler\.pt|scaler\.pt|rng_state(_\d+)?\.pth|"
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config|processor_config)\.json|"
    r"(vocab|merges)\.txt|chat_template\.jinja|.*\.model|adapter_.*|README\.md"
)
"""What the Trainer and tokenizers put beside a model."""
_MODEL = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json")
_SCHEDULES = {"linear": "WarmupDecayLR", "constant_with_warmup": "WarmupLR", "cosine": "WarmupCosineLR"}
"""DeepSpeed's names for the Trainer's schedules."""


class WeightAveragingCallback(TrainerCallback):
    """Keeps a running average of the weights, evaluates with it, and leaves it in the model at the end.

        trainer = ZeroTrainer(model, args, callbacks=[WeightAveragingCallback(decay=0.999)], ...)

    Checkpoints hold the weights and, beside the optimizer's state, the average; a run that resumes goes on with both.

    Args:
        decay: See `ZeroEngine.average_weights`; None: the mean of all updates.
        leave: Let the model become its average when training ends (or that of the best checkpoint, if that is loaded);
            False leaves its own weights, and `trainer.zero_engine.average` has the others.
        **options: The other arguments of `ZeroEngine.average_weights`.
    """

    def __init__(self, decay: float | None = 0.999, *, leave: bool = True, **options: Any) -> None:
        self.decay, self.leave, self.options = decay, leave, options
        self.average: WeightAverage | None = None
        self._engine: Callable[[], ZeroEngine | None] | None = None

    def train(self, engine: Callable[[], ZeroEngine | None]) -> None:
        """A training of `ZeroTrainer` begins, whose engine will be that."""
        self._engine, self.average = engine, None

    def begin(self) -> None:
        """Keep an average from now on, unless that is done.

        Raises:
            ValueError: Under another Trainer.
        """
        engine = None if self._engine is None else self._engine()
        if engine is None:
            raise ValueError(f"{type(self).__name__} averages shards: give it to a ZeroTrainer, not to a plain Trainer")
        if self.average is None:
            self.average = engine.average_weights(self.decay, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Begin, unless a checkpoint was loaded, before which `ZeroTrainer` calls `begin`."""
        self.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Let the model become its average."""
        if self.leave and self.average is not None and not args.load_best_model_at_end:
            self.average.copy_to_model()


class ZeroTrainerMixin(SurvivingSteps, SlotSteps):
    """Mixin that makes a Trainer shard; put it before the Trainer's class.

    Args:
        zero_config: Anything `load_config` takes; default: the file that `ZERO_STRATEGY_CONFIG` names, else stage 3.

    Raises:
        ValueError: If the arguments ask for DeepSpeed or FSDP as well, or each process would train alone.
    """

    accelerator: Any
    args: Any
    model: Any
    lr_scheduler: Any
    processing_class: Any
    optimizer: Any
    compute_loss_func: Any

    def __init__(self, *arguments: Any, zero_config: ConfigSource | None = None, **keywords: Any) -> None:
        self._zero_config, self._weights_later, self._slot_losses, self._loss_means = zero_config, False, [], []
        super().__init__(*arguments, **keywords)
        self._given_optimizers = self.optimizer, self.lr_scheduler
        if self.accelerator.zero_config.mesh.sequence > 1:
            self._check_loss()
        checkpoints = self.accelerator.zero_config.checkpoint
        frozen = dict(checkpoints.settings())["checkpoint.frozen"]
        if is_adapted(self.model) and frozen.origin == DEFAULT:  # the Trainer's checkpoints leave out the base, too
            checkpoints.record("frozen", "reference", f"{type(self).__name__}: the model is a PEFT adapter's")
        if self.accelerator.zero_config.stage == 3 and isinstance(self.model, PreTrainedModel):
            # transformers' own mark for "forwards are collective": ranks then generate for equally many tokens.
            vars(self.model)["_is_fsdp_managed_module"] = True
        self._adopt()

    def create_accelerator_and_postprocess(self) -> None:
        """Take the Accelerator that the Trainer makes for one that shards."""
        for name in ("deepspeed", "fsdp"):
            if given := getattr(self.args, name, None):
                way = f"; DeepSpeed's file is taken as it is: {type(self).__name__}(..., zero_config={given!r})"
                raise ValueError(
                    f"TrainingArguments({name}={given!r}) asks for another way of sharding beside "
                    f"{type(self).__name__}'s zero_config; drop one of them{way if name == 'deepspeed' else ''}"
                )
        asked = asked_parallelism(getattr(self.args, "parallelism_config", None), os.environ)
        if asked is not None:
            self.args.parallelism_config = None  # Accelerate would make a device mesh
        try:
            with without_parallelism(os.environ):
                super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            if asked is not None:
                self.args.parallelism_config = asked
        self.accelerator = ZeroAccelerator.adopt(self.accelerator, self._zero_config, self._fitted, asked)
        if self.accelerator.slot_training.seed is None:
            self.accelerator.slot_training.seed = self.args.seed
        _check_schedule(self.accelerator.zero_config)
        # The Trainer has taken it from the Accelerator that is replaced.
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        self._adopt()

    def _adopt(self) -> None:
        """Let what TRL's trainers have for gathering go by the Accelerator that there is."""
        # A trainer of TRL's has imported it; others need not.
        if "trl.distributed" in sys.modules:
            from zero_strategy.integrations.huggingface.trl import adopt

            adopt(self)

    def _fitted(self, config: ZeroConfig) -> dict[str, Fact]:
        """Settings that the arguments decide, once they fit the config."""
        if self._given_accumulation is None:
            check_survivable(self.args, config)
            self._given_accumulation = self.args.gradient_accumulation_steps
        fit_arguments(self.args, config)
        return _facts(self.args, self.args.world_size // (config.mesh.sequence * (config.mesh.tensor or 1)))

    def _check_loss(self) -> None:
        """Raise for losses that are computed from whole sequences."""
        smoothing = getattr(self.args, "label_smoothing_factor", 0.0)
        for name, value in (("label_smoothing_factor", smoothing), ("compute_loss_func", self.compute_loss_func)):
            if value:
                raise ValueError(
                    f"{name}={value!r} beside mesh.sequence: losses of whole sequences, of which a rank has a part; "
                    "leave it out, so that the model computes the loss"
                )

    def get_tp_size(self) -> int:
        """Ranks that get the same samples: they divide layers, or the tokens of sequences."""
        mesh = self.accelerator.zero_config.mesh
        return int(super().get_tp_size()) * int(mesh.sequence) * int(mesh.tensor or 1)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, *rest: Any, **more: Any) -> Any:
        """See the Trainer's: logits are those of all tokens."""
        loss_only = rest[0] if rest else more["prediction_loss_only"]
        divided = self.accelerator.divided(model)
        for one in divided:
            one.loss_only = loss_only
        try:
            loss, logits, labels = super().prediction_step(model, inputs, *rest, **more)  # type: ignore[misc]
        finally:
            # Whoever calls the model afterwards, in a callback or a script, wants logits.
            for one in divided:
                one.loss_only = False
        engine = self.zero_engine
        if engine is not None and engine.sequence.size > 1 and logits is not None and labels is not None:
            logits = gathered(engine.sequence, logits, labels.shape[1])
        return loss, logits, labels

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """See the Trainer's: a schedule that was given beside one of a DeepSpeed JSON is one too many."""
        found = self.accelerator.zero_config.deepspeed
        if self.lr_scheduler is not None and found is not None and found.scheduler is not None:
            raise ValueError(
                f"optimizers=(..., {type(self.lr_scheduler).__name__}) and scheduler {found.scheduler.type!r} "
                f"[{found.scheduler.origin}] are two schedules; drop one of them"
            )
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    @property
    def zero_engine(self) -> ZeroEngine | None:
        """The engine that shards the model, once it was prepared by training or evaluation, here or by another one."""
        engine: ZeroEngine | None = self.accelerator.engines.get(id(self.model))
        if engine is None and isinstance(self.model, nn.Module):
            return next(iter(engines_over(self.model)), None)
        return engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        config = self.accelerator.zero_config
        whole = config.stage < 3 and not is_deferred(model) and not alone_yet(config)
        if whole:  # else it may not fit: the engine moves its slices
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """See the Trainer's: what it logs of training comes with what was recorded of the last step."""
        engine = self.zero_engine
        if engine is not None and "loss" in logs and self.accelerator.zero_config.diagnostics.log:
            logs = {**logs, **engine.step_metrics()}
        super().log(logs, *arguments, **keywords)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's: `True` passes over a checkpoint that a run was killed in while it wrote it."""
        if self.accelerator.zero_config.survive.enabled:
            return self._survive(self._train, resume_from_checkpoint, arguments, keywords)
        return self._train(resume_from_checkpoint, *arguments, **keywords)

    def _train(self, resume_from_checkpoint: str | bool | None, *arguments: Any, **keywords: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_resumable(Path(self.args.output_dir)) or "") or True
        if self.accelerator.zero_config.auto.enabled:
            choose_for_trainer(self)
        if callback := self._averaging():
            callback.train(lambda: self.zero_engine)
        self.accelerator.doing, self._slot_losses, self._loss_means = f"{type(self).__name__}.train()", [], []
        try:
            return super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]
        finally:
            self.accelerator.doing = ""

    # ---- averages of the weights ----

    def _averaging(self) -> WeightAveragingCallback | None:
        callbacks = self.callback_handler.callbacks
        return next((each for each in callbacks if isinstance(each, WeightAveragingCallback)), None)

    def _shown(self) -> AbstractContextManager[object]:
        """The average in place of the weights, while training keeps one."""
        callback = self._averaging()
        kept = callback is not None and callback.average is not None and self.is_in_train  # type: ignore[attr-defined]
        return callback.average.applied() if kept else nullcontext()  # type: ignore[union-attr]

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's: during training with the average, if one is kept."""
        with self._shown():
            return super().evaluate(*arguments, **keywords)  # type: ignore[misc]

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights and config as `from_pretrained` reads them; all ranks call it."""
        engine, directory = self.zero_engine, output_dir or self.args.output_dir
        if engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        # A model to upload has its frozen weights, of which checkpoints may hold digests only.
        lacking = not _internal_call and self.accelerator.zero_config.checkpoint.frozen == "reference"
        if not _internal_call and not lacking and self._export(engine, directory):
            return
        resumable = _internal_call and not self.args.save_only_model and bool(engine.optimizers)
        # Ranks may see a shared directory differently, and must go one way.
        replaceable = all(engine.mesh.control.all_gather_objects(_replaceable(directory)))
        beside = adapter_files(engine) if is_adapted(self.model) else config_files(self.model)
        if not resumable and (lacking or not (isinstance(self.model, PreTrainedModel) and replaceable)):
            self._save_in_place(engine, directory, beside)
            return
        if not replaceable:
            raise ValueError(f"{directory} holds {_foreign(directory)[:5]}, which a checkpoint there would replace")
        # Not in the background: the Trainer writes its own files into the directory right afterwards.
        engine.save(directory, extra_files=beside, optimizers=resumable, update_latest=False)
        if self.args.should_save:
            self._save_own_files(directory)
            # Now, before the Trainer removes the oldest by these times.
            if self.args.save_total_limit:
                date_by_step(Path(directory).parent)

    def _export(self, engine: ZeroEngine, directory: str) -> bool:
        """Write weights and config and no more, if that can be done without a rank that holds them all."""
        exportable = isinstance(self.model, PreTrainedModel) and not is_adapted(self.model) and _is_model(directory)
        if not all(engine.mesh.control.all_gather_objects(exportable)):
            return False
        if not export_weights(engine, directory, config_files(self.model)):
            return False
        if self.args.should_save:
            self._save_own_files(directory)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]
        return True

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The optimizer is in the checkpoint already; `save_model` wrote it with the weights."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_in_place(self, engine: ZeroEngine, directory: str, adapter: dict[str, bytes]) -> None:
        """Weights alone, file by file, beside whatever else is there."""
        if self.args.should_save:
            (Path(directory) / MANIFEST_NAME).unlink(missing_ok=True)  # of weights that are written over now
        if not is_adapted(self.model):
            self._save(directory, state_dict=self.accelerator.main_state_dict(self.model))  # type: ignore[attr-defined]
        elif self.args.should_save:
            for name, content in adapter.items():
                path = Path(directory) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            self._save_own_files(directory)
        self.accelerator.wait_for_everyone()

    def _save_own_files(self, directory: str) -> None:
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)
        torch.save(self.args, os.path.join(directory, _ARGUMENTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing yet if it is ours, or the model has no memory: each rank reads its part once that is prepared."""
        if self._is_copy(resume_from_checkpoint):
            return
        self._weights_later = is_deferred(self.model) and not is_adapted(self.model)
        if not (Path(resume_from_checkpoint) / MANIFEST_NAME).is_file() and not self._weights_later:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Each rank reads its part, whoever saved it."""
        engine, callback = self.zero_engine, self._averaging()
        # Before the optimizer's state is read, since an average lies beside it in a checkpoint.
        if engine is not None and callback is not None:
            callback.begin()
        if checkpoint is None or engine is None or self._load_copy(checkpoint):
            return
        if not (Path(checkpoint) / MANIFEST_NAME).is_file():
            if self._weights_later:
                engine.load_weights(checkpoint)
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        # Weights first: they set master weights too, which optimizer states then set to more digits.
        reader = engine.load_weights(checkpoint)
        if reader.manifest.optimizers:
            engine.load_optimizers(reader)
            engine.steps.load_counters(reader.manifest.counters)
        scheduler = Path(checkpoint) / _SCHEDULER
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _load_best_model(self) -> None:
        engine = self.zero_engine
        best = self.state.best_model_checkpoint
        if engine is not None and best is not None and (Path(best) / MANIFEST_NAME).is_file():
            callback, reader = self._averaging(), open_any(best)
            # The callback leaves an average in the model, so that of the best checkpoint is the one to load.
            averaged = callback is not None and callback.leave and has_averages(reader)
            engine.load_weights(averages_of(reader) if averaged else reader)
        else:
            super()._load_best_model()  # type: ignore[misc]


class ZeroTrainer(ZeroTrainerMixin, Trainer):
    """The transformers Trainer with ZeRO sharding; takes `zero_config` beside everything that `Trainer` takes."""


def make_zero_trainer(trainer: type[Trainer]) -> type[Trainer]:
    """A subclass of a Trainer class, such as TRL's, that takes `zero_config` and shards."""
    made: type[Trainer] = type(f"Zero{trainer.__name__}", (ZeroTrainerMixin, trainer), {"__doc__": trainer.__doc__})
    return made


def _facts(args: TrainingArguments, copies: int) -> dict[str, Fact]:
    """Settings that the arguments decide, by DeepSpeed's names; `copies` ranks get different data."""

    def fact(name: str, value: Any) -> Fact:
        return Fact(value, f"TrainingArguments({name}={getattr(args, name)!r})")

    steps, micro = args.gradient_accumulation_steps, args.per_device_train_batch_size
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    return {
        "gradient_accumulation_steps": fact("gradient_accumulation_steps", steps),
        "train_micro_batch_size_per_gpu": fact("per_device_train_batch_size", micro),
        "train_batch_size": batch_fact(copies, micro, steps),
        "gradient_clipping": fact("max_grad_norm", args.max_grad_norm),
        "training_precision": Fact(args.mixed_precision, "TrainingArguments"),
        "dataloader_drop_last": fact("dataloader_drop_last", args.dataloader_drop_last),
        "scheduler": fact("lr_scheduler_type", _SCHEDULES.get(schedule, schedule)),
    }


def _check_schedule(config: ZeroConfig) -> None:
    """The Trainer makes the schedule from its arguments, so that numbers in a DeepSpeed JSON would be nobody's."""
    named = None if config.deepspeed is None else config.deepspeed.scheduler
    numbers = {} if named is None else {key: value for key, value in named.params.items() if value != "auto"}
    if numbers:
        raise ValueError(
            f"scheduler.params {numbers} of the DeepSpeed JSON: the Trainer takes its schedule from TrainingArguments "
            '(warmup_steps, learning_rate, max_steps); set it there, and write "auto" in the JSON'
        )


def _replaceable(directory: str) -> bool:
    """True if a checkpoint may take the place of a directory: it is empty or not there, or holds one and no more."""
    path = Path(directory)
    known = not path.is_dir() or not any(path.iterdir()) or (path / MANIFEST_NAME).is_file()
    return known and not _foreign(directory)


def _is_model(directory: str) -> bool:
    """True if a directory is replaceable, or holds a model and what the Trainer puts beside it, and no more."""
    path = Path(directory)
    return _replaceable(directory) or all(
        entry.is_file() and (_MODEL.fullmatch(entry.name) or _OWN.fullmatch(entry.name)) for entry in path.iterdir()
    )


def _foreign(directory: str) -> list[str]:
    """Files in a directory that are neither a checkpoint's nor the Trainer's own."""
    return [path.name for path in unlisted(Path(directory)) if path.is_dir() or not _OWN.fullmatch(path.name)]


def is_adapted(module: nn.Module) -> bool:
    """True if a module is PEFT's, of which only adapters are saved."""
    peft = sys.modules.get("peft")  # nobody has such a module without it
    return peft is not None and isinstance(module, peft.PeftModel)


def adapter_files(engine: ZeroEngine) -> dict[str, bytes]:
    """Files of PEFT's `save_pretrained`, {relative path: content}, on rank 0; nothing on others. All ranks call it.

    Only what it writes is gathered, into the host memory of every rank.
    """
    model: Any = engine.module
    entries = state_dict_entries(model, tied=True)
    hollow = {name: torch.empty_like(tensor, device="meta") for name, tensor in entries}
    state = {**hollow, **engine.full_state_dict(_written(model, hollow))}
    with tempfile.TemporaryDirectory() as folder:
        # PEFT asks modules for their state dicts on the way, which is a collective.
        model.save_pretrained(folder, state_dict=state, is_main_process=engine.mesh.rank == 0)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _written(model: Any, hollow: dict[str, Tensor]) -> set[str]:
    """The names of what PEFT writes; all of them where it computes with a tensor instead of taking it."""
    from peft import get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in hollow.items()}
    found: set[str] = set()
    for adapter in model.peft_config:
        for tensor in get_peft_model_state_dict(model, state_dict=dict(hollow), adapter_name=adapter).values():
            if id(tensor) not in names:
                return set(hollow)
            found.add(names[id(tensor)])
    return found


_STATE = "trainer_state.json"
"""The last that the Trainer writes into a checkpoint."""
_TICK = 1_000_000
"""Nanoseconds; any file system can tell times that differ by this, or has none at all."""


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints of the Trainer, whole or not, in the order of their steps."""
    found = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    numbered = [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]))


def last_resumable(folder: Path) -> Path | None:
    """The last checkpoint that has all that the Trainer resumes from; None if it is the last of all, or there is none.

    A warning names those after it.
    """
    found = checkpoints_in(folder)
    whole = [path for path in found if (path / _STATE).is_file()]
    if not whole or whole[-1] == found[-1]:
        return None
    skipped = [path.name for path in found[found.index(whole[-1]) + 1 :]]
    warnings.warn(
        f"{folder}: a run was ended while it wrote {', '.join(skipped)}; resuming from {whole[-1].name}", stacklevel=3
    )
    return whole[-1]


def date_by_step(folder: Path) -> None:
    """Let modification times grow with steps, as the Trainer takes for granted when it removes the oldest."""
    found = checkpoints_in(folder)
    if not found or not (found[-1] / MANIFEST_NAME).is_file():
        return
    bound = found[-1].stat().st_mtime_ns
    for path in reversed(found[:-1]):
        status = path.stat()
        if status.st_mtime_ns >= bound:
            os.utime(path, ns=(status.st_atime_ns, bound - _TICK))
        bound = min(bound - _TICK, status.st_mtime_ns)
