"""This rank's part of each parameter, as an optimizer sees it: flat, in float32 where a master copy is kept.

A piece is a view of the bucket's master weights. It stays the same object as long as these lie in the same place, so
that an optimizer's state can belong to it. Where the masters are in a tier, a piece has the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.fsdp.dtensor import TensorPart
from zero_strategy.fsdp.grad_bucket import GradientBucket
from zero_strategy.fsdp.layout import Piece
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.fsdp.shard_storage import ShardStorage, split_pieces
from zero_strategy.fsdp.state_bits import is_coded, may_be_coded


@dataclass(frozen=True)
class Row:
    """One parameter of a param group, with what a step needs to know of it.

    Attributes:
        parameter: The module's.
        bucket, index: Where it is.
        gradients: Those of the bucket.
        piece: What the optimizer sees; None: this rank has no element of it.
        cut: Its place among the bucket's owned elements; None likewise.
        values: The piece as a plain tensor; None likewise.
        copy: The low-precision values that follow the piece, if it is a master copy in memory.
        state_bits: 8 or 32, as the config says of the parameter, for groups that do not say it.
    """

    parameter: nn.Parameter
    bucket: ParameterBucket
    index: int
    gradients: GradientBucket
    piece: nn.Parameter | None
    cut: Piece | None
    values: Tensor | None
    copy: Tensor | None
    state_bits: int = 32

    def is_coded(self, group: dict[str, Any]) -> bool:
        """True if states have 8 bits, in a param group with these options."""
        asked = group.get("state_bits")
        # Nearly all trainings have neither, and ask in each step.
        if asked is None and self.state_bits == 32:
            return False
        return is_coded(asked, self.state_bits, self.parameter.numel())


class Pieces:
    """The pieces of one optimizer's parameters.

    Args:
        optimizer: The user's.
        model: The sharded model.

    Attributes:
        full: Each param group's own list of parameters, while the groups list pieces; else None.
    """

    def __init__(self, optimizer: Optimizer, model: ShardedModel) -> None:
        self._optimizer, self._model = optimizer, model
        self.full: list[list[nn.Parameter]] | None = None
        self._known: dict[int, tuple[nn.Parameter, Piece, ShardStorage]] = {}
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._rows: list[list[Row]] = []
        self._not_float32: list[nn.Parameter] = []
        self._rows_are_of: tuple[list[list[int]], list[tuple[ShardStorage, ShardStorage]]] | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The module parameters of all groups, in group order."""
        for group in self.full or [group["params"] for group in self._optimizer.param_groups]:
            yield from group

    def bucket_and_index(self, parameter: nn.Parameter) -> tuple[ParameterBucket, int]:
        """The bucket of a parameter of the model, and its index there."""
        place = self._model.place(parameter)
        assert place is not None
        return place

    def part(self, parameter: nn.Parameter) -> TensorPart:
        """The part of a parameter that this rank's model has."""
        bucket, index = self.bucket_and_index(parameter)
        return bucket.parts[index]

    def check(self) -> None:
        """Raise if a param group has a parameter that is not the model's.

        Raises:
            ValueError: Naming it by its number.
        """
        if self._rows_are_of is not None and self._rows_are_of[0] == self._listed():
            return  # the same ones as in the last step
        for number, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if self._model.place(parameter) is None:
                    raise ValueError(
                        f"parameter {index} of param group {number} of {type(self._optimizer).__name__}, shape "
                        f"{tuple(parameter.shape)}, is not a parameter of the sharded module. Build the optimizer from "
                        "that module's parameters() (not from a copy, and not before the module was moved)."
                    )

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This rank's piece of a parameter; None if it has no element of it."""
        known = self._known.get(id(parameter))
        bucket, index = self.bucket_and_index(parameter)
        # A storage that moves is replaced by another object, so the same one means the same address.
        if known is not None and known[2] is bucket.master:
            return known[0]
        cut = bucket.piece_of.get(index)
        if cut is None:
            return None
        piece = None if known is None else known[0]
        values = self._values_of(bucket, index, cut) if bucket.master.tensor is not None else None
        # Masters in a tier have no address: the piece is kept as long as size and dtype are, for state to belong to.
        if values is None:
            if piece is None or piece.numel() != cut.numel or piece.dtype != bucket.master.dtype:
                piece = nn.Parameter(self._stand_in(bucket, index, cut))
        elif piece is None or piece.data_ptr() != values.data_ptr() or piece.dtype != values.dtype:
            piece = nn.Parameter(values)
        self._known[id(parameter)] = (piece, cut, bucket.master)
        return piece

    def _values_of(self, bucket: ParameterBucket, index: int, cut: Piece) -> Tensor:
        """A view of the master weights; in the parameter's shape if all of it is here."""
        view = bucket.master.values[cut.offset : cut.offset + cut.numel]
        shape = bucket.layout.segments[index].shape
        # A parameter of shape () stays a vector of one element, whose state can be told from plain numbers.
        return view.view(shape) if shape and (bucket.whole or not bucket.placement.shard_optimizer) else view

    def _stand_in(self, bucket: ParameterBucket, index: int, cut: Piece) -> Tensor:
        """A tensor of a piece's shape and dtype without memory of its own, for state to belong to."""
        dtype, shape = bucket.master.dtype, bucket.layout.segments[index].shape
        # NaN, so that arithmetic on it by mistake shows.
        nothing = self._nothing.setdefault(dtype, torch.full((1,), float("nan"), dtype=dtype)).expand(cut.numel)
        if not bucket.placement.shard_optimizer and shape:
            return nothing.view(shape) if cut.numel else torch.empty(shape)
        return nothing

    def rows(self) -> list[list[Row]]:
        """The parameters of each group, with their pieces.

        They are made anew only if the groups list other parameters, or values lie elsewhere: a step asks once, while
        the device waits for it.
        """
        groups = self._listed()
        places = [(bucket.master, bucket.weights) for bucket in self._model.buckets]
        if self._rows_are_of != (groups, places):
            views: dict[int, dict[int, Tensor]] = {}
            self._rows = [
                [self._row(each, views) for each in group["params"]] for group in self._optimizer.param_groups
            ]
            pieces = ((row.parameter, row.values) for rows in self._rows for row in rows)
            self._not_float32 = [p for p, values in pieces if values is not None and values.dtype != torch.float32]
            self._rows_are_of = groups, places
        return self._rows

    def _listed(self) -> list[list[int]]:
        """The ids of the parameters that each group lists."""
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def all_float32(self) -> bool:
        """True if every piece that is trained is float32, as update rules want it."""
        self.rows()
        return not any(parameter.requires_grad for parameter in self._not_float32)

    def _row(self, parameter: nn.Parameter, views: dict[int, dict[int, Tensor]]) -> Row:
        """One row; `views` has the low-precision pieces of buckets that were met before, by the buckets' ids."""
        bucket, index = self.bucket_and_index(parameter)
        piece, copy = self.of(parameter), None
        # Weights in a tier are written there, chunk by chunk.
        if piece is not None and bucket.has_master and bucket.weights.tensor is not None:
            if id(bucket) not in views:
                views[id(bucket)] = split_pieces(bucket.weights.values, bucket.cuts)
            copy = views[id(bucket)].get(index)
        values = None if piece is None else piece.detach()
        gradients = self._model.gradient_of(bucket)
        bits = self.state_bits(parameter)
        return Row(parameter, bucket, index, gradients, piece, bucket.piece_of.get(index), values, copy, bits)

    def state_bits(self, parameter: nn.Parameter) -> int:
        """Bits of a parameter's states, as the config says."""
        config, (bucket, index) = self._model.config, self.bucket_and_index(parameter)
        bits = config.optimizer.state_bits
        return bits if bits == 32 or may_be_coded(config, bucket.names[index], parameter.numel()) else 32

    # ---- values that lie elsewhere ----

    def viewed(self) -> Iterator[int]:
        """For each tensor that is kept from step to step, what it is a view of, by id."""
        yield from (id(storage) for _, _, storage in self._known.values())
        for row in (row for rows in self._rows for row in rows):
            if row.values is not None:
                yield id(row.bucket.master)
            if row.copy is not None:
                yield id(row.bucket.weights)

    def follow_masters(self) -> None:
        """Master weights lie elsewhere: pieces stay the same objects, to which the state belongs."""
        # Rows hold views of the former memory, which could not go.
        self._rows, self._rows_are_of = [], None
        for parameter in self.parameters():
            place, known = self._model.place(parameter), self._known.get(id(parameter))
            if place is None or known is None:
                continue
            bucket, (piece, cut, _) = place[0], known
            if bucket.master.tensor is not None:
                piece.data = bucket.master.tensor[cut.offset : cut.offset + cut.numel].view(piece.shape)
            self._known[id(parameter)] = (piece, cut, bucket.master)
