"""Whether all ranks see the same directory, and if not, which of them share a host: found out with files of one name.

Once per engine and folder, before the first byte of a save. The name is new every time: a network file system that
remembers what was not there a moment ago has not been asked for it.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from zero_strategy.checkpoint.leftovers import leave_mark, mark_name
from zero_strategy.checkpoint.replace import remove
from zero_strategy.distributed.save_board import SaveBoard


@dataclass(frozen=True)
class Sharing:
    """Who sees this rank's directory.

    Attributes:
        shared: All ranks see one directory.
        leader: The lowest rank that sees this rank's directory.
        leaders: That of every rank, on rank 0; empty elsewhere.
    """

    shared: bool
    leader: int
    leaders: tuple[int, ...] = ()


def find_out(board: SaveBoard, parent: Path, token: str) -> Sharing:
    """Asks all ranks; each calls it with its own view of the folder, which is made if need be.

    Args:
        board: This rank's.
        parent: The folder that checkpoints go into.
        token: New for every call, equal on all ranks.

    Raises:
        OSError: If the folder cannot be written to.
        FailedElsewhereError: If that is so on another rank.
    """
    if board.world_size == 1:
        return Sharing(True, 0, (0,))
    try:
        return _ask(board, parent, token)
    finally:
        remove(parent / mark_name(token, board.rank))


def warn_unshared(sharing: Sharing, parent: Path) -> None:
    """Tells, on rank 0, what was found and what to do."""
    hosts: dict[int, list[int]] = {}
    for rank, leader in enumerate(sharing.leaders):
        hosts.setdefault(leader, []).append(rank)
    groups = "; ".join(f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in hosts.values())
    warnings.warn(
        f"{parent} is not one directory for all ranks, but one for each of: {groups}. Checkpoints are saved in pieces, "
        "each rank's on its own host. The same number of ranks on the same hosts resumes from them as they are; for "
        "anything else bring the hosts' directories together and run `zero-strategy checkpoint merge DIR [DIR...] "
        "--output OUT`. checkpoint.layout='pieces' says that this is as intended, 'shared' that it is not so.",
        UserWarning,
        stacklevel=2,
    )


def _ask(board: SaveBoard, parent: Path, token: str) -> Sharing:
    parent.mkdir(parents=True, exist_ok=True)
    if board.rank == 0:
        leave_mark(parent / mark_name(token, 0))
        board.post("placed")
        sees = True
    else:
        board.wait("placed", 0)
        sees = _is_there(parent, token, 0)
    board.send("looked", json.dumps(sees).encode())
    if board.rank == 0:
        others = [json.loads(board.receive("looked", rank)) for rank in range(1, board.world_size)]
        board.send("judged", json.dumps(all(others)).encode())
        shared = all(others)
    else:
        shared = json.loads(board.receive("judged", 0))
    if shared:
        return Sharing(True, 0, (0,) * board.world_size if board.rank == 0 else ())
    return _leaders(board, parent, token)


def _leaders(board: SaveBoard, parent: Path, token: str) -> Sharing:
    if board.rank != 0:
        leave_mark(parent / mark_name(token, board.rank))
    board.post("named")
    board.wait("named")
    leader = next(rank for rank in range(board.world_size) if _is_there(parent, token, rank))
    board.send("led", json.dumps(leader).encode())
    board.post("compared")
    board.wait("compared")  # before anybody takes his file away
    if board.rank != 0:
        return Sharing(False, leader)
    leaders = [json.loads(board.receive("led", rank)) for rank in range(1, board.world_size)]
    return Sharing(leaders == [0] * len(leaders), 0, (0, *leaders))


def _is_there(parent: Path, token: str, rank: int) -> bool:
    return os.path.lexists(parent / mark_name(token, rank))
