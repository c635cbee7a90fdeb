"""Reads every byte of a checkpoint and says what is wrong with it, all of it at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from zero_strategy.checkpoint.checksums import Block
from zero_strategy.checkpoint.header import read_layout
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.locate import checkpoint_directory
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.remote import RemoteFolder, is_remote, remote_checkpoint
from zero_strategy.checkpoint.storage import Folder, Storage
from zero_strategy.checkpoint.verify_pieces import piece_bytes, problems_of_pieces
from zero_strategy.runtime.regular_files import open_regular, read_regular, size_of
from zero_strategy.runtime.transfer import checksum_of

_CHUNK = 4 << 20
Progress = Callable[[int], object]
"""Is given the number of bytes that were read since it was called last."""


@dataclass(frozen=True)
class Verdict:
    """What was found.

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
