"""Muon's steps on slices of matrices: state in memory (`MuonStep`), and the two halves of a step on state in a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.optim.elementwise_step import ElementwiseStep, segments_of
from zero_strategy.optim.fused import AdamRule, Combine, Segment, UpdateRule
from zero_strategy.optim.muon import MOMENTUM, MuonAdamW, change, direction, muon_groups
from zero_strategy.optim.optimizer_checks import check_matrices, is_matrix_optimizer
from zero_strategy.optim.orthogonaliser import Matrix, orthogonalisers
from zero_strategy.optim.step_method import SteppedOptimizer


class MuonStep(ElementwiseStep):
    """Muon's step on its param groups, and a rule's, or torch's own, on all others; state is in memory."""

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        self._orthogonalisers = orthogonalisers(self.model)
        self._matrices: list[list[Matrix]] = []

    @classmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True for Muon on matrices that are divided, unless the layout keeps each on one rank.

        In slots (`reproducible`) so are those of stage 0, since torch's own arithmetic rounds otherwise.
        """
        whole = is_matrix_optimizer(optimizer, model.config.matrix_optimizers)
        own = model.placement.shard_optimizer or model.slots is not None
        return bool(muon_groups(optimizer)) and own and not whole

    def _check_kind(self) -> None:
        """Do nothing: what is not in Muon's groups is AdamW's."""

    def check_groups(self) -> None:
        """See `StepMethod`; slices of a matrix may lie on several ranks."""
        check_matrices(self.optimizer, self.model, whole=False)

    def prepare(self) -> None:
        """Choose the rule of the other groups, and find the matrices, on whatever rank."""
        others = self.optimizer.adamw if isinstance(self.optimizer, MuonAdamW) else self.optimizer
        self.rule, groups = self._rule_of(others), muon_groups(self.optimizer)
        self.by_hand = set(map(id, groups)) if self.rule is None else None
        # Now, while the groups list the module's parameters.
        of_groups = [group["params"] for group in groups]
        self._matrices = [each.matrices(groups, of_groups) for each in self._orthogonalisers]
        self._note_rule()
        # Matrices go by rounds, not by buckets, so recorders are told of all before the first.
        self.records_itself = False

    def take(self, scale: float) -> None:
        """See `PieceStep`. A collective."""
        segments, muon = segments_of(self.updates), {id(group) for group in muon_groups(self.optimizer)}
        if self.rule is not None:
            self.rule.update([each for each in segments if id(each.group) not in muon], scale, self.add_up)
        of_matrix = {id(segment.owner): segment for segment in segments if id(segment.group) in muon}
        for segment in of_matrix.values():
            if MOMENTUM not in segment.state:
                segment.state[MOMENTUM] = torch.zeros_like(segment.like)

        def take(rank: int, matrix: Matrix) -> Tensor:
            segment = of_matrix[id(matrix.parameter)]
            gradient = matrix.of(segment.grad.view(-1), rank).to(segment.param.dtype)
            factor = segment.scale * scale
            gradient = gradient if factor == 1.0 else gradient * factor
            return direction(gradient, matrix.of(segment.state[MOMENTUM].view(-1), rank), matrix.group)

        def give(rank: int, matrix: Matrix, values: Tensor) -> None:
            segment = of_matrix[id(matrix.parameter)]
            weights = matrix.of(segment.param.view(-1), rank)
            change(weights, values, matrix.group, matrix.shape)
            if segment.copy is not None:
                matrix.of(segment.copy.view(-1), rank).copy_(weights)

        for each, matrices in zip(self._orthogonalisers, self._matrices, strict=True):
            each.run(matrices, partial(take, each.rank), partial(give, each.rank))


class Directions(UpdateRule):
    """The first half of a step chunk by chunk: momentum, and the directions of the elements, kept by parameter."""

    def __init__(self) -> None:
        self._found: dict[int, list[Tensor]] = {}
        self._left: dict[int, int] = {}

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """See `UpdateRule`."""
        for segment in segments:
            gradient, factor = segment.grad.to(torch.float32), segment.scale * scale
            gradient = gradient if factor == 1.0 else gradient * factor
            if MOMENTUM not in segment.state:
                segment.state[MOMENTUM] = torch.zeros_like(gradient)
            found = direction(gradient, segment.state[MOMENTUM], segment.group)
            self._found.setdefault(id(segment.owner), []).append(found)

    def take(self, matrix: Matrix, rank: int, device: torch.device) -> Tensor:
        """The direction of a rank's elements of a matrix, once."""
        found = self._found[id(matrix.parameter)]
        if len(found) > 1:  # parts came in the order of chunks, which is that of elements
            found[:] = [torch.cat([part.to(device) for part in found])]
        own = matrix.of(found[0].to(device), rank)
        left = self._left.get(id(matrix.parameter), len(found[0])) - len(own)
        self._left[id(matrix.parameter)] = left
        if not left:  # taken out, so that its memory goes
            del self._found[id(matrix.parameter)]
        return own


class MuonParts(UpdateRule):
    """The second half for Muon's param groups, with updates in the place of gradients; AdamW for all others."""

    _others = AdamRule()

    def refuses(self, group: dict[str, Any]) -> str | None:
        """See `UpdateRule`."""
        return None if _is_muon(group) else self._others.refuses(group)

    def vectors(self, group: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]] | None:
        """See `UpdateRule`."""
        if _is_muon(group):
            return {MOMENTUM: (torch.float32, 0.0)}
        return None if self._others.refuses(group) else self._others.vectors(group)

    def update(self, segments: Sequence[Segment], scale: float = 1.0, combine: Combine | None = None) -> None:
        """See `UpdateRule`."""
        for segment in segments:
            if _is_muon(segment.group):
                assert segment.owner is not None
                change(segment.param, segment.grad, segment.group, segment.owner.shape)
                if segment.copy is not None:
                    segment.copy.copy_(segment.param)
        others = [segment for segment in segments if not _is_muon(segment.group)]
        if others:
            self._others.update(others, scale, combine)


def _is_muon(group: Mapping[str, Any]) -> bool:
    # Groups of torch's own class have no mark, but options that AdamW has not.
    return bool(group.get("use_muon", "ns_steps" in group))
