"""Snapshots: a copy of what a rank is about to write, in memory or in files, so that training goes on.

in files.

state in files        is not copied: what changes meanwhile is written elsewhere (`memory.images`)
state in memory       is copied into files, a few megabytes at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from zero_strategy.checkpoint.manifest import CheckpointPlan, FileKind
from zero_strategy.checkpoint.writer import LatePiece, Piece, in_file_order
from zero_strategy.offload.chunk_store import FileCopies, StateImages
from zero_strategy.offload.tier import Tier
from zero_strategy.runtime.host_bytes import PAGE, AlignedArena


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

AnyPiece = Piece | LatePiece


class FileSnapshot:
    """Room in files for one snapshot at a time; it is kept for the next.

    Args:
        tier: Where it is.
    """

    def __init__(self, tier: Tier) -> None:
        self._copies = FileCopies(tier, "checkpoint")

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of copies that are asked for and taken; of state in files, `OffloadStores.spare_bytes` are."""
        return self._copies.nbytes

    def begin(self) -> StateImages:
        """Images for pieces that are read late; their `reader` is what `pieces_of` needs."""
        return StateImages(self._copies)

    def reserve(self, images: StateImages, live: Sequence[tuple[FileKind, AnyPiece]]) -> None:
        """Make room.

        Args:
            images: Of what the late pieces read.
            live: What is to be saved.

        Raises:
            OSError: If there is not enough.
        """
        images.reserve({name: piece.numel * piece.dtype.itemsize for name, piece in _in_memory(live)})

    def take(
        self, plan: CheckpointPlan, images: StateImages, live: Sequence[tuple[FileKind, AnyPiece]]
    ) -> list[tuple[FileKind, AnyPiece]]:
        """Fix all values. The same arguments as for `reserve`.

        Returns:
            The same pieces in the order of the files' bytes, all to be read late.

        Raises:
            OSError: If the tier fails.
        """
        images.take()
        self._copies.write((name, piece.data) for name, piece in _in_memory(live))
        names = {id(piece): name for name, piece in _in_memory(live)}
        fixed = [(kind, self._late(names[id(piece)], piece) if id(piece) in names else piece) for kind, piece in live]
        return in_file_order(plan, fixed)

    def _late(self, name: str, piece: AnyPiece) -> LatePiece:
        load = partial(self._copies.read, name, piece.dtype)
        return LatePiece(piece.name, piece.start, piece.numel, piece.dtype, load)


def _in_memory(live: Iterable[tuple[FileKind, AnyPiece]]) -> Iterable[tuple[str, Piece]]:
    """Pieces that have their values with them, each with a name for its copy."""
    for number, (_, piece) in enumerate(live):
        if isinstance(piece, Piece):
            yield f"piece {number}", piece
