"""A copy of what a rank is about to write, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zero_strategy.checkpoint.aligned import PAGE, AlignedArena
from zero_strategy.checkpoint.plan import CheckpointPlan, FileKind
from zero_strategy.checkpoint.save_writer import Piece, in_file_order
from zero_strategy.checkpoint.transfer import as_bytes


def snapshot(
    plan: CheckpointPlan, pieces: Iterable[tuple[FileKind, Piece]], arena: AlignedArena
) -> list[tuple[FileKind, Piece]]:
    """Copies pieces into host memory that lies as the files do, so that it is written without another copy.

    Args:
        plan: where the pieces go.
        pieces: views of live memory on any device.
        arena: is used from its beginning; what it held before is given up.

    Returns:
        The same pieces in the order of the files' bytes, on the CPU.
    """
    ordered = in_file_order(plan, pieces)
    sources = [as_bytes(piece.data) for _, piece in ordered]
    arena.reserve(sum(source.numel() for source in sources) + PAGE * len(sources))
    copies = []
    for (kind, piece), source in zip(ordered, sources, strict=True):
        layout = plan.layout_of(kind, piece.name)
        offset, nbytes = layout.span(piece.name, piece.start, piece.start + piece.data.numel())
        memory = arena.take(nbytes, offset).copy_(source, non_blocking=True)
        copies.append((kind, Piece(piece.name, piece.start, memory.view(piece.data.dtype))))
    if any(source.is_cuda for source in sources):
        torch.cuda.current_stream().synchronize()
    return copies
