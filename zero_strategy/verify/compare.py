"""The comparison of both sides of a phase, and the report of what was found.

Digests are compared first, tensors where those differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from zero_strategy.comm.collectives import Communicator
from zero_strategy.verify.reference_run import Tensors

MOST_SHOWN = 16
"""Tensors of a phase that are reported."""
MOST_FETCHED = 256
"""Tensors of other ranks that are looked at, in a phase that is not as expected there."""
PER_RANK = ("loss", "buffer")
"""Phases in which ranks have values of their own; in the others all are to have the same."""
NORM_ERROR = 1e-6
"""Relative error of norms, which each side sums in float64 in an order of its own and rounds to float32."""


@dataclass(frozen=True)
class Difference:
    """One tensor that is not what the plain reference run has.

    Attributes:
        step: Counted from 0; -1 before the first.
        phase: See `PHASES`.
        name: The parameter, "state of parameter", buffer or loss.
        rank: Whose copy it is, or who owns the first element that differs; None: all ranks that have it have the same.
        what: In words: how many elements differ, by how much, and which is the first.
        largest: Largest absolute difference, None where values cannot be compared.
        explained: What re-ordered summation explains, None if not known.
        place: The rank in words, such as "rank 1 (stage 1)"; "": as the rank says.
        hint: The kind of fault that the numbers point to, "" if none.
    """

    step: int
    phase: str
    name: str
    rank: int | None
    what: str
    largest: float | None = None
    explained: float | None = None
    place: str = ""
    hint: str = ""

    @property
    def times(self) -> float | None:
        """Difference as a multiple of re-ordered summation's."""
        if self.largest is None or self.explained is None:
            return None
        if math.isinf(self.explained):
            return 0.0
        return self.largest / self.explained if self.explained else math.inf

    def __str__(self) -> str:
        rank = self.place or ("all ranks" if self.rank is None else f"rank {self.rank}")
        when = "before the first step" if self.step < 0 else f"step {self.step}, {self.phase}"
        text = f"{when}: {self.name}, {rank}: {self.what}"
        if self.times is not None:
            text += f"; re-ordered summation explains {self.explained:.3g}, this is {self.times:.3g} times as much"
        return text + (f"\n    hint: {self.hint}" if self.hint else "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "times": self.times}


def digest(tensor: Tensor | None) -> str:
    """A digest of shape, dtype and values; both zeros are one value, and so are all NaNs."""
    if tensor is None:
        return "none"
    values = tensor.detach().cpu()
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.full_like(values, float("nan")), values + 0.0)
    raw = values.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tuple(values.shape)} {values.dtype} {xxhash.xxh3_128_hexdigest(raw.data if raw.size else b'')}"


