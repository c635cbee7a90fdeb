"""A verification, phase by phase, and the sharded run that it compares.

A session holds one rank's training by the engine, and what can be seen of it after each phase.

Reading is what any user could do between two calls: gradients before clipping and after the step (in between a factor
may wait for the step to take it along, and reading would carry it out), states and parameters after the step.

Both sides train, and the first difference is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.activation.rng import RandomState
from zero_strategy.comm.collectives import Communicator
from zero_strategy.comm.process_group import group_takes_gpu, world_rank
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.recorder import install_diagnostics
from zero_strategy.engine import ZeroEngine
from zero_strategy.optim import LossScaler
from zero_strategy.optim.full_state import safe_get_full_fp32_param, safe_get_full_grad
from zero_strategy.runtime.compute_device import current_gpu
from zero_strategy.verify.compare import Comparison, Difference, PhaseCount, VerifyReport
from zero_strategy.verify.disturbance import DisturbedRuns
from zero_strategy.verify.reference_run import ReferenceRun, StepRecord, Tensors, flat_state
from zero_strategy.verify.subject import (
    DEFAULT_TOLERANCE,
    Factory,
    Subject,
    VerifySettings,
    make_subject,
    unreproducible,
)


class ShardedRun:
    """One rank's training. A subclass may train otherwise, to be compared like this one.

    Args:
        subject: What is trained, in place.
        config: The engine's settings.
        settings: How it trains.

    Attributes:
        engine: The engine.
        optimizer: The attached optimizer.
        rank: This rank.
        ranks: How many there are.
        taken: Whether the step at hand is taken: in fp16 an overflow is a reason not to.
    """

    def __init__(self, subject: Subject, config: ResolvedConfig, settings: VerifySettings) -> None:
        self.subject, self.config, self.settings = subject, config, settings
        self.model, self.taken = subject.model, True
        self.engine, self.optimizer = self.build()
        if (
            settings.scales_loss and self.engine.scaler is None
        ):  # autocast is the integrations' business, and so is its scaler
            self.engine.use_loss_scaler(LossScaler(config.config.loss_scale))
        self.rank, self.ranks = self.engine.mesh.rank, self.engine.mesh.world_size
        self.seed()

    def build(self) -> tuple[ZeroEngine, Optimizer]:
        """Make the engine and its optimizer."""
        settings = self.settings
        engine = ZeroEngine(self.model, self.config, compute_dtype=settings.compute_dtype, device=settings.device)
        install_diagnostics(engine)
        optimizer = self.subject.optimizer(self.model)
        engine.attach(optimizer)
        return engine, optimizer

    @property
    def control(self) -> Communicator:
        """All ranks that train."""
        return self.engine.mesh.control

    # ---- the training ----

    def seed(self) -> None:
        """Let this rank draw random numbers of its own."""
        RandomState.seeded(self.settings.seed + self.rank).restore()

    def train(self, step: int) -> Tensors:
        """Forward and backward of a step; returns the loss of each micro-batch."""
        losses: Tensors = {}
        for micro in range(self.settings.accumulation):
            last = micro == self.settings.accumulation - 1
            with nullcontext() if last else self.engine.no_sync():
                losses[f"loss of micro-batch {micro}"] = self.micro_batch(step, micro)
        return losses

    def seen_in_training(self) -> list[tuple[str, Callable[[], Tensors]]]:
        """Further phases that `train` has gone through, and what can be seen of them."""
        return []

    def micro_batch(self, step: int, micro: int) -> Tensor:
        """Forward and backward of one micro-batch; returns its loss."""
        number = self.settings.number(step, micro, self.rank, self.ranks)
        batch = self.subject.batch(number, self.settings.device)
        with self.engine.forward_scope() if self.subject.scoped else nullcontext():
            with self.settings.forward_context():
                loss = self.subject.loss(self.model, batch)
        self.engine.scale_loss(loss / self.settings.accumulation).backward()
        return loss.detach().clone()

    def unscale(self) -> Tensors:
        """Undo the loss scale; returns what it was, and whether the step will be taken."""
        assert self.engine.scaler is not None
        scale = self.engine.scaler.scale
        self.taken = self.engine.unscale_gradients(self.optimizer)
        return {"step taken": torch.tensor(self.taken), "loss scale": torch.tensor(scale)}

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients; returns their norm before."""
        return self.engine.clip_grad_norm_(max_norm)

    def update(self) -> None:
        """The optimizer's step, and what follows from it for the loss scale."""
        self.optimizer.step()
        if self.engine.scaler is not None:
            self.engine.scaler.update(finite=self.taken)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    # ---- what can be seen of it ----

    def gradients(self) -> Tensors:
        """The whole mean gradient of every parameter, None where there is none. A collective."""
        found: Tensors = {}
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.is_floating_point() else None
            found[name] = None if gradient is None else gradient.clone()
        return found

    def state(self) -> Tensors:
        """The whole state of the optimizer. A collective."""
        return flat_state(self.engine.full_optimizer_state(self.optimizer))

    def masters(self) -> Tensors:
        """The whole master weights, where they are copies of their own. A collective."""
        found: Tensors = {}
        for name, parameter in self.model.named_parameters():
            place = self.engine.model.place(parameter)
            assert place is not None
            if place[0].has_master:
                found[name] = safe_get_full_fp32_param(parameter)
        return found

    def parameters(self) -> Tensors:
        """This rank's copy of every parameter, under all its names, whole. A collective."""
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        return {name: value for name, value in self.engine.full_state_dict(names).items() if name in set(names)}

    def buffers(self) -> Tensors:
        """This rank's own buffers."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def owner(self, name: str, element: int) -> int | None:
        """The rank that owns an element of a parameter, if one alone does.

        Args:
            name: Of the parameter, or "state of parameter".
            element: Counted in the flattened parameter.
        """
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        place = self.engine.model.place(parameters[name]) if name in parameters else None
        if place is None or not place[0].placement.shard_optimizer or self.ranks == 1:
            return None
        bucket, index = place
        return (bucket.layout.segments[index].offset + element) // bucket.layout.slice_numel

    def title(self, rank: int) -> str:
        """Name of a rank."""
        return f"rank {rank}"


def place_to_train(ranks: int) -> torch.device:
    """Devices of the ranks of this host: a GPU each if there are enough and their group takes it, else the CPU."""
    if group_takes_gpu() and torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        return current_gpu()
    return torch.device("cpu")


class Verification:
    """One rank's part of a verification.

    Args:
        factory: Makes what is trained; called once on every rank, and for each plain reference run.
        config: The resolved config.
        settings: How to train.
        run_class: What trains the sharded side: `ShardedRun` or a subclass.
    """

    def __init__(
        self, factory: Factory, config: ResolvedConfig, settings: VerifySettings, run_class: Callable[..., ShardedRun]
    ) -> None:
        self.factory, self.config, self.settings = factory, config, settings
        self.reason = "" if settings.tolerance == 0 else unreproducible(config, settings)
        if settings.tolerance is not None:
            self.tolerance = settings.tolerance
        else:
            self.tolerance = DEFAULT_TOLERANCE if self.reason else 0.0
        subject = self._subject()
        self.plain = self._reference(subject) if world_rank() == 0 else None
        self.run_of = run_class(subject, config, settings)
        run = self.run_of
        self.comparison = Comparison(run.control, self.tolerance, self._explained, run.owner, run.title)
        self._record = StepRecord()
        self._disturbed = DisturbedRuns(lambda seed: self._reference(self.run_of.subject, seed))
        self._steps = 0

    def _subject(self) -> Subject:
        settings = self.settings
        return make_subject(self.factory, settings.seed, settings.batches(self.config.world_size))

    def _reference(self, sharded: Subject, jitter: int | None = None) -> ReferenceRun:
        subject = self._subject()
        check_anew(sharded, subject)
        return ReferenceRun(subject, self.config, self.settings, jitter)

    def run(self) -> VerifyReport:
        """Train and compare, up to the first phase that differs."""
        found = self._compare(-1, "start", self.run_of.parameters())
        for step in range(self.settings.steps if not found else 0):
            found = self._step(step)
            if found:
                break
        return self._report(found)

    def _step(self, step: int) -> list[Difference]:
        """Train one step on both sides; returns what differs in the first phase where anything does."""
        run, clip_norm = self.run_of, self.settings.clip_norm
        if self.plain is not None:
            self._record, self._steps = self.plain.step(), step + 1
            self._disturbed.note(self._record)
            if self.tolerance:
                self._disturbed.catch_up()
        phases: list[tuple[str, Callable[[], Tensors]]] = [
            ("loss", lambda: run.train(step)),
            *run.seen_in_training(),
            ("gradient", run.gradients),
        ]
        if run.engine.scaler is not None:
            phases.append(("loss scale", run.unscale))
        if clip_norm is not None:
            phases.append(("norm", lambda: {"gradient norm": run.clip(clip_norm)} if run.taken else {}))
        phases.append(("clipped gradient", self._updated))
        phases += [
            ("optimizer state", run.state),
            ("master weight", run.masters),
            ("parameter", run.parameters),
            ("buffer", run.buffers),
        ]
        for phase, look in phases:
            mine = look()
            if phase == "clipped gradient" and clip_norm is None:
                continue
            if found := self._compare(step, phase, mine):
                return found
        run.zero_grad()
        odd = [Difference(step, "formula of the step", name, None, how) for name, how in self._record.odd_steps.items()]
        return list(run.control.all_gather_objects(odd)[0])

    def _updated(self) -> Tensors:
        self.run_of.update()
        return self.run_of.gradients() if self.settings.clip_norm is not None and self.run_of.taken else {}

    def _compare(self, step: int, phase: str, mine: Tensors) -> list[Difference]:
        if self.plain is None:
            return self.comparison.phase(step, phase, mine, None)
        if phase == "start":
            self._record = StepRecord({"start": self.plain.start()})
        return self.comparison.phase(step, phase, mine, lambda rank: self._expected(phase, rank))

    def _expected(self, phase: str, rank: int) -> Tensors:
        """Values that a rank is to have."""
        return self._record.of(phase, rank)

    # ---- what re-ordered summation explains ----

    def _explained(self, phase: str, name: str, rank: int) -> float | None:
        if phase == "start":
            return 0.0
        if phase == "gradient" and not self._record.taken:
            return math.inf  # what an overflow leaves; both sides drop it
        return self._disturbed.explained(self._record, phase, name, rank)

    def _report(self, found: list[Difference]) -> VerifyReport:
        comparison = self.comparison
        counts = [
            PhaseCount(phase, compared, comparison.equal[phase], comparison.worst.get(phase))
            for phase, compared in comparison.compared.items()
            if compared
        ]
        report = VerifyReport(
            stage=self.config.config.stage,
            pipeline_stages=self.config.config.pipeline.stages,
            ranks=self.config.world_size,
            steps=self._steps,
            tolerance=self.tolerance,
            reason=self.reason,
            phases=counts,
            differences=found,
        )
        shared: VerifyReport = self.run_of.control.all_gather_objects(report)[0]
        return shared


def check_anew(sharded: Subject, plain: Subject) -> None:
    """See that the two sides have models of their own.

    Raises:
        ValueError: If they share a parameter.
    """
    there = {id(parameter) for parameter in sharded.model.parameters()}
    if any(id(parameter) in there for parameter in plain.model.parameters()):
        raise ValueError("the factory returned one model twice: build it anew in every call")
