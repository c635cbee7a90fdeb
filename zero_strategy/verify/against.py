"""Verification of a distributed training that is not this package's: is it what one plain process trains?

    report = verify_against("train.py:factory", "fsdp2", ranks=2, steps=3, clip_norm=1.0)
    report = verify_against("train.py:factory", "parallel.py:make", ranks=4)      # a script's own distributed code

Every rank trains its part; rank 0 trains the reference run beside it, phase by phase. Where something differs, the
reference run is repeated with what hints need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_strategy.activation.rng import RandomState, kept_random_state
from zero_strategy.comm.collectives import CommunicationCounters, Communicator
from zero_strategy.comm.local_ranks import run_local_ranks
from zero_strategy.comm.process_group import has_process_group, own_group, require_group, world_rank, world_size
from zero_strategy.verify.compare import MOST_SHOWN, Difference, PhaseCount, VerifyReport
from zero_strategy.verify.distributed_run import MakeRun, RunOfRank
from zero_strategy.verify.disturbance import DisturbedRuns
from zero_strategy.verify.hints import Hints, Sizes, hint_at_start, wrong_on_the_way_back
from zero_strategy.verify.rank_comparison import RankComparison, Wrong
from zero_strategy.verify.reference_run import StepRecord, Tensors
from zero_strategy.verify.session import check_anew, place_to_train
from zero_strategy.verify.sides import READY, make_ready
from zero_strategy.verify.subject import (
    DEFAULT_TOLERANCE,
    Factory,
    Subject,
    VerifySettings,
    check_place,
    load_factory,
    make_subject,
    place_of,
)
from zero_strategy.verify.whole_run import Shares, WholeRun


def verify_against(
    factory: Factory,
    against: str | MakeRun,
    *,
    ranks: int | None = None,
    stage: int | None = None,
    deepspeed_config: Mapping[str, Any] | None = None,
    steps: int = 5,
    accumulation: int = 1,
    clip_norm: float | None = None,
    compute_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout: float = 1800.0,
) -> VerifyReport:
    """Train a few steps distributed and in one plain process, and compare all that the distributed side shows.

    Inside of a process group all ranks call it, and it uses those. Else it starts `ranks` processes on this host.

    Args:
        factory: Makes model, optimizer, batches and loss; see `verify_subject`.
        against: "ddp", "fsdp2", "deepspeed" or "plain", or a function from (subject, settings) to a `DistributedRun`,
            or its place. In processes of their own functions are found by their places.
        ranks: How many to start; default: those there are, else 2.
        stage: "deepspeed": the ZeRO stage, default 2; "fsdp2": 3 (default), or 2: weights are kept after forward.
        deepspeed_config: Settings of DeepSpeed beside batch sizes, clipping and precision.
        steps: Optimizer steps.
        accumulation: Micro-batches per step and data rank.
        clip_norm: Bound of the gradient norm, or None.
        compute_dtype: torch.bfloat16: computed with bf16 weights, beside fp32 ones that the optimizer updates.
        autocast: torch.bfloat16: of autocast.
        seed: Of the factory; data rank d draws from seed + d afterwards.
        tolerance: How many times what re-ordered summation explains may differ; default 8.
        timeout: Seconds until the processes that were started are given up.

    Raises:
        ValueError: If an argument, the factory or the distributed run is not as described.
        LocalRankError: If a rank that was started failed.
    """
    options: dict[str, Any] = dict(
        steps=steps, accumulation=accumulation, clip_norm=clip_norm, compute_dtype=compute_dtype, autocast=autocast,
        seed=seed, tolerance=tolerance,
    )  # fmt: skip
    extra = {"stage": stage, "deepspeed_config": deepspeed_config}
    checked(against, options, extra)
    if has_process_group():
        if ranks not in (None, world_size()):
            raise ValueError(f"ranks={ranks}, but this process group has {world_size()}: leave the argument out")
        settings = VerifySettings(**options, device=place_to_train(1))
        return verify_against_here(factory, against, settings, **extra)
    place = against if isinstance(against, str) else place_of(against)
    ranks = 2 if ranks is None else ranks
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; accepted: 1 or more")
    call = (_absolute(place_of(factory)), place if place in READY else _absolute(place), options, extra, ranks)
    backend = "nccl" if place_to_train(ranks).type == "cuda" else "gloo"
    reports = run_local_ranks(f"{__name__}:_on_rank", call, ranks, timeout=timeout, backend=backend)
    found: VerifyReport = reports[0]
    return found


def checked(against: str | MakeRun, options: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """See that the options make sense, before any rank is started.

    Raises:
        ValueError: If they make no sense, or there is no such distributed side.
    """
    settings = VerifySettings(**options)
    if isinstance(against, str) and against in READY:
        make_ready(against, **extra)
    elif any(value is not None for value in extra.values()):
        raise ValueError("a stage or a config is of no use for a distributed run of your own; leave it out")
    if settings.scales_loss:
        raise ValueError("fp16 scales losses, which is left to each training's own scaler: verify in bf16 or float32")
    if settings.tolerance == 0:
        raise ValueError("tolerance is 0, but the order in which others sum is not known: give more, or leave it out")
    if isinstance(against, str) and against not in READY:
        if ":" not in against:
            raise ValueError(f"against {against!r}: accepted: {', '.join(READY)}, or path.py:function of your own")
        check_place(against, "distributed run")


def _absolute(place: str) -> str:
    file, attribute = check_place(place)
    return f"{os.path.abspath(os.path.expanduser(file))}:{attribute}" if file.endswith(".py") else place


def _on_rank(factory: str, against: str, options: dict[str, Any], extra: dict[str, Any], ranks: int) -> VerifyReport:
    return verify_against_here(factory, against, VerifySettings(**options, device=place_to_train(ranks)), **extra)


def verify_against_here(
    factory: Factory, against: str | MakeRun, settings: VerifySettings, **extra: Any
) -> VerifyReport:
    """Verify on the ranks of this process group. A collective; see `verify_against`.

    Args:
        factory: See there.
        against: See there.
        settings: How to train.
        extra: `stage` and `deepspeed_config`.
    """
    require_group("verify_against_here compares ranks")
    title, make = _maker(against, extra)
    with kept_random_state():
        return _Session(factory, title, make, settings).run()


def _maker(against: str | MakeRun, extra: Mapping[str, Any]) -> tuple[str, MakeRun]:
    """The distributed side's name, and what makes it."""
    if isinstance(against, str) and against in READY:
        return make_ready(against, **extra)
    if isinstance(against, str):
        return against, load_factory(against, "distributed run")
    return getattr(against, "__name__", "distributed run"), against


