"""Newton-Schulz on matrices whose parts lie on several ranks: who does it, and the messages for it.

Momentum, weight decay and the change of weights are elementwise, and stay in each rank's slices. Newton-Schulz needs a
whole matrix; each has an owner, to whom the other ranks send what they hold of the direction.

    rank 0   [ q | k | first part of v ]   --- part of v --->   owner of v: Newton-Schulz
    rank 1   [ rest of v | o ]             <-- its update ---   ... of q, k and o where they lie

Directions and updates travel in the dtype of Newton-Schulz, bfloat16, which it rounds them to anyway; so the bits are
those of one process. Owners are those who hold most of a matrix, unless that would give them more than their share of
the arithmetic. It goes in rounds of some matrices per owner: directions of the next round arrive, and updates of the
last one leave, beside the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.mesh import ShardRanks
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.muon import newton_schulz_all, newton_schulz_dtype

_SHARE = 1.1
"""Arithmetic of an owner over the mean of all, up to which it may be whoever holds most of a matrix."""
_ROUND_NUMEL = 1 << 22
"""Elements of an owner's matrices in a round, unless a single one has more."""


@dataclass(frozen=True)
class Matrix:
    """A matrix with a gradient.

    Attributes:
        parameter: The module's.
        group: Its param group.
        shape: Rows and columns.
        held: Elements that each rank holds, which follow each other in the order of ranks.
        number: Of the matrix in a stack of several (experts).
        begins: Place of the first element that this rank holds in its part of the parameter.
    """

    parameter: nn.Parameter
    group: dict[str, Any]
    shape: tuple[int, int]
    held: tuple[int, ...]
    number: int = 0
    begins: int = 0

    def of(self, part: Tensor, rank: int) -> Tensor:
        """A rank's elements of the matrix, among those of its part of the parameter, flat."""
        return part[self.begins : self.begins + self.held[rank]]

    @property
    def cost(self) -> int:
        """Multiplications of a step of Newton-Schulz."""
        short, long = sorted(self.shape)
        # Of an iteration: the product with the transpose, its square, and the product with the matrix.
        return short * short * (2 * long + short)


