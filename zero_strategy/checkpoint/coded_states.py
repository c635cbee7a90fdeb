"""Loading of optimizer states of 8 bits: scales, and states that have other bits in the checkpoint than in the run.

    in the checkpoint   in the run   what is read, of this rank's piece
    8 bits              8 bits       codes and scales, as they are
    8 bits              32 bits      codes and the scales of all blocks that the piece touches; decoded, exactly
    32 bits             8 bits       float32 values, which are coded: a piece is of whole blocks, so that all ranks
                                     together have the codes of the whole

A conversion needs the float32 values of a rank's piece once, beside what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.reader import Wanted
from zero_strategy.fsdp.layout import Piece
from zero_strategy.offload.chunks import OffloadedPart
from zero_strategy.ops.dynamic_codes import BLOCK, blocks_of, decode, encode
from zero_strategy.optim.coded_state import SCALES, SIGNED, blocks_within, codes_key, is_coded_key, scale_key
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

Conversion = Callable[[], None]
"""Gives a parameter the states that have been read with other bits."""


def dtypes_here(stored: Mapping[str, torch.dtype], *, coded: bool) -> dict[str, torch.dtype]:
    """Dtypes by key as a run keeps states, from those of a checkpoint."""
    found = dict(stored)
    for key in SIGNED:
        if coded and key in found:
            del found[key]
            found |= {codes_key(key): torch.uint8, scale_key(key): torch.float32}
        elif not coded and codes_key(key) in found:
            del found[codes_key(key)]
            found.pop(scale_key(key), None)
            found[key] = torch.float32
    return found


class StatesOfOtherBits:
    """States of one piece of a parameter that are read apart: scales, and what is to be converted.

    Args:
        sharded: The optimizer.
        parameter: The module's.
        cut: This rank's piece of it.
        kinds: What the checkpoint has of it.

    Attributes:
        conversion: What is to be done when all has been read; None: nothing.
    """

    def __init__(self, sharded: ShardedOptimizer, parameter: nn.Parameter, cut: Piece, kinds: Collection[str]) -> None:
        self._sharded, self._parameter, self._cut = sharded, parameter, cut
        self._coded, self._kinds = sharded.coded(parameter), kinds
        self._read: dict[str, Tensor] = {}
        self.conversion: Conversion | None = None

    def takes(self, kind: str) -> bool:
        """True if it is read here."""
        return kind in SCALES or (kind in SIGNED if self._coded else is_coded_key(kind))

    def want(self, name: str, number: str, kind: str, dtype: torch.dtype) -> Wanted:
        """The range of a state of the parameter `name` that this rank reads.

        Args:
            name: Of the parameter.
            number: Of the optimizer.
            kind: For which `takes` is true.
            dtype: In the checkpoint.
        """
        start, stop = self._cut.start, self._cut.stop
        if kind in SCALES:
            start, stop = (start // BLOCK, blocks_of(stop)) if start < stop else blocks_within(start, stop)
        values = self._read[kind] = torch.empty(stop - start, dtype=dtype)
        self.conversion = self._convert
        return Wanted(name, start, stop, (number, kind), out=values)

    def _convert(self) -> None:
        piece = self._sharded.piece(self._parameter)
        assert piece is not None
        values: dict[str, Any] = dict(self._sharded.state.get(piece, {}))
        for key, signed in SIGNED.items():
            codes, scale = self._read.get(codes_key(key)), self._read.get(scale_key(key))
            if self._coded and key in self._read:
                codes, scale = encode(self._read[key].float(), signed=signed)
            if self._coded and codes is not None:
                values[codes_key(key)] = self._placed(codes_key(key), codes, piece)
            if self._coded and scale is not None:
                values[scale_key(key)] = scale.to(piece.device)
            if not self._coded and codes is not None and scale is not None:
                values[key] = self._placed(key, self._decoded(codes, scale, signed), piece)
        self._read.clear()
        self._sharded.set_state_of(self._parameter, values)

    def _decoded(self, codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
        """The piece's numbers; it may begin inside of a block."""
        lead = self._cut.start % BLOCK if codes.numel() else 0
        led = torch.cat([codes.new_zeros(lead), codes])
        return decode(led, scale, signed=signed)[lead:]

    def _placed(self, key: str, values: Tensor, piece: Tensor) -> Tensor | OffloadedPart:
        """Values in memory of the piece's shape, or in the tier."""
        place = self._sharded.offloaded_place(self._parameter, key)
        if place is None:
            return values.to(piece.device).view(piece.shape)
        place.write(values)
        return place