MOST_HINTS = 4
"""Tensors of a phase to which a hint is looked for."""


def _names(wrong: Sequence[Wrong]) -> str:
    shown = [one.difference.name for one in wrong[:4]]
    return ", ".join(shown) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")


class _Session:
    """One rank's part.

    Args:
        factory: Makes what is trained.
        title: The distributed side's name.
        make: Makes this rank's part of it.
        settings: How to train.
    """

    def __init__(self, factory: Factory, title: str, make: MakeRun, settings: VerifySettings) -> None:
        self.factory, self.title, self.settings = factory, title, settings
        self.tolerance = DEFAULT_TOLERANCE if settings.tolerance is None else settings.tolerance
        rank, ranks = world_rank(), world_size()
        # Of gloo and its own, so that nothing that the script sends can pair up with it.
        group = own_group([range(ranks)], backend="gloo") if has_process_group() else None
        self.control = Communicator(group, CommunicationCounters(), owns=group is not None)
        self.subject = self._subject(ranks)
        self.shown = RunOfRank(make(self.subject, settings), rank, ranks, settings.accumulation)
        self.sizes = self._sizes(ranks)
        self.plain = self._reference(None) if rank == 0 else None
        self.disturbed = DisturbedRuns(self._reference)
        self.comparison = RankComparison(self.control, self.sizes.data_rank_of, self.tolerance, self._explained)
        self.record = StepRecord()
        RandomState.seeded(settings.seed + self.shown.data_rank).restore()

    def _subject(self, ranks: int) -> Subject:
        return make_subject(self.factory, self.settings.seed, self.settings.batches(ranks))

    def _sizes(self, ranks: int) -> Sizes:
        """Sizes that all ranks have stated.

        Raises:
            ValueError: If they do not fit together.
        """
        told = self.control.all_gather_objects((self.shown.data_rank, self.shown.data_ranks, self.shown.reduction))
        stated_alike = len({(of, reduction) for _, of, reduction in told}) == 1
        if not stated_alike or {own for own, _, _ in told} != set(range(told[0][1])):
            stated = "; ".join(f"rank {r}: {own} of {of}, {how}" for r, (own, of, how) in enumerate(told))
            raise ValueError(
                "ranks have to state the same data_ranks and reduction, and all data ranks from 0 on have to be there: "
                f"{stated}"
            )
        return Sizes(ranks, self.shown.data_ranks, self.settings.accumulation, [own for own, _, _ in told])

    def _reference(self, jitter: int | None, keep_parts: bool = False) -> WholeRun:
        with kept_random_state():
            subject = self._subject(self.sizes.ranks)
        check_anew(self.subject, subject)
        shares = None if self.shown.reduction == "mean" else self._shares(subject)
        shared = self.shown.shares_buffers
        return WholeRun(subject, self.settings, self.sizes.data_ranks, shares, shared, jitter, keep_parts)

    def _shares(self, subject: Subject) -> Shares:
        """Factors of losses by the stated reduction."""
        settings, sizes, shown = self.settings, self.sizes, self.shown

        def shares(step: int) -> dict[tuple[int, int], float]:
            every = [(rank, micro) for micro in range(sizes.micros) for rank in range(sizes.data_ranks)]
            if shown.reduction == "sum":
                return dict.fromkeys(every, 1.0)
            numbers = [settings.number(step, micro, rank, sizes.data_ranks) for rank, micro in every]
            counts = [shown.tokens(subject.batch(number, settings.device)) for number in numbers]
            return {key: count / sum(counts) for key, count in zip(every, counts, strict=True)}

        return shares

    # ---- the training ----

    def run(self) -> VerifyReport:
        """Train and compare, up to the first step in which anything differs."""
        found = self._told(self._compare(-1, "start", self.shown.weights()), [])
        steps = 0
        while steps < self.settings.steps and not found:
            found = self._step(steps)
            steps += 1
        report = VerifyReport(
            stage=0,
            ranks=self.sizes.ranks,
            steps=steps,
            tolerance=self.tolerance,
            reason="the order in which others sum is not known",
            phases=self._counts(),
            differences=found,
            against=self.title,
        )
        shared: VerifyReport = self.control.all_gather_objects(report)[0]
        return shared

    def _step(self, step: int) -> list[Difference]:
        """Train one step on both sides; returns what differs in the first phase where anything does."""
        if self.plain is not None:
            self.record = self.plain.step()
            self.disturbed.note(self.record)
        shown = self.shown
        phases: list[tuple[str, Callable[[], Tensors]]] = [
            ("loss", lambda: shown.backward(self._batches(step))),
            ("gradient" if shown.split else "clipped gradient", shown.gradients),
            ("norm", self._updated),
            ("optimizer state", shown.state),
            ("parameter", shown.weights),
            ("buffer", shown.buffers),
        ]
        for at, (phase, look) in enumerate(phases):
            wrong = self._compare(step, phase, look())
            # What follows from a wrong loss or state is part of the hint: nothing may.
            further = phases[at + 1] if phase in ("loss", "optimizer state") else None
            if found := self._told(wrong, [] if further is None else [further]):
                return found
        return []

    def _updated(self) -> Tensors:
        self.shown.update()
        return self.shown.norm()

    def _told(self, wrong: list[Wrong], further: Sequence[tuple[str, Callable[[], Tensors]]]) -> list[Difference]:
        """Differences with hints, the same on all ranks. A collective.

        Args:
            wrong: On rank 0: what is wrong in a phase.
            further: The phase after it, which is looked at if anything is wrong.
        """
        step = self.control.all_gather_objects(wrong[0].difference.step if wrong else None)[0]
        if step is None:
            return []
        later = [(phase, self._compare(step, phase, mine), bool(mine)) for phase, look in further for mine in [look()]]
        told = self._hinted(step, wrong, later) if self.plain is not None else []
        return list(self.control.all_gather_objects(told)[0])

    def _hinted(self, step: int, wrong: list[Wrong], later: list[tuple[str, list[Wrong], bool]]) -> list[Difference]:
        """Differences with hints; the most telling first."""
        assert self.plain is not None
        phase, back = wrong[0].difference.phase, ""
        if phase in ("gradient", "clipped gradient"):
            gradients = self.record.phases[phase]
            back = wrong_on_the_way_back(wrong, [name for name in self.plain.named if gradients[name] is not None])
            wrong = wrong[::-1] if back else wrong  # the one that is nearest to the fault
        hints = None if step < 0 else self._hints(step)
        told = [hint_at_start(one) if hints is None else hints.of(one, wrong) for one in wrong[:MOST_HINTS]]
        if not told[0]:
            others = [f"as of {one.difference.name}: {hint}" for one, hint in zip(wrong, told, strict=False) if hint]
            told[0] = "".join(others[:1])
        after = [f"{of}s {f'differ, too: {_names(some)}' if some else 'agree'}" for of, some, shown in later if shown]
        told[0] = "; ".join(filter(None, [back or told[0], *after]))
        told += [""] * (len(wrong) - len(told))
        return [replace(one.difference, hint=hint) for one, hint in zip(wrong[:MOST_SHOWN], told, strict=False)]

    def _hints(self, step: int) -> Hints:
        """Hints on a step, by reference runs that are brought there."""
        replay, ahead = self._reference(None, keep_parts=True), self._reference(None)
        with kept_random_state():
            for _ in range(step):
                ahead.step()
            for _ in range(step + 1):
                replay.step()
        return Hints(replay, ahead, self.record, self.sizes)

    def _batches(self, step: int) -> list[Any]:
        settings, sizes, own = self.settings, self.sizes, self.shown.data_rank
        numbers = [settings.number(step, micro, own, sizes.data_ranks) for micro in range(sizes.micros)]
        return [self.subject.batch(number, settings.device) for number in numbers]

    # ---- the comparison ----

    def _compare(self, step: int, phase: str, mine: Tensors) -> list[Wrong]:
        plain = self.plain
        if plain is None:
            return self.comparison.phase(step, phase, mine, None)
        if phase == "start":
            self.record = StepRecord({"start": plain.start()})
        weights = phase in ("start", "parameter")
        required = [plain.aliases(name) for name in plain.named] if weights else []
        return self.comparison.phase(step, phase, mine, lambda rank: self._expected(phase, rank), required)

    def _expected(self, phase: str, data_rank: int) -> Tensors:
        found = self.record.of(phase, data_rank)
        return {name: None if tensor is None else tensor.cpu() for name, tensor in found.items()}

    def _explained(self, phase: str, name: str, data_rank: int) -> float:
        if phase == "start":
            return 0.0
        return self.disturbed.explained(self.record, phase, name, data_rank)

    def _counts(self) -> list[PhaseCount]:
        counted = self.comparison
        return [
            PhaseCount(phase, compared, counted.equal.get(phase, 0), counted.worst.get(phase))
            for phase, compared in counted.compared.items()
            if compared
        ]
