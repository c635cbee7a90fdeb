"""One save of one checkpoint: where it goes, which writer it needs, and the job to its last byte.

The ranks that share a file system are found out with files of one name.

Once per engine and folder, before the first byte of a save. The name is new every time: a network file system that
remembers what was not there a moment ago has not been asked for it.

A job writes in place, in pieces per host, or to an object store.

rank 0     prepare -- "prepared"     write -- "written"     wait for all -- commit -- "committed"
others     wait ------------------>  write -- "written"     wait ------------------>
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zero_strategy.checkpoint.disk import remove
from zero_strategy.checkpoint.folders import Found, is_export, leave_mark, mark_name, which_to_remove
from zero_strategy.checkpoint.manifest import LATEST_NAME, MANIFEST_NAME, Manifest
from zero_strategy.checkpoint.piece_writer import HostPieceWriter
from zero_strategy.checkpoint.plan import CheckpointPlan
from zero_strategy.checkpoint.storage import RemoteFolder, RemotePieceWriter, is_remote
from zero_strategy.checkpoint.writer import CheckpointWriter, Entry, SaveWriter
from zero_strategy.comm.store import FailedElsewhereError, RankLostError, SaveBoard
from zero_strategy.runtime.terminal import progress


@dataclass(frozen=True)
class Sharing:
    """Ranks that see this rank's directory.

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
        # Also after an error: a mark that stays would be a rank's that nobody asks.
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
        # Before this rank looks: a file that comes later would seem to be on another host's disk.
        board.wait("placed", 0)
        sees = _is_there(parent, token, 0)
    # Counted, so that rank 0 asks no rank by itself.
    if not sees:
        board.post("apart")
    board.post("looked")
    if board.rank == 0:
        board.wait("looked")
        shared = board.count("apart") == 0
        board.send("judged", json.dumps(shared).encode())
    else:
        shared = json.loads(board.receive("judged", 0, before="looked"))
    if shared:
        return Sharing(True, 0, (0,) * board.world_size if board.rank == 0 else ())
    return _leaders(board, parent, token)


def _leaders(board: SaveBoard, parent: Path, token: str) -> Sharing:
    if board.rank != 0:
        leave_mark(parent / mark_name(token, board.rank))
    # All marks are there before anybody looks, and the lowest that a rank sees is its host's leader.
    board.post("named")
    board.wait("named")
    leader = next(rank for rank in range(board.world_size) if _is_there(parent, token, rank))
    board.send("led", json.dumps(leader).encode())
    board.post("compared")
    board.wait("compared")  # before anybody takes his file away
    # Rank 0 says it, since a mark may have come into sight meanwhile: ranks of two minds would write in two ways.
    if board.rank != 0:
        return Sharing(json.loads(board.receive("settled", 0)), leader)
    leaders = [json.loads(board.receive("led", rank)) for rank in range(1, board.world_size)]
    shared = leaders == [0] * len(leaders)
    board.send("settled", json.dumps(shared).encode())
    return Sharing(shared, 0, (0, *leaders))


def _is_there(parent: Path, token: str, rank: int) -> bool:
    return os.path.lexists(parent / mark_name(token, rank))


@dataclass(frozen=True)
class SavePlace:
    """Target of a checkpoint, found out once for all that a save asks of it.

    Attributes:
        path: The checkpoint, as the user gave it.
        parent: The folder, or the URL of the folder, that it goes into.
        remote: Whether these are URLs.
        known: Whether nothing has to be found out about the folder.
    """

    path: str
    parent: str
    remote: bool
    known: bool


