"""Reads a checkpoint that is made of pieces: any element range, from whichever ranks' files have it.

Where hosts share no directory, saves are not mixed, and hosts give one another what they lack. Same shape, same hosts,
stages 1 to 3: all slices of a rank lie on its own host. What lies elsewhere are buffers, which rank 0 wrote; what ranks
hold whole (stage 0), what replicas hold, and after a change of shape any slice. That travels in messages of bounded
size, to all ranks alike, of which each keeps what it wants: slow for a large model in another shape, where merging
first is better, and nothing to speak of for buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from zero_strategy.checkpoint.disk import (
    all_beside,
)
from zero_strategy.checkpoint.layout import FileLayout, TensorSpec
from zero_strategy.checkpoint.manifest import FileKind, Manifest
from zero_strategy.checkpoint.ranges import Block, PieceTable, Slice, batches, rank_path, small_path
from zero_strategy.checkpoint.reader import LayoutReader, StateReader, Wanted, check_out
from zero_strategy.checkpoint.storage import Storage
from zero_strategy.comm.store import together

if TYPE_CHECKING:
    from zero_strategy.train_state import TrainState


_TOGETHER_BYTES = 32 << 20
"""Most bytes of one request."""
_GAP_BYTES = 1 << 20
"""Unwanted bytes between two ranges that are read along rather than asked for around."""
_AT_ONCE = 4
"""Requests that are handed to the storage together; an object store carries them out at the same time."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Consecutive bytes of a rank's file: a block with its checksum, or any range where nothing is compared.

    Attributes:
        rank, offset, nbytes: The bytes.
        item: Index of the range that was asked for.
        start, stop: Elements of the tensor that they are.
        checksum: What they must have, or None.
    """

    rank: int
    offset: int
    nbytes: int
    item: int
    start: int
    stop: int
    checksum: str | None


class PieceReader(LayoutReader):
    """A checkpoint of pieces, open for reading. It keeps no file open between calls.

    Args:
        storage: Where the pieces are, or some of them.
        manifest: The checkpoint's.
        directory: What users call it.
        verify: Compare the checksums of all that is read; a block is read whole where a part of it is asked for.

    Raises:
        ValueError: If the manifest is that of an ordinary checkpoint, or its checksums leave out elements of a tensor.
    """

    def __init__(self, storage: Storage, manifest: Manifest, directory: Path | str, *, verify: bool = True) -> None:
        if manifest.pieces is None:
            raise ValueError(f"{directory}: an ordinary checkpoint, not one of pieces")
        self.directory = directory
        self.aliases = dict(manifest.aliases)
        self._storage, self._manifest, self._verify = storage, manifest, verify
        self._pieces: PieceTable = manifest.pieces
        self._weight_files = {name: record.file for name, record in manifest.weights.items()}
        self._weights = {name: self._layout(path).specs[name] for name, path in self._weight_files.items()}
        self._supplied: dict[tuple[str, str, int], torch.Tensor] = {}
        self._small: dict[str, bytes] = {}
        if verify:
            check_blocks(manifest, self._pieces, str(directory))

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        out: torch.Tensor | None = None,
        kind: FileKind = "model",
    ) -> torch.Tensor:
        """See `StateReader.read`.

        Raises:
            ValueError, TypeError: As there; also if the elements are in the file of a rank that is not here, naming it.
        """
        found: list[torch.Tensor] = []
        stop = self.spec(name, kind).numel if stop is None else stop
        self.read_many([Wanted(name, start, stop, kind, out, found.append)])
        return found[0]

    def read_many(self, wanted: Sequence[Wanted]) -> None:
        """Reads ranges in the order of the ranks' files, neighbours in one request."""
        results = _Results(wanted)
        parts: list[_Part] = []
        for number, item in enumerate(wanted):
            layout, stored = self._find(item.name, item.kind)
            layout.span(stored, item.start, item.stop)  # that there are such elements
            results.begin(number, layout.specs[stored])
            for one in self._pieces.overlapping(layout.path, stored, item.start, item.stop):
                values = self._supplied.get((layout.path, stored, one.start))
                if values is None:
                    begin, end = max(item.start, one.start), min(item.stop, one.stop)
                    parts += self._parts(layout, stored, one, begin, end, number)
                else:
                    results.put(number, one.start, values)
        # Nothing is ever put into a range without elements, so it would never be given to its taker.
        results.finish_empty()
        groups = list(_pipeline_peers(sorted(parts, key=lambda part: (part.rank, part.offset))))
        for at in range(0, len(groups), _AT_ONCE):
            self._carry_out(groups[at : at + _AT_ONCE], wanted, results)

    def extra(self, path: str) -> bytes:
        """See `StateReader.extra`.

        Raises:
            ValueError: If there is no such file, it is damaged, or the rank that wrote it has it on another host.
        """
        if path not in self._pieces.owners:
            raise ValueError(f"{self.directory}: the manifest lists no file {path!r} that is not made of pieces")
        if path in self._small:
            return self._small[path]
        place = small_path(self._pieces.folder, path)
        try:
            content = self._storage.read(place)
        except FileNotFoundError:
            raise ValueError(self._elsewhere(place, f"the file {path!r}", self._pieces.owners[path])) from None
        if self._verify:
            self.manifest.checksums.check_file(path, content, f"{self.directory}/{place}")
        return content

    def lacking(self) -> list[int]:
        """The ranks whose files are not here."""
        folder = self._pieces.folder
        return [rank for rank in sorted(self._pieces.ranks) if self._storage.size(rank_path(folder, rank)) is None]

    def lacking_small(self) -> list[str]:
        """The small files that are not here."""
        folder = self._pieces.folder
        return [path for path in sorted(self._pieces.owners) if self._storage.size(small_path(folder, path)) is None]

    def slices_of(self, name: str, kind: FileKind, start: int, stop: int) -> list[Slice]:
        """Places of elements [start, stop) of a tensor."""
        layout, stored = self._find(name, kind)
        return self._pieces.overlapping(layout.path, stored, start, stop)

    def supply(self, name: str, kind: FileKind, one: Slice, values: torch.Tensor) -> None:
        """Gives it a slice that another rank has read, flat, on the CPU; see `forget_supplied`."""
        layout, stored = self._find(name, kind)
        check_out(name, layout.specs[stored].dtype, one.stop - one.start, values)
        self._supplied[layout.path, stored, one.start] = values

    def supply_small(self, path: str, content: bytes) -> None:
        """Gives it a small file that another rank has read."""
        self._small[path] = content

    def forget_supplied(self) -> None:
        """Gives the memory of all slices free that it was given."""
        self._supplied.clear()

    def _layout(self, path: str) -> FileLayout:
        return self._pieces.layouts[path]

    def _parts(self, layout: FileLayout, name: str, one: Slice, start: int, stop: int, item: int) -> Iterator[_Part]:
        """Reads for elements [start, stop) of one slice."""
        size = layout.specs[name].dtype.itemsize
        blocks: list[tuple[int, int, str | None]] = [(start, stop, None)]
        if self._verify:
            found = self.manifest.checksums.overlapping(layout.path, name, start, stop)
            blocks = [(block.start, block.stop, block.checksum) for block in found]
        for begin, end, checksum in blocks:
            offset = one.offset + (begin - one.start) * size
            yield _Part(one.rank, offset, (end - begin) * size, item, begin, end, checksum)

    def _carry_out(self, groups: list[list[_Part]], wanted: Sequence[Wanted], results: _Results) -> None:
        folder = self._pieces.folder
        ranges = []
        for parts in groups:
            begin, end = parts[0].offset, max(part.offset + part.nbytes for part in parts)
            path = rank_path(folder, parts[0].rank)
            ranges.append((path, begin, end - begin))
        for parts, content in zip(groups, self._fetch(ranges, groups, wanted), strict=True):
            for part in parts:
                at = part.offset - parts[0].offset
                piece = memoryview(content)[at : at + part.nbytes]
                name = wanted[part.item].name
                self._check(part, name, piece)
                results.put(part.item, part.start, torch.frombuffer(piece, dtype=torch.uint8))

    def _fetch(
        self, ranges: list[tuple[str, int, int]], groups: list[list[_Part]], wanted: Sequence[Wanted]
    ) -> list[bytearray]:
        try:
            return self._storage.read_ranges(ranges)
        except FileNotFoundError:
            for (path, _, _), parts in zip(ranges, groups, strict=True):
                if self._storage.size(path) is None:
                    part = parts[0]
                    what = f"elements [{part.start}, {part.stop}) of tensor {wanted[part.item].name!r}"
                    raise ValueError(self._elsewhere(path, what, part.rank)) from None
            raise

    def _check(self, part: _Part, name: str, content: memoryview) -> None:
        place = f"{self.directory}/{rank_path(self._pieces.folder, part.rank)}"
        if len(content) != part.nbytes:
            raise ValueError(f"{place}: truncated inside tensor {name!r}")
        if part.checksum is not None:
            Block(part.start, part.stop, part.checksum).check(xxhash.xxh3_64_hexdigest(content), name, place)

    def _elsewhere(self, place: str, what: str, rank: int | None) -> str:
        who = "every host has a copy of" if rank is None else f"rank {rank} wrote on its host"
        return (
            f"{self._storage.name}: {place} is not here, which {who}, and {what} is needed from it. Bring the "
            f"directories of all hosts together with `zero-strategy checkpoint merge DIR [DIR...] --output OUT`, and "
            "load OUT"
        )


