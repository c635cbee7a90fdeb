"""Weights that reach forward and backward in the form that their layers cast them to, at stage 3.

Each rank casts its slice, and the codes are gathered: fewer bytes than values, and the bits that the layers would have
made of the gathered values. The parameters stay released meanwhile. What a layer asks torch to do with a released
parameter arrives in `fsdp/released.py`, and it is given a tensor of the codes there, whose gradient is the parameter's.
Whoever else reads the parameter gets its values, gathered in the dtype that they have; from then on the layer casts
these itself. So nothing hides a parameter, nobody but layers computes with rounded values, and what is written to a
parameter counts.

Kinds: `fsdp/float8_gather.py`, `fsdp/autocast_gather.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import PendingWork
from zero_strategy.comm.mesh import ShardRanks
from zero_strategy.fsdp.layout import BucketLayout, Piece
from zero_strategy.fsdp.released import CountedWrites
from zero_strategy.fsdp.shard_storage import ShardStorage
from zero_strategy.runtime.torch_private import in_backward, outside_transforms, version_of, without_grad


class CodedBucket(Protocol):
    """Weights of such layers alone; see `ParameterBucket`."""

    names: list[str]
    parameters: list[nn.Parameter]
    ranks: ShardRanks
    layout: BucketLayout
    slice: slice
    slice_pieces: tuple[Piece, ...]
    shard: ShardStorage
    flat: Tensor
    dtype: torch.dtype
    device: torch.device
    gathered: bool
    generation: int
    editors: int
    codes: GatheredCodes | None

    @property
    def writes(self) -> CountedWrites: ...


class GatheredCodes(ABC):
    """The whole weights of one bucket as their layers cast them, while a forward or a backward uses them.

    Args:
        bucket: Weights of such layers alone.
        container: A dtype with the codes' number of bytes, which collectives know.

    Attributes:
        gathered: All codes are here.
        asked: Indices of the parameters that layers have asked for in the present forward of their unit.
        on_demand: Gathers them where a backward finds them released; the unsharder's.
        read_on_demand: Gathers the bucket's values, as `unshard_on_demand` does; the unsharder's.
    """

    def __init__(self, bucket: CodedBucket, container: torch.dtype) -> None:
        self.bucket = bucket
        self.gathered = False
        self.asked: set[int] = set()
        self.on_demand: Callable[[], object] = _nothing
        self.read_on_demand: Callable[[], object] = _nothing
        self._codes = torch.empty(bucket.layout.numel, dtype=container, device=bucket.device)
        self._codes.untyped_storage().resize_(0)
        self._counts: list[int] = []
        """Counts of writes to the parameters as codes were made."""
        self._pending: PendingWork | None = None

    @property
    def names(self) -> list[str]:
        """Names of the weights, in bucket order."""
        return self.bucket.names

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights, in bucket order."""
        return self.bucket.parameters

    @property
    def pending(self) -> bool:
        """True if a gather is under way."""
        return self._pending is not None

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with memory of its own, with its category in the ledger; codes may be without memory."""
        yield "gather buffers", self._codes

    # ---- the kind ----

    @abstractmethod
    def wanted(self) -> bool:
        """True if the layers of a forward that begins now would cast their weights, so far as is known."""

    @abstractmethod
    def answer(self, index: int, func: Callable[..., Any], asker: FrameType | None) -> Tensor | None:
        """The weight as its layer asks for it while it is released; None where values are wanted.

        Args:
            index: Of the parameter in the bucket.
            func: A function of torch that is called with the parameter.
            asker: The frame that asks.
        """

    @abstractmethod
    def _prepare(self) -> None:
        """Make ready to cast slices. A collective perhaps."""

    @abstractmethod
    def _cast(self, index: int, values: Tensor, codes: Tensor) -> None:
        """Cast a part of this rank's slice, or of it all, of the parameter `index`."""

    @abstractmethod
    def _prepare_whole(self, index: int, values: Tensor) -> None:
        """Make ready to cast the whole values of the parameter `index`, which are here."""

    # ---- gather and release ----

    def start_unshard(self) -> None:
        """Begin to gather, unless all is here or on its way."""
        if not self.gathered and self._pending is None:
            self._pending = self._gather(empty=True)

    def finish_unshard(self) -> None:
        """Wait until all is here."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            self.gathered = True

    def refresh(self) -> None:
        """Bring new values into what is held whole. A collective then."""
        if self.gathered:
            self._gather(empty=False).wait()

    def invalidate(self) -> None:
        """Values are about to change, or have, on all ranks."""
        self.finish_unshard()  # what is sent may be what changes

    def release(self) -> None:
        """Free all codes."""
        self.finish_unshard()
        if self.gathered:
            self.gathered = False
            self._codes.untyped_storage().resize_(0)

    def need(self) -> None:
        """Have the codes here: a graph computes with them. A collective where nothing of the weights is here."""
        self.finish_unshard()
        if self.bucket.gathered:
            # As a layer casts the values that it finds here: somebody may have written to them.
            if not self.gathered or self._counts != self.bucket.writes.counts():
                self._cast_values()
        elif not self.gathered:
            self.on_demand()

    @outside_transforms
    @without_grad
    def _cast_values(self) -> None:
        """Make codes of values that are whole here."""
        with torch.inference_mode(False):
            if not self.gathered:
                self._codes.untyped_storage().resize_(self._codes.nbytes)
            for index, (parameter, segment) in enumerate(
                zip(self.bucket.parameters, self.bucket.layout.segments, strict=True)
            ):
                values = parameter.detach().reshape(-1)
                self._prepare_whole(index, values)
                self._cast(index, values, self._codes[segment.offset : segment.stop])
        self.gathered, self._counts = True, self.bucket.writes.counts()

    def _gather(self, *, empty: bool) -> PendingWork:
        with torch.inference_mode(False):  # whose tensors could not be saved for a backward
            return self._cast_and_gather(empty)

    @outside_transforms
    @without_grad
    def _cast_and_gather(self, empty: bool) -> PendingWork:
        self._prepare()
        self._counts = self.bucket.writes.counts()
        if empty:
            self._codes.untyped_storage().resize_(self._codes.nbytes)
        own = self._codes[self.bucket.slice]
        for piece in self.bucket.slice_pieces:
            values = self.bucket.shard.read(piece.offset, piece.offset + piece.numel)
            self._cast(piece.index, values, own[piece.offset : piece.offset + piece.numel])
        return self.bucket.ranks.gather.all_gather(self._codes, of=self.bucket.names)

    # ---- what graphs hold ----

    def values_like(self, index: int, codes: Tensor) -> Tensor:
        """The values that lie in the parameter as these codes lie among the bucket's. A collective if they are away."""
        if not self.bucket.gathered:
            self.read_on_demand()
        if not self.bucket.gathered:
            raise RuntimeError(
                f"parameter {self.bucket.names[index]!r} is released (stage 3), and read outside of a forward and a "
                "backward by way of what autograd has saved. Read it inside `with "
                "zero_strategy.sharding.GatheredParameters(parameters):` on all ranks"
            )
        return self.bucket.flat.as_strided(codes.size(), codes.stride(), codes.storage_offset())


def _nothing() -> None:
    """Gather nothing: there is no unsharder."""


class WeightPart:
    """One weight of a bucket, as graphs hold it: without the engine.

    Args:
        source: The bucket's codes.
        index: Of the parameter in it.
    """

    def __init__(self, source: GatheredCodes, index: int) -> None:
        self._source, self.index = ref(source), index
        self._parameter = source.parameters[index]
        self._version = version_of(self._parameter)

    @property
    def source(self) -> GatheredCodes:
        """The bucket's codes.

        Raises:
            RuntimeError: If the module is gone.
        """
        if (source := self._source()) is None:
            raise RuntimeError(
                "backward through a module that is gone, and whose weights stage 3 has released: keep the module until "
                "backward is over"
            )
        return source

    def check(self) -> None:
        """Raise if a backward would find other values than its forward, as torch does for what it has saved."""
        if in_backward() and self._is_changed():
            raise RuntimeError(
                f"parameter {self.source.names[self.index]!r}, which a forward has used, has been modified by "
                "an inplace operation before its backward"
            )

    def _is_changed(self) -> bool:
        return version_of(self._parameter) != self._version