class Comparison:
    """Compares phases; all ranks call it alike, and rank 0 has what is expected.

    Args:
        control: All ranks.
        tolerance: See `VerifySettings`; None has been replaced.
        explained: (phase, name, rank) -> what re-ordered summation explains; called on rank 0.
        owner: (name, element) -> the rank that owns it.
        title: What a rank is called.
    """

    def __init__(
        self,
        control: Communicator,
        tolerance: float,
        explained: Callable[[str, str, int], float | None],
        owner: Callable[[str, int], int | None],
        title: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.control, self.tolerance, self._explained, self._owner = control, tolerance, explained, owner
        self._title = title
        self.compared: dict[str, int] = {}
        self.equal: dict[str, int] = {}
        self.worst: dict[str, float] = {}

    def phase(
        self, step: int, phase: str, mine: Tensors, expected: Callable[[int], Tensors] | None
    ) -> list[Difference]:
        """Differences of a phase that are too large, the same list on all ranks. A collective.

        Args:
            step: Counted from 0.
            phase: Its name.
            mine: What this rank has.
            expected: On rank 0: what each rank is to have.
        """
        everyone = self.control.all_gather_objects({name: digest(tensor) for name, tensor in mine.items()})
        wanted = [] if expected is None else _digests([expected(rank) for rank in range(len(everyone))])
        odd = _odd(everyone, wanted)
        holders = {name: [r for r, part in enumerate(everyone) if name in part or name in wanted[r]] for _, name in odd}
        alike, wrong = phase not in PER_RANK, set(odd)
        # One rank stands for all that have the same wrong values.
        chosen = [
            (rank, name)
            for rank, name in odd
            if not alike
            or rank == (first := holders[name][0])
            or (first, name) not in wrong
            or everyone[rank].get(name) != everyone[first].get(name)
        ]
        asked = self.control.all_gather_objects([one for one in chosen if one[0]][:MOST_FETCHED])[0]
        sent = self.control.all_gather_objects(
            {name: on_host(mine[name]) for rank, name in asked if rank == self.control.rank and name in mine}
        )
        found: list[Difference] = []
        if expected is not None:
            self._count(phase, everyone, len(holders))
            for rank, name in chosen:
                if rank and (rank, name) not in asked:
                    continue
                who, first = holders[name], holders[name][0]
                same = all(everyone[other].get(name) == everyone[rank].get(name) for other in who)
                theirs = mine if rank == 0 else sent[rank]
                owned, exactly = alike and rank == first and same, alike and rank != first
                for one in self._judged(step, phase, name, rank, expected(rank), theirs, owned, exactly):
                    alone = who[0] if len(who) == 1 < len(everyone) else one.rank
                    found.append(replace(one, rank=alone, place=self._words(alone, who, len(everyone))))
        return list(self.control.all_gather_objects(found[:MOST_SHOWN])[0])

    def _words(self, rank: int | None, holders: Sequence[int], ranks: int) -> str:
        if rank is not None:
            return self._title(rank)
        return "all ranks" if len(holders) == ranks else ", ".join(map(self._title, holders))

    def _count(self, phase: str, everyone: Sequence[dict[str, str]], odd: int) -> None:
        names = {name for part in everyone for name in part}
        self.compared[phase] = self.compared.get(phase, 0) + len(names)
        self.equal[phase] = self.equal.get(phase, 0) + len(names) - odd

    def _judged(
        self,
        step: int,
        phase: str,
        name: str,
        rank: int,
        expected: Tensors,
        theirs: Tensors,
        owned: bool,
        exactly: bool,
    ) -> list[Difference]:
        """The difference, if it is too large.

        Args:
            step: And the rest: see `Difference`.
            expected: What the rank is to have.
            theirs: What it has.
            owned: All ranks that have it have these values: name the one that owns the first wrong element.
            exactly: It has other values than the first of them, though all are to be equal.
        """
        mine, wanted = theirs.get(name), expected.get(name)
        if mine is None or wanted is None:
            what = f"{said(theirs, name)}, the plain run has {said(expected, name)}"
            return [Difference(step, phase, name, None if owned else rank, what)]
        if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
            what = f"{tuple(mine.shape)} {mine.dtype}, the plain run has {tuple(wanted.shape)} {wanted.dtype}"
            return [Difference(step, phase, name, None if owned else rank, what)]
        largest, first, what = described(mine, wanted)
        if phase == "norm" and largest <= NORM_ERROR * float(wanted.abs().max()):
            return []
        place: int | None = rank
        if owned:
            place = self._owner(name.partition(" of ")[2] if phase == "optimizer state" else name, first)
        if exactly:
            what += "; another rank has other values"
        found = Difference(step, phase, name, place, what, largest, self._explained(phase, name, rank))
        if found.times is not None:
            self.worst[phase] = max(self.worst.get(phase, 0.0), found.times)
            if self.tolerance and found.times <= self.tolerance and not exactly:
                return []
        return [found]


def _digests(expected: Sequence[Tensors]) -> list[dict[str, str]]:
    """Digests of what each rank is to have; tensors that several are to have are read once."""
    known: dict[int, str] = {}
    for tensor in (tensor for tensors in expected for tensor in tensors.values()):
        if id(tensor) not in known:
            known[id(tensor)] = digest(tensor)
    return [{name: known[id(tensor)] for name, tensor in tensors.items()} for tensors in expected]


def _odd(everyone: Sequence[dict[str, str]], wanted: Sequence[dict[str, str]]) -> list[tuple[int, str]]:
    """(rank, name) of all that has other bits than expected, in the order of names."""
    names = dict.fromkeys(name for part in (*wanted, *everyone) for name in part)
    return [
        (rank, name)
        for name in names
        for rank in range(len(wanted))
        if everyone[rank].get(name, "missing") != wanted[rank].get(name, "missing")
    ]


def described(mine: Tensor, wanted: Tensor) -> tuple[float, int, str]:
    """Largest difference, first element that differs (flattened), and both in words."""
    a, b = mine.cpu().double().reshape(-1), wanted.cpu().double().reshape(-1)
    off = ~((a == b) | (a.isnan() & b.isnan()))
    first = int(off.nonzero()[0]) if bool(off.any()) else 0
    gap = (a - b)[off].abs()
    largest = float(gap.nan_to_num(float("inf"), float("inf")).max()) if gap.numel() else 0.0
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), mine.shape)] if mine.dim() else []
    what = f"{int(off.sum())} of {a.numel()} elements differ, by up to {largest:.3g}; the first is "
    what += f"{place}: " if place else ""
    return largest, first, what + f"{float(a[first]):.9g}, the plain run has {float(b[first]):.9g}"


