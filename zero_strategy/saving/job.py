"""One save of one checkpoint by all ranks, from the first byte to the last, without a collective; now or in a thread.

    rank 0     prepare -- "prepared"     write -- "written"     wait for all -- commit -- "committed"
    others     wait ------------------>  write -- "written"     wait ------------------>
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zero_strategy.checkpoint import CheckpointPlan, FileKind, LatePiece, Manifest, Piece, SaveWriter
from zero_strategy.distributed.save_board import FailedElsewhereError, RankLostError, SaveBoard
from zero_strategy.runtime.progress import progress

_THREADS = 2
"""Of a save that training waits for."""


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
    pieces: Sequence[tuple[FileKind, Piece | LatePiece]]
    own_files: Mapping[str, bytes]
    manifest: Manifest
    extra_files: Mapping[str, bytes]
    update_latest: bool
    committed: Callable[[], None]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(piece.numel * piece.dtype.itemsize for _, piece in self.pieces)

    def run(
        self, *, threads: int, bytes_per_second: float | None, tell: Callable[[int], object] | None = None
    ) -> None:
        """Carry it out.

        Args:
            threads: See `SaveWriter.write_all`.
            bytes_per_second: Bound on this rank's speed.
            tell: Hears of bytes that are written, in any thread.

        Raises:
            OSError, ValueError: What went wrong on this rank. The earlier checkpoint is as it was.
            FailedElsewhereError: What went wrong on another.
        """
        with self.board.alive():
            self.board.clear_earlier()
            self._run(threads, bytes_per_second, tell)

    def _run(self, threads: int, bytes_per_second: float | None, tell: Callable[[int], object] | None) -> None:
        first, written = self.board.rank == 0, False

        def wrote(nbytes: int) -> None:
            self.board.progress(nbytes)
            if tell is not None:
                tell(nbytes)

        try:
            self.writer.prepare(self.plan)
            if first:
                self.board.post("prepared")
            else:
                self.board.wait("prepared", 0)
            self.writer.write_files(self.own_files)
            self.writer.write_all(self.pieces, threads=threads, bytes_per_second=bytes_per_second, wrote=wrote)
            self.board.post("written")
            written = not first
            if not first:
                self.writer.follow()
                self._await_commit()
                return
            self.board.wait("written")
            self.writer.commit(self.manifest, self.extra_files, update_latest=self.update_latest)
        except BaseException as error:
            self._fail(error, leave=written)
            raise
        self.board.post("committed")

    def clean_up(self) -> None:
        """Afterwards: remove what was replaced, and what is not kept. It may take as long as the save."""
        self.writer.clean_up()
        if self.board.rank == 0 or self.writer.leads:
            self.committed()

    def _await_commit(self) -> None:
        """Rank 0 may have left the program at once, and the store with it: then the directory tells."""
        try:
            self.board.wait("committed", 0)
        except Exception as error:
            failed = isinstance(error, FailedElsewhereError) and not isinstance(error, RankLostError)
            if failed or not self.writer.is_committed():
                raise

    def _fail(self, error: BaseException, leave: bool) -> None:
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
        directory: The checkpoint, as the user named it.
        job: What `run` or `start`, one of them once, carries out; it is let go of when all is done.
        before: The save before, which may still be cleaning up.

    Attributes:
        directory: The checkpoint.
    """

    def __init__(self, directory: str, job: SaveJob, before: PendingSave | None) -> None:
        self.directory = directory
        self._job: SaveJob | None = job
        self._before = before
        self._over, self._process = threading.Event(), os.getpid()
        self._cleaned = threading.Event()
        self._over.set()
        self._cleaned.set()
        self._error: BaseException | None = None
        self._raised = False
        self._afterwards: list[tuple[Callable[[], object], bool]] | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether it is over on this rank, well or not."""
        return self._over.is_set()

    def failed(self) -> bool:
        """Whether it is over and has failed, and nobody was told yet."""
        return self.done() and self._error is not None and not self._raised

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
        atexit.unregister(self.wait)
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def then(self, action: Callable[[], object], *, failed: bool = False) -> None:
        """Do something once the checkpoint is there, or (`failed`) cannot be: now, in the background, or never.

        What goes wrong with it is a warning: the save is over, on all ranks alike.
        """
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
            self._before = None
            raise
        self._in_thread(partial(self._end, job.clean_up))

    def start(self, bytes_per_second: float | None) -> None:
        """Carry it out in the background, no faster than that."""
        self._over.clear()
        self._in_thread(partial(self._write, self._take(), bytes_per_second))

    def _take(self) -> SaveJob:
        """The job, which is not held here while it runs: its pieces hold the state that is saved."""
        job, self._job = self._job, None
        assert job is not None, "a save is carried out once"
        return job

    def _in_thread(self, task: Callable[[], None]) -> None:
        """Do it in a thread that keeps the process alive until then."""
        self._afterwards = []
        self._cleaned.clear()
        atexit.register(self.wait)  # the interpreter prints what it raises
        threading.Thread(target=task, name="checkpoint", daemon=False).start()

    def _write(self, job: SaveJob, bytes_per_second: float | None) -> None:
        try:
            job.run(threads=0, bytes_per_second=bytes_per_second)
        except BaseException as error:
            self._error = error
        self._end(job.clean_up)

    def _end(self, clean_up: Callable[[], object]) -> None:
        """Tell that it is over, and do what was to be done then."""
        self.then(clean_up)
        self._over.set()
        before, self._before = self._before, None
        try:
            if before is not None:
                before._cleaned.wait()
            self._do_afterwards()
        finally:
            self._cleaned.set()

    def _do_afterwards(self) -> None:
        with self._lock:
            actions, self._afterwards = self._afterwards, None
        for action, failed in actions or []:
            if failed == (self._error is not None):
                try:
                    action()
                except Exception as error:
                    warnings.warn(f"after saving {self.directory}: {type(error).__name__}: {error}", stacklevel=1)
