"""The comparison of ranks that show whole tensors with one process, within rounding.

Ranks show what they have, under the names of the whole model; a pipeline's ranks show different names. Digests are
compared first. Rank 0 then gets each version of a tensor that differs from the reference run's, judges it, and keeps
the values of all that are wrong, since they tell what kind of fault it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from zero_strategy.comm.collectives import Communicator
from zero_strategy.verify.compare import NORM_ERROR, PER_RANK, Difference, described, digest, on_host
from zero_strategy.verify.reference_run import Tensors


@dataclass(frozen=True)
class Wrong:
    """A tensor that some ranks have otherwise than the reference run.

    Attributes:
        difference: What is reported, without a hint.
        values: What each rank that has it has.
        wanted: What each of them is to have.
        ranks: Those whose values are wrong.
        bound: The largest difference that is accepted.
    """

    difference: Difference
    values: dict[int, Tensor | None]
    wanted: dict[int, Tensor | None]
    ranks: list[int]
    bound: float


class RankComparison:
    """Compares phases; all ranks call it alike, and rank 0 has what is expected.

    Args:
        control: All ranks.
        data_ranks: Data rank of each rank.
        tolerance: How many times what re-ordered summation explains may differ.
        explained: (phase, name, data rank) -> what it explains; called on rank 0.
    """

    def __init__(
        self,
        control: Communicator,
        data_ranks: Sequence[int],
        tolerance: float,
        explained: Callable[[str, str, int], float],
    ) -> None:
        self.control, self.data_ranks, self.tolerance, self._explained = control, data_ranks, tolerance, explained
        self.compared: dict[str, int] = {}
        self.equal: dict[str, int] = {}
        self.worst: dict[str, float] = {}

    def phase(
        self,
        step: int,
        phase: str,
        mine: Tensors,
        expected: Callable[[int], Tensors] | None,
        required: Sequence[Sequence[str]] = (),
    ) -> list[Wrong]:
        """Tensors that differ too much, on rank 0, in the order of the reference run's names. A collective.

        Args:
            step: Counted from 0; -1: before the first.
            phase: Its name.
            mine: What this rank has.
            expected: On rank 0: what each data rank is to have.
            required: Sets of names, of each of which some rank has to have one.
        """
        digests = self.control.all_gather_objects({name: digest(tensor) for name, tensor in mine.items()})
        sent = self._fetch(mine, digests)
        if expected is None:
            return []
        by_data_rank = {of: expected(of) for of in sorted({self._whose(phase, rank) for rank in range(len(digests))})}
        wanted = [by_data_rank[self._whose(phase, rank)] for rank in range(len(digests))]
        given = {name for part in digests for name in part}
        names = [name for name in dict.fromkeys(name for part in wanted for name in part) if name in given]
        names += [one for one in dict.fromkeys(name for part in digests for name in part) if one not in wanted[0]]
        found = [_missing(step, phase, some[0], given) for some in required if not given & set(some)]
        self.compared[phase] = self.compared.get(phase, 0) + len(names)
        for name in names:
            holders = [rank for rank, part in enumerate(digests) if name in part]
            values = {rank: sent.get((name, digests[rank][name]), mine.get(name)) for rank in holders}
            should = {rank: wanted[rank].get(name) for rank in holders}
            right = {id(tensor): digest(tensor) for tensor in should.values()}
            if all(digests[rank][name] == right[id(should[rank])] for rank in holders):
                self.equal[phase] = self.equal.get(phase, 0) + 1
            elif (wrong := self._judged(step, phase, name, values, should, digests)) is not None:
                found.append(wrong)
        return found

    def _whose(self, phase: str, rank: int) -> int:
        """The data rank whose values a rank is to have; all of them have the same but in some phases."""
        return self.data_ranks[rank] if phase in PER_RANK else 0

    def _fetch(self, mine: Tensors, digests: Sequence[dict[str, str]]) -> dict[tuple[str, str], Tensor | None]:
        """Versions that rank 0 does not have itself, by name and digest; each is sent by the first that has it."""
        sender: dict[tuple[str, str], int] = {}
        for rank, part in enumerate(digests):
            for version in part.items():
                sender.setdefault(version, rank)
        own = self.control.rank
        outgoing = {
            (name, version): on_host(mine[name])
            for (name, version), rank in sender.items()
            if rank == own and rank != 0
        }
        return {key: value for part in self.control.all_gather_objects(outgoing) for key, value in part.items()}

    def _judged(
        self,
        step: int,
        phase: str,
        name: str,
        values: dict[int, Tensor | None],
        wanted: dict[int, Tensor | None],
        digests: Sequence[dict[str, str]],
    ) -> Wrong | None:
        first: Difference | None = None
        bound, wrong = 0.0, []
        judged: dict[tuple[str, int], bool] = {}
        for rank in values:
            key = digests[rank][name], self._whose(phase, rank)
            if key not in judged:
                difference, bound = self._difference(step, phase, name, rank, values[rank], wanted)
                judged[key] = difference is not None
                first = first or difference
            if judged[key]:
                wrong.append(rank)
        if first is None:
            return None
        versions = {digests[rank][name] for rank in wrong}
        place = "" if len(wrong) == len(digests) else places(wrong)
        what = first.what + (f"; {places(wrong)} have different values" if len(versions) > 1 else "")
        alone = wrong[0] if len(wrong) == 1 else None
        return Wrong(replace(first, rank=alone, place=place, what=what), values, wanted, wrong, bound)

    def _difference(
        self, step: int, phase: str, name: str, rank: int, mine: Tensor | None, wanted: dict[int, Tensor | None]
    ) -> tuple[Difference | None, float]:
        """The difference of one rank's value if it is too large, and the bound."""
        should = wanted[rank]
        if mine is None or should is None:
            # Where nothing is to be added, zeros are as good as none; a step that takes them otherwise shows itself.
            either = mine if should is None else should
            if phase != "buffer" and either is not None and not bool(either.count_nonzero()):
                return None, 0.0
            had = "there is none" if mine is None else "there is one"
            theirs = "one" if should is not None else "nothing of that name" if phase == "start" else "none"
            return Difference(step, phase, name, rank, f"{had}, the plain run has {theirs}"), 0.0
        if mine.shape != should.shape:
            what = f"shape {tuple(mine.shape)}, the plain run has {tuple(should.shape)}"
            return Difference(step, phase, name, rank, what), 0.0
        largest, _, what = described(mine, should)
        explained = self._explained(phase, name, self._whose(phase, rank))
        bound = explained * self.tolerance
        if phase == "norm":
            bound = max(bound, NORM_ERROR * float(should.abs().max()))
        found = Difference(step, phase, name, rank, what, largest, explained or None)
        if largest <= bound:
            if explained:
                self.worst[phase] = max(self.worst.get(phase, 0.0), largest / explained)
            return None, bound
        return found, bound


def _missing(step: int, phase: str, name: str, given: set[str]) -> Wrong:
    has = f"; ranks have, for example, {min(given)!r}" if given else "; ranks show nothing at all"
    return Wrong(Difference(step, phase, name, None, f"no rank shows it{has}"), {}, {}, [], 0.0)


def places(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
