"""The gather after a step at stages 1 and 2, of what has changed in place of all values.

That is `communication.parameters: delta`. Every rank holds all parameters as they were before the step. So a rank codes
the xors of its slice's bits (`comm.delta`) and sends these; the others apply them to what they hold. The values are
those of a gather, bit by bit: an XXH3 of each slice's new values goes along and is compared. If values changed
otherwise meanwhile, if codes would be as long as the values, or if sums differ, all ranks gather whole values for this
step.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_strategy.comm.delta import Words, apply, encode, words_of
from zero_strategy.comm.mesh import Mesh
from zero_strategy.fsdp.param_bucket import ParameterBucket

_RANGE = 1 << 20
"""Elements that are coded as one."""
_HEAD = struct.Struct("<Q")
_UNKNOWN = -1


class ChangedValues:
    """Gathers of changes, among the ranks of the shard axis.

    Args:
        mesh: The ranks.
        device: Of the values; a GPU is warned of by name.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        if device.type == "cuda":
            warnings.warn(
                "communication.parameters: delta codes changes on the host: each step copies this rank's slice from "
                f"{device} twice and every other slice once each way, and waits for it (seconds per GB). On a GPU it "
                "is of use where a slow network connects the ranks; else leave it at values",
                stacklevel=4,
            )
        self._former: dict[int, Tensor] = {}
        self._coded: dict[int, bytes] = {}
        self._seen: dict[int, int] = {}

    def takes(self, bucket: ParameterBucket) -> bool:
        """True if all ranks that shard have slices of the bucket."""
        return bucket.ranks.gather is self._mesh.gather

    def before(self, buckets: Sequence[ParameterBucket]) -> None:
        """See `ValueRecorder`."""
        for bucket in filter(self.takes, buckets):
            # First: what the user has written raises the generation, which tells whether the base is still known.
            bucket.follow_edits()
            known = self._seen.get(id(bucket)) == bucket.generation
            # Left by a step that did not come to its gather.
            self._former.pop(id(bucket), None)
            self._coded.pop(id(bucket), None)
            if known:
                # A copy on the CPU too, since the step writes to this very memory.
                self._former[id(bucket)] = bucket.flat[bucket.slice].detach().to("cpu", copy=True)

    def after(self, buckets: Sequence[ParameterBucket]) -> None:
        """See `ValueRecorder`: code at once what a fused step has changed, so that former values can go."""
        for bucket in filter(self.takes, buckets):
            self._code(bucket)

    def _code(self, bucket: ParameterBucket) -> None:
        former = self._former.pop(id(bucket), None)
        if former is None:
            return
        old, new = words_of(former), words_of(bucket.flat[bucket.slice].detach().cpu())
        parts = [encode(old[at : at + _RANGE], new[at : at + _RANGE]) for at in range(0, len(new), _RANGE)]
        self._coded[id(bucket)] = _sum_of(new) + b"".join(_HEAD.pack(len(part)) + part for part in parts)

    def gather(self, buckets: Sequence[ParameterBucket], *, copied: bool) -> None:
        """Bring the values of a step into the parameters of all ranks. A collective.

        Args:
            buckets: Those that it stepped on; the same on all ranks.
            copied: The slices have them already, in the parameters' dtype.
        """
        for bucket in buckets:
            bucket.write_weights(copied=copied)
            # Of steps that are not fused: `after` comes later, and finds nothing left to code.
            self._code(bucket)
        coded = [self._coded.pop(id(bucket), None) for bucket in buckets]
        message = None if None in coded else b"".join(part for part in coded if part is not None)
        dense = sum(bucket.layout.slice_numel * bucket.flat.element_size() for bucket in buckets)
        # A message as long as the values saves nothing: all ranks gather these.
        if not self._exchange(buckets, message if message is not None and len(message) < dense else None):
            # Cast already, by `write_weights`.
            for work in [bucket.publish(copied=True) for bucket in buckets]:
                work.wait()
        for bucket in buckets:
            self._seen[id(bucket)] = bucket.generation

    def _agree(self, size: int) -> list[int]:
        """Every rank's size of its message."""
        sizes = self._mesh.shard_control.all_gather_small(torch.tensor([size]), "sizes of changes")
        return [int(each) for each in sizes]

    def _exchange(self, buckets: Sequence[ParameterBucket], message: bytes | None) -> bool:
        """Send it, and apply the others'; False if whole values are to be gathered, on all ranks."""
        group, sizes = self._mesh.gather, self._agree(_UNKNOWN if message is None else len(message))
        if message is None or min(sizes) == _UNKNOWN:
            return False
        device = buckets[0].flat.device
        # `frombuffer` warns of bytes, which are read-only.
        own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        arriving = [own.new_empty(size if rank != group.rank else 0) for rank, size in enumerate(sizes)]
        group.all_to_all([own] * group.size, arriving, max(sizes), "changes of parameters").wait()
        right = all(
            self._apply(buckets, rank, arrived.cpu().numpy().tobytes())
            for rank, arrived in enumerate(arriving)
            if rank != group.rank
        )
        # A sum that is wrong on one rank lets all gather values, since that is a collective.
        return all(self._agree(int(right)))

    def _apply(self, buckets: Sequence[ParameterBucket], rank: int, message: bytes) -> bool:
        """Take a rank's changes; True if the values are its own now."""
        at, right = 0, True
        for bucket in buckets:
            start, stop = bucket.layout.slice_bounds(rank)
            place = bucket.flat[start:stop].detach()
            held = place.cpu()
            words = words_of(held)
            wanted, at = message[at : at + _HEAD.size], at + _HEAD.size
            for first in range(0, len(words), _RANGE):
                (length,) = _HEAD.unpack_from(message, at)
                apply(message[at + _HEAD.size : at + _HEAD.size + length], words[first : first + _RANGE])
                at += _HEAD.size + length
            right = right and _sum_of(words) == wanted
            # On the CPU `held` is that memory itself.
            if not place.is_cpu:
                place.copy_(held)
        return right


def _sum_of(words: Words) -> bytes:
    import xxhash

    return xxhash.xxh3_64(words).digest()  # type: ignore[arg-type]
