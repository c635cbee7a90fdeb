"""Writes to gathered parameters, noticed where they would be lost: by version counters, and by hashes of the values.

Torch counts writes to a parameter (`p.zero_()`), not those through `p.data` or a numpy view, which change values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_char
from typing import Protocol

import torch
import xxhash
from torch import Tensor, nn


class WatchedBucket(Protocol):
    """A bucket of parameters as its watch sees it; see `ParameterBucket`."""

    names: list[str]
    parameters: list[nn.Parameter]
    watches: list[EditWatch]

    @property
    def gathered(self) -> bool: ...

    @property
    def follows_edits(self) -> bool: ...

    def present_versions(self) -> list[tuple[int, int]]: ...

    def segment_view(self, index: int) -> Tensor: ...

_PART = 1 << 20
"""Elements of a device's memory that are hashed at once; each needs 16 bytes meanwhile."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EditWatch:
    """Notices writes to a bucket while it is whole. Where they count, those that torch has not counted are counted.

    Values that the engine itself replaces (an optimizer's step, a load) come between `let_go` and `renew`.

    Args:
        bucket: It; gathered.
        hashed: Look at values, too: one pass over them now, and one at the end. Else at version counters alone.
    """

    def __init__(self, bucket: WatchedBucket, *, hashed: bool) -> None:
        self.bucket, self._hashed = bucket, hashed
        self._lost: set[int] = set()
        self.renew()

    def renew(self) -> None:
        """Present values are right."""
        self._replaced = False
        self._versions = self.bucket.present_versions()
        self._hashes = self._present_hashes()

    def let_go(self) -> None:
        """Values are about to be replaced: with them goes what was written so far."""
        if not self._replaced:
            self._lost.update(self._look())
            self._replaced = True

    def lost(self) -> list[str]:
        """The parameters with writes that are lost now, in order."""
        return [self.bucket.names[index] for index in sorted(self._lost | self._look())]

    def _look(self) -> set[int]:
        """Indices of parameters that were written to since `renew`; none where writes count."""
        if not self.bucket.gathered:  # an engine's `reset` has released it
            return set()
        now, hashes = self.bucket.present_versions(), self._present_hashes()
        counted = {index for index, (before, after) in enumerate(zip(self._versions, now)) if before != after}
        changed = {index for index, (before, after) in enumerate(zip(self._hashes, hashes)) if before != after}
        if not self.bucket.follows_edits:
            return counted | changed
        for index in changed - counted:
            torch.autograd.graph.increment_version(self.bucket.parameters[index])
        return set()

    def _present_hashes(self) -> list[int]:
        views = [self.bucket.segment_view(index) for index in range(len(self.bucket.names)) if self._hashed]
        return hashes_of(views)


def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """A hash of each contiguous tensor's bytes; of those on a device in one transfer to the host."""
    found: dict[int, int] = {}
    away: dict[int, Tensor] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            flat = tensor.detach().reshape(-1)
            if flat.device.type == "cpu":
                # A numpy view would keep the memory from being given back.
                content = (c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
                found[index] = xxhash.xxh3_64_intdigest(content)
            else:
                away[index] = weighted_sum(flat)
        if away:
            found.update(zip(away, torch.stack(list(away.values())).tolist(), strict=True))
    return [found[index] for index in range(len(tensors))]


def weighted_sum(flat: Tensor) -> Tensor:
    """The bits of all elements as integers, times numbers that depend on the place, summed up modulo 2 ** 64; 0-d."""
    words = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(min(_PART, words.numel()), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(words.split(_PART)):
        factors = (places[: part.numel()] + number * _PART) * 0x2545F4914F6CDD1D
        total += (part.to(torch.int64) * (factors ^ (factors >> 29)).bitwise_or_(1)).sum()
    return total
