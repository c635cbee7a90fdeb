"""Reads every byte of a checkpoint of pieces and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash

from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.pieces import PieceTable, rank_path, small_path
from zero_strategy.checkpoint.storage import Storage
from zero_strategy.runtime.transfer import checksum_of

_AT_ONCE_BYTES = 32 << 20


@dataclass(frozen=True)
class _Block:
    """A block of a tensor in a rank's file."""

    offset: int
    nbytes: int
    checksum: str
    tensor: str
    elements: str


def piece_bytes(pieces: PieceTable, manifest: Manifest) -> int:
    """How much `problems_of_pieces` reads where all is there."""
    return sum(size for size, _ in pieces.ranks.values()) + sum(manifest.files[path] for path in pieces.owners)


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


def problems_of_pieces(
    storage: Storage, manifest: Manifest, pieces: PieceTable, report: Callable[[int], object]
) -> Iterator[str]:
    """One sentence for each problem, with the file and, in it, the tensor.

    Args:
        storage: Where the pieces are.
        manifest: The checkpoint's.
        pieces: The manifest's.
        report: Is given the number of bytes that were read since it was called last.
    """
    try:
        check_blocks(manifest, pieces, storage.name)
    except ValueError as error:
        yield str(error)
        return  # where blocks lie is not certain
    blocks = _blocks(manifest, pieces)
    for rank, (size, header) in sorted(pieces.ranks.items()):
        path = rank_path(pieces.folder, rank)
        place = f"{storage.name}/{path}"
        try:
            actual = storage.size(path)
        except ValueError as error:
            yield str(error)
            continue
        if actual is None:
            yield f"{place}: is missing; rank {rank} wrote it on its host"
        elif actual != size:
            yield f"{place}: has {actual} bytes, the manifest says {size}"
        else:
            yield from _problems_of_rank(storage, path, size, header, blocks.get(rank, []), report)
    for name, owner in sorted(pieces.owners.items()):
        path = small_path(pieces.folder, name)
        try:
            size_there = storage.size(path)
        except ValueError as error:  # a pipe, a directory
            yield str(error)
            continue
        if size_there is None:
            yield f"{storage.name}/{path}: is missing" + (f"; rank {owner} wrote it on its host" if owner else "")
            continue
        content = storage.read(path)
        if checksum_of(content) != manifest.checksums.files[name]:
            yield f"{storage.name}/{path}: is damaged: its checksum is not the manifest's"
        report(len(content))


def _blocks(manifest: Manifest, pieces: PieceTable) -> dict[int, list[_Block]]:
    """Rank -> the blocks of its file, in order."""
    found: dict[int, list[_Block]] = {}
    for path, tensors in pieces.slices.items():
        for name, slices in tensors.items():
            size = pieces.layouts[path].specs[name].dtype.itemsize
            for one in slices:
                for block in manifest.checksums.overlapping(path, name, one.start, one.stop):
                    offset = one.offset + (block.start - one.start) * size
                    nbytes, elements = (block.stop - block.start) * size, f"[{block.start}, {block.stop})"
                    found.setdefault(one.rank, []).append(_Block(offset, nbytes, block.checksum, name, elements))
    for blocks in found.values():
        blocks.sort(key=lambda block: block.offset)
    return found


def _problems_of_rank(
    storage: Storage, path: str, size: int, header: str, blocks: list[_Block], report: Callable[[int], object]
) -> Iterator[str]:
    data_start = blocks[0].offset if blocks else size
    (head,) = storage.read_ranges([(path, 0, data_start)])
    report(len(head))
    if checksum_of(bytes(head)) != header:
        yield f"{storage.name}/{path}: is damaged: its header's checksum is not the manifest's"
    while blocks:
        count, nbytes = 1, blocks[0].nbytes
        while count < len(blocks) and nbytes + blocks[count].nbytes <= _AT_ONCE_BYTES:
            nbytes += blocks[count].nbytes
            count += 1
        batch, blocks = blocks[:count], blocks[count:]
        (content,) = storage.read_ranges([(path, batch[0].offset, nbytes)])
        report(len(content))
        for block in batch:
            at = block.offset - batch[0].offset
            if xxhash.xxh3_64_hexdigest(memoryview(content)[at : at + block.nbytes]) != block.checksum:
                yield (
                    f"{storage.name}/{path}: tensor {block.tensor!r} is damaged: the checksum of elements "
                    f"{block.elements} is not the manifest's"
                )
