"""Element ranges of tensors: written ones, checksums of blocks, and places in the files of ranks.

*Coverage*: no element twice, and none missing. Each rank records its own ranges; before the checkpoint is committed,
one rank adds them all up. An element that nobody wrote would read back as a silent zero.

*Checksums*: an XXH3 checksum of 64 bits per block of a tensor and per other file. A block is what one rank wrote of a
tensor, in pieces of at most `BLOCK_BYTES`. Blocks are noted in the ranks' receipts while they are written and end up in
the manifest; a reader checks whole blocks, also where it needs a part of one. XXH3 finds damage, not forgery:
https://github.com/Cyan4973/xxHash

*Slices*: where the bytes lie that ranks could not write in place, one file of slices per rank.

    manifest.json                             the ordinary one, and a `PieceTable` in it
    pieces-<token>/rank-00003.safetensors     slices of rank 3, each a 1-D tensor named "file:tensor[start:stop]"
    pieces-<token>/files/<path>               small files, such as random states

The manifest describes the *logical* files, those that an in-place save would have written and that merging writes:
their names, sizes, headers and checksums. The table says where their bytes are meanwhile.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zero_strategy.checkpoint.layout import DTYPE_NAMES, DTYPES, FileLayout, TensorSpec
from zero_strategy.runtime.host_bytes import checksum_of

T = TypeVar("T")


def batches(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in their order, in lists of at most so many bytes; a larger item comes alone."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > most:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


class Coverage:
    """Disjoint element ranges per tensor of each file, adjacent ones merged."""

    def __init__(self) -> None:
        # file path -> tensor name -> sorted [start, stop] ranges
        self._ranges: dict[str, dict[str, list[list[int]]]] = {}

    def add(self, path: str, name: str, start: int, stop: int) -> None:
        """Records elements [start, stop).

        Raises:
            ValueError: naming the tensor, if one of them is already recorded.
        """
        if start == stop:
            return
        ranges = self._ranges.setdefault(path, {}).setdefault(name, [])
        at = bisect_right(ranges, [start, start])
        # Ranges are disjoint and in order, so only neighbours can overlap.
        for other_start, other_stop in ranges[max(at - 1, 0) : at + 1]:
            if max(start, other_start) < min(stop, other_stop):
                raise ValueError(
                    f"{path}: elements [{start}, {stop}) of tensor {name!r} overlap "
                    f"[{other_start}, {other_stop}), which is already written"
                )
        # The one behind first: taking it out leaves the place of the one in front.
        if at < len(ranges) and ranges[at][0] == stop:
            stop = ranges.pop(at)[1]
        if at > 0 and ranges[at - 1][1] == start:
            ranges[at - 1][1] = stop
        else:
            ranges.insert(at, [start, stop])

    def check_complete(self, layouts: Iterable[FileLayout]) -> None:
        """Checks that every element of the given files is recorded.

        Raises:
            ValueError: listing every tensor with missing elements.
        """
        holes = []
        for layout in layouts:
            recorded = self._ranges.get(layout.path, {})
            for name, spec in layout.specs.items():
                ranges = recorded.get(name, [])
                if spec.numel and ranges != [[0, spec.numel]]:
                    done = sum(stop - start for start, stop in ranges)
                    holes.append(f"{name!r} in {layout.path} ({spec.numel - done} of {spec.numel} elements)")
        if holes:
            raise ValueError(f"elements of {len(holes)} tensors were written by no rank: " + ", ".join(holes))

    def to_json(self) -> dict[str, dict[str, list[list[int]]]]:
        """The record as JSON can hold it, for another rank to `merge_json`."""
        return self._ranges

    def merge_json(self, record: dict[str, dict[str, list[list[int]]]]) -> None:
        """Adds the record of another rank.

        Raises:
            ValueError: naming the tensor, if both ranks wrote the same element.
        """
        for path, tensors in record.items():
            for name, ranges in tensors.items():
                for start, stop in ranges:
                    self.add(path, name, start, stop)


BLOCK_BYTES = 16 << 20
"""Most bytes of a block."""
# Eighteen digits: whatever a manifest says fits an int64.
_BLOCK = re.compile("([0-9]{1,18}):([0-9]{1,18}):([0-9a-f]{16})")


@dataclass(frozen=True)
class Block:
    """Elements [start, stop) of a row-major flattened tensor and the checksum of their bytes, 16 hexadecimal digits."""

    start: int
    stop: int
    checksum: str

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}:{self.checksum}"

    def check(self, actual: str, name: str, place: object) -> None:
        """Raises ValueError, with the tensor's name and its file, if the bytes have another checksum."""
        if actual != self.checksum:
            raise ValueError(
                f"{place}: tensor {name!r} is damaged: elements [{self.start}, {self.stop}) have the checksum "
                f"{actual}, the manifest says {self.checksum}"
            )


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of a row-major flattened tensor, at a byte offset of a rank's file."""

    start: int
    stop: int
    rank: int
    offset: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}:{self.rank}:{self.offset}"