class _Results:
    """Ranges that are being put together from parts."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._out: dict[int, torch.Tensor] = {}
        self._specs: dict[int, TensorSpec] = {}
        self._left: dict[int, int] = {}

    def begin(self, number: int, spec: TensorSpec) -> None:
        item = self._wanted[number]
        self._specs[number], self._left[number] = spec, item.stop - item.start
        if item.out is not None:
            check_out(item.name, spec.dtype, item.stop - item.start, item.out)

    def finish_empty(self) -> None:
        for number in [number for number, left in self._left.items() if left == 0]:
            if number not in self._out:
                self._done(number, self._memory(number))

    def put(self, number: int, start: int, content: torch.Tensor) -> None:
        """Elements from `start` on, as bytes or as the tensor's dtype; those that nobody wants are left out."""
        item, spec = self._wanted[number], self._specs[number]
        values = content.view(torch.uint8)
        size = spec.dtype.itemsize
        stop = start + values.numel() // size
        begin, end = max(start, item.start), min(stop, item.stop)
        target = self._memory(number).view(torch.uint8)[(begin - item.start) * size : (end - item.start) * size]
        target.copy_(values[(begin - start) * size : (end - start) * size])
        self._left[number] -= end - begin
        if self._left[number] == 0:
            self._done(number, self._out[number])

    def _memory(self, number: int) -> torch.Tensor:
        item = self._wanted[number]
        if number not in self._out:
            out = item.out
            if out is None:
                out = torch.empty(item.stop - item.start, dtype=self._specs[number].dtype)
            self._out[number] = out
        return self._out[number]

    def _done(self, number: int, values: torch.Tensor) -> None:
        self._wanted[number].take(values)
        # The values' memory goes; the entry stays, and says that the range is done.
        self._out[number] = torch.empty(0)


