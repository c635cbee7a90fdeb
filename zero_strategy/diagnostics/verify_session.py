"""A verification, phase by phase: both sides train, and what differs first is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from zero_strategy.activation.seeds import kept_random_state
from zero_strategy.config import ResolvedConfig
from zero_strategy.diagnostics.verify_compare import Comparison, Difference
from zero_strategy.diagnostics.verify_report import PhaseCount, VerifyReport
from zero_strategy.diagnostics.verify_run import ShardedRun
from zero_strategy.diagnostics.verify_settings import DEFAULT_TOLERANCE, VerifySettings, unreproducible
from zero_strategy.diagnostics.verify_subject import Factory, Subject, make_subject
from zero_strategy.diagnostics.verify_twin import StepRecord, Tensors, Twin
from zero_strategy.distributed.world import world_rank

JITTERS = (1, 2)
"""Seeds of the disturbed twins; what re-ordered summation explains is the larger of what they show."""


class Verification:
    """One rank's part of a verification.

    Args:
        factory: Makes what is trained; called once on every rank, and for each plain twin.
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
        self.plain = self._twin(subject) if world_rank() == 0 else None
        self.run_of = run_class(subject, config, settings)
        run = self.run_of
        self.comparison = Comparison(run.control, self.tolerance, self._explained, run.owner, run.title)
        self._record = StepRecord()
        self._taken: list[StepRecord] = []
        self._disturbed: list[tuple[Twin, StepRecord]] = []
        self._steps = 0

    def _subject(self) -> Subject:
        settings = self.settings
        return make_subject(self.factory, settings.seed, settings.batches(self.config.world_size))

    def _twin(self, sharded: Subject, jitter: int | None = None) -> Twin:
        subject = self._subject()
        check_anew(sharded, subject)
        return Twin(subject, self.config, self.settings, jitter)

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
            self._taken.append(StepRecord(taken=self._record.taken))
            if self.tolerance:
                self._disturb()
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
        return list(run.control.gather_objects(odd)[0])

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
        """What a rank is to have."""
        return self._record.of(phase, rank)

    # ---- what re-ordered summation explains ----

    def _disturb(self) -> None:
        """Bring the disturbed twins to the step at which the plain one is."""
        if not self._disturbed:
            with kept_random_state():  # the sharded side goes on drawing
                self._disturbed = [(self._twin(self.run_of.subject, seed), StepRecord()) for seed in JITTERS]
        while (number := self._disturbed[0][0].steps_taken) < self._steps:
            self._disturbed = [(twin, twin.step(self._taken[number])) for twin, _ in self._disturbed]

    def _explained(self, phase: str, name: str, rank: int) -> float | None:
        if phase == "start":
            return 0.0
        if phase == "gradient" and not self._record.taken:
            return math.inf  # what an overflow leaves; both sides drop it
        self._disturb()
        plain = self._record.of(phase, rank).get(name)
        if plain is None or not plain.is_floating_point():
            return 0.0
        if not plain.numel():
            return 0.0
        gaps = [torch.finfo(plain.dtype).eps * plain.abs().max().double()]
        for _, record in self._disturbed:
            if (other := record.of(phase, rank).get(name)) is not None:
                gap = (other.double() - plain.double()).abs()
                gaps.append(torch.where(gap.isfinite(), gap, 0.0).max())
        return float(torch.stack(gaps).nan_to_num().max())

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
        shared: VerifyReport = self.run_of.control.gather_objects(report)[0]
        return shared



def check_anew(sharded: Subject, plain: Subject) -> None:
    """See that the two sides have models of their own.

    Raises:
        ValueError: If they share a parameter.
    """
    there = {id(parameter) for parameter in sharded.model.parameters()}
    if any(id(parameter) in there for parameter in plain.model.parameters()):
        raise ValueError("the factory returned one model twice: build it anew in every call")
