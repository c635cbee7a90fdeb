"""Writes of user code to the full parameters of a bucket: counted, found, and brought back into the bucket.

Torch counts writes to a parameter; what `p.data` gives has a version counter of its own, one for all that is made of it
here (`fsdp/tracked.py` routes it). A parameter that is assigned lies in the user's memory at first, as in plain torch,
and is copied to its place before the bucket needs its values. What lay there before is kept as long as somebody holds
it: an average's values take the parameters' place and leave it again, by assignments of what `p.data` gave before.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.layout import BucketLayout
from zero_strategy.fsdp.tracked import GET_DATA, SET_DATA
from zero_strategy.runtime.torch_private import base_of, storage_key, version_of, versions_of


class WrittenBucket(Protocol):
    """A bucket of full parameters; see `ParameterBucket`."""

    names: list[str]
    parameters: list[nn.Parameter]
    tensors: list[Tensor]
    views: list[Tensor]
    layout: BucketLayout
    flat: Tensor
    dtype: torch.dtype
    device: torch.device


class UserWrites:
    """Counts, finds and takes in the writes of user code to the full parameters of one bucket.

    Args:
        bucket: The bucket.
    """

    def __init__(self, bucket: WrittenBucket) -> None:
        self._bucket = bucket
        self._divided = any(t is not p for t, p in zip(bucket.tensors, bucket.parameters, strict=True))
        self._seen: list[int] = []
        self._aliases: dict[int, Tensor] = {}
        """By index: values of which `p.data` gives views. All that is made of one shares its version counter."""
        self._closed: dict[int, int] = {}
        """By index: the counts of aliases that are no more."""
        self._given: dict[int, list[ref[Tensor]]] = {}
        """By index: what `p.data` and `p.detach()` gave, which somebody may still hold."""
        self._assigned: set[int] = set()
        """Indices of parameters that lie in memory of the user's, after `p.data = values`."""
        self._displaced: dict[int, list[tuple[list[ref[Tensor]], Tensor]]] = {}
        """By index: values that such memory has replaced here, and what was given of them; both may be brought back."""

    # ---- what was written ----

    def counts(self) -> list[int]:
        """Torch's counts of writes to each parameter: to itself, what a `DTensor` holds, and what `p.data` gave."""
        counts = versions_of(self._bucket.parameters)
        for index, tensor in enumerate(self._bucket.tensors if self._divided else ()):
            if tensor is not self._bucket.parameters[index]:  # `to_local()` shows it
                counts[index] += version_of(tensor)
        for index, alias in self._aliases.items():
            counts[index] += version_of(alias)
        for index, closed in self._closed.items():
            counts[index] += closed
        return counts

    def note(self) -> None:
        """Note that all writes so far count already, or are lost."""
        self._seen = self.counts()

    @property
    def are_there(self) -> bool:
        """True if there may be writes since the last `note`."""
        # Nothing tells of an assignment to what a `DTensor` holds: `take` looks at addresses.
        return bool(self._assigned) or self._divided or self.counts() != self._seen

    def take(self) -> set[int]:
        """Indices of parameters that were written to since the last `note`; assigned ones are in their places now.

        Raises:
            ValueError: As `take_assigned`.
        """
        found, now = self.take_assigned(), self.counts()
        found |= {index for index, (count, seen) in enumerate(zip(now, self._seen, strict=True)) if count != seen}
        self._seen = now
        return found

    def forget(self) -> None:
        """Hold nothing any more: the parameters are nobody's."""
        self._aliases.clear()
        self._given.clear()
        self._displaced.clear()

    # ---- what `p.data` gives and takes ----

    @property
    def aliases(self) -> int:
        """Number of tensors of its own that it has beside the parameters."""
        return len(self._aliases)

    def data_of(self, index: int) -> Tensor:
        """The values of a full parameter, detached, as `p.data` gives them; all results share one version counter.

        Args:
            index: Of the parameter in the bucket.
        """
        if index in self._assigned:
            return GET_DATA(self._bucket.parameters[index])  # copied whole later on: writes need no count
        alias = self._aliases.get(index)
        if alias is None:
            alias = self._aliases[index] = GET_DATA(self._bucket.parameters[index])
        values = alias.detach()
        self.note_given(index, values)
        return values

    def note_given(self, index: int, values: Tensor) -> None:
        """Somebody has values of a parameter, which lie in the bucket, and may bring them back."""
        # Those that are gone are left out, or each read of `p.data` would add to the list for good.
        self._given[index] = [*(known for known in self._given.get(index, ()) if known() is not None), ref(values)]

    @torch.no_grad()
    def replace(self, index: int, values: Tensor) -> None:
        """Let a full parameter have other values: `p.data = values`.

        As in plain torch it lies in their memory at first, and what it had before stays what it was, for who holds it.
        `follow_edits` brings it back into the bucket.

        Args:
            index: Of the parameter in the bucket.
            values: Of its shape, dtype and device.

        Raises:
            ValueError: If they are not, or are another parameter's memory; names the parameter.
        """
        self._check_assigned(index, values)
        tensor, view = self._bucket.tensors[index], self._bucket.views[index]
        if not values.is_set_to(view):
            SET_DATA(tensor, values)
            self._assigned.add(index)
            return
        SET_DATA(tensor, view)
        self._assigned.discard(index)
        if (former := self._former(index, values)) is not None:
            # Through what `p.data` gives, so that it counts as a write.
            self.data_of(index).copy_(former)

    def _former(self, index: int, given: Tensor) -> Tensor | None:
        """The values that `given`, which `p.data` gave once, stands for; None: the present ones."""
        # Given since other values came here: it shows the present ones.
        if any(known() is given for known in self._given.get(index, ())):
            return None
        levels = self._displaced.get(index, [])
        wanted = (given, base_of(given))
        for holders, former in levels:
            if any(known() is each for known in holders for each in wanted if each is not None):
                return former
        return levels[-1][1] if levels else None

    def _displace(self, index: int) -> None:
        """Before other values come here: keep those that somebody holds, who may bring them back."""
        holders = [known for known in self._given.pop(index, ()) if known() is not None]
        levels = [level for level in self._displaced.get(index, ()) if any(known() is not None for known in level[0])]
        if holders:
            levels.append((holders, self._bucket.views[index].clone()))
        self._displaced[index] = levels

    def take_assigned(self) -> set[int]:
        """Copy parameters that lie elsewhere (`p.data = values`, `p.set_(...)`) to their places, and point them there.

        Returns:
            Their indices.

        Raises:
            ValueError: If one has another shape, dtype or device now; names it.
        """
        found = set()
        for index, (tensor, view) in enumerate(zip(self._bucket.tensors, self._bucket.views)):
            if tensor.is_set_to(view):
                continue
            values = GET_DATA(tensor)
            self._check_assigned(index, values)  # `p.set_(...)` has not been checked yet
            self._displace(index)
            view.copy_(self._apart(values))
            SET_DATA(tensor, view)
            found.add(index)
        self._assigned.clear()
        return found

    def _check_assigned(self, index: int, values: Tensor) -> None:
        segments, names = self._bucket.layout.segments, self._bucket.names
        segment, name, dtype, device = segments[index], names[index], self._bucket.dtype, self._bucket.device
        if values.shape != segment.shape or values.dtype != dtype or values.device != device:
            raise ValueError(
                f"parameter {name!r} is sharded: it cannot become a tensor of shape {tuple(values.shape)}, "
                f"{values.dtype} on {values.device}; it has shape {tuple(segment.shape)}, {dtype} on {device}. Change "
                "shapes, dtypes and devices before the engine is made, or after it has ended "
                "(zero_strategy.engine_of(module).close(gather=True), on all ranks)."
            )
        if self._lies_here(values) and not segment.offset <= values.storage_offset() < segment.stop and values.numel():
            other = next(n for n, s in zip(names, segments) if values.storage_offset() < s.stop)
            raise ValueError(
                f"parameter {name!r} is sharded: `p.data = ...` would tie it to {other!r}. Tie parameters before the "
                "engine is made, or assign a clone."
            )

    def _lies_here(self, values: Tensor) -> bool:
        return storage_key(values.untyped_storage()) == storage_key(self._bucket.flat.untyped_storage())

    def _apart(self, values: Tensor) -> Tensor:
        """The values; a copy if they lie in the bucket, where writing some would change others."""
        return values.clone() if self._lies_here(values) else values

    def close_aliases(self) -> None:
        """Forget what `p.data` gave, which lies elsewhere from now on; its counts stay."""
        for index, alias in self._aliases.items():
            self._closed[index] = self._closed.get(index, 0) + version_of(alias)
        self._aliases.clear()
