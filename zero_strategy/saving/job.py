"""One save of one checkpoint by all ranks, from the first byte to the last, without a collective.

    rank 0     prepare -- "prepared"     write -- "written"     wait for all -- commit -- "committed"
    others     wait ------------------>  write -- "written"     wait ------------------>
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from zero_strategy.checkpoint import CheckpointPlan, FileKind, LatePiece, Manifest, Piece, SaveWriter
from zero_strategy.distributed.save_board import FailedElsewhereError, RankLostError, SaveBoard


@dataclass
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
