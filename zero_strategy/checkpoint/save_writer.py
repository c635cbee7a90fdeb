"""What every writer of checkpoints is and checks, in place or in pieces."""

from __future__ import annotations

import errno
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_strategy.checkpoint.layout import FileLayout
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, RECEIPTS_NAME, Manifest
from zero_strategy.checkpoint.names import folders_above, is_inner_path
from zero_strategy.checkpoint.pieces import FOLDER_PREFIX
from zero_strategy.checkpoint.plan import CheckpointPlan, FileKind


@dataclass(frozen=True, eq=False)
class Piece:
    """A range of a tensor.

    Attributes:
        name: the tensor.
        start: index of the piece's first element in the row-major flattened tensor.
        data: the elements; 1-D, contiguous, of the tensor's dtype, on any device.
    """

    name: str
    start: int
    data: torch.Tensor

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype."""
        return self.data.dtype

    def loaded(self) -> Piece:
        """Itself: its elements are in memory."""
        return self


@dataclass(frozen=True, eq=False)
class LatePiece:
    """A range of a tensor that is read when its turn to be written comes.

    Attributes:
        name: the tensor.
        start: index of the piece's first element in the row-major flattened tensor.
        numel: its elements.
        dtype: their dtype.
        load: gives them, 1-D and contiguous.
    """

    name: str
    start: int
    numel: int
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]

    def loaded(self) -> Piece:
        """With its elements in memory."""
        return Piece(self.name, self.start, self.load())


def in_file_order(
    plan: CheckpointPlan, pieces: Iterable[tuple[FileKind, Piece | LatePiece]]
) -> list[tuple[FileKind, Piece | LatePiece]]:
    """Pieces in the order of their bytes in the files of `plan`."""
    order = {layout.path: number for number, layout in enumerate(plan.layouts)}

    def place(item: tuple[FileKind, Piece | LatePiece]) -> tuple[int, int]:
        kind, piece = item
        layout = plan.layout_of(kind, piece.name)
        return order[layout.path], layout.offsets[piece.name] + piece.start * piece.dtype.itemsize

    return sorted(pieces, key=place)


class SaveWriter(ABC):
    """One rank's part in saving one checkpoint; `saving.job.SaveJob` says in which order the ranks call it.

    Attributes:
        leads: Whether this rank, not being rank 0, is the first one of a host with a directory of its own.
    """

    leads = False

    @abstractmethod
    def prepare(self, plan: CheckpointPlan) -> None:
        """Before the first byte; every rank calls it, with the same plan."""

    @abstractmethod
    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes small files of this rank's own, such as its random state, under paths that no other rank uses."""

    @abstractmethod
    def write_all(
        self,
        pieces: Iterable[tuple[FileKind, Piece | LatePiece]],
        *,
        threads: int = 2,
        bytes_per_second: float | None = None,
        wrote: Callable[[int], object] | None = None,
    ) -> None:
        """Writes this rank's pieces and flushes them."""

    @abstractmethod
    def commit(
        self,
        manifest: Manifest,
        extra_files: Mapping[str, bytes] | None = None,
        *,
        update_latest: bool = True,
    ) -> None:
        """Makes the checkpoint durable and visible; rank 0 calls it, when all ranks have written."""

    def follow(self) -> None:
        """What the other ranks do while rank 0 is in `commit`."""
        return

    @abstractmethod
    def is_committed(self) -> bool:
        """Whether the target is what this writer's group wrote."""

    def clean_up(self) -> None:  # noqa: B027 (most have nothing to do)
        """Removes what a commit has replaced, if it has left that for later."""

    @abstractmethod
    def abandon(self) -> None:
        """Removes what was written; the target is not touched. After `commit` it does nothing."""


def check_piece(layout: FileLayout, piece: Piece | LatePiece) -> None:
    """Raises ValueError or TypeError, naming the tensor, if a piece does not fit into its file."""
    spec = layout.specs[piece.name]
    if piece.dtype != spec.dtype:
        raise TypeError(f"piece of tensor {piece.name!r} has dtype {piece.dtype}, the file has {spec.dtype}")
    if isinstance(piece, Piece):
        _check_data(piece)
    layout.span(piece.name, piece.start, piece.start + piece.numel)


def _check_data(piece: Piece) -> None:
    data = piece.data
    if data.dim() != 1 or not data.is_contiguous() or data.is_conj() or data.is_neg():
        raise TypeError(f"piece of tensor {piece.name!r} must be 1-D and contiguous, got {tuple(data.shape)}")
    if data.device.type == "meta":
        raise TypeError(f"piece of tensor {piece.name!r} is on the meta device and has no data")


def check_replaceable(target: Path) -> None:
    """Raises ValueError if the target exists and is not a checkpoint."""
    # Replacing removes the old directory with all that is in it, so it must be one of ours. A file is replaced as any
    # saving call does it: a run that goes on from another strategy's checkpoints meets its `last.ckpt`.
    if not target.is_dir() or (target / MANIFEST_NAME).is_file():
        return
    if any(target.iterdir()):
        raise ValueError(f"{target} exists and is not a checkpoint; it will not be overwritten")


def unlisted(target: Path) -> list[Path]:
    """What lies in a checkpoint's directory and is not of it, which replacing the checkpoint would remove as well."""
    try:
        listed = {path.partition("/")[0] for path in Manifest.read(target).files}
    except (OSError, ValueError):
        return []
    return sorted(path for path in target.iterdir() if path.name not in listed | {MANIFEST_NAME})


def check_free_space(parent: Path, needed: int) -> None:
    """Raises OSError (ENOSPC) if the file system has too little room."""
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the checkpoint takes {needed} bytes, {free} are free", str(parent))


def check_extra_files(plan: CheckpointPlan, extra_files: Mapping[str, bytes]) -> None:
    """Raises ValueError if the path of a small file is not free, or leads out of the checkpoint."""
    taken = plan.sizes().keys() | {MANIFEST_NAME}
    for path in extra_files:
        if not is_inner_path(path) or path.startswith((RECEIPTS_NAME, FOLDER_PREFIX)) or path in taken:
            raise ValueError(f"extra file {path!r}: not a free relative path inside the checkpoint")
    files = taken | extra_files.keys()
    if clash := sorted({folder for path in files for folder in folders_above(path)} & files):
        raise ValueError(f"extra file: {clash[0]!r} would be both a file and the folder of another one")


def check_free_of(taken: Mapping[str, object], files: Mapping[str, object]) -> None:
    """Raises ValueError if a small file has two writers."""
    if twice := sorted(taken.keys() & files.keys()):
        raise ValueError(f"extra file {twice[0]!r} is written by two ranks, or by a rank and at the commit")


def check_manifest(plan: CheckpointPlan, manifest: Manifest) -> None:
    """Raises ValueError if the manifest was made for another plan."""
    owners = {optimizer for optimizer, _ in plan.states}
    same = dict(manifest.weights) == plan.weight_records() and dict(manifest.aliases) == dict(plan.aliases)
    same = same and owners <= manifest.optimizers.keys()
    if not same or any(dict(e.states) != plan.state_paths(n) for n, e in manifest.optimizers.items()):
        raise ValueError("the manifest does not describe the plan; make it with plan.manifest(...)")
