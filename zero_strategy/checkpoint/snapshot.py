"""A copy of what a rank is about to write, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zero_strategy.checkpoint.plan import CheckpointPlan, FileKind
from zero_strategy.checkpoint.save_writer import LatePiece, Piece, in_file_order
from zero_strategy.runtime.aligned import PAGE, AlignedArena


class Snapshot:
    """Host memory that lies as the files do, so that it is written without another copy.

    The places of one plan's pieces are kept for the next time, which is then hardly more than the copies.

    Args:
        pinned: page-locked memory, for copies from a CUDA device.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._arena = AlignedArena(pinned)
        self._plan: CheckpointPlan | None = None
        self._keys: list[tuple[FileKind, str, int, int, torch.dtype]] = []
        self._places: list[torch.Tensor] = []
        self._copies: list[tuple[FileKind, Piece]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held."""
        return self._arena.nbytes

    @torch.no_grad()
    def take(
        self, plan: CheckpointPlan, pieces: Iterable[tuple[FileKind, Piece | LatePiece]]
    ) -> list[tuple[FileKind, Piece]]:
        """Copies pieces; what was copied before is given up.

        Args:
            plan: where the pieces go.
            pieces: views of live memory on any device.

        Returns:
            The same pieces in the order of the files' bytes, on the CPU.
        """
        live = list(pieces)
        keys = [(kind, piece.name, piece.start, piece.numel, piece.dtype) for kind, piece in live]
        if plan is not self._plan or keys != self._keys:
            self._lay_out(plan, live)
            self._plan, self._keys = plan, keys
        on_device = False
        for place, (_, piece) in zip(self._places, live, strict=True):
            data = piece.loaded().data
            place.copy_(data, non_blocking=True)
            on_device = on_device or data.is_cuda
        if on_device:
            torch.cuda.current_stream().synchronize()
        return self._copies

    def _lay_out(self, plan: CheckpointPlan, live: list[tuple[FileKind, Piece | LatePiece]]) -> None:
        """Gives each piece its place."""
        self._plan = None  # not even half of the old places are valid any more
        ordered = in_file_order(plan, live)
        sizes = [piece.numel * piece.dtype.itemsize for _, piece in ordered]
        self._arena.reserve(sum(sizes) + PAGE * len(sizes))
        self._copies, places = [], dict[int, torch.Tensor]()
        for (kind, piece), nbytes in zip(ordered, sizes, strict=True):
            layout = plan.layout_of(kind, piece.name)
            offset, _ = layout.span(piece.name, piece.start, piece.start + piece.numel)
            place = self._arena.take(nbytes, offset).view(piece.dtype)
            self._copies.append((kind, Piece(piece.name, piece.start, place)))
            places[id(piece)] = place
        self._places = [places[id(piece)] for _, piece in live]
