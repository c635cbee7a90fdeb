"""A step of a run trained again, in one process, from the last checkpoint before it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zero_strategy.activation.rng import kept_random_state
from zero_strategy.checkpoint.folders import find_checkpoints
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.config import ZeroConfig, load_config
from zero_strategy.diagnostics.journal import StepJournal
from zero_strategy.diagnostics.journal_file import Session, StepEntry
from zero_strategy.diagnostics.journal_header import Place
from zero_strategy.engine import ZeroEngine
from zero_strategy.engine_slots import SLOTS
from zero_strategy.replay.comparison import Difference, compare_steps, differing
from zero_strategy.replay.factory import SlotSubject, slot_subject
from zero_strategy.replay.run_journal import RunJournal, RunSession, read_run_journal
from zero_strategy.runtime.shown import shown
from zero_strategy.runtime.terminal import each
from zero_strategy.verify.subject import Factory

_DEPTH = 3
"""Levels below a directory in which checkpoints are looked for."""


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        run: Name of the directory.
        step: That was asked for.
        start: The first step that was trained again.
        checkpoint: That it began with; None: the beginning.
        stopped: The last step that was trained: the one asked for, or that of the difference.
        difference: The first, where the replay is the other run; None: there is none.
        environment: What differs in versions and machines between the run and the replay.
    """

    run: str
    step: int
    start: int
    checkpoint: str | None
    stopped: int
    difference: Difference | None
    environment: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """True if no recorded bit differs."""
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "equal": self.equal,
            "run": self.run,
            "step": self.step,
            "start": self.start,
            "checkpoint": self.checkpoint,
            "stopped": self.stopped,
            "difference": None if self.difference is None else self.difference.to_json(),
            "environment": {key: list(both) for key, both in self.environment.items()},
        }

    def __str__(self) -> str:
        begin = f"the checkpoint {self.checkpoint}" if self.checkpoint else "the beginning"
        lines = [f"{self.run}: steps {self.start} to {self.stopped} trained again in one process, from {begin}", ""]
        if self.difference is None:
            lines.append(f"EQUAL up to step {self.step}")
        else:
            lines.append(f"DIFFERENT from {self.difference}")
            if self.environment:
                lines += ["", "versions and machines that differ (recorded, here), which may be the reason:"]
                lines += [f"  {key}: {ours!r}, {theirs!r}" for key, (ours, theirs) in self.environment.items()]
        return "\n".join(shown(line) for line in lines)


def replay(
    run: str | os.PathLike[str],
    step: int,
    factory: Factory | None = None,
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    seed: int = 0,
    recorded_hyper: bool = False,
    device: torch.device | None = None,
) -> ReplayReport:
    """Train a run's steps again in this process, up to one of them, and compare each with the journal.

    Args:
        run: Directory of the run, as `diagnostics.run_dir` named it.
        step: The last one, counted from 0.
        factory: Makes model, optimizer, batches and loss; see `replay.factory`. None: what the run's
            `diagnostics.journal_factory` names.
        checkpoints: Where checkpoints of the run are; None: in its directory, up to three levels below.
        seed: Of the factory.
        recorded_hyper: Take all hyper-parameters from the journal. Else they are compared, apart from those that a
            scheduler changes (it leaves `initial_lr` in the groups), which are taken.
        device: Where to compute; None: the CPU.

    Raises:
        ValueError: If the journal, the factory or a checkpoint is not as it has to be; says what to do.
        OSError: If a file cannot be read.
    """
    recorded = read_run_journal(run)
    session = recorded.session(step)
    factory = factory or str(session.header.get("factory") or "") or None
    if factory is None:
        raise ValueError(
            f"{shown(os.fspath(run))}: give a factory (path.py:function), for the run did not name one in "
            "diagnostics.journal_factory"
        )
    start, checkpoint = _last_checkpoint(Path(run if checkpoints is None else checkpoints), step)
    _check_steps(recorded, start, step)
    with kept_random_state(), _as_recorded(session.header, device):
        subject = slot_subject(factory, seed, int(session.header["slots"]))
        again = _Again(recorded, subject, start, checkpoint, recorded_hyper, device)
        try:
            return again.run(step)
        finally:
            again.close()