def owners(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix.

    Costly ones are placed first: with the rank that holds most, if that leaves it within `_SHARE` of the mean cost,
    else with the rank that has least to do.
    """
    found, loads = [0] * len(matrices), [0] * ranks
    most = _SHARE * sum(matrix.cost for matrix in matrices) / ranks
    # Positions break ties, so that all ranks find the same owners without a message.
    for position in sorted(range(len(matrices)), key=lambda position: (-matrices[position].cost, position)):
        matrix = matrices[position]
        by_held = sorted(range(ranks), key=lambda rank: (-matrix.held[rank], loads[rank], rank))
        fitting = (rank for rank in by_held if matrix.held[rank] and loads[rank] + matrix.cost <= most)
        owner = next(fitting, loads.index(min(loads)))
        found[position] = owner
        loads[owner] += matrix.cost
    return found


def rounds(matrices: Sequence[Matrix], owned_by: Sequence[int], ranks: int) -> list[list[int]]:
    """Positions of the matrices in each round, the costliest of every owner first.

    Rounds are of about `_ROUND_NUMEL` elements per owner, or of one matrix if it has more. All owners have like shares
    of their arithmetic in a round, since each waits there for what the others send.
    """
    sizes = [math.prod(matrix.shape) for matrix in matrices]
    elements, loads, done = [0] * ranks, [0] * ranks, [0] * ranks
    for matrix, numel, owner in zip(matrices, sizes, owned_by, strict=True):
        elements[owner] += numel
        loads[owner] += matrix.cost
    count = -(-max(elements) // max(_ROUND_NUMEL, *sizes)) if matrices else 0
    found: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(matrices)), key=lambda position: (-matrices[position].cost, position)):
        owner, cost = owned_by[position], matrices[position].cost
        # The middle of its cost counts, on the scale of the busiest owner, so that owners reach a round's end together.
        found[min(count - 1, (done[owner] + cost // 2) * count // max(loads))].append(position)
        done[owner] += cost
    return [one for one in found if one]


Take = Callable[[Matrix], Tensor]
"""Gives this rank's part of a matrix's direction, flat."""
Give = Callable[[Matrix, Tensor], None]
"""Takes this rank's part of its update, flat."""


@dataclass
class _Round:
    """A round under way.

    Attributes:
        matrices: Those in it, with their owners.
        own: This rank's parts of the directions.
        arriving: From each rank, parts of the matrices that this rank owns, or of updates of what it holds.
        most: Elements of the largest message of either way.
        work: What is to be waited for.
    """

    matrices: list[tuple[Matrix, int]]
    own: list[Tensor]
    arriving: list[Tensor]
    most: int
    work: PendingWork


def orthogonalisers(model: ShardedModel) -> list[Orthogonaliser]:
    """One for each group of ranks that share matrices: where ranks divide experts, those with the same ones, too."""
    groups = [model.mesh.of_dense, *([model.mesh.of_experts] if model.experts.layers else [])]
    return [Orthogonaliser(model, ranks) for ranks in groups]


class Orthogonaliser:
    """Newton-Schulz on matrices whose parts lie on ranks of one model.

    Args:
        model: The model.
        ranks: Those that share the buckets of the matrices.
    """

    def __init__(self, model: ShardedModel, ranks: ShardRanks) -> None:
        self._model, self._of = model, ranks
        divided = model.placement.shard_optimizer
        self._group = ranks.gather
        self._rank, self._ranks = (self._group.rank, self._group.size) if divided else (0, 1)
        self._held: dict[int, list[list[tuple[int, int]]]] = {}
        self._planned: tuple[tuple[tuple[int, int], ...], list[list[tuple[int, int]]]] | None = None

    def matrices(self, groups: Sequence[dict[str, Any]], parameters: Sequence[Sequence[nn.Parameter]]) -> list[Matrix]:
        """Matrices of param groups that these ranks share and that have a gradient; the same on all of them.

        Args:
            groups: Hyper-parameters.
            parameters: The module's, of each group.
        """
        found = []
        for group, whole in zip(groups, parameters, strict=True):
            for parameter in whole:
                place = self._model.place(parameter)
                assert place is not None
                bucket, index = place
                shared = bucket.ranks is self._of
                if shared and index in self._model.gradient_of(bucket).live and parameter.numel():
                    *stack, rows, columns = bucket.layout.segments[index].shape
                    pieces = self._held_of(bucket)[index]
                    for number in range(math.prod(stack)):
                        first = number * rows * columns
                        parts = [_both(piece, (first, first + rows * columns)) for piece in pieces]
                        held = tuple(stop - start for start, stop in parts)
                        begins = max(0, parts[self._rank][0] - pieces[self._rank][0])
                        found.append(Matrix(parameter, group, (rows, columns), held, number, begins))
        return found

    def _held_of(self, bucket: Any) -> list[list[tuple[int, int]]]:
        """Elements of each parameter of a bucket on each rank: first, one past the last."""
        if id(bucket) not in self._held:
            layout = bucket.layout
            bounds = (
                [layout.slice_bounds(rank) for rank in range(self._ranks)] if self._ranks > 1 else [(0, layout.numel)]
            )
            found = [[(0, 0)] * self._ranks for _ in layout.segments]
            for rank, bound in enumerate(bounds):
                for piece in layout.pieces(*bound):
                    found[piece.index][rank] = piece.start, piece.stop
            self._held[id(bucket)] = found
        return self._held[id(bucket)]

    @property
    def rank(self) -> int:
        """This rank among those that share the matrices."""
        return self._rank

    def owned(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """Matrices that this rank orthogonalises."""
        plan = self._plan(matrices)
        return [matrices[position] for one in plan for position, owner in one if owner == self._rank]

    def run(self, matrices: Sequence[Matrix], take: Take, give: Give) -> None:
        """Orthogonalise all of them. A collective.

        Args:
            matrices: The same on all ranks.
            take: Called once for each matrix of which this rank holds a part, round by round.
            give: Likewise, later.
        """
        begun: _Round | None = None
        leaving: _Round | None = None
        # The empty round lets the last one out.
        for places in [*self._plan(matrices), []]:
            one = [(matrices[position], owner) for position, owner in places]
            # Begun before the arithmetic of the round at hand, beside which directions then arrive.
            before, begun = begun, self._begin(one, take) if one else None
            if before is not None:
                before.work.wait()
                last, leaving = leaving, self._orthogonalise(before)
                # After that arithmetic, beside which the updates of the round before have travelled.
                if last is not None:
                    self._end(last, give)
        if leaving is not None:
            self._end(leaving, give)

    def _plan(self, matrices: Sequence[Matrix]) -> list[list[tuple[int, int]]]:
        """Rounds of positions of matrices with their owners."""
        # Matrices with a gradient may be others from step to step.
        key = tuple((id(matrix.parameter), matrix.number) for matrix in matrices)
        if self._planned is None or self._planned[0] != key:
            owned_by = owners(matrices, self._ranks)
            found = rounds(matrices, owned_by, self._ranks)
            self._planned = key, [[(position, owned_by[position]) for position in one] for one in found]
        return self._planned[1]

    def _begin(self, one: list[tuple[Matrix, int]], take: Take) -> _Round:
        """Let parts of directions travel to the owners."""
        rank, ranks = self._rank, range(self._ranks)
        own = [take(matrix) if matrix.held[rank] else torch.empty(0) for matrix, _ in one]
        like = next((each for each in own if each.numel()), torch.empty(0, device=self._model.device))
        dtype = newton_schulz_dtype(one[0][0].group)
        nothing = like.new_empty(0, dtype=dtype)
        outgoing = [
            _joined([part for part, (_, owner) in zip(own, one, strict=True) if owner == other != rank], nothing)
            for other in ranks
        ]
        mine = [matrix for matrix, owner in one if owner == rank]
        arriving = [nothing.new_empty(sum(matrix.held[other] for matrix in mine) * (other != rank)) for other in ranks]
        sums = {(owner, other): 0 for owner in ranks for other in ranks}
        for matrix, owner in one:
            for other in ranks:
                sums[owner, other] += matrix.held[other] * (owner != other)
        # From the plan, not from this rank's own messages: all ranks have to name the same number.
        most = max(sums.values())
        work = self._group.all_to_all(outgoing, arriving, most, "directions of matrices")
        return _Round(one, own, arriving, most, work)

    def _orthogonalise(self, one: _Round) -> _Round:
        """Orthogonalise what this rank owns, and let the updates travel to who holds the matrices."""
        rank, ranks = self._rank, range(self._ranks)
        at, back = [0] * self._ranks, list[list[Tensor]]([] for _ in ranks)
        wholes = []
        for (matrix, owner), part in zip(one.matrices, one.own, strict=True):
            if owner != rank:
                continue
            parts = []
            for other, numel in enumerate(matrix.held):
                if numel and other != rank:
                    parts.append(one.arriving[other][at[other] : at[other] + numel])
                    at[other] += numel
                elif numel:
                    parts.append(part)
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            wholes.append((whole.view(matrix.shape), matrix.group))
        # Which matrices come together depends on the ranks and on the layers of a pipeline's stage.
        updates, own = iter(newton_schulz_all(wholes, singly=self._model.slots is not None)), []
        for (matrix, owner), part in zip(one.matrices, one.own, strict=True):
            if owner != rank:
                own.append(part.new_empty(0))  # a view would keep what has been sent
                continue
            for other, values in enumerate(next(updates).reshape(-1).split_with_sizes(list(matrix.held))):
                if other == rank:
                    own.append(values)
                else:
                    back[other].append(values)
        nothing = one.arriving[rank].new_empty(0)
        outgoing = [_joined(parts, nothing) for parts in back]
        arriving = [
            nothing.new_empty(sum(matrix.held[rank] for matrix, owner in one.matrices if owner == other != rank))
            for other in ranks
        ]
        work = self._group.all_to_all(outgoing, arriving, one.most, "updates of matrices")
        return _Round(one.matrices, own, arriving, one.most, work)

    def _end(self, one: _Round, give: Give) -> None:
        """Give the updates of what this rank holds."""
        one.work.wait()
        at = [0] * self._ranks
        for (matrix, owner), own in zip(one.matrices, one.own, strict=True):
            numel = matrix.held[self._rank]
            if not numel:
                continue
            if owner == self._rank:
                give(matrix, own)
                continue
            give(matrix, one.arriving[owner][at[owner] : at[owner] + numel])
            at[owner] += numel


def _both(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The elements of two ranges that both have; an empty range where there are none."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else (start, start)


def _joined(parts: Sequence[Tensor], nothing: Tensor) -> Tensor:
    filled = [part for part in parts if part.numel()]
    return torch.cat(filled) if filled else nothing
