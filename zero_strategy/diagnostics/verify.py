"""Proof, on the user's own model, that sharded training is what one plain process trains.

    report = verify("train.py:factory", load_config(stage=3), ranks=2, steps=5)
    print(report); report.raise_if_failed()

Rank 0 trains a plain twin beside its shards, phase by phase, so it needs the memory of a whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from zero_strategy.config import ResolvedConfig, load_config, resolve
from zero_strategy.diagnostics.verify_compare import Comparison, Difference
from zero_strategy.diagnostics.verify_report import PhaseCount, VerifyReport
from zero_strategy.diagnostics.verify_run import ShardedRun, place_to_train
from zero_strategy.diagnostics.verify_settings import DEFAULT_TOLERANCE, VerifySettings, unreproducible
from zero_strategy.diagnostics.verify_subject import Factory, check_place, kept_random_state, make_subject, place_of
from zero_strategy.diagnostics.verify_twin import StepRecord, Tensors, Twin
from zero_strategy.distributed.local_ranks import run_local_ranks
from zero_strategy.distributed.world import has_group, world_rank, world_size

JITTERS = (1, 2)
"""Seeds of the disturbed twins; what re-ordered summation explains is the larger of what they show."""


def verify(
    factory: Factory,
    config: Any = None,
    *,
    ranks: int | None = None,
    steps: int = 5,
    accumulation: int = 1,
    clip_norm: float | None = None,
    compute_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float = 1800.0,
) -> VerifyReport:
    """Train a few steps sharded and plain, and compare all there is.

    Inside of a process group all ranks call it, and it uses those. Else it starts `ranks` processes on this host.

    Args:
        factory: Makes model, optimizer, batches and loss; see `verify_subject`. In processes of their own it is found
            by its place, so it has to be at the top of a module then.
        config: Anything `load_config` takes.
        ranks: How many to start; default: those there are, else 2.
        steps: Optimizer steps.
        accumulation: Micro-batches per step and rank.
        clip_norm: Bound of the gradient norm, or None.
        compute_dtype: What parameters are computed with (bf16 with fp32 master weights), None for their own.
        autocast: Dtype of autocast, or None.
        seed: Of the factory; rank r draws from seed + r afterwards.
        tolerance: See `VerifySettings`.
        timeout: Seconds until the processes that were started are given up.

    Raises:
        ValueError: If an argument or the factory is not as described, or there are pipeline stages.
        LocalRankError: If a rank that was started failed.
    """
    loaded = config if isinstance(config, ResolvedConfig) else load_config(config)
    options = dict(
        steps=steps, accumulation=accumulation, clip_norm=clip_norm, compute_dtype=compute_dtype, autocast=autocast,
        seed=seed, tolerance=tolerance,
    )  # fmt: skip
    VerifySettings(**options)  # type: ignore[arg-type]  # refused here, not on some rank
    if has_group() or ranks == 1:
        if ranks not in (None, world_size()):
            raise ValueError(f"ranks={ranks}, but this process group has {world_size()}: leave the argument out")
        return verify_here(factory, loaded, VerifySettings(**options, device=place_to_train(1)))  # type: ignore[arg-type]
    if isinstance(loaded, ResolvedConfig):
        raise ValueError("a resolved config is for the ranks there are: give the config itself, or start ranks before")
    return verify_on_new_ranks(place_of(factory), loaded, options, 2 if ranks is None else ranks, timeout)


def verify_on_new_ranks(
    factory: str, config: Any, options: dict[str, Any], ranks: int, timeout: float = 1800.0
) -> VerifyReport:
    """Start ranks on this host and let them verify; see `verify` for the arguments."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; accepted: 1 or more")
    place, attribute = check_place(factory)
    if place.endswith(".py"):
        factory = f"{os.path.abspath(os.path.expanduser(place))}:{attribute}"
    backend = "nccl" if place_to_train(ranks).type == "cuda" else "gloo"
    call = (factory, config, options, ranks)
    reports = run_local_ranks(f"{__name__}:_on_rank", call, ranks, timeout=timeout, backend=backend)
    found: VerifyReport = reports[0]
    return found


def _on_rank(factory: str, config: Any, options: dict[str, Any], ranks: int) -> VerifyReport:
    return verify_here(factory, config, VerifySettings(**options, device=place_to_train(ranks)))


