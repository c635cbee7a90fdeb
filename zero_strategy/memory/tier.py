"""What a place for state below the device's memory has to offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor


class PendingIO(Protocol):
    """A read or a write under way."""

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            OSError: Naming the path, the place and the cause.
        """


class Tier(Protocol):
    """Where records are kept. Memory that is handed in is uint8, 1-D, page-aligned and of the record's size."""

    name: str

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Make room for records of these bytes; raises OSError if there is none."""

    def resident(self, record: str) -> Tensor | None:
        """The record itself where it lies in host memory, else None."""

    def read(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to fill `memory` with a record that was written."""

    def write(self, record: str, memory: Tensor) -> PendingIO:
        """Begin to write a record; `memory` stays as it is until it is done."""

    def staging(self, nbytes: int) -> Tensor:
        """Memory of `nbytes` bytes, at a page boundary, that reads and writes are fastest with."""

    def mark_torn(self, records: Iterable[str], reason: str) -> None:
        """Refuse to read records until they are written anew: they are of two states."""

    def is_torn(self, record: str) -> bool:
        """Whether a record is refused."""

    def release(self, records: Iterable[str]) -> None:
        """Give the room of records back."""

    def close(self) -> None:
        """Wait for what is under way and give all room back."""


def wait_all(pending: Sequence[PendingIO]) -> None:
    """Wait for all, also where one has failed; raises the first error."""
    error: BaseException | None = None
    for each in pending:
        try:
            each.wait()
        except BaseException as caught:
            error = error or caught
    if error is not None:
        raise error
