"""Observers that a DeepSpeed JSON asks for: tensorboard, wandb, csv_monitor, comms_logger, flops_profiler.

    Train/Samples/train_loss    mean over the step's micro-batches of rank 0
    Train/Samples/lr            of the first param group, as the step used it
    Train/Samples/loss_scale    in fp16

They are written on rank 0 after each step, against the number of samples so far; against steps where nobody says how
many samples a step has.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

from torch import Tensor

from zero_strategy.diagnostics.profiles import FlopsProfile, MessageLog
from zero_strategy.runtime.observer import Mark

if TYPE_CHECKING:
    from zero_strategy.config.deepspeed.settings import DeepSpeedSettings
    from zero_strategy.engine import ZeroEngine


class Event(NamedTuple):
    """A value to be written.

    Attributes:
        name: Such as "Train/Samples/lr".
        value: A number.
        samples: So far.
    """

    name: str
    value: float
    samples: int


class EventWriter(Protocol):
    """Somewhere that events are written to."""

    def write(self, events: Sequence[Event]) -> None:
        """Write events of one step."""

    def close(self) -> None:
        """Write what is left."""


class CsvWriter:
    """A file for each name of an event: `output_path/job_name/Train_Samples_lr.csv`, with the columns step and lr.

    Args:
        output_path: A folder; None or "": the current one.
        job_name: A folder in it.
    """

    def __init__(self, output_path: str | None, job_name: str) -> None:
        self.directory = Path(output_path or "", job_name)
        self.directory.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        """See `EventWriter.write`."""
        for event in events:
            path = self.directory / (event.name.replace("/", "_").replace(" ", "_") + ".csv")
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", event.name.rpartition("/")[2]])
                rows.writerow([event.samples, event.value])

    def close(self) -> None:
        """See `EventWriter.close`."""


class TensorBoardWriter:
    """Files of TensorBoard in `output_path/job_name`; arguments as of `CsvWriter`."""

    def __init__(self, output_path: str | None, job_name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(log_dir=str(Path(output_path or "", job_name)))

    def write(self, events: Sequence[Event]) -> None:
        """See `EventWriter.write`."""
        for event in events:
            self._writer.add_scalar(event.name, event.value, event.samples)
        self._writer.flush()

    def close(self) -> None:
        """See `EventWriter.close`."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases.

    Args:
        project: Of the run.
        group: Of runs; None: none.
        team: Whose it is; None: the user's own.
    """

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        self._run: Any = importlib.import_module("wandb").init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Event]) -> None:
        """See `EventWriter.write`."""
        for event in events:
            self._run.log({event.name: event.value}, step=event.samples)

    def close(self) -> None:
        """See `EventWriter.close`."""
        self._run.finish()


_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}
_WRITERS: Mapping[str, Callable[[Mapping[str, Any]], EventWriter]] = {
    "csv_monitor": lambda options: CsvWriter(options["output_path"], options["job_name"]),
    "tensorboard": lambda options: TensorBoardWriter(options["output_path"], options["job_name"]),
    "wandb": lambda options: WandbWriter(options["project"], options["group"], options["team"]),
}


class Monitor:
    """Carries the sections out for one engine.

    Args:
        engine: The engine.
        settings: The DeepSpeed JSON.

    Attributes:
        samples_per_step: Of all ranks; None: unknown, and steps are counted instead.

    Raises:
        ImportError: If a package is missing that a section needs; on every rank where it is.
        ValueError: If a section cannot be carried out for such an engine.
    """

    def __init__(self, engine: ZeroEngine, settings: DeepSpeedSettings) -> None:
        sections = settings.observers
        for name, package in _PACKAGES.items():
            if name in sections and importlib.util.find_spec(package) is None:
                raise ImportError(
                    f"{name}.enabled is true{settings.reports_origin(name)}, which needs the package {package!r}: "
                    f"pip install {package}, or turn it off"
                )
        self._engine = ref(engine)
        self.samples_per_step = settings.batch.train_batch_size
        self._losses: list[Tensor] = []
        first = engine.mesh.world_group.rank == 0
        self._writers = [make(sections[name]) for name, make in _WRITERS.items() if name in sections and first]
        self._messages: MessageLog | None = None
        if "comms_logger" in sections:
            options = sections["comms_logger"]
            kinds = None if options["prof_all"] else options["prof_ops"]
            self._messages = MessageLog(engine, kinds, verbose=options["verbose"])
        self._profile: FlopsProfile | None = None
        if "flops_profiler" in sections and first:
            self._profile = FlopsProfile(engine, sections["flops_profiler"])
        if self._writers or self._messages is not None:
            engine.observed.listeners.append(self._mark)

    def close(self) -> None:
        """Write what is left, and listen no more."""
        engine = self._engine()
        if engine is not None and self._mark in engine.observed.listeners:
            engine.observed.listeners.remove(self._mark)
        if self._profile is not None:
            self._profile.close()
        for writer in self._writers:
            writer.close()
        self._writers = []

    def _mark(self, mark: Mark, value: Any) -> None:
        if mark == "loss" and self._writers:
            self._losses.append(value.detach())
        elif mark == "step over":
            self._step_over()

    def _step_over(self) -> None:
        engine = self._engine()
        if engine is None:
            return
        steps = engine.steps.taken + engine.steps.skipped
        if self._messages is not None:
            self._messages.step_over(steps)
        if not self._writers:
            return
        samples = steps * (self.samples_per_step or 1)
        found: dict[str, float] = {}
        if self._losses:
            found["Train/Samples/train_loss"] = sum(float(loss) for loss in self._losses) / len(self._losses)
        self._losses.clear()
        found["Train/Samples/lr"] = float(engine.optimizers[0].optimizer.param_groups[0]["lr"])
        if engine.scaler is not None:
            found["Train/Samples/loss_scale"] = engine.scaler.scale
        events = [Event(name, value, samples) for name, value in found.items()]
        for writer in self._writers:
            writer.write(events)
