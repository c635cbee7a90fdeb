"""Where records lie in the files of a state: pure arithmetic.

    directory 0   | a0 | a2 | b1 |  ...         record a = stripes a0 a1 a2, b = b0 b1
    directory 1   | a1 | b0 |                   consecutive stripes go round the directories

A record begins on a boundary of `alignment` bytes and has whole such units to itself, so that no two records share a
block of the disk. With one directory a record is one piece. It begins where least has been placed so far, or else a
hundred records of less than a stripe would all lie in directory 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Bytes [begin, end) of a record lie at `offset` of the file in directory number `directory`."""

    directory: int
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Record:
    nbytes: int
    first: int
    bases: tuple[int, ...]


class StateLayout:
    """All records of one rank.

    Args:
        records: Name -> logical bytes, 0 or more.
        directories: How many there are.
        alignment: Of the beginnings of records, in bytes.
        stripe_bytes: A multiple of the alignment.

    Attributes:
        sizes: Bytes of the file in each directory.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, records: Mapping[str, int], directories: int, alignment: int, stripe_bytes: int) -> None:
        if stripe_bytes <= 0 or stripe_bytes % alignment:
            raise ValueError(f"stripe_bytes must be a positive multiple of {alignment}, got {stripe_bytes}")
        self.alignment, self._directories, self._stripe = alignment, directories, stripe_bytes
        self._records: dict[str, _Record] = {}
        sizes = [0] * directories
        for name, nbytes in records.items():
            if nbytes < 0:
                raise ValueError(f"record {name!r} cannot have {nbytes} bytes")
            record = _Record(nbytes, sizes.index(min(sizes)), tuple(sizes))
            self._records[name] = record
            whole, rest = divmod(self.padded(nbytes), stripe_bytes)
            for step in range(directories):
                stripes = whole // directories + (step < whole % directories)
                last = rest if step == whole % directories else 0
                sizes[(record.first + step) % directories] += stripes * stripe_bytes + last
        self.sizes = tuple(sizes)

    def padded(self, nbytes: int) -> int:
        """Bytes that so many bytes take up."""
        return -(-nbytes // self.alignment) * self.alignment

    def places(self, name: str, start: int, stop: int) -> list[Place]:
        """Where bytes [start, stop) of a record lie, in their order; `stop` may be in the padding."""
        record, found = self._records[name], []
        stripe = self._stripe if self._directories > 1 else max(self.padded(record.nbytes), 1)
        while start < stop:
            number, within = divmod(start, stripe)
            end = min(stop, (number + 1) * stripe)
            row, step = divmod(number, self._directories)
            directory = (record.first + step) % self._directories
            found.append(Place(directory, record.bases[directory] + row * stripe + within, start, end))
            start = end
        return found
