"""Training of the transformers Trainer that goes on when ranks die (`survive`): same process, Trainer and callbacks.

The Trainer's training runs inside of `survive`. After each step a copy in memory has the weights and optimizer state,
and what the Trainer writes beside them: its TrainerState, the schedule, the states of callbacks, sums of losses. When
ranks have changed an exception leaves the training; it begins anew with another Accelerator, by the Trainer's own way
to resume, from a folder that has the TrainerState alone: the rest comes out of the copy.

Before the first step there is a copy of the weights alone: those of a module whose ranks are gone have no values.

The last step of an epoch is copied after what the Trainer does at the epoch's end, which would not be done again.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import ExportableState

from zero_strategy.checkpoint import StateReader
from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.integrations.accelerate.survival import packed, unpacked
from zero_strategy.integrations.takeover import engines_over
from zero_strategy.survive import Run

_STATE = "trainer_state.json"
_NUMBERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen")
"""Attributes of a Trainer that begin anew when it resumes; here the training is one."""
_BEGUN = "begun"
"""Entry of a copy's state: that the training has come to its steps."""
_RESUMED: dict[str, Any] = {
    "eval_on_start": False,
    "ignore_data_skip": False,
    "restore_callback_states_from_checkpoint": False,  # by making other objects; here they get their states back
}
"""Arguments of a training that goes on."""


def check_survivable(args: Any, config: ZeroConfig) -> None:
    """Raise where a training that goes on with other ranks would be another one.

    Raises:
        ValueError: Naming what to change.
    """
    if not config.survive.enabled:
        return
    origin = config.origin_of("survive.enabled")
    if not config.reproducible.slots:
        raise ValueError(
            f"survive.enabled is True [{origin}] without reproducible.slots: with other ranks a step would have other "
            "samples; set reproducible to the micro-batches of a step, such as 12, over all ranks"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}) with survive.enabled "
            f"[{origin}]: it follows from reproducible.slots and the ranks that are there; leave it out"
        )


def _as_text(value: Any) -> str:
    """JSON, in which tensors and numbers of numpy are plain numbers, as far as they are such."""
    return json.dumps(value, default=lambda each: each.tolist() if hasattr(each, "tolist") else str(each))


class LogText:
    """The log history as JSON, of which each entry is made text once."""

    def __init__(self) -> None:
        self._entries: list[str] = []

    def of(self, history: list[dict[str, float]]) -> str:
        """The text of a history that has grown since, or is another one."""
        if len(history) < len(self._entries):
            self._entries = []
        self._entries += [_as_text(entry) for entry in history[len(self._entries) :]]
        return f"[{', '.join(self._entries)}]"