Part = TypeVar("Part", Block, Slice)


def _overlapping(parts: list[Part], start: int, stop: int) -> list[Part]:
    """Parts, of some in order, that have elements of [start, stop)."""
    if start >= stop:
        return []
    first = bisect_right(parts, start, key=lambda part: part.stop)
    last = bisect_right(parts, stop - 1, key=lambda part: part.start)
    return parts[first:last]


def _end_of(parts: Iterable[Part]) -> int:
    """End of what parts in order have from element 0 on, without a gap and no element twice."""
    end = 0
    for part in parts:
        if part.start != end or part.stop <= end:
            return min(end, part.start)
        end = part.stop
    return end


def ranges_to_json(tensors: Mapping[str, Mapping[str, Iterable[Part]]]) -> dict[str, dict[str, list[str]]]:
    """File -> tensor -> parts as text: "start:stop:checksum" or "start:stop:rank:offset"."""
    return {
        path: {name: [str(part) for part in parts] for name, parts in found.items()} for path, found in tensors.items()
    }


def blocks_of(start: int, stop: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Divides elements [start, stop) into blocks, which end at multiples of BLOCK_BYTES from the tensor's beginning.

    Slices of several world sizes then have most of their blocks in common.
    """
    # In elements: no block cuts one.
    most = BLOCK_BYTES // itemsize
    while start < stop:
        end = min(stop, (start // most + 1) * most)
        yield start, end
        start = end


@dataclass
class Checksums:
    """Checksums of one checkpoint.

    Attributes:
        files: Path -> checksum; of a file with tensors its header's, of any other the whole content's.
        tensors: Path -> tensor name -> blocks, disjoint and in order.
    """

    files: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, dict[str, list[Block]]] = field(default_factory=dict)

    def add(self, path: str, name: str, block: Block) -> None:
        """Note a block that was written."""
        self.tensors.setdefault(path, {}).setdefault(name, []).append(block)

    def merge(self, other: Checksums) -> None:
        """Take in another rank's checksums."""
        self.files.update(other.files)
        for path, tensors in other.tensors.items():
            for name, blocks in tensors.items():
                self.tensors.setdefault(path, {}).setdefault(name, []).extend(blocks)

    def sort(self) -> None:
        """Put each tensor's blocks in order."""
        for tensors in self.tensors.values():
            for blocks in tensors.values():
                blocks.sort(key=lambda block: block.start)

    def overlapping(self, path: str, name: str, start: int, stop: int) -> list[Block]:
        """The blocks that have elements of [start, stop)."""
        return _overlapping(self.tensors.get(path, {}).get(name, []), start, stop)

    def check_file(self, path: str, content: bytes, place: object) -> None:
        """Raises ValueError, naming the place of a file, if its content (or its header) is another one."""
        expected = self.files[path]
        if (actual := checksum_of(content)) != expected:
            raise ValueError(f"{place}: is damaged: its checksum is {actual}, the manifest says {expected}")

    def check_cover(self, path: str, sizes: Mapping[str, int], source: str) -> None:
        """Checks that each element of a file's tensors is in one block.

        Args:
            path: The file.
            sizes: Tensor name -> elements.
            source: The file's name in errors.

        Raises:
            ValueError: Naming the tensor.
        """
        found = self.tensors.get(path, {})
        if unknown := sorted(found.keys() - sizes.keys()):
            raise ValueError(f"{source}: there are checksums of tensors that the file does not have: {unknown}")
        for name, numel in sizes.items():
            if (end := _end_of(found.get(name, []))) != numel:
                raise ValueError(f"{source}: the checksums of tensor {name!r} end at element {end} of {numel}")

    def to_json(self) -> dict[str, object]:
        """A form for JSON; a block is "start:stop:checksum"."""
        tensors = {path: dict(sorted(found.items())) for path, found in sorted(self.tensors.items())}
        return {"files": dict(sorted(self.files.items())), "tensors": ranges_to_json(tensors)}

    @classmethod
    def from_json(cls, value: object) -> Checksums:
        """Read the result of `to_json`.

        Raises:
            ValueError: If it is something else, saying what.
        """
        if not isinstance(value, dict) or value.keys() != {"files", "tensors"}:
            raise ValueError("checksums must have files and tensors")
        files, tensors = value["files"], value["tensors"]
        if not isinstance(files, dict) or not all(_is_checksum(entry) for entry in files.values()):
            raise ValueError("checksums.files does not map paths to 16 hexadecimal digits")
        if not isinstance(tensors, dict) or not all(isinstance(entry, dict) for entry in tensors.values()):
            raise ValueError("checksums.tensors does not map paths to tensors")
        return cls(
            dict(files),
            {path: {name: _blocks(f"{path}: {name!r}", e) for name, e in t.items()} for path, t in tensors.items()},
        )


def _blocks(where: str, entries: object) -> list[Block]:
    if not isinstance(entries, list):
        raise ValueError(f"checksums of {where} are no list")
    blocks = []
    for entry in entries:
        found = _BLOCK.fullmatch(entry) if isinstance(entry, str) else None
        if found is None:
            raise ValueError(f"checksums of {where} have the malformed entry {entry!r}")
        blocks.append(Block(int(found[1]), int(found[2]), found[3]))
    return blocks


def _is_checksum(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value) is not None


FOLDER_PREFIX = "pieces-"
_FOLDER = re.compile(FOLDER_PREFIX + "[A-Za-z0-9_-]+")
# As above; nine digits of a rank fit an int32.
_SLICE = re.compile("([0-9]{1,18}):([0-9]{1,18}):([0-9]{1,9}):([0-9]{1,18})")


def folder_of(token: str) -> str:
    """The folder of one save's pieces."""
    return FOLDER_PREFIX + token


def rank_path(folder: str, rank: int) -> str:
    """The file of a rank's slices, relative to the checkpoint."""
    return f"{folder}/rank-{rank:05d}.safetensors"


def small_path(folder: str, path: str) -> str:
    """Path of a small file, relative to the checkpoint."""
    return f"{folder}/files/{path}"


def slice_name(path: str, name: str, start: int, stop: int) -> str:
    """Name that elements [start, stop) of a tensor of a logical file have in a rank's file."""
    return f"{path}:{name}[{start}:{stop}]"


@dataclass(frozen=True)
class PlacedSlice:
    """A slice in a rank's file.

    Attributes:
        path: The logical file.
        tensor: The full tensor.
        place: Elements and offset.
    """

    path: str
    tensor: TensorSpec
    place: Slice

    @property
    def spec(self) -> TensorSpec:
        """The slice as a tensor of the rank's file."""
        start, stop = self.place.start, self.place.stop
        return TensorSpec(slice_name(self.path, self.tensor.name, start, stop), self.tensor.dtype, (stop - start,))

    def __str__(self) -> str:
        return f"elements [{self.place.start}, {self.place.stop}) of tensor {self.tensor.name!r} of {self.path}"


@dataclass
class PieceTable:
    """Places of all bytes of one save.

    Attributes:
        folder: The folder of all files of the save.
        ranks: Rank -> (bytes of its file, checksum of that file's header).
        layouts: Logical file with tensors -> its layout.
        slices: Logical file -> tensor -> its slices, in order, together the full tensor.
        owners: Small file -> the rank that alone has it, or None where every host has a copy.
    """

    folder: str
    ranks: dict[int, tuple[int, str]] = field(default_factory=dict)
    layouts: dict[str, FileLayout] = field(default_factory=dict)
    slices: dict[str, dict[str, list[Slice]]] = field(default_factory=dict)
    owners: dict[str, int | None] = field(default_factory=dict)

    def files(self) -> dict[str, int | None]:
        """Physical path of every file besides the manifest -> the rank that wrote it; None: a copy on every host."""
        small = {small_path(self.folder, path): rank for path, rank in self.owners.items()}
        return {rank_path(self.folder, rank): rank for rank in self.ranks} | small

    def overlapping(self, path: str, name: str, start: int, stop: int) -> list[Slice]:
        """The slices that have elements of [start, stop)."""
        return _overlapping(self.slices.get(path, {}).get(name, []), start, stop)

    def placed(self) -> dict[int, list[PlacedSlice]]:
        """Rank -> the slices in its file, in the order of their bytes."""
        found: dict[int, list[PlacedSlice]] = {rank: [] for rank in self.ranks}
        for path, tensors in self.slices.items():
            for name, parts in tensors.items():
                for part in parts:
                    found.setdefault(part.rank, []).append(PlacedSlice(path, self.layouts[path].specs[name], part))
        for slices in found.values():
            slices.sort(key=lambda each: each.place.offset)
        return found

    def to_json(self) -> dict[str, object]:
        """A form for JSON; a slice is "start:stop:rank:offset"."""
        return {
            "folder": self.folder,
            "ranks": {str(rank): list(entry) for rank, entry in sorted(self.ranks.items())},
            "layouts": {path: _layout_to_json(layout) for path, layout in self.layouts.items()},
            "slices": ranges_to_json(self.slices),
            "owners": dict(sorted(self.owners.items())),
        }

    @classmethod
    def from_json(cls, value: Any) -> PieceTable:
        """Read the result of `to_json`.

        Raises:
            ValueError: If it is something else, or slices leave elements out; says what and where.
        """
        keys = {"folder", "ranks", "layouts", "slices", "owners"}
        good = isinstance(value, dict) and value.keys() == keys
        if not good or not all(isinstance(value[key], dict) for key in keys - {"folder"}):
            raise ValueError(f"pieces must have {sorted(keys)}")
        folder = value["folder"]
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
            raise ValueError(f"pieces.folder is {folder!r}, expected {FOLDER_PREFIX}<token>")
        if not all(owner is None or _is_count(owner) for owner in value["owners"].values()):
            raise ValueError("pieces.owners does not map paths to ranks")
        table = cls(
            folder,
            dict(_rank_entry(rank, entry) for rank, entry in value["ranks"].items()),
            {path: _layout_from_json(path, entry) for path, entry in value["layouts"].items()},
            slices_from_json(value["slices"]),
            dict(value["owners"]),
        )
        _check_complete(table)
        return table


def slices_from_json(value: Mapping[str, Any]) -> dict[str, dict[str, list[Slice]]]:
    """Read the result of `ranges_to_json` of slices.

    Raises:
        ValueError: Naming the tensor with a malformed entry.
    """
    if not all(isinstance(tensors, dict) for tensors in value.values()):
        raise ValueError("pieces.slices does not map files to tensors")
    for path, tensors in value.items():
        if odd := [name for name, entries in tensors.items() if not isinstance(entries, list)]:
            raise ValueError(f"pieces.slices has no list of slices for tensor {odd[0]!r} of {path}")
    return {
        path: {name: [_slice(path, name, entry) for entry in entries] for name, entries in tensors.items()}
        for path, tensors in value.items()
    }


def _slice(path: str, name: str, entry: Any) -> Slice:
    found = _SLICE.fullmatch(entry) if isinstance(entry, str) else None
    if found is None:
        raise ValueError(f"pieces of tensor {name!r} of {path} have the malformed entry {entry!r}")
    return Slice(*(int(number) for number in found.groups()))


def _rank_entry(rank: str, entry: Any) -> tuple[int, tuple[int, str]]:
    good = rank.isdecimal() and isinstance(entry, list) and len(entry) == 2
    if not good or not _is_count(entry[0]) or not _is_checksum(entry[1]):
        raise ValueError(f"pieces.ranks has the malformed entry {rank!r}: {entry!r}")
    return int(rank), (entry[0], entry[1])


def _layout_to_json(layout: FileLayout) -> dict[str, object]:
    tensors = {spec.name: [DTYPE_NAMES[spec.dtype], list(spec.shape)] for spec in layout.specs.values()}
    return {"metadata": dict(layout.metadata), "tensors": tensors}


def _layout_from_json(path: str, entry: Any) -> FileLayout:
    """The layout follows from the tensors, as it did when it was planned."""
    try:
        specs = [TensorSpec(name, DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in entry["tensors"].items()]
        return FileLayout.compute(path, specs, entry["metadata"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"pieces.layouts of {path} is malformed: {error}") from None


def _check_complete(table: PieceTable) -> None:
    for path, layout in table.layouts.items():
        found = table.slices.get(path, {})
        if unknown := sorted(found.keys() - layout.specs.keys()):
            raise ValueError(f"there are pieces of tensors that {path} does not have: {unknown}")
        for name, spec in layout.specs.items():
            # A slice of a rank that has no file is as good as missing.
            end = _end_of(part for part in found.get(name, []) if part.rank in table.ranks)
            if end != spec.numel:
                raise ValueError(f"the pieces of tensor {name!r} of {path} end at element {end} of {spec.numel}")
    if unknown := sorted(table.slices.keys() - table.layouts.keys()):
        raise ValueError(f"there are pieces of files without a layout: {unknown}")
    for rank, slices in table.placed().items():
        file, end = rank_path(table.folder, rank), 0
        if rank not in table.ranks:
            raise ValueError(f"{file}: has {slices[0]}, and no rank {rank} saved")
        # Found here: a reader that compares no checksums would not notice that two slices have the same bytes.
        for each in slices:
            begin = each.place.offset
            if begin < end:
                raise ValueError(f"{file}: {each} begin at byte {begin}, within what ends at byte {end}")
            end = begin + (each.place.stop - each.place.start) * each.tensor.dtype.itemsize
            if end > table.ranks[rank][0]:
                raise ValueError(f"{file}: {each} end at byte {end}, the file at byte {table.ranks[rank][0]}")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