class _Again:
    """The replay of some steps.

    Args:
        recorded: The run.
        subject: What it trains.
        start: The first step.
        checkpoint: To begin with.
        recorded_hyper: See `replay`.
        device: Likewise.
    """

    def __init__(
        self,
        recorded: RunJournal,
        subject: SlotSubject,
        start: int,
        checkpoint: Path | None,
        recorded_hyper: bool,
        device: torch.device | None,
    ) -> None:
        self._recorded, self._subject = recorded, subject
        self._start, self._checkpoint, self._recorded_hyper = start, checkpoint, recorded_hyper
        header = recorded.session(start).header
        model = subject.subject.model
        model.train()
        dtype = _dtype(header["compute_dtype"])
        self._engine = ZeroEngine(model, _config(header), compute_dtype=dtype, device=device)
        self._optimizer: Optimizer = subject.subject.optimizer(model)
        self._engine.attach(self._optimizer)
        self._sink = _Kept(recorded.name)
        self._journal = StepJournal(self._engine, self._sink, weights_every=1, elements=int(header["elements"]))
        if checkpoint is not None:
            self._engine.load(checkpoint)

    def close(self) -> None:
        """Let go of the model."""
        self._journal.close()
        self._engine.close()

    def run(self, last: int) -> ReplayReport:
        """Train up to a step, or up to one that differs."""
        difference, session, at = None, None, self._start
        for at in each("replaying", range(self._start, last + 1), 0):
            if (now := self._recorded.session(at)) is not session:
                session = now
                self._journal.begin_session(list(session.places.values()))
            self._prepare_hyper(session, at)
            self._train(session, at)
            again = self._sink.sessions[-1]
            difference = compare_steps(session.view(at), again.view(at))
            if difference is not None:
                break
        assert session is not None
        ours, theirs = session.header, self._sink.sessions[-1].header
        environment = {k: v for k, v in differing(ours, theirs).items() if k.split(".")[0] in _ENVIRONMENT}
        checkpoint = None if self._checkpoint is None else os.fspath(self._checkpoint)
        return ReplayReport(self._recorded.name, last, self._start, checkpoint, at, difference, environment)

    def _prepare_hyper(self, session: RunSession, step: int) -> None:
        """Take over what a schedule has changed in the run, or all."""
        for key, value in session.hyper(step).items():
            if key == "loss_scale":
                continue
            _, group, name = key.split(".", 2)
            if int(group) >= len(self._optimizer.param_groups):
                continue
            own = self._optimizer.param_groups[int(group)]
            scheduled = f"0.{group}.initial_lr" in session.hyper(step) and name in _SCHEDULED
            if (scheduled or self._recorded_hyper) and not isinstance(own.get(name), torch.Tensor):
                own[name] = tuple(value) if isinstance(value, list) else value

    def _train(self, session: RunSession, step: int) -> None:
        engine, subject, entry = self._engine, self._subject.subject, session.view(step).entry
        device = engine.model.device
        autocast = _dtype(session.header["autocast"])
        for _ in range(engine.slots.count):
            with engine.micro_batch() as slot:
                batch = self._subject.batch_on(device, step, slot)
                context = nullcontext() if autocast is None else torch.autocast(device.type, autocast)
                with engine.forward_scope(batch), context:
                    loss = subject.loss(engine.module, batch)
                engine.check_loss(loss)
                engine.scale_loss(loss).backward()
        engine.unscale_gradients(self._optimizer)
        if entry.partly:
            raise ValueError(f"step {step} clipped the gradients of some parameters only, which cannot be replayed")
        if entry.clip == "norm":
            engine.clip_grad_norm_(entry.bound)
        elif entry.norm is not None:
            engine.grad_norm()
        if entry.clip == "value":
            engine.clip_grad_value_(entry.bound)
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Kept:
    """Keeps a journal in memory, as it would be read back; see `diagnostics.journal.Sink`."""

    def __init__(self, name: str) -> None:
        self._name = f"the replay of {name}"
        self.sessions: list[RunSession] = []

    def header(self, place: Place, header: Mapping[str, Any]) -> None:
        """See `Sink`."""
        if not self.sessions or place.rank in self.sessions[-1].ranks:
            self.sessions.append(RunSession(self._name))
        self.sessions[-1].ranks[place.rank] = Session(header)

    def hyper(self, step: int, changes: Mapping[str, Any]) -> None:
        """See `Sink`."""
        for session in self.sessions[-1].ranks.values():
            session.hyper[step] = changes

    def step(self, place: Place, entry: StepEntry) -> None:
        """See `Sink`."""
        self.sessions[-1].ranks[place.rank].take(entry)

    def weights(self, place: Place, step: int, lines: tuple[int, ...]) -> None:
        """See `Sink`."""
        self.sessions[-1].ranks[place.rank].weights[step] = lines

    def close(self) -> None:
        """See `Sink`."""


