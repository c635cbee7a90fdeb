"""States that every rank has of its own, such as a data loader's position: a small file of each in the checkpoint."""

from __future__ import annotations

import io
import warnings
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from zero_strategy.integrations.checkpoint_dict import unpack

if TYPE_CHECKING:
    from zero_strategy.checkpoint import StateReader
    from zero_strategy.comm.mesh import Mesh

_DIRECTORY = "ranks"


def path_of(rank: int) -> str:
    """The file of a rank, relative to the checkpoint; written by `torch.save`."""
    return f"{_DIRECTORY}/rank-{rank:05d}.pt"


def own_file(state: Any, mesh: Mesh) -> dict[str, bytes]:
    """This rank's state as a file, {path: content}; nothing for an empty state, or where there is one rank only."""
    if not state or mesh.world_size == 1 or mesh.tensor.rank:  # ranks that divide layers have the same data
        return {}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {path_of(mesh.rank): buffer.getvalue()}


def load_own(reader: StateReader, mesh: Mesh, weights_only: bool | None, what: str) -> Any:
    """Argument of this rank for `own_file`; None where rank 0's, in the framework's own file, is the one to take.

    Saved by another number of ranks, states cannot be handed out again; that rank 0's goes to all is told, unless all
    saved the same.

    Args:
        reader: The checkpoint.
        mesh: Who loads it.
        weights_only: See `unpack`.
        what: What is in the states, for the warning.
    """
    files = reader.manifest.files if reader.has_manifest else {}
    saved = [path for path in files if str(PurePosixPath(path).parent) == _DIRECTORY]
    if not saved:
        return None
    mine = path_of(mesh.rank)
    if len(saved) == mesh.world_size and mine in files:
        return unpack(reader.extra(mine), f"{reader.directory}/{mine}", weights_only)
    checksums = reader.manifest.checksums
    if mesh.rank == 0 and (checksums is None or len({checksums.files[path] for path in saved}) > 1):
        warnings.warn(
            f"{reader.directory} was saved by {len(saved)} ranks, each with a state of its own ({what}), and is loaded "
            f"by {mesh.world_size}: every rank gets the one of rank 0. In the rest of this epoch data may be seen "
            "twice or not at all; go on from the end of an epoch, or with as many ranks, to avoid that.",
            stacklevel=2,
        )
    return None
