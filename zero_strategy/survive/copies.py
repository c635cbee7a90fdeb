"""The state after each of the last two steps, in the memory files of each host.

    /dev/shm/zero_strategy.RUN/0        a checkpoint of pieces (see `checkpoint.piece_writer`), of an even turn
    /dev/shm/zero_strategy.RUN/1        of an odd one

A copy is written over the one before the last, so that a death in the middle of it loses nothing. It is a checkpoint
like any other: any number of ranks reads it, and the checksum of each block is compared when it is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_strategy.checkpoint import random_state
from zero_strategy.checkpoint.folders import make_signed
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.memory_writer import MemoryPieceWriter, slices_bytes
from zero_strategy.checkpoint.piece_reader import PieceReader
from zero_strategy.checkpoint.ranges import rank_path, small_path
from zero_strategy.checkpoint.storage import Folder
from zero_strategy.checkpoint.writer import SaveWriter
from zero_strategy.comm.store import SaveBoard
from zero_strategy.engine import ZeroEngine
from zero_strategy.survive.buddies import Buddies
from zero_strategy.survive.membership import World

_TURN, _STATE, _HISTORY = "turn", "state", "history"
"""Entries of a copy's user metadata: its number, what the training function has given, and the run's history."""
_TURNS = 2
_PATIENCE = 5.0
"""Seconds without a sign of life, such as of a host that has died while it copied."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A copy that this host has, or a part of it.

    Attributes:
        turn: Its number.
        save: Names the save that has written it.
        manifest: As JSON.
        paths: Files of it that are here.
        needed: All of its files.
    """

    turn: int
    save: str
    manifest: bytes
    paths: frozenset[str]
    needed: frozenset[str]


@dataclass(frozen=True)
class Copy:
    """A copy that is whole, its files being on one host or several.

    Attributes:
        turn: Its number.
        state: What `take` was given.
        reader: Reads it.
        history: What `take` was given.
    """

    turn: int
    state: Mapping[str, Any]
    reader: PieceReader
    history: str = ""

    @property
    def step(self) -> int:
        """Steps taken with it."""
        return int(self.reader.manifest.counters.get("global_steps") or 0)


class MemoryCopies:
    """Copies of one run on this host.

    Args:
        folder: Of the run, in a memory file system; it is made if need be.

    Attributes:
        folder: As above.
        turn: Number of the last copy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.turn = folder, 0
        self._files: dict[int, Path] = {}
        self._buddies: Buddies | None = None
        self._buddies_for = ""
        make_signed(folder, exist_ok=True)

    def take(
        self,
        engine: ZeroEngine,
        world: World,
        state: Mapping[str, Any],
        extra_files: Mapping[str, bytes] | None = None,
        history: str = "",
    ) -> None:
        """Write the next copy. A collective.

        Args:
            engine: At the end of a step.
            world: Its ranks.
            state: What the training function needs to go on, JSON-able.
            extra_files: Small files beside it, given on rank 0.
            history: Of the run, as text.

        Raises:
            OSError: On all ranks, if a host has no memory left for it; the one before is there.
        """
        turn = self.turn + 1
        number = turn % _TURNS
        directory = self.folder / str(number)
        buddies, watchdog = self._buddies_of(world), engine.mesh.watchdog
        # Before the one before that goes: the last one has to be with the buddies.
        buddies.wait(lambda: None if watchdog is None else watchdog.check())
        buddies.make_room(directory)

        def writer(board: SaveBoard, token: str) -> SaveWriter:
            made = MemoryPieceWriter(
                directory, rank=board.rank, world_size=board.world_size, token=token, board=board,
                leader=world.local_rank == 0, spare=self._files.get(number),
            )  # fmt: skip
            self._files[number] = made.file
            return made

        engine.saver.save(
            f"copy {number} in memory", user={_TURN: turn, _STATE: dict(state), _HISTORY: history},
            extra_files=extra_files or {}, own_files={},
            counters=engine.steps.counters(), optimizers=True, update_latest=False, asynchronous=False,
            weights_dtype=None, writer=writer, patience=_PATIENCE,
        )  # fmt: skip
        self.turn = turn
        file = self._files[number]
        small = file.parent / "files" / random_state.path_of(world.rank)
        buddies.start(directory, file, [small] if small.exists() else [])
        engine.saver.copied_bytes = sum(slices_bytes(path) for path in self._files.values()) + buddies.kept_bytes()

    def _buddies_of(self, world: World) -> Buddies:
        if self._buddies is None or self._buddies_for != world.key:
            self._buddies, self._buddies_for = Buddies(world), world.key
        return self._buddies

    def leave(self) -> None:
        """The formation is no more; what still travels in it is of no use, and is not waited for."""
        self._buddies = None

    def restore(self, engine: ZeroEngine, told: Callable[[Copy], None] | None = None) -> dict[str, Any] | None:
        """Load the newest copy that is whole, on any hosts; None: there is none. A collective.

        Args:
            engine: The training.
            told: Called with that copy once it is loaded.

        Returns:
            The state that `take` was given.
        """
        for copy in self.find(engine.mesh.world_group.control.all_gather_objects):
            try:
                engine.load(copy.reader)
            except (OSError, ValueError, RuntimeError) as error:
                if engine.desync is not None:
                    raise
                _logger.warning("the copy of turn %d in memory is damaged, and is not used: %s", copy.turn, error)
                continue
            self.turn = copy.turn
            if told is not None:
                told(copy)
            return dict(copy.state)
        return None

    def find(self, gather: Callable[[Any], list[Any]]) -> list[Copy]:
        """Copies that are whole, the newest first. A collective.

        Who loads one sets `turn` to its number, so that the next one is not written over it.

        Args:
            gather: Gives the objects of all ranks.
        """
        everyone: list[list[Found]] = gather(self._found())
        copies = []
        for turn, save in _whole(everyone):
            one = next(each for there in everyone for each in there if each.save == save)
            directory = self.folder / str(turn % _TURNS)
            manifest = Manifest.from_json(one.manifest, str(directory))
            reader = PieceReader(Folder(directory), manifest, directory)
            copies.append(Copy(turn, manifest.user[_STATE], reader, manifest.user[_HISTORY]))
        # A number that no copy of before has.
        self.turn = max((each.turn for there in everyone for each in there), default=0)
        return copies

    def remove(self) -> None:
        """The run is over: its memory goes."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _found(self) -> list[Found]:
        found = []
        for number in range(_TURNS):
            directory = self.folder / str(number)
            try:
                manifest = Manifest.load(directory)
            except (OSError, ValueError):  # none, or torn
                continue
            pieces = manifest.pieces
            assert pieces is not None
            needed = {rank_path(pieces.folder, rank): size for rank, (size, _) in pieces.ranks.items()}
            needed |= {small_path(pieces.folder, path): manifest.files[path] for path in pieces.owners}
            storage = Folder(directory)
            here = frozenset(path for path, size in needed.items() if storage.size(path) == size)
            turn = manifest.user[_TURN]
            found.append(Found(turn, manifest.save, manifest.to_json(), here, frozenset(needed)))
        return found


def _whole(everyone: list[list[Found]]) -> list[tuple[int, str]]:
    """Copies of which each file is on some host: (turn, save), the newest first."""
    here: dict[tuple[int, str], set[str]] = {}
    needed: dict[tuple[int, str], frozenset[str]] = {}
    for there in everyone:
        for each in there:
            here.setdefault((each.turn, each.save), set()).update(each.paths)
            needed[each.turn, each.save] = each.needed
    return sorted((copy for copy, paths in here.items() if paths >= needed[copy]), reverse=True)
