"""The kind of fault that the numbers of a wrong tensor point to.

A gradient that is wrong is compared with what it is made of: the gradients of every data rank's micro-batches, whose
coefficients least squares find. From these follow the common faults: a sum where the mean is meant, a rank's own
gradient, a micro-batch left out, a factor. Values of ranks are compared with each other: parts that were not summed,
replicas that have diverged. Moments and the first steps of weights are looked at in the same way where they are
multiples of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zero_strategy.verify.disturbance import FEW as FEW_ELEMENTS
from zero_strategy.verify.likeness import CLOSE, block_of, elements_off, multiple, near, rounded, same
from zero_strategy.verify.rank_comparison import Wrong, places
from zero_strategy.verify.reference_run import StepRecord, Tensors
from zero_strategy.verify.whole_run import WholeRun

FEW = 4
"""Elements of which a factor means nothing, unless it is one of the numbers of ranks or micro-batches."""
DIVERGED = "replicas have diverged"
MOST_PARAMETERS = 512
"""Parameters that are tried one by one as the cause of a wrong loss or norm."""


@dataclass(frozen=True)
class Sizes:
    """Numbers that a wrong factor may come from.

    Attributes:
        ranks: Of all.
        data_ranks: That have micro-batches of their own.
        micros: Micro-batches of a step.
        data_rank_of: Data rank of each rank.
    """

    ranks: int
    data_ranks: int
    micros: int
    data_rank_of: Sequence[int]

    def named(self, factor: float) -> str:
        """Meanings of a factor, "" if it is none of these numbers."""
        shared = self.ranks // self.data_ranks
        meanings = {"the number of ranks": self.ranks, "the number of micro-batches": self.micros}
        if shared > 1 and self.data_ranks > 1:
            meanings["the number of data ranks"] = self.data_ranks
            meanings["the number of ranks that share micro-batches"] = shared
        if self.ranks > 1 and self.micros == 1:
            meanings["the square of the number of ranks"] = self.ranks**2
        known = [words for words, number in meanings.items() if number > 1 and near(factor, number)]
        known += [f"1 / {words}" for words, number in meanings.items() if number > 1 and near(factor, 1 / number)]
        return " or ".join(known)


class Hints:
    """Hints on what is wrong in one step.

    Args:
        replay: A reference run that has trained this step and kept its parts.
        ahead: A reference run that is about to train it.
        record: The plain run's.
        sizes: Numbers of ranks and micro-batches.
    """

    def __init__(self, replay: WholeRun, ahead: WholeRun, record: StepRecord, sizes: Sizes) -> None:
        self.replay, self.ahead, self.record, self.sizes = replay, ahead, record, sizes

    def of(self, wrong: Wrong, others: Sequence[Wrong]) -> str:
        """The hint on one tensor.

        Args:
            wrong: The tensor.
            others: All that are wrong in this phase, itself included.
        """
        phase, name = wrong.difference.phase, wrong.difference.name
        values = {rank: value for rank in wrong.ranks if (value := wrong.values[rank]) is not None}
        if not all(rank in values and _comparable(values[rank], wrong.wanted[rank]) for rank in wrong.ranks):
            return _absent(wrong)
        if not all(bool(value.isfinite().all()) for value in values.values() if value.is_floating_point()):
            return "it has values that are not finite"
        if phase == "loss":
            return self._loss(wrong, values, others)
        if phase == "norm":
            return self._norm(wrong, values)
        if phase in ("gradient", "clipped gradient"):
            return self._gradient(name, wrong, values, others)
        if phase == "optimizer state":
            return self._state(name, wrong, values)
        if phase == "parameter":
            return self._weight(name, wrong, values)
        return self._buffer(name, wrong, values)

    # ---- gradients, and what is a multiple of them ----

    def _gradient(self, name: str, wrong: Wrong, values: Mapping[int, Tensor], others: Sequence[Wrong]) -> str:
        first = self.replay.names.get(name, name)
        named = {one.difference.name: one for one in others}
        tied = [named[alias] for alias in self.replay.aliases(first) if alias in named]
        count, all_of = len({self.replay.names.get(one, one) for one in named}), len(self._gradients())
        much = "on this parameter alone" if count == 1 else ""
        if count == all_of > 1:
            much = f"all {count} gradients are wrong: see how the loss is scaled and gradients are reduced"
        return self._made_of(wrong, values, self._parts(first, _wanted(wrong, values)), tied, much)

    def _parts(self, first: str, wanted: Tensor) -> dict[tuple[int, int], Tensor]:
        """Summands of a tensor that is a multiple of the gradient, as momenta are; empty: it is none."""
        gradient = self.record.phases["gradient"].get(first)
        scale = None if gradient is None else multiple(wanted, gradient, equal=True)
        if scale is None:
            return {}
        return {key: part[first] * scale for key, part in self.replay.parts.items() if first in part}

    def _made_of(
        self,
        wrong: Wrong,
        values: Mapping[int, Tensor],
        parts: Mapping[tuple[int, int], Tensor],
        tied: Sequence[Wrong],
        much: str = "",
    ) -> str:
        """A tensor that is a sum of micro-batches' parts, or a multiple of it.

        Args:
            wrong: The tensor.
            values: Of ranks.
            parts: By (data rank, micro-batch): summands of the right value.
            tied: The tensor under all names that are wrong.
            much: On how many tensors there are.
        """
        rank, value = next(iter(values.items()))
        wanted = _wanted(wrong, values)
        off = elements_off(value, wanted, wrong.bound)
        where, zero = block_of(off), not bool(value[off].count_nonzero())
        cut = {} if zero else {key: part[off] for key, part in parts.items()}
        made = self._coefficients(value[off], cut, wrong.bound)
        summands = _between_ranks(tied or [wrong])
        said = self._read(made, rank) or summands
        if not said and zero:
            said = "it is zero: nothing arrives there, or it was zeroed"
        if not said and (factor := multiple(value[off], wanted[off])) is not None:
            few = int(off.sum()) < FEW and not self.sizes.named(factor)
            said = "" if few else _times(factor, self.sizes)
        said = said or rounded(value[off], wanted[off]) or (DIVERGED if _differ(values) else "")
        return ", ".join(filter(None, [said, where])) + (f"; {much}" if said and much else "")

    def _coefficients(
        self, value: Tensor, parts: Mapping[tuple[int, int], Tensor], bound: float
    ) -> dict[tuple[int, int], float]:
        """Factors of the parts whose sum a tensor is; empty if it is none, or if they cannot be told."""
        if not parts or value.numel() <= len(parts):
            return {}
        matrix = torch.stack([part.double().reshape(-1) for part in parts.values()], dim=1)
        used = [column for column in range(len(parts)) if bool(matrix[:, column].count_nonzero())]
        matrix, target = matrix[:, used], value.double().reshape(-1, 1)
        if not used or int(torch.linalg.matrix_rank(matrix, rtol=1e-4)) < len(used):
            return {}
        solution = torch.linalg.lstsq(matrix, target).solution
        most = max(CLOSE * float(target.norm()), bound * math.sqrt(value.numel()))
        if float((matrix @ solution - target).norm()) > min(most, 0.1 * float(target.norm())):
            return {}
        keys = list(parts)
        return {keys[column]: float(factor) for column, factor in zip(used, solution[:, 0], strict=True)}

    def _read(self, found: Mapping[tuple[int, int], float], rank: int) -> str:
        """Coefficients in words, "" if there are none, or all are as they should be."""
        if not found:
            return ""
        sizes, own = self.sizes, self.sizes.data_rank_of[rank]
        by_rank = {r: [factor for (of, _), factor in found.items() if of == r] for r in {of for of, _ in found}}
        by_micro = {m: [factor for (_, of), factor in found.items() if of == m] for m in {of for _, of in found}}
        if len(by_rank) > 1 and all(_zero(f) for r, some in by_rank.items() if r != own for f in some):
            factor = by_rank.get(own, [0.0])[0]
            times = "" if near(factor, sizes.data_ranks) else f" times {factor / sizes.data_ranks:.4g}"
            return f"it is the own gradient of data rank {own}{times}: it has not been reduced over the data ranks"
        lost = [r for r, some in by_rank.items() if all(map(_zero, some))]
        if lost and len(lost) < len(by_rank):
            return f"it lacks the micro-batches of data rank {', '.join(map(str, lost))}"
        dropped = [m for m, some in by_micro.items() if all(map(_zero, some))]
        if dropped and len(dropped) < len(by_micro):
            lacks = ", ".join(map(str, dropped))
            return f"it lacks micro-batch {lacks} of each data rank: overwritten, or zeroed between"
        factors = list(found.values())
        if all(near(factor, factors[0]) for factor in factors):
            return "" if near(factors[0], 1.0) else _times(factors[0], sizes)
        told = ", ".join(f"{factor:.4g} of data rank {r}'s micro-batch {m}" for (r, m), factor in found.items())
        return f"the micro-batches count differently: {told}; 1 is right"

    # ---- state, weights, buffers ----

    def _state(self, name: str, wrong: Wrong, values: Mapping[int, Tensor]) -> str:
        key, _, of = name.partition(" of ")
        parts = self._parts(self.replay.names.get(of, of), _wanted(wrong, values))
        said = self._made_of(wrong, values, parts, [wrong])
        return said + ("; a square, so gradients may be off by its root" if "sq" in key and "times" in said else "")

    def _weight(self, name: str, wrong: Wrong, values: Mapping[int, Tensor]) -> str:
        value, wanted = next(iter(values.values())), _wanted(wrong, values)
        before = self.replay.before[name]
        assert before is not None
        before = before.cpu()
        moved, should = value.double() - before.double(), wanted.double() - before.double()
        if not bool(should.count_nonzero()):
            decay = multiple(moved, before)
            shrinks = f": it shrinks by {-decay:.3g} of itself, weight decay" if decay is not None and decay < 0 else ""
            return f"it moves, and in one process it does not{shrinks}"
        if not bool(moved.count_nonzero()):
            if len(values) < len(wrong.values):
                where = places(wrong.ranks)
                return f"it has not moved on {where}, where the step was skipped or not handed out: {DIVERGED}"
            return "it has not moved: it is not in the optimizer, it is frozen, or the new value is not handed out"
        if _differ({rank: value for rank, value in wrong.values.items() if value is not None}):
            return DIVERGED
        if (factor := multiple(moved, should)) is not None:
            return _times(factor, self.sizes).replace("it is", "its step is", 1)
        decay = multiple(value.double() - wanted.double(), before)
        return "" if decay is None else f"it is off by {decay:.3g} of itself: weight decay"

    def _buffer(self, name: str, wrong: Wrong, values: Mapping[int, Tensor]) -> str:
        rank, value = next(iter(values.items()))
        own = self.sizes.data_rank_of[rank]
        before = self.ahead.buffers_of(own).get(name)
        if before is not None and same(value, before.cpu(), 0.0):
            return "it has not changed in this step: it is stale"
        for other in range(self.sizes.data_ranks):
            theirs = self.replay.buffers_of(other).get(name)
            if other != own and theirs is not None and same(value, theirs.cpu(), wrong.bound):
                return f"it is the buffer of data rank {other}"
        return ""

    # ---- the norm ----

    def _norm(self, wrong: Wrong, values: Mapping[int, Tensor]) -> str:
        wanted = float(_wanted(wrong, values))
        mine = {rank: float(value) for rank, value in values.items()}
        squares = {name: float(g.double().square().sum()) for name, g in self._gradients().items()}
        total, rank = wanted**2, next(iter(mine))
        if len(mine) > 1 and near(sum(value**2 for value in mine.values()), total, 1e-4):
            return "each rank has the norm of its own part: the sum of squares over the ranks is missing"
        excess = mine[rank] ** 2 - total
        for times in dict.fromkeys((self.sizes.ranks, self.sizes.ranks // self.sizes.data_ranks, 2)):
            for names in _candidates(list(squares)) if times > 1 and excess > 0 else ():
                if near((times - 1) * sum(squares[name] for name in names), excess, 1e-3):
                    return f"it counts {_listed(names)} {times} times"
        for names in _candidates(list(squares)) if excess < 0 else ():
            if near(sum(squares[name] for name in names), -excess, 1e-3):
                return f"it leaves out {_listed(names)}"
        for own in range(self.sizes.data_ranks):
            parts = [part for (of, _), part in self.replay.parts.items() if of == own]
            local = _total_norm(parts) * self.sizes.data_ranks
            if self.sizes.data_ranks > 1 and near(mine[rank], local, 1e-4):
                return f"it is the norm of data rank {own}'s own gradients, before they are reduced"
        factor = mine[rank] / wanted if wanted else math.inf
        if self.sizes.named(factor) or self.sizes.named(factor**2):
            return f"it is {factor:.4g} times what it should be, its square {factor**2:.4g} times" + (
                f" ({self.sizes.named(factor) or self.sizes.named(factor**2)})"
            )
        return "ranks have different norms: each takes those that it has" if _differ(values) else ""

    def _gradients(self) -> dict[str, Tensor]:
        found = self.record.phases["gradient"]
        return {name: g for name in self.replay.named if (g := found.get(name)) is not None}

    # ---- the loss ----

    def _loss(self, wrong: Wrong, values: Mapping[int, Tensor], others: Sequence[Wrong]) -> str:
        """The first other way of computing losses that gives all the wrong ones."""
        rank, value = next(iter(values.items()))
        own = self.sizes.data_rank_of[rank]
        told = [(self.sizes.data_rank_of[r], _micro(one), one, r) for one in others for r in one.ranks]
        for said, losses in self._other_losses():
            if all(self._is_loss(one, r, losses(of), micro) for of, micro, one, r in told):
                return said
        factor = multiple(value.reshape(1), _wanted(wrong, values).reshape(1))
        if factor is not None and self.sizes.named(factor):
            return _times(factor, self.sizes)
        shared = {r: v for r, v in values.items() if self.sizes.data_rank_of[r] == own}
        if len(shared) > 1 and _differ(shared):
            modes = zip(self.ahead.losses(own), self.ahead.losses(own, training=False), strict=True)
            drawn = any(not torch.equal(one, other) for one, other in modes)
            random = "dropout, which has to be the same on them where activations are, or " if drawn else ""
            return f"ranks with the same micro-batches have different values: {random}weights or inputs differ"
        return ""

    def _with_batches_of(self, other: int, own: int) -> list[Tensor]:
        return self.ahead.losses(other, own)

    @staticmethod
    def _is_loss(wrong: Wrong, rank: int, losses: Sequence[Tensor], micro: int | None) -> bool:
        value, wanted = wrong.values[rank], wrong.wanted[rank]
        if value is None or wanted is None:
            return False
        other = torch.stack([loss.double() for loss in losses]).mean() if micro is None else losses[micro].double()
        most = max(wrong.bound / FEW_ELEMENTS, 2e-6 * float(wanted.abs()))
        return abs(float(other - wanted)) > wrong.bound and abs(float(other - value)) <= most

    def _other_losses(self) -> Iterator[tuple[str, Callable[[int], list[Tensor]]]]:
        """Other ways, in words and as a function of the data rank; likely ones first."""
        ahead, sizes = self.ahead, self.sizes
        for other in range(sizes.data_ranks) if sizes.data_ranks > 1 else ():
            yield f"it is the loss of data rank {other}'s batches", partial(self._with_batches_of, other)
            said = f"it is the loss with data rank {other}'s random numbers: ranks draw the same dropout masks"
            yield said, partial(ahead.losses, drawn_by=other)
        yield "it is the loss in evaluation mode: without dropout", partial(ahead.losses, training=False)
        if sizes.data_ranks > 1:
            every = [ahead.losses(of) for of in range(sizes.data_ranks)]
            mean = [torch.stack(some).mean() for some in zip(*every, strict=True)]
            yield "it is the mean over the data ranks, not this rank's", lambda of: mean
        for factor in (float(sizes.ranks), 1.0 / sizes.ranks, 0.0) if sizes.ranks > 1 else ():
            for name, parameter in list(ahead.named.items())[:MOST_PARAMETERS]:
                if parameter.is_floating_point():
                    said = f"it is the loss with {factor:.4g} x {name}: each rank adds it, or its part of it is wrong"
                    said = f"it is the loss without {name}" if factor == 0 else said
                    yield said, partial(ahead.losses, scaled=(parameter, factor))


# -------------------------------------------------------------------------------------------------- several at once


def wrong_on_the_way_back(wrong: Sequence[Wrong], order: Sequence[str]) -> str:
    """The place where gradients go wrong, if all parameters before one are wrong and none from there on.

    Args:
        wrong: Gradients that are wrong.
        order: Parameters that have gradients, in the order of the model.
    """
    names = [one.difference.name for one in wrong]
    if not 1 < len(names) < len(order) or set(names) != set(order[: len(names)]):
        return ""
    last, good = order[len(names) - 1], order[len(names)]
    return (
        f"all gradients up to {last} are wrong and none from {good} on: what {good}'s layer sends back to the layers "
        "before it is wrong"
    )


# ------------------------------------------------------------------------------------------------ several at a time


def hint_at_start(wrong: Wrong) -> str:
    """The hint on a weight that is wrong before the first step."""
    values = {rank: value for rank, value in wrong.values.items() if value is not None}
    if not values:
        return ""
    if _differ(values):
        return f"ranks begin with different values, and nothing hands rank 0's out: {DIVERGED}"
    return "it begins with another value: another seed, or made in another way"


def _comparable(value: Tensor, wanted: Tensor | None) -> bool:
    return wanted is not None and wanted.shape == value.shape


def _wanted(wrong: Wrong, values: Mapping[int, Tensor]) -> Tensor:
    """The right value of the first of these ranks."""
    found = wrong.wanted[next(iter(values))]
    assert found is not None
    return found


def _micro(wrong: Wrong) -> int | None:
    """The micro-batch of a loss, None of their mean."""
    number = wrong.difference.name.rpartition(" ")[2]
    return int(number) if number.isdigit() else None


def _absent(wrong: Wrong) -> str:
    if "gradient" in wrong.difference.phase and any(value is None for value in wrong.values.values()):
        return "ranks that have none did not use it, or dropped it before the step"
    return ""


def _between_ranks(wrong: Sequence[Wrong]) -> str:
    """The right value as what ranks have together, where they have different ones.

    Args:
        wrong: A tensor under its names: a tied weight has another on each stage.
    """
    values: dict[int, Tensor] = {}
    for one in wrong:
        values = {rank: value.double() for rank, value in one.values.items() if value is not None} | values
    wanted = next(iter(wrong[0].wanted.values()))
    if len(values) < 2 or wanted is None or not _differ(values):
        return ""
    summed = torch.stack(list(values.values())).sum(dim=0)
    if same(summed, wanted, wrong[0].bound):
        return "ranks have different values, whose sum is right: each has its part, and a sum over the ranks is missing"
    if same(summed / len(values), wanted, wrong[0].bound):
        return "ranks have different values, whose mean is right: a mean over the ranks is missing"
    return ""


def _differ(values: Mapping[int, Tensor]) -> bool:
    first = next(iter(values.values())).double()
    return any(not same(value, first, 0.0) for value in values.values())


def _times(factor: float, sizes: Sizes) -> str:
    meaning = sizes.named(factor)
    return f"it is {factor:.4g} times what one process has" + (f" ({factor:.4g} is {meaning})" if meaning else "")


def _zero(factor: float) -> bool:
    return abs(factor) < 5e-3


def _candidates(names: Sequence[str]) -> Iterator[list[str]]:
    """Sets of parameters that a norm may count wrongly: all, one, those with one ending, two."""
    yield list(names)
    names = names[:MOST_PARAMETERS]
    yield from ([name] for name in names)
    for depth in (1, 2):
        endings: dict[str, list[str]] = {}
        for name in names:
            endings.setdefault(".".join(name.split(".")[-depth:]), []).append(name)
        yield from (some for some in endings.values() if len(some) > 1)
    yield from ([first, second] for at, first in enumerate(names[:64]) for second in names[at + 1 : 64])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _total_norm(parts: Sequence[Mapping[str, Tensor]]) -> float:
    total: Tensors = {}
    for part in parts:
        for name, gradient in part.items():
            before = total.get(name)
            total[name] = gradient.double() if before is None else before + gradient.double()
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in total.values() if gradient is not None))