def _pipeline_peers(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts of one file that are read in one request, given in order."""
    for _, of_rank in groupby(parts, key=lambda part: part.rank):
        group: list[_Part] = []
        for part in of_rank:
            if group:
                end = max(other.offset + other.nbytes for other in group[-2:])
                if part.offset - end > _GAP_BYTES or part.offset + part.nbytes - group[0].offset > _TOGETHER_BYTES:
                    yield group
                    group = []
            group.append(part)
        if group:
            yield group


def check_blocks(manifest: Manifest, pieces: PieceTable, source: str) -> None:
    """Checks that each element of all tensors is in one block, and each block within one rank's slice.

    Args:
        manifest: The checkpoint's.
        pieces: The manifest's.
        source: The checkpoint, for errors.

    Raises:
        ValueError: Naming the file and the tensor.
    """
    for path, layout in pieces.layouts.items():
        where = f"{source}/{path}"
        manifest.checksums.check_cover(path, {name: spec.numel for name, spec in layout.specs.items()}, where)
        for name, slices in pieces.slices.get(path, {}).items():
            ends = [block.stop for block in manifest.checksums.tensors.get(path, {}).get(name, [])]
            if across := sorted({one.stop for one in slices} - set(ends)):
                raise ValueError(f"{where}: a checksum of tensor {name!r} goes across a slice's end at {across[0]}")


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
    # One flag first: readers of ordinary checkpoints need no more.
    of_pieces: list[bool] = engine.mesh.world_group.control.all_gather_objects(isinstance(reader, PieceReader))
    if not any(of_pieces):
        return
    everyone: list[tuple[str, str, dict[str, str]]] = engine.mesh.world_group.control.all_gather_objects(
        (own, str(reader.directory), beside)
    )
    saves = [save for save, _, _ in everyone]
    if len(set(saves)) == 1 and all(of_pieces):
        if _may_differ(engine, reader):
            assert isinstance(reader, PieceReader)
            _supply_small(engine, reader)
        return
    lines = [f"\n  rank {rank}: {place} is of save {save!r}" for rank, (save, place, _) in enumerate(everyone)]
    # A save that was sealed everywhere and not renamed on some host is whole: it can be told how to go on.
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
    control, lacks = engine.mesh.world_group.control, dict[_Slice, int]()

    def look() -> set[int]:
        missing = set(reader.lacking())
        for item in wanted if missing else ():
            size = reader.spec(item.name, item.kind).dtype.itemsize
            for one in reader.slices_of(item.name, item.kind, item.start, item.stop):
                if one.rank in missing:
                    lacks[item.name, item.kind, one] = (one.stop - one.start) * size
        return missing

    # A host whose disk fails would leave the others in the exchange.
    missing = together(control, look)
    everyone: list[tuple[dict[_Slice, int], set[int]]] = control.all_gather_objects((lacks, missing))
    needed: dict[_Slice, int] = {}
    for slices, _ in everyone:
        needed |= slices
    # What no rank has is left out: reading it names the rank that wrote it, and what to do.
    givers = {writer: _first_without(writer, [absent for _, absent in everyone]) for writer in _writers(reader)}
    try:
        order = sorted(needed, key=lambda entry: (str(entry[1]), entry[0], entry[2].start))  # the same on all ranks
        for batch in batches(order, needed.__getitem__, _MESSAGE_BYTES):
            mine = [entry for entry in batch if givers[entry[2].rank] == engine.mesh.world_group.rank]
            for entry, values in _exchange(engine, lambda mine=mine: [(e, _read(reader, e)) for e in mine]):  # type: ignore[misc]
                if entry in lacks:
                    reader.supply(entry[0], entry[1], entry[2], values)
        yield
    finally:
        # Also after an error: it may be much memory, and the reader lives on.
        reader.forget_supplied()


def _supply_small(engine: TrainState, reader: PieceReader) -> None:
    """Random states and the like: each rank's own is on its own host."""
    control = engine.mesh.world_group.control
    missing = together(control, lambda: set(reader.lacking_small()))
    everyone: list[set[str]] = control.all_gather_objects(missing)
    needed = sorted(set().union(*everyone))
    mine = [path for path in needed if _first_without(path, everyone) == engine.mesh.world_group.rank]
    if needed:
        for name, content in _exchange(engine, lambda: [(path, reader.extra(path)) for path in mine]):
            if name in missing:
                reader.supply_small(name, content)


def _complete_beside(reader: PieceReader) -> dict[str, str]:
    """Save -> place of what a save left complete without its name, as far as this host can tell.

    It is for a message alone, and other ranks wait for this one.
    """
    found: dict[str, str] = {}
    if not isinstance(reader.directory, Path):
        return found
    with suppress(OSError):  # the folder may not be listed, or its drive fails
        for path in all_beside(reader.directory, "tmp"):
            with suppress(OSError, ValueError):
                found[Manifest.load(path).save] = str(path)
    return found


def _may_differ(engine: TrainState, reader: StateReader) -> bool:
    """True if other ranks may see other pieces than this one; all ranks say the same, see `check_one_save`."""
    return (
        isinstance(reader, PieceReader)
        and isinstance(reader.directory, Path)
        and engine.mesh.world_group.world_size > 1
    )


def _writers(reader: PieceReader) -> list[int]:
    pieces = reader.manifest.pieces
    assert pieces is not None
    return list(pieces.ranks)


def _first_without(item: Any, missing: Sequence[set[Any]]) -> int | None:
    """The first rank that does not miss something."""
    return next((rank for rank, items in enumerate(missing) if item not in items), None)


def _read(reader: PieceReader, entry: _Slice) -> torch.Tensor:
    name, kind, one = entry
    return reader.read(name, one.start, one.stop, kind=kind)


def _exchange(engine: TrainState, read: Callable[[], list[tuple[Any, Any]]]) -> Iterator[tuple[Any, Any]]:
    """Contents of a file, on all ranks."""
    mine: list[tuple[Any, Any]] = []
    error: str | None = None
    try:
        mine = read()
    # Raised by all behind the exchange; a rank that left before it would leave the others waiting there.
    except (OSError, ValueError) as caught:
        error = str(caught)
    everyone = engine.mesh.world_group.control.all_gather_objects((mine, error))
    if errors := {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}:
        raise RuntimeError(f"pieces that other ranks need cannot be read, on rank(s): {errors}")
    for found, _ in everyone:
        yield from found