def verify_here(
    factory: Factory, config: Any, settings: VerifySettings, run_class: Callable[..., ShardedRun] = ShardedRun
) -> VerifyReport:
    """Verify on the ranks of this process group, or on this process alone. A collective.

    Args:
        factory: Makes what is trained; called once on every rank, and for each plain twin.
        config: A config, or a resolved one.
        settings: How to train.
        run_class: What trains the sharded side: `ShardedRun` or a subclass.

    Raises:
        ValueError: See `verify`.
    """
    resolved = config if isinstance(config, ResolvedConfig) else resolve(config, world_size())
    if resolved.config.pipeline.stages > 1:
        raise ValueError(
            f"pipeline.stages is {resolved.config.pipeline.stages}: verify trains whole modules; set it to 1, and "
            "compare a pipeline's checkpoint with one of a run without stages (zero-strategy checkpoint diff)"
        )
    with kept_random_state():
        return _Verification(factory, resolved, settings, run_class).run()


class _Verification:
    """One rank's part of a verification."""

    def __init__(
        self, factory: Factory, config: ResolvedConfig, settings: VerifySettings, run_class: Callable[..., ShardedRun]
    ) -> None:
        self.factory, self.config, self.settings = factory, config, settings
        self.reason = "" if settings.tolerance == 0 else unreproducible(config, settings)
        if settings.tolerance is not None:
            self.tolerance = settings.tolerance
        else:
            self.tolerance = DEFAULT_TOLERANCE if self.reason else 0.0
        subject = make_subject(factory, settings.seed, settings.batches(config.world_size))
        self.plain = self._twin() if world_rank() == 0 else None
        if self.plain is not None and self.plain.model is subject.model:
            raise ValueError("the factory returned one model twice: build it anew in every call")
        self.run_of = run_class(subject, config, settings)
        self.comparison = Comparison(
            self.run_of.engine.mesh.control, self.tolerance, self._explained, self.run_of.owner
        )
        self._record = StepRecord()
        self._disturbed: list[tuple[Twin, StepRecord]] = []
        self._steps = 0

    def _twin(self, jitter: int | None = None) -> Twin:
        settings = self.settings
        subject = make_subject(self.factory, settings.seed, settings.batches(self.config.world_size))
        return Twin(subject, self.config, settings, jitter)

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
            if self.tolerance:
                self._disturb()
        phases: list[tuple[str, Callable[[], Tensors]]] = [
            ("loss", lambda: run.train(step)),
            ("gradient", run.gradients),
        ]
        if clip_norm is not None:
            phases.append(("norm", lambda: {"gradient norm": run.clip(clip_norm)}))
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
        return list(run.engine.mesh.control.gather_objects(odd)[0])

    def _updated(self) -> Tensors:
        self.run_of.update()
        return self.run_of.gradients() if self.settings.clip_norm is not None else {}

    def _compare(self, step: int, phase: str, mine: Tensors) -> list[Difference]:
        if self.plain is None:
            return self.comparison.phase(step, phase, mine, None)
        if phase == "start":
            self._record = StepRecord({"start": self.plain.start()})
        return self.comparison.phase(step, phase, mine, lambda rank: self._record.of(phase, rank))

    # ---- what re-ordered summation explains ----

    def _disturb(self) -> None:
        """Bring the disturbed twins to the step at which the plain one is."""
        if not self._disturbed:
            with kept_random_state():  # the sharded side goes on drawing
                self._disturbed = [(self._twin(seed), StepRecord()) for seed in JITTERS]
        while self._disturbed[0][0].steps_taken < self._steps:
            self._disturbed = [(twin, twin.step()) for twin, _ in self._disturbed]

    def _explained(self, phase: str, name: str, rank: int) -> float | None:
        if phase == "start":
            return 0.0
        self._disturb()
        plain = self._record.of(phase, rank).get(name)
        if plain is None or not plain.is_floating_point():
            return 0.0
        least = torch.finfo(plain.dtype).eps * float(plain.abs().max()) if plain.numel() else 0.0
        gaps = [least]
        for _, record in self._disturbed:
            other = record.of(phase, rank).get(name)
            if other is not None and plain.numel():
                gaps.append(float((other.double() - plain.double()).abs().max()))
        return max(gaps)

    def _report(self, found: list[Difference]) -> VerifyReport:
        comparison = self.comparison
        counts = [
            PhaseCount(phase, compared, comparison.equal[phase], comparison.worst.get(phase))
            for phase, compared in comparison.compared.items()
            if compared
        ]
        report = VerifyReport(
            stage=self.config.config.stage,
            ranks=self.config.world_size,
            steps=self._steps,
            tolerance=self.tolerance,
            reason=self.reason,
            phases=counts,
            differences=found,
        )
        shared: VerifyReport = self.run_of.engine.mesh.control.gather_objects(report)[0]
        return shared

