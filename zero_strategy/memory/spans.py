"""What one staging buffer holds at a time: spans of records, by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a record."""

    record: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """How many."""
        return self.stop - self.start


def parts_of(
    items: Iterable[str | Span | Sequence[str | Span]], sizes: Mapping[str, int], capacity: int, alignment: int
) -> list[tuple[Span, ...]]:
    """Cuts items so that each part fits into a buffer.

    An item that does not fit becomes several parts; the spans of one that has several are cut at the same bytes, and
    so must be of one length.

    Args:
        items: In the order in which they are worked on.
        sizes: Record -> bytes.
        capacity: Bytes of a buffer.
        alignment: Each span takes up a multiple of so many bytes of it, and cuts are made at multiples of it.

    Raises:
        ValueError: If there is no such record or span, an item cannot be cut, or bytes are asked for twice.
    """
    parts: list[tuple[Span, ...]] = []
    for item in items:
        members = [item] if isinstance(item, (str, Span)) else list(item)
        parts += _cut([_span(member, sizes, alignment) for member in members], capacity, alignment)
    _check_disjoint(parts)
    return parts


def padded(nbytes: int, alignment: int) -> int:
    """Bytes that a span takes up."""
    return -(-nbytes // alignment) * alignment


def _span(member: str | Span, sizes: Mapping[str, int], alignment: int) -> Span:
    record = member if isinstance(member, str) else member.record
    if record not in sizes:
        raise ValueError(f"there is no record {record!r}")
    if isinstance(member, str):
        return Span(record, 0, sizes[record])
    ends_well = member.stop == sizes[record] or (member.stop % alignment == 0 and member.stop < sizes[record])
    if member.start < 0 or member.start % alignment or member.stop < member.start or not ends_well:
        raise ValueError(
            f"{member} is no span of a record of {sizes[record]} bytes: it must begin at a multiple of {alignment}, "
            "and end at one or with the record"
        )
    return member


def _cut(spans: list[Span], capacity: int, alignment: int) -> Iterator[tuple[Span, ...]]:
    if sum(padded(span.nbytes, alignment) for span in spans) <= capacity:
        yield tuple(spans)
        return
    length = spans[0].nbytes
    step = capacity // len(spans) // alignment * alignment
    if step == 0 or any(span.nbytes != length for span in spans):
        asked = ", ".join(f"{span.record!r} ({span.nbytes} bytes)" for span in spans)
        raise ValueError(
            f"{asked} do not fit into a staging buffer of {capacity} bytes together, and only spans of one length are "
            "cut together: use larger buffers, or give spans"
        )
    for begin in range(0, length, step):
        end = min(begin + step, length)
        yield tuple(Span(span.record, span.start + begin, span.start + end) for span in spans)


def _check_disjoint(parts: list[tuple[Span, ...]]) -> None:
    known: dict[str, list[Span]] = {}
    for part in parts:
        for span in part:
            known.setdefault(span.record, []).append(span)
    for record, spans in known.items():
        spans.sort(key=lambda span: (span.start, span.stop))
        for one, other in pairwise(spans):
            if other.start < one.stop or one == other:
                end = min(one.stop, other.stop)
                raise ValueError(f"bytes {other.start} to {end} of record {record!r} are asked for twice")
