"""Loading pieces where every host has its own: saves are not mixed, and hosts give one another what they lack.

Same shape, same hosts, stages 1 to 3: all slices of a rank lie on its own host. What lies elsewhere are buffers, which
rank 0 wrote; what ranks hold whole (stage 0), what replicas hold, and after a change of shape any slice. That travels
in messages of bounded size, to all ranks alike, of which each keeps what it wants: slow for a large model in another
shape, where merging first is better, and nothing to speak of for buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.checkpoint import Manifest, StateReader
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.pieces import Slice
from zero_strategy.checkpoint.plan import FileKind
from zero_strategy.checkpoint.replace import all_beside
from zero_strategy.checkpoint.state_reader import Wanted

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState

_MESSAGE_BYTES = 32 << 20
"""Of slices that travel together."""
_Slice = tuple[str, FileKind, Slice]


def check_one_save(engine: TrainState, reader: StateReader) -> None:
    """Check that, and give readers the small files that are on other hosts only; all ranks call it.

    Raises:
        ValueError: On all ranks, if hosts have checkpoints of different saves under one name; says which rank has
            which, and where one lies that all hosts have.
    """
    own = reader.manifest.save if reader.has_manifest else ""
    beside = _complete_beside(reader) if isinstance(reader, PieceReader) else {}
    of_pieces: list[bool] = engine.mesh.team.control.gather_objects(isinstance(reader, PieceReader))
    if not any(of_pieces):
        return
    everyone: list[tuple[str, str, dict[str, str]]] = engine.mesh.team.control.gather_objects(
        (own, str(reader.directory), beside)
    )
    saves = [save for save, _, _ in everyone]
    if len(set(saves)) == 1 and all(of_pieces):
        if _may_differ(engine, reader):
            assert isinstance(reader, PieceReader)
            _supply_small(engine, reader)
        return
    lines = [f"\n  rank {rank}: {place} is of save {save!r}" for rank, (save, place, _) in enumerate(everyone)]
    for save in sorted(set(saves)):
        if all(save == there or save in beside for there, _, beside in everyone):
            lines.append(f"\nSave {save!r} is complete on all hosts. Give it its name, and load again:")
            moves = {f"\n  rank {r}: mv {b[save]} {p}" for r, (there, p, b) in enumerate(everyone) if there != save}
            lines += sorted(moves)
    raise ValueError("the ranks would load checkpoints of different saves:" + "".join(lines))


@contextmanager
def supplied(engine: TrainState, reader: StateReader, wanted: Sequence[Wanted]) -> Iterator[None]:
    """Inside, a reader has the slices that its host lacks and another one has; all ranks call it, with what they want.

    Raises:
        RuntimeError: On all ranks, if one cannot read what others need; says which and why.
    """
    if not _may_differ(engine, reader):
        yield
        return
    assert isinstance(reader, PieceReader)
    missing = set(reader.lacking())
    lacks: dict[_Slice, int] = {}
    for item in wanted if missing else ():
        size = reader.spec(item.name, item.kind).dtype.itemsize
        for one in reader.slices_of(item.name, item.kind, item.start, item.stop):
            if one.rank in missing:
                lacks[item.name, item.kind, one] = (one.stop - one.start) * size
    everyone: list[tuple[dict[_Slice, int], set[int]]] = engine.mesh.team.control.gather_objects((lacks, missing))
    needed: dict[_Slice, int] = {}
    for slices, _ in everyone:
        needed |= slices
    givers = {writer: _first_without(writer, [absent for _, absent in everyone]) for writer in _writers(reader)}
    try:
        for batch in _batches(needed):
            mine = [entry for entry in batch if givers[entry[2].rank] == engine.mesh.team.rank]
            for entry, values in _exchange(engine, lambda mine=mine: [(e, _read(reader, e)) for e in mine]):  # type: ignore[misc]
                if entry in lacks:
                    reader.supply(entry[0], entry[1], entry[2], values)
        yield
    finally:
        reader.forget_supplied()


def _supply_small(engine: TrainState, reader: PieceReader) -> None:
    """Random states and the like: each rank's own is on its own host."""
    missing = set(reader.lacking_small())
    everyone: list[set[str]] = engine.mesh.team.control.gather_objects(missing)
    needed = sorted(set().union(*everyone))
    mine = [path for path in needed if _first_without(path, everyone) == engine.mesh.team.rank]
    if needed:
        for name, content in _exchange(engine, lambda: [(path, reader.extra(path)) for path in mine]):
            if name in missing:
                reader.supply_small(name, content)


def _complete_beside(reader: PieceReader) -> dict[str, str]:
    """Save -> place of what a save left complete without its name."""
    found: dict[str, str] = {}
    if isinstance(reader.directory, Path):
        for path in all_beside(reader.directory, "tmp"):
            try:
                found[Manifest.load(path).save] = str(path)
            except (OSError, ValueError):
                continue
    return found


def _may_differ(engine: TrainState, reader: StateReader) -> bool:
    """Whether other ranks may see other pieces than this one; all ranks say the same, see `check_one_save`."""
    return isinstance(reader, PieceReader) and isinstance(reader.directory, Path) and engine.mesh.team.world_size > 1


def _writers(reader: PieceReader) -> list[int]:
    pieces = reader.manifest.pieces
    assert pieces is not None
    return list(pieces.ranks)


def _first_without(item: Any, missing: Sequence[set[Any]]) -> int | None:
    """The first rank that does not miss something."""
    return next((rank for rank, items in enumerate(missing) if item not in items), None)


def _batches(needed: Mapping[_Slice, int]) -> Iterator[list[_Slice]]:
    """In an order that is the same on all ranks."""
    batch: list[_Slice] = []
    size = 0
    for entry, nbytes in sorted(needed.items(), key=lambda item: (str(item[0][1]), item[0][0], item[0][2].start)):
        if batch and size + nbytes > _MESSAGE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += nbytes
    if batch:
        yield batch


def _read(reader: PieceReader, entry: _Slice) -> torch.Tensor:
    name, kind, one = entry
    return reader.read(name, one.start, one.stop, kind=kind)


def _exchange(engine: TrainState, read: Callable[[], list[tuple[Any, Any]]]) -> Iterator[tuple[Any, Any]]:
    """What all ranks read, on all ranks."""
    mine: list[tuple[Any, Any]] = []
    error: str | None = None
    try:
        mine = read()
    except (OSError, ValueError) as caught:
        error = str(caught)
    everyone = engine.mesh.team.control.gather_objects((mine, error))
    if errors := {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}:
        raise RuntimeError(f"pieces that other ranks need cannot be read, on rank(s): {errors}")
    for found, _ in everyone:
        yield from found
