"""Makes the ordinary checkpoint of the pieces that ranks wrote, byte for byte what they would have written in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from zero_strategy.checkpoint.folders import checkpoint_directory
from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import FileKind, Manifest
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.ranges import PieceTable, batches, rank_path
from zero_strategy.checkpoint.reader import Wanted
from zero_strategy.checkpoint.storage import Folder, RemoteFolder, Storage, is_remote, remote_checkpoint
from zero_strategy.checkpoint.writer import CheckpointWriter, Piece

_TOGETHER_BYTES = 32 << 20
"""Read at a time; a block has at most half of it."""
Progress = Callable[[int], object]
"""Is given the number of bytes that were moved since it was called last."""


@dataclass(frozen=True)
class Merged:
    """Result of the merge.

    Attributes:
        directory: The ordinary checkpoint.
        ranks: Of how many ranks' pieces.
        files: How many files it has.
        bytes: Their size.
    """

    directory: Path
    ranks: int
    files: int
    bytes: int


class Folders(Storage):
    """Directories that together hold one checkpoint, such as those of several hosts."""

    def __init__(self, folders: Sequence[Storage]) -> None:
        self._folders = folders
        self.name = " + ".join(folder.name for folder in folders)

    def size(self, path: str) -> int | None:
        """See `Storage.size`."""
        return next((size for folder in self._folders if (size := folder.size(path)) is not None), None)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        return self._holder(path).read(path)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytearray]:
        """See `Storage.read_ranges`."""
        return [self._holder(path).read_ranges([(path, offset, nbytes)])[0] for path, offset, nbytes in ranges]

    def _holder(self, path: str) -> Storage:
        return next((folder for folder in self._folders if folder.size(path) is not None), self._folders[0])


def merge(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    progress: Callable[[int], Progress] | None = None,
) -> Merged:
    """Merge; memory is bounded by the size of a block, and the output appears whole or not at all.

    Args:
        sources: The directory (or URL) that has all pieces, or the directories of all hosts, in any order.
        output: The new checkpoint, a local path that does not exist.
        progress: Is given the number of bytes that will be written, and returns what is told of each part.

    Raises:
        ValueError: If the output exists, a source is no checkpoint of pieces, they are of different saves, pieces are
            missing or damaged; names what and where.
        OSError: If the file system fails.
    """
    target = Path(os.path.abspath(output))
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already; merging does not overwrite")
    storage, manifest, pieces = _opened(sources)
    reader = PieceReader(storage, manifest, storage.name)
    if lacking := reader.lacking():
        names = ", ".join(rank_path(pieces.folder, rank) for rank in lacking)
        raise ValueError(
            f"{storage.name}: the pieces of rank(s) {lacking} are missing ({names}); give the directories of all hosts"
        )
    plan = _plan(manifest, pieces)
    report = progress(plan.total_bytes) if progress else lambda count: None
    own = pieces.owners.keys() - plan.generated.keys()
    small = {path: reader.extra(path) for path in manifest.files if path in own}
    writer = CheckpointWriter(target, rank=0, world_size=1, token=manifest.save)
    try:
        writer.prepare(plan)
        writer.write_all(_pieces(plan, pieces, manifest, reader, report))
        writer.commit(replace(manifest, pieces=None), small, update_latest=False)
    except BaseException:
        writer.abandon()
        raise
    made = Manifest.read(target)
    return Merged(target, len(pieces.ranks), len(made.files), sum(made.files.values()))


def _opened(sources: Sequence[str | os.PathLike[str]]) -> tuple[Storage, Manifest, PieceTable]:
    """All sources as one, with their manifest."""
    if not sources:
        raise ValueError("give at least one directory")
    storages: list[Storage] = []
    first: Manifest | None = None
    for source in sources:
        manifest, storage = _open(source)
        if manifest.pieces is None:
            raise ValueError(f"{storage.name}: is an ordinary checkpoint already; there is nothing to merge")
        if first is not None and manifest.save != first.save:
            raise ValueError(
                f"{storage.name} is of another save ({manifest.save}) than {storages[0].name} ({first.save})"
            )
        first = first or manifest
        storages.append(storage)
    assert first is not None and first.pieces is not None
    return (storages[0] if len(storages) == 1 else Folders(storages)), first, first.pieces


def _open(source: str | os.PathLike[str]) -> tuple[Manifest, Storage]:
    if is_remote(source):
        folder, manifest = remote_checkpoint(RemoteFolder(os.fspath(source)), fall_back=False)
        return manifest, folder
    directory = checkpoint_directory(source, fall_back=False)
    return Manifest.read(directory), Folder(directory)


def _plan(manifest: Manifest, pieces: PieceTable) -> CheckpointPlan:
    """The plan that the ranks had."""
    weights = dict.fromkeys(record.file for record in manifest.weights.values())
    states = {path for record in manifest.optimizers.values() for path in record.states.values()}
    files = [path for path in pieces.layouts if path in weights or path not in states]
    return CheckpointPlan(
        tuple(pieces.layouts[path] for path in files),
        {
            (optimizer, kind): pieces.layouts[path]
            for optimizer, record in manifest.optimizers.items()
            for kind, path in record.states.items()
        },
        dict(manifest.aliases),
    )


def _pieces(
    plan: CheckpointPlan, pieces: PieceTable, manifest: Manifest, reader: PieceReader, report: Progress
) -> Iterator[tuple[FileKind, Piece]]:
    """All tensors in the order of the files, in the blocks in which the ranks wrote them."""
    kinds: dict[str, FileKind] = {layout.path: "model" for layout in plan.weights}
    kinds |= {layout.path: kind for kind, layout in plan.states.items()}
    for layout in plan.layouts:
        kind = kinds[layout.path]
        report(len(layout.header))
        blocks = manifest.checksums.tensors.get(layout.path, {})
        ranges = [Wanted(name, b.start, b.stop, kind) for name in layout.specs for b in blocks.get(name, [])]
        for batch in batches(ranges, partial(_nbytes, layout), _TOGETHER_BYTES):
            found: dict[int, torch.Tensor] = {}
            reader.read_many(
                [replace(item, then=partial(found.__setitem__, number)) for number, item in enumerate(batch)]
            )
            for number, item in enumerate(batch):
                yield kind, Piece(item.name, item.start, found[number])
                report(_nbytes(layout, item))


def _nbytes(layout: FileLayout, item: Wanted) -> int:
    return layout.span(item.name, item.start, item.stop)[1]
