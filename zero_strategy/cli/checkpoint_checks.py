"""A check of a whole checkpoint: all bytes against their checksums; it reports all that is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from zero_strategy.checkpoint.folders import checkpoint_directory
from zero_strategy.checkpoint.layout import FileLayout, parse_layout, read_layout
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest, listed
from zero_strategy.checkpoint.piece_reader import check_blocks
from zero_strategy.checkpoint.ranges import Block, PieceTable, PlacedSlice, batches, rank_path, small_path
from zero_strategy.checkpoint.storage import Folder, RemoteFolder, Storage, is_remote, remote_checkpoint
from zero_strategy.runtime.host_bytes import checksum_of
from zero_strategy.runtime.regular_files import open_regular, read_regular, size_of

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
    """Number of bytes that `problems_of_pieces` reads if all is there."""
    return sum(size for size, _ in pieces.ranks.values()) + sum(manifest.files[path] for path in pieces.owners)


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
    blocks, placed = _blocks(manifest, pieces), pieces.placed()
    for rank, (size, header) in sorted(pieces.ranks.items()):
        path = rank_path(pieces.folder, rank)
        lost = listed(list(dict.fromkeys(each.tensor.name for each in placed[rank])))
        place = f"{storage.name}/{path}"
        try:
            actual = storage.size(path)
        except ValueError as error:
            yield str(error)
            continue
        if actual is None:
            yield f"{place}: is missing; rank {rank} wrote it on its host{lost}"
        elif actual != size:
            yield f"{place}: has {actual} bytes, the manifest says {size}{lost}"
        else:
            yield from _problems_of_header(storage, path, size, header, placed[rank], report)
            yield from _problems_of_blocks(storage, path, blocks.get(rank, []), report)
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


def _problems_of_header(
    storage: Storage, path: str, size: int, header: str, slices: list[PlacedSlice], report: Callable[[int], object]
) -> Iterator[str]:
    """Compares the header of a rank's file with its checksum, and its tensors with the manifest's slices."""
    place, start = f"{storage.name}/{path}", slices[0].place.offset if slices else size
    (head,) = storage.read_ranges([(path, 0, start)])
    report(len(head))
    if checksum_of(bytes(head)) != header:
        yield f"{place}: is damaged: its header's checksum is not the manifest's"
    try:
        found = parse_layout(bytes(head), size, path, place)
    except ValueError as error:
        yield str(error)
        return
    for each in slices:
        spec, there = each.spec, found.specs.get(each.spec.name)
        if there is None:
            yield f"{place}: lacks {each}, which the manifest has there"
        elif (there.dtype, there.shape) != (spec.dtype, spec.shape):
            yield f"{place}: has {each} as {there.dtype} {there.shape}, the manifest as {spec.dtype} {spec.shape}"
        elif found.offsets[spec.name] != each.place.offset:
            where = found.offsets[spec.name]
            yield f"{place}: has {each} at byte {where}, the manifest at byte {each.place.offset}"
    if extra := sorted(found.specs.keys() - {each.spec.name for each in slices}):
        yield f"{place}: has tensors of which the manifest knows nothing, such as {extra[0]!r}"


def _problems_of_blocks(
    storage: Storage, path: str, blocks: list[_Block], report: Callable[[int], object]
) -> Iterator[str]:
    for batch in batches(blocks, lambda block: block.nbytes, _AT_ONCE_BYTES):
        (content,) = storage.read_ranges([(path, batch[0].offset, sum(block.nbytes for block in batch))])
        report(len(content))
        for block in batch:
            at = block.offset - batch[0].offset
            if xxhash.xxh3_64_hexdigest(memoryview(content)[at : at + block.nbytes]) != block.checksum:
                yield (
                    f"{storage.name}/{path}: tensor {block.tensor!r} is damaged: the checksum of elements "
                    f"{block.elements} is not the manifest's"
                )


_CHUNK = 4 << 20
Progress = Callable[[int], object]
"""Is given the number of bytes that were read since it was called last."""


@dataclass(frozen=True)
class Verdict:
    """Result of the verification.

    Attributes:
        directory: The checkpoint; a text if it is a URL.
        problems: One sentence each, with the file and, in it, the tensor; empty if all is well.
        files: How many files the manifest lists.
        bytes: Their size.
    """

    directory: Path | str
    problems: tuple[str, ...]
    files: int
    bytes: int


def verify(path: str | os.PathLike[str], progress: Callable[[int], Progress] | None = None) -> Verdict:
    """Compare all bytes of a checkpoint with its checksums.

    Args:
        path: A checkpoint, or its parent with a `latest` file; a directory or a URL.
        progress: Is given the number of bytes that will be read, and returns what is told of each part.

    Raises:
        ValueError: If there is no checkpoint, or its manifest cannot be trusted.
    """
    if is_remote(path):
        folder, manifest = remote_checkpoint(RemoteFolder(os.fspath(path)), fall_back=False)
        return _verdict_of_pieces(folder.url, folder, manifest, progress)
    directory = checkpoint_directory(path, fall_back=False)
    manifest = Manifest.read(directory)
    if manifest.pieces is not None:
        return _verdict_of_pieces(directory, Folder(directory), manifest, progress)
    total = sum(manifest.files.values())
    problems = tuple(_problems(directory, manifest, progress(total) if progress else lambda count: None))
    return Verdict(directory, problems, len(manifest.files), total)


def _verdict_of_pieces(
    directory: Path | str, storage: Storage, manifest: Manifest, progress: Callable[[int], Progress] | None
) -> Verdict:
    pieces = manifest.pieces
    if pieces is None:
        raise ValueError(f"{directory}: an ordinary checkpoint can be verified in a local directory only")
    total = piece_bytes(pieces, manifest)
    report = progress(total) if progress else lambda count: None
    problems = list(problems_of_pieces(storage, manifest, pieces, report))
    if isinstance(directory, Path):
        found = {str(place.relative_to(directory)) for place in directory.rglob("*") if not place.is_dir()}
        unknown = sorted(found - pieces.files().keys() - {MANIFEST_NAME})
        problems += [f"{directory / extra}: the manifest does not list it" for extra in unknown]
    return Verdict(directory, tuple(problems), len(pieces.files()), total)


def _problems(directory: Path, manifest: Manifest, report: Progress) -> Iterator[str]:
    found = {str(place.relative_to(directory)) for place in directory.rglob("*") if not place.is_dir()}
    for extra in sorted(found - manifest.files.keys() - {MANIFEST_NAME}):
        yield f"{directory / extra}: the manifest does not list it"
    with_tensors = {record.file for record in manifest.weights.values()}
    with_tensors |= {place for record in manifest.optimizers.values() for place in record.states.values()}
    for name, size in manifest.files.items():
        file = directory / name
        try:
            actual = size_of(file)
        except ValueError as error:
            yield str(error)
            continue
        if actual is None:
            yield f"{file}: is missing{manifest.lost(directory, name)}"
        elif actual != size:
            yield f"{file}: has {actual} bytes, the manifest says {size}{manifest.lost(directory, name)}"
        elif name in with_tensors:
            yield from _problems_of_tensors(file, name, manifest, report)
        else:
            if checksum_of(read_regular(file)) != manifest.checksums.files[name]:
                yield f"{file}: is damaged: its checksum is not the manifest's"
            report(size)


def _problems_of_tensors(file: Path, name: str, manifest: Manifest, report: Progress) -> Iterator[str]:
    fd = open_regular(file)
    try:
        layout = read_layout(fd, name, str(file))
        if checksum_of(layout.header) != manifest.checksums.files[name]:
            yield f"{file}: is damaged: its header's checksum is not the manifest's"
            return
        sizes = {spec.name: spec.numel for spec in layout.specs.values()}
        manifest.checksums.check_cover(name, sizes, str(file))
        for weight, record in manifest.weights.items():
            spec = layout.specs.get(weight)
            if record.file == name and (spec is None or (spec.dtype, spec.shape) != (record.dtype, record.shape)):
                yield f"{file}: has not the tensor {weight!r} of dtype and shape that the manifest says"
        report(len(layout.header))
        for tensor in layout.specs:
            for block in manifest.checksums.tensors.get(name, {}).get(tensor, []):
                if _checksum(fd, layout, tensor, block, report) != block.checksum:
                    place = f"elements [{block.start}, {block.stop})"
                    yield f"{file}: tensor {tensor!r} is damaged: the checksum of {place} is not the manifest's"
    except ValueError as error:
        yield str(error)
    except OSError as error:
        yield f"{file}: cannot be read: {error.strerror or error}"
    finally:
        os.close(fd)


def _checksum(fd: int, layout: FileLayout, tensor: str, block: Block, report: Progress) -> str:
    checksum = xxhash.xxh3_64()
    offset, left = layout.span(tensor, block.start, block.stop)
    while left:
        data = os.pread(fd, min(left, _CHUNK), offset)
        if not data:
            break  # cut off meanwhile: the checksum tells
        checksum.update(data)
        report(len(data))
        offset, left = offset + len(data), left - len(data)
    return str(checksum.hexdigest())