class _TrainerRun(Run):
    """Beginnings of a training, whose engine is the Trainer's, and outlives it."""

    trainer: SurvivingSteps

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Inside is the training; all ranks come to its end."""
        yield
        engine = self.trainer.zero_engine
        assert engine is not None
        # One that dies before this takes the others back to the last copy, who would not wait for it afterwards.
        engine.mesh.world_group.barrier.wait_for_all("the end of the training")

    def leave(self) -> None:
        """Let go of a world that is no more."""
        self.trainer._abandon()
        super().leave()


class SurvivingSteps:
    """Part of a Trainer's mixin: what it does about `survive`. Without that everything is the Trainer's own."""

    accelerator: Any
    args: Any
    model: Any
    state: Any
    control: Any
    lr_scheduler: Any
    optimizer: Any
    callback_handler: Any
    model_init: Any
    model_wrapped: Any
    current_flos: Any
    _loss_means: list[float]
    _given_accumulation: int | None = None
    _given_optimizers: tuple[Any, Any] = (None, None)
    """What the script has given; a beginning begins with these."""
    _run: Run | None = None
    _survived = False
    """A training has been."""
    _lost = False
    """The weights of the script's model were an engine's whose ranks are gone."""
    _found: dict[str, Any] | None = None
    """The state of the copy from which this beginning goes on."""
    _reader: StateReader | None = None
    """Of that copy, or of one of the first weights."""
    _folder: str | None = None
    _arrived = False
    """This beginning has come to its steps."""
    _place: tuple[int, int] = (0, 0)
    """Epoch, and the global step at its beginning."""
    _at_end = False
    """The last step of an epoch is done, and the Trainer has yet to come to the epoch's end."""
    _steps = 0
    """Of an epoch."""
    _start_time: float = 0.0
    _logs: LogText

    @property
    def zero_engine(self) -> ZeroEngine | None:
        """The engine, once there is one."""
        raise NotImplementedError

    # ---- beginnings ----

    def _survive(self, train: Callable[..., Any], checkpoint: Any, arguments: Any, keywords: Any) -> Any:
        """Train until the end, whoever dies.

        Args:
            train: One beginning.
            checkpoint: To begin with where there is no copy.
            arguments, keywords: Further ones of `train`.

        Raises:
            ValueError: If this process has done so before, or others have formed its ranks; or see `survive`.
        """
        if self._survived:
            raise ValueError(
                f"{type(self).__name__}.train() a second time with survive.enabled: its memory is that of one training "
                "for each start of the script; leave survive out, or start a script for each"
            )
        if dist.is_initialized():
            raise ValueError(
                "survive.enabled is True, and there is a process group already, which cannot change: start the script "
                "by `zero-strategy run`, not by torchrun or accelerate launch, and leave init_process_group out"
            )
        self._survived, self._logs, self._start_time = True, LogText(), time.time()
        slots = self.accelerator.zero_config.reproducible.slots
        run, ranks = _TrainerRun.launched(f"{type(self).__name__} with survive.enabled", slots)
        run.trainer = self
        try:
            return run.call(self._begin, ranks, train, checkpoint, arguments, keywords)
        finally:
            self._run = None
            run.close()

    def _begin(self, run: Run, train: Callable[..., Any], checkpoint: Any, arguments: Any, keywords: Any) -> Any:
        """One beginning, on the ranks that have formed."""
        self._run, self._found, self._arrived, self._at_end = run, None, False, False
        self._look_again()
        copy = run.find()
        self._reader = None if copy is None else copy.reader
        if copy is not None and copy.state[_BEGUN]:
            with self._going_on(dict(copy.state)) as folder:
                return train(folder, *arguments, **keywords)
        if copy is None and self._lost and self.model_init is None:
            raise RuntimeError(
                "a rank has died before a copy of the first weights was in memory, and those of the model are lost: "
                "start the script again"
            )
        return train(checkpoint, *arguments, **keywords)

    def _abandon(self) -> None:
        """Leave a training that an exception has ended as one that can begin anew."""
        for engine in engines_over(self.model):
            # Also if it was torn in its making: there is nobody to have the values from.
            self._lost = True
            engine.abandon("ranks have changed")
        if (hooked := getattr(self, "neftune_hook_handle", None)) is not None:
            hooked.remove()
        self.optimizer, self.lr_scheduler = self._given_optimizers
        if self.optimizer is not None:
            # The state of the script's own was the engine's, and comes out of the copy.
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": {}, "param_groups": groups})
        self.model_wrapped = self.model

    def _look_again(self) -> None:
        """Make an Accelerator of the ranks that are here."""
        self.args.gradient_accumulation_steps = self._given_accumulation
        # transformers keeps the device, and with it the ranks, for the life of the arguments.
        vars(self.args).pop("_setup_devices", None)
        _ = self.args.device
        self.create_accelerator_and_postprocess()  # type: ignore[attr-defined]
        # One process by itself would have had the samples of all GPUs of its host.
        self._train_batch_size = self.args.train_batch_size

    @contextmanager
    def _going_on(self, found: dict[str, Any]) -> Iterator[str]:
        """Inside, the Trainer resumes from the folder that this gives, as one training."""
        before = {name: getattr(self.args, name) for name in _RESUMED}
        with tempfile.TemporaryDirectory(prefix="zero_strategy.") as folder:
            state = {**json.loads(found["trainer"]), "log_history": json.loads(found["log_history"])}
            Path(folder, _STATE).write_text(json.dumps(state))
            # Entries of a step that is computed again have other times.
            self._found, self._folder, self._logs = found, folder, LogText()
            for name, value in _RESUMED.items():
                setattr(self.args, name, value)
            try:
                yield folder
            finally:
                self._folder = None
                for name, value in before.items():
                    setattr(self.args, name, value)

    # ---- the Trainer's way to resume ----

    def _is_copy(self, checkpoint: Any) -> bool:
        return self._folder is not None and checkpoint == self._folder

    def _load_scaler(self, checkpoint: str | None) -> None:
        """See the Trainer's; a copy has had it with the optimizer."""
        if not self._is_copy(checkpoint):
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """See the Trainer's; random numbers of a training that goes on are those of its slots."""
        if not self._is_copy(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _load_copy(self, checkpoint: str | None) -> bool:
        """Load weights, optimizer and schedule of the copy, if the Trainer goes on from it."""
        if not self._is_copy(checkpoint):
            return False
        engine, found, reader = self.zero_engine, self._found, self._reader
        assert engine is not None and found is not None and reader is not None
        engine.load(reader)
        self.lr_scheduler.load_state_dict(unpacked(found["scheduler"]))
        return True

    def _init_training_state(self, *arguments: Any, **keywords: Any) -> tuple[int, int]:
        """See the Trainer's, which tells the place in an epoch by the number of all steps."""
        place: tuple[int, int] = super()._init_training_state(*arguments, **keywords)  # type: ignore[misc]
        if (found := self._found) is None:
            return place
        saved = json.loads(found["callbacks"])
        for each in self._exportable():
            kept = next((one for one in saved if one[0] == type(each).__name__), None)
            if kept is not None:  # else one that another process has not
                saved.remove(kept)
                for name, value in kept[1]["attributes"].items():
                    setattr(each, name, value)
        return int(found["epoch"]), int(found["step"]) * int(self.args.gradient_accumulation_steps)

    def _prepare_for_training(self, *arguments: Any, **keywords: Any) -> Any:
        """See the Trainer's; before the first step the weights are copied, or come out of their copy."""
        prepared = super()._prepare_for_training(*arguments, **keywords)  # type: ignore[misc]
        engine, run = self.zero_engine, self._run
        if run is not None and self._found is None:
            assert engine is not None
            if self._reader is None:
                run.copy(engine, {_BEGUN: False}, asks=False)
            else:
                engine.load(self._reader)
        return prepared

    # ---- steps ----

    def _run_epoch(self, *arguments: Any, **keywords: Any) -> None:
        """See the Trainer's; a training that goes on has its sums of before, and may be at its end already."""
        if self._run is None:
            super()._run_epoch(*arguments, **keywords)  # type: ignore[misc]
            return
        epoch, skipped = int(keywords["epoch"]), 0
        if epoch == keywords["epochs_trained"] and keywords["resume_from_checkpoint"] is not None:
            skipped = int(keywords["steps_trained_in_current_epoch"]) // int(self.args.gradient_accumulation_steps)
        self._place, self._steps = (
            (epoch, self.state.global_step - skipped),
            int(keywords["num_update_steps_per_epoch"]),
        )
        if not self._arrived:
            self._arrive()
            if self._found is not None and self._found["ended"]:
                self.control.should_training_stop = True
                return
        super()._run_epoch(*arguments, **{**keywords, "start_time": self._start_time})  # type: ignore[misc]

    def _arrive(self) -> None:
        """Take the sums of before."""
        self._arrived = True
        if (found := self._found) is None:
            return
        self._start_time, self.current_flos = found["start"], 0
        self._loss_means = list(found["losses"])
        for name, value in found["numbers"].items():
            setattr(self, name, value)

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        """See the Trainer's; the last that it does in a step, and once more at the end of an epoch."""
        super()._maybe_log_save_evaluate(*arguments, **keywords)  # type: ignore[misc]
        if self._run is None:
            return
        epoch, done = self._place[0], self.state.global_step - self._place[1]
        leaves = self.control.should_epoch_stop or self.control.should_training_stop
        if self._at_end:
            self._at_end = False
            self._commit(epoch + 1, 0)
        elif done >= self._steps or leaves:
            self._at_end = True
        else:
            self._commit(epoch, done)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """See the Trainer's; of a training that was at its end, too."""
        if self._run is not None:
            start_time = self._start_time
            if not self._arrived:
                self._arrive()
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]

    # ---- copies ----

    def _commit(self, epoch: int, step: int) -> None:
        """Copy the training, which goes on with a step of an epoch."""
        engine, run = self.zero_engine, self._run
        assert engine is not None and run is not None
        self._settle_losses()  # type: ignore[attr-defined]
        self.store_flos()  # type: ignore[attr-defined]
        known = {field.name: getattr(self.state, field.name) for field in fields(self.state)}
        history = known.pop("log_history")
        run.commit(
            engine,
            {
                _BEGUN: True,
                "epoch": epoch,
                "step": step,
                "ended": bool(self.control.should_training_stop),
                "start": self._start_time,
                "trainer": _as_text(known),
                "log_history": self._logs.of(history),
                "callbacks": _as_text([[type(each).__name__, each.state()] for each in self._exportable()]),
                "scheduler": packed(self.lr_scheduler.state_dict()),
                "numbers": {name: getattr(self, name) for name in _NUMBERS},
                "losses": self._loss_means,
            },
        )

    def _exportable(self) -> list[Any]:
        """Callbacks that have a state, and the control; as the Trainer saves them."""
        return [each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)]


def alone_yet(config: ZeroConfig) -> bool:
    """True where the ranks of a training are yet to meet: it survives, and has not begun."""
    return config.survive.enabled and not dist.is_initialized()
