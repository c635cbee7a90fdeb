"""What was written of each record, by checksums: a debug mode that finds a drive, or a program, that changes bytes."""

from __future__ import annotations

from torch import Tensor

from zero_strategy.runtime.transfer import checksum_of, memory_of


class CorruptRecordError(RuntimeError):
    """A record does not have the bytes that were written."""


class RecordChecksums:
    """A checksum for every range that was written, until another write overlaps it.

    A read checks the ranges that lie in it as a whole; so one that has the same bounds as the writes checks all of it.
    """

    def __init__(self) -> None:
        self._ranges: dict[str, dict[int, tuple[int, str]]] = {}

    def note(self, name: str, start: int, memory: Tensor) -> None:
        """Bytes that are to be written at `start` of a record."""
        stop = start + memory.numel()
        known = self._ranges.setdefault(name, {})
        for begin, (end, _) in list(known.items()):
            if begin < stop and start < end:
                del known[begin]
        if memory.numel():
            known[start] = (stop, _checksum(memory))

    def check(self, name: str, start: int, memory: Tensor, where: str) -> None:
        """Bytes that were read at `start` of a record.

        Raises:
            CorruptRecordError: Naming the record, the bytes and where they lie.
        """
        for begin, (end, wanted) in sorted(self._ranges.get(name, {}).items()):
            if begin < start or end > start + memory.numel():
                continue
            found = _checksum(memory[begin - start : end - start])
            if found != wanted:
                raise CorruptRecordError(
                    f"record {name!r}: bytes {begin} to {end} are not those that were written (checksum {found}, not "
                    f"{wanted}): {where} was changed by something else, the drive lost a write, or the memory was "
                    "changed while it was being written"
                )


def _checksum(memory: Tensor) -> str:
    return checksum_of(memory_of(memory))