def said(tensors: Tensors, name: str) -> str:
    if name not in tensors:
        return "there is nothing of that name"
    return "there is none" if tensors[name] is None else "there is one"


def on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


@dataclass(frozen=True)
class PhaseCount:
    """Number of tensors of a phase that were compared over all steps.

    Attributes:
        phase: Its name.
        compared: How many.
        equal: How many had the same bits.
        worst: The largest difference among the others, as a multiple of what re-ordered summation explains.
    """

    phase: str
    compared: int
    equal: int
    worst: float | None = None


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`.

    Attributes:
        stage: The ZeRO stage.
        ranks: How many trained.
        steps: How many steps were compared.
        tolerance: Multiple of what re-ordered summation explains that was accepted; 0: bits were compared.
        reason: Why bits were not, "" if they were.
        phases: What was compared.
        differences: What differs in the first phase of the first step where anything does; empty if nothing does.
        pipeline_stages: Ranks that a copy of the model was divided among.
        against: The distributed training where it is not this package's: "ddp", "fsdp2", the place of a function.
    """

    stage: int
    ranks: int
    steps: int
    tolerance: float
    reason: str
    phases: list[PhaseCount] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    pipeline_stages: int = 1
    against: str = ""

    @property
    def passed(self) -> bool:
        """True if nothing differs too much."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs."""
        return self.differences[0] if self.differences else None

    def raise_if_failed(self) -> None:
        """Raise if something differs.

        Raises:
            AssertionError: With the first difference.
        """
        if self.differences:
            raise AssertionError(str(self.differences[0]))

    def to_json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "passed": self.passed,
            "stage": self.stage,
            "against": self.against,
            "pipeline_stages": self.pipeline_stages,
            "ranks": self.ranks,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "reason": self.reason,
            "phases": [vars(phase) for phase in self.phases],
            "differences": [difference.as_dict() for difference in self.differences],
        }

    def __str__(self) -> str:
        how = "bit by bit" if not self.tolerance else f"within {self.tolerance:g} x what re-ordered summation explains"
        stages = f", {self.pipeline_stages} pipeline stages," if self.pipeline_stages > 1 else ""
        side = self.against or f"stage {self.stage}"
        lines = [f"{side} on {self.ranks} rank(s){stages} against plain torch in one process, {how}"]
        if self.reason:
            lines.append(f"(not by bits: {self.reason})")
        lines += ["", f"{'phase':<18}{'compared':>10}{'equal bits':>12}{'largest / re-ordering':>23}"]
        for phase in self.phases:
            worst = "-" if phase.worst is None else f"{phase.worst:.3g}"
            lines.append(f"{phase.phase:<18}{phase.compared:>10}{phase.equal:>12}{worst:>23}")
        lines.append("")
        if self.passed:
            lines.append(f"PASSED: {self.steps} step(s)")
        else:
            lines.append(f"FAILED: the first that differs is {self.differences[0]}")
            lines += [f"  also {difference}" for difference in self.differences[1:]]
        return "\n".join(lines)