class SavePlaces:
    """Facts of one engine about the folders that its checkpoints go into.

    Args:
        layout: The setting `checkpoint.layout`.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._known: dict[str, Sharing] = {}

    def place_of(self, directory: str | os.PathLike[str], *, asked: bool = True) -> SavePlace:
        """The place of a checkpoint; `asked`: ranks find out which of them see the same folder."""
        path = os.fspath(directory)
        if is_remote(path):
            return SavePlace(path, path.rstrip("/").rpartition("/")[0], remote=True, known=True)
        parent = os.path.dirname(os.path.abspath(path))
        known = not asked or self._layout == "shared" or parent in self._known
        return SavePlace(path, parent, remote=False, known=known)

    def writer(self, place: SavePlace, board: SaveBoard, token: str, *, known: bool) -> SaveWriter:
        """The writer of a save; all ranks call it, and meet over the board where a folder is new.

        Args:
            place: Where the checkpoint goes.
            board: This rank's.
            token: Names the save; equal on all ranks.
            known: Whether the folder is known to all ranks: all find out about it, or none.

        Raises:
            OSError: If the folder cannot be written to.
            FailedElsewhereError: If that is so on another rank.
            ImportError: If it is a URL and fsspec is missing.
            ValueError: If it is a URL and `checkpoint.layout` is "shared".
        """
        ranks = {"rank": board.rank, "world_size": board.world_size}
        if not place.remote:
            sharing = self._sharing(place, board, token, known)
            if self._layout == "shared" or (self._layout == "auto" and sharing.shared):
                return CheckpointWriter(place.path, **ranks, token=token, cleans_later=True)
            return HostPieceWriter(place.path, **ranks, token=token, board=board, leader=sharing.leader)
        url = place.path
        if self._layout == "shared":
            raise ValueError(f"{url}: checkpoint.layout is 'shared'; URLs need 'auto' or 'pieces'")
        if not url.partition("://")[2].strip("/"):
            raise ValueError(f"{url}: names no folder; give a path in it, such as {url.rstrip('/')}//run/step-100")
        return RemotePieceWriter(url, **ranks, token=token, board=board)

    def removes(self, path: str | os.PathLike[str], rank: int) -> bool:
        """True if this rank is the one that removes a checkpoint that it can see."""
        sharing = self._known.get(self.place_of(path).parent)
        return rank == (0 if sharing is None else sharing.leader)

    def _sharing(self, place: SavePlace, board: SaveBoard, token: str, known: bool) -> Sharing:
        # The setting is the user's word: nothing has to be asked.
        if self._layout == "shared":
            return Sharing(True, 0)
        if not known:
            self._known.pop(place.parent, None)  # stays so if this fails
            parent = Path(place.parent)
            self._known[place.parent] = sharing = find_out(board, parent, token)
            if not sharing.shared and board.rank == 0 and self._layout == "auto":
                warn_unshared(sharing, parent)
        return self._known[place.parent]


def remove_remote(url: str | os.PathLike[str]) -> None:
    """Removes a checkpoint at a URL: first its manifest, so that it is none any more, then the rest."""
    folder = RemoteFolder(os.fspath(url))
    folder.remove(MANIFEST_NAME)
    folder.remove()


def prune_remote(url: str, keep_last: int, keep_every: int) -> None:
    """Removes what `folders.which_to_remove` chooses among the checkpoints at a URL; their age is their step.

    Raises:
        OSError: If the store fails.
    """
    folder = RemoteFolder(url)
    names = folder.names()
    latest = folder.read(LATEST_NAME).decode().strip() if LATEST_NAME in names else None
    found = []
    # Whatever is no checkpoint of this format is neither counted nor removed.
    for name in set(names) - {LATEST_NAME}:
        try:
            manifest = folder.child(name).manifest()
        except ValueError:
            continue
        if manifest is not None:
            step = manifest.counters.get("global_steps")
            step = step if type(step) is int else None
            found.append(Found(Path(name), step, 0, is_latest=name == latest, is_export=is_export(manifest)))
    for old in which_to_remove(found, keep_last, keep_every):
        remove_remote(folder.child(old.path.name).url)


_THREADS = 2
"""Of a save that training waits for."""
_RETURN_SECONDS = 1.0
"""How long the thread of a save that is over may take to end: it has nothing left to do."""


@dataclass(frozen=True)
class SaveJob:
    """All that a save needs, in memory that training does not touch, or while training waits.

    Attributes:
        writer: This rank's.
        board: This rank's.
        plan: The same on all ranks.
        pieces: What this rank writes, in the order of the files.
        own_files: Small files of this rank alone.
        manifest: Rank 0's counts; without checksums.
        extra_files: Rank 0's count.
        update_latest: Let `latest` name the checkpoint.
        committed: Called on rank 0, and on the first rank of each host with a directory of its own, when the
            checkpoint is there.
    """

    writer: SaveWriter
    board: SaveBoard
    plan: CheckpointPlan
    pieces: Sequence[Entry]
    own_files: Mapping[str, bytes]
    manifest: Manifest
    extra_files: Mapping[str, bytes]
    update_latest: bool
    committed: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.numel * piece.dtype.itemsize for _, piece in self.pieces)

    def run(self, *, threads: int, bytes_per_second: float | None, tell: Callable[[int], object] | None = None) -> None:
        """Carry it out.

        Args:
            threads: See `SaveWriter.write_all`.
            bytes_per_second: Bound on this rank's speed.
            tell: Hears of bytes that are written, in any thread.

        Raises:
            OSError, ValueError: What went wrong on this rank. The earlier checkpoint is as it was.
            FailedElsewhereError: What went wrong on another.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(self.board.alive())
                # Inside, as it is many messages to the store, and the others watch this rank already.
                self.board.clear_earlier()
            except BaseException as error:
                self.fail(error)
                raise
            self._run(threads, bytes_per_second, tell)

    def _run(self, threads: int, bytes_per_second: float | None, tell: Callable[[int], object] | None) -> None:
        first, written = self.board.rank == 0, False

        def wrote(nbytes: int) -> None:
            self.board.progress(nbytes)
            if tell is not None:
                tell(nbytes)

        try:
            # On every rank: hosts with directories of their own have to make them.
            self.writer.prepare(self.plan)
            # Before others write: they open files that rank 0 makes, or make some that it could take for leftovers.
            if first:
                self.board.post("prepared")
            else:
                self.board.wait("prepared", 0)
            self.writer.write_files(self.own_files)
            self.writer.write_all(self.pieces, threads=threads, bytes_per_second=bytes_per_second, wrote=wrote)
            self.board.post("written")
            # From here on rank 0 may be renaming it: a failure on another rank removes nothing any more.
            written = not first
            if not first:
                self.writer.follow()
                self._await_commit()
                return
            # All bytes are on the disk before the manifest says so.
            self.board.wait("written")
            self.writer.commit(self.manifest, self.extra_files, update_latest=self.update_latest)
        except BaseException as error:
            self.fail(error, leave=written)
            raise
        # Outside: a checkpoint that is there is not given up because others cannot be told.
        self.board.post("committed")

    def clean_up(self) -> None:
        """Afterwards: remove what was replaced, and what is not kept. It may take as long as the save."""
        self.writer.clean_up()
        if self.board.rank == 0 or self.writer.leads:
            self.committed()

    def _await_commit(self) -> None:
        """Rank 0 may have left the program at once, and the store with it: then the directory tells."""
        try:
            self.board.wait("committed", 0, before="written")
        except Exception as error:
            failed = isinstance(error, FailedElsewhereError) and not isinstance(error, RankLostError)
            if failed or not self.writer.is_committed():
                raise

    def fail(self, error: BaseException, *, leave: bool = False) -> None:
        """Tell the others; remove what was written, unless only rank 0 may still touch it."""
        try:
            if not isinstance(error, FailedElsewhereError) or isinstance(error, RankLostError):
                self.board.check()  # what failed first, elsewhere, may be the cause of what failed here
                self.board.fail(f"{type(error).__name__}: {error}")
        except FailedElsewhereError as cause:
            raise cause from error
        except Exception:  # the store is gone with its rank: there is nobody to tell
            pass
        finally:
            if not leave:
                self.writer.abandon()


