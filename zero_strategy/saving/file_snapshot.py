"""What a rank is about to write, fixed at one moment where there is no memory for a copy of it: in files.

    state in files        is not copied: what changes meanwhile is written elsewhere (`memory.images`)
    state in memory       is copied into files, a few megabytes at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from zero_strategy.checkpoint import CheckpointPlan, FileKind, LatePiece, Piece
from zero_strategy.checkpoint.save_writer import in_file_order
from zero_strategy.memory.file_copies import FileCopies
from zero_strategy.memory.images import StateImages
from zero_strategy.memory.tier import Tier

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