_ENVIRONMENT = ("versions", "threads", "capability", "device", "deterministic")
_SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum")
"""Names in a group that schedulers write."""

_TAKEN = (
    "stage", "gradient_reduction", "nonfinite_gradients", "matrix_optimizers", "matrix_parameters",
    "elementwise_optimizers", "fused_optimizers", "units.", "precision.", "optimizer.", "loss_scale.",
    "activation_checkpointing.tile_tokens",
)  # fmt: skip
"""Settings that bits depend on, or what a unit is."""


def _config(header: Mapping[str, Any]) -> ZeroConfig:
    """The settings of one process that trains like a run."""
    found: dict[str, Any] = {"reproducible": {"slots": header["slots"], "seed": header["seed"]}}
    for key, value in header["config"].items():
        if value is not None and key.startswith(_TAKEN):
            section, _, name = key.rpartition(".")
            (found.setdefault(section, {}) if section else found)[name] = value
    return load_config(found)


def _dtype(name: str | None) -> torch.dtype | None:
    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"the journal names a dtype {shown(name)!r}, which torch does not have")
    return found


@contextmanager
def _as_recorded(header: Mapping[str, Any], device: torch.device | None) -> Iterator[None]:
    """Set as many threads as a rank had, and deterministic algorithms on a GPU."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(int(header["threads"]))
    if device is not None and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def _check_steps(recorded: RunJournal, start: int, step: int) -> None:
    missing = [number for number in range(start, step + 1) if number not in recorded.sessions_of]
    if missing:
        raise ValueError(
            f"{shown(recorded.name)}: the journal has no step {missing[0]}, which comes after the last checkpoint "
            f"before step {step}: give --checkpoints DIR with one of {missing[-1] + 1} steps or more"
        )


def _last_checkpoint(folder: Path, step: int) -> tuple[int, Path | None]:
    """Steps of the last checkpoint that has no more than `step` of them, and its place; (0, None): there is none."""
    best: tuple[int, Path | None] = (0, None)
    for parent in _folders(folder):
        for found in find_checkpoints(parent):
            if found.complete and not found.is_export and found.step is not None:
                counters = Manifest.load(found.path).counters
                taken = found.step + int(counters.get("skipped_steps") or 0)
                if SLOTS in counters and best[0] < taken <= step:
                    best = taken, found.path
    return best


def _folders(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        raise ValueError(f"{shown(os.fspath(folder))}: no such directory")
    levels = [[folder]]
    for _ in range(_DEPTH):
        levels.append(
            [path for parent in levels[-1] for path in parent.iterdir() if path.is_dir() and path.name[0] != "."]
        )
    return [path for level in levels for path in level]
