"""Steps on pieces in memory: by an update rule of `optim.fused` in one pass, or by the optimizer's own code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.ops.library import lacks_kernels
from zero_strategy.optim.fused import Segment, UpdateRule, rule_for, rule_in_memory
from zero_strategy.optim.muon import MuonAdamW, muon_groups
from zero_strategy.optim.optimizer_checks import check_elementwise, check_matrices, is_matrix_optimizer
from zero_strategy.optim.pieces import Row
from zero_strategy.optim.power_sums import Shard
from zero_strategy.optim.state_bits_check import wants_codes
from zero_strategy.optim.step_method import PieceStep, SteppedOptimizer
from zero_strategy.optim.streamed import Update


class ElementwiseStep(PieceStep):
    """The step of an optimizer that changes each element by itself, or by norms that pieces can add up (LAMB).

    Args:
        sharded: The optimizer.

    Raises:
        TypeError: If it is not elementwise, and parameters are divided.
    """

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        self.rule: UpdateRule | None = None
        self._check_kind()

    def _check_kind(self) -> None:
        model = self.model
        whole = not (model.placement.shard_optimizer or model.mesh.tensor.size > 1 or model.experts.layers)
        check_elementwise(self.optimizer, model.config.elementwise_optimizers, whole=whole)

    @classmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True for all; others are asked before."""
        return True

    def prepare(self) -> None:
        """Choose the rule, if one serves the options that the groups have now."""
        self.rule = self._rule_of(self.optimizer)
        self.by_hand = set() if self.rule is None else None
        self._note_rule()

    def _rule_of(self, optimizer: Optimizer) -> UpdateRule | None:
        """The rule for steps of an optimizer on these pieces, or None."""
        # Rules update float32 alone; low precision without master weights is left to torch's code.
        if not self.sharded.pieces.all_float32():
            return None
        buckets = self.model.buckets
        if wants_codes(optimizer, self.model):
            return rule_for(optimizer, any_implementation=True)
        return rule_in_memory(
            optimizer,
            fused_optimizers=self.model.config.fused_optimizers,
            devices={bucket.device.type for bucket in buckets},
            masters=any(bucket.keeps_master and bucket.trainable for bucket in buckets),
        )

    def _note_rule(self) -> None:
        self.copied = self.rule is not None
        # LAMB cannot go bucket by bucket: norms of all parameters are added up over ranks at once, before any changes.
        self.records_itself = self.rule is not None and self.rule.elementwise

    def gradients_of(self, row: Row) -> dict[int, tuple[Shard, float]]:
        """See `PieceStep`: a rule multiplies by the factor in its one pass, where there are kernels for it."""
        # Torch's code takes no factor, and its kernels multiply apart: the bucket does so for neighbours at once.
        if self.rule is None or lacks_kernels(row.bucket.device):
            return super().gradients_of(row)
        return row.gradients.scaled_gradients()

    def take(self, scale: float) -> None:
        """See `PieceStep`; torch's code does what no rule does."""
        if self.rule is None:
            return
        if not self.rule.elementwise or not self.model.recorders:
            self.rule.update(segments_of(self.updates), scale, self.add_up)
            return
        # One bucket after the other, so that recorders keep former values of no more than one.
        of_bucket: dict[int, list[Update]] = {}
        for update in self.updates:
            of_bucket.setdefault(id(update.bucket), []).append(update)
        for updates in of_bucket.values():
            self.sharded.record_before([updates[0].bucket])
            self.rule.update(segments_of(updates), scale)
            self.sharded.record_after()

    def add_up(self, segments: Sequence[Segment], sums: Tensor) -> Tensor:
        """Sums over the pieces of a parameter, wherever they lie. A collective where the optimizer is divided.

        Args:
            segments: Pieces on this rank.
            sums: (segments, k), float64, of each.
        """
        pieces, mesh = self.sharded.pieces, self.model.mesh
        rows = {id(parameter): row for row, parameter in enumerate(pieces.parameters())}
        chosen = [rows[id(segment.owner)] for segment in segments]
        # A row for each parameter, also of those without a piece here: all ranks have to send the same shape.
        table = torch.zeros(len(rows), sums.shape[1], dtype=torch.float64)
        table[chosen] = sums
        if self.model.placement.shard_optimizer:
            # Summed in the order of ranks, so that all of them get the same bits.
            table = torch.stack(mesh.shard_control.all_gather_small(table)).sum(dim=0)
        experts = [row for row, each in enumerate(pieces.parameters()) if each in self.model.experts]
        if experts and not self.model.placement.shard_optimizer:  # else they are spread over the ranks that shard
            table[experts] = torch.stack(mesh.expert.all_gather_small(table[experts])).sum(dim=0)
        divided = [
            row
            for row, each in enumerate(pieces.parameters())
            if pieces.part(each).dim is not None and each not in self.model.experts
        ]
        if divided:  # the same on all tensor-parallel ranks
            table[divided] = torch.stack(mesh.tensor.all_gather_small(table[divided])).sum(dim=0)
        return table[chosen]


class MatrixStep(ElementwiseStep):
    """The step of an optimizer of whole matrices, each of which lies in one rank's slice: its own code.

    Raises:
        ValueError: If it holds a parameter that no rank has whole.
    """

    def __init__(self, sharded: SteppedOptimizer) -> None:
        super().__init__(sharded)
        self._needs_whole = is_matrix_optimizer(self.optimizer, self.model.config.matrix_optimizers)
        self.opaque_state = why_opaque(self.optimizer, self.model)

    @classmethod
    def takes(cls, optimizer: Optimizer, model: ShardedModel) -> bool:
        """True for classes that the config declares, and for Muon where each rank has all matrices."""
        return is_matrix_optimizer(optimizer, model.config.matrix_optimizers) or bool(muon_groups(optimizer))

    def _check_kind(self) -> None:
        """Do nothing: the config says what it is."""

    def check_groups(self) -> None:
        """See `StepMethod`."""
        check_matrices(self.optimizer, self.model, whole=self._needs_whole)

    def _rule_of(self, optimizer: Optimizer) -> UpdateRule | None:
        return None if isinstance(optimizer, MuonAdamW) else super()._rule_of(optimizer)


def why_opaque(optimizer: Optimizer, model: ShardedModel) -> str:
    """Why state of an optimizer of whole matrices cannot be shown value by value; "": it can."""
    if not is_matrix_optimizer(optimizer, model.config.matrix_optimizers):
        return ""
    if not model.placement.shard_optimizer or model.mesh.shard_size == 1:
        return ""
    return f"since the state of {type(optimizer).__name__} lies with the ranks that have whole matrices"


def segments_of(updates: Sequence[Update]) -> list[Segment]:
    """Updates of pieces that are in memory, as a rule takes them."""
    found = []
    for update in updates:
        row, piece, gradient = update.row, update.piece, update.gradient
        assert isinstance(gradient, Tensor) and row.values is not None
        own = update.group, row.values, gradient, update.state, piece, row.copy, update.factor, row.parameter
        found.append(Segment(*own, coded=update.coded))
    return found