class PendingSave:
    """A save that may still be going on.

    Args:
        job: What `run` or `start`, one of them once, carries out; it is let go of when all is done.
        before: The save before, which may still be cleaning up.

    Attributes:
        directory: The checkpoint, as the user named it.
    """

    def __init__(self, job: SaveJob, before: PendingSave | None) -> None:
        self.directory = job.writer.target
        self._job: SaveJob | None = job
        self._before = before
        self._over, self._process = threading.Event(), os.getpid()
        self._cleaned = threading.Event()
        # Until a thread begins: a save that its caller carries out has nobody to wait for.
        self._over.set()
        self._cleaned.set()
        self._error: BaseException | None = None
        self._raised = False
        self._afterwards: list[tuple[Callable[[], object], bool]] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """True if it is over on this rank, well or not."""
        return self._over.is_set()

    def failed(self) -> bool:
        """True if it is over and has failed, and nobody was told yet."""
        return self.done() and self._error is not None and not self._raised

    def lost(self) -> bool:
        """True if it is over and has failed, whoever was told."""
        return self.done() and self._error is not None

    def join(self) -> None:
        """Return when it is over, well or not."""
        if self._process == os.getpid():  # a forked child has no such thread
            self._over.wait()  # not the thread's `join`, which does not survive an interruption

    def wait(self) -> None:
        """Return when the checkpoint is there.

        Raises:
            OSError, ValueError, RuntimeError: Why it is not, on this rank or on another; once.
        """
        self.join()
        # Its error is told here, and not once more at exit.
        atexit.unregister(self.wait)
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def then(self, action: Callable[[], object], *, failed: bool = False) -> None:
        """Do something once the checkpoint is there, or (`failed`) cannot be: now, in the background, or never.

        What goes wrong with it is a warning: the save is over, on all ranks alike.
        """
        # An action is in the list before the thread takes it, or sees that it was taken: none is lost.
        with self._lock:
            if self._afterwards is not None:
                self._afterwards.append((action, failed))
                return
        if failed == (self._error is not None):
            action()

    def finish(self) -> None:
        """`wait`, and return when what it replaced is removed, too."""
        self.wait()
        if self._process == os.getpid():
            self._cleaned.wait()
            # A moment, in which the thread returns: who counts threads after a run finds none of this save.
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_RETURN_SECONDS)

    def run(self) -> None:
        """Carry it out while training waits; what it replaced is removed in the background.

        Raises:
            OSError, ValueError, RuntimeError: See `SaveJob.run`.
        """
        job = self._take()
        try:
            with progress("saving", job.nbytes, job.board.rank) as tell:
                job.run(threads=_THREADS, bytes_per_second=None, tell=tell)
        except BaseException:
            # No thread lets go of it later; what it may still remove is what a next save has to wait for.
            if self._before is not None:
                self._cleaned, self._thread, self._before = self._before._cleaned, self._before._thread, None
            raise
        end = partial(self._end, job.clean_up)
        try:
            self._in_thread(end)
        except RuntimeError:  # no thread can be started: the checkpoint is there, and is not given up for that
            end()

    def start(self, bytes_per_second: float | None) -> None:
        """Carry it out in the background, no faster than that."""
        job = self._take()
        # Before the thread is there, which may be over at once.
        self._over.clear()
        atexit.register(self.wait)  # the interpreter prints what it raises
        try:
            self._in_thread(partial(self._write, job, bytes_per_second))
        except RuntimeError as error:
            # No thread can be started: told like any error in the background, by all ranks before one step.
            self._error = error
            with suppress(FailedElsewhereError):
                job.fail(error)
            self._end(job.clean_up)

    def _take(self) -> SaveJob:
        """The job, which is not held here while it runs: its pieces hold the state that is saved."""
        job, self._job = self._job, None
        assert job is not None, "a save is carried out once"
        return job

    def _in_thread(self, task: Callable[[], None]) -> None:
        """Do it in a thread that keeps the process alive until then."""
        self._afterwards = []
        self._cleaned.clear()
        thread = threading.Thread(target=task, name="checkpoint", daemon=False)
        thread.start()
        self._thread = thread

    def _write(self, job: SaveJob, bytes_per_second: float | None) -> None:
        try:
            # It writes itself, for it mostly waits for the disk.
            job.run(threads=0, bytes_per_second=bytes_per_second)
        except BaseException as error:
            # Every error, kept for whoever waits: a thread has no caller.
            self._error = error
        self._end(job.clean_up)

    def _end(self, clean_up: Callable[[], object]) -> None:
        """Tell that it is over, and do what was to be done then."""
        # Before anybody who waits goes on: what he asks for then comes behind it.
        self.then(clean_up)
        self._over.set()
        # A chain of all saves would keep them alive.
        before, self._before = self._before, None
        try:
            if before is not None:
                # Two removals at once would find each other's directories in the folder.
                before._cleaned.wait()
            self._do_afterwards()
        finally:
            # Also after an error: `finish` waits for it.
            self._cleaned.set()

    def _do_afterwards(self) -> None:
        with self._lock:
            actions, self._afterwards = self._afterwards, None
        # Outside of the lock: an action may take long, or ask for another.
        for action, failed in actions or []:
            if failed == (self._error is not None):
                try:
                    action()
                except Exception as error:
                    warnings.warn(f"after saving {self.directory}: {type(error).__name__}: {error}", stacklevel=1)
