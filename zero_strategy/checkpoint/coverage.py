"""Which elements have been written: no element twice, and none forgotten.

Each rank records its own ranges and leaves them as a small file beside the data. Before the checkpoint is
committed, one rank adds them all up. An element that nobody wrote would read back as a silent zero.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from zero_strategy.checkpoint.layout import FileLayout


class Coverage:
    """Disjoint element ranges per tensor of each file, adjacent ones merged."""

    def __init__(self) -> None:
        # file path -> tensor name -> sorted [start, stop] ranges
        self._ranges: dict[str, dict[str, list[list[int]]]] = {}

    def check_free(self, path: str, name: str, start: int, stop: int) -> None:
        """Checks that no element of [start, stop) is recorded.

        Raises:
            ValueError: naming the tensor, if one is.
        """
        ranges = self._ranges.get(path, {}).get(name, [])
        at = bisect_right(ranges, [start, start])
        for other_start, other_stop in ranges[max(at - 1, 0) : at + 1]:
            if max(start, other_start) < min(stop, other_stop):
                raise ValueError(
                    f"{path}: elements [{start}, {stop}) of tensor {name!r} overlap "
                    f"[{other_start}, {other_stop}), which is already written"
                )

    def add(self, path: str, name: str, start: int, stop: int) -> None:
        """Records elements [start, stop).

        Raises:
            ValueError: naming the tensor, if one of them is already recorded.
        """
        self.check_free(path, name, start, stop)
        if start == stop:
            return
        ranges = self._ranges.setdefault(path, {}).setdefault(name, [])
        at = bisect_right(ranges, [start, start])
        if at < len(ranges) and ranges[at][0] == stop:
            stop = ranges.pop(at)[1]
        if at > 0 and ranges[at - 1][1] == start:
            ranges[at - 1][1] = stop
        else:
            ranges.insert(at, [start, stop])

    def check_complete(self, layouts: Iterable[FileLayout]) -> None:
        """Checks that every element of the given files is recorded.

        Raises:
            ValueError: listing every tensor with missing elements.
        """
        holes = []
        for layout in layouts:
            recorded = self._ranges.get(layout.path, {})
            for name, spec in layout.specs.items():
                ranges = recorded.get(name, [])
                if spec.numel and ranges != [[0, spec.numel]]:
                    done = sum(stop - start for start, stop in ranges)
                    holes.append(f"{name!r} in {layout.path} ({spec.numel - done} of {spec.numel} elements)")
        if holes:
            raise ValueError(f"elements of {len(holes)} tensors were written by no rank: " + ", ".join(holes))

    def to_json(self) -> dict[str, dict[str, list[list[int]]]]:
        """The record as JSON can hold it, for another rank to `merge_json`."""
        return self._ranges

    def merge_json(self, record: dict[str, dict[str, list[list[int]]]]) -> None:
        """Adds the record of another rank.

        Raises:
            ValueError: naming the tensor, if both ranks wrote the same element.
        """
        for path, tensors in record.items():
            for name, ranges in tensors.items():
                for start, stop in ranges:
                    self.add(path, name, start, stop)
