"""Activation offload: what autograd keeps inside of units waits in host memory, fetched one unit ahead.

Host buffers have the size that was asked for, and serve the next request of that size again.

    forward     unit 1 | unit 2           | unit 3
                       | 1 to the host    | 2 to the host
    backward    unit 3        | unit 2        | unit 1
                2 comes back  | 1 comes back

What moves is memory, not tensors: views of the same memory move it once, and come back as views of one copy. On a GPU
copies have two streams of their own, one each way. Memory of less than a page stays, and so do parameters, buffers, and
tensors of other kinds than plain ones.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.offload.tier import HeldCopy, HeldForCopies, HostMemory, Streams, streams_of
from zero_strategy.runtime.host_bytes import PAGE
from zero_strategy.runtime.torch_private import is_fake, storage_key, version_of

Storages = dict[StorageWeakRef, int]
"""Bytes of each. While a reference is there, no other memory gets the same key."""


def add_storage(found: Storages, tensor: Tensor, known: frozenset[int]) -> None:
    """Note the memory of a tensor that is kept, unless it is among `known`."""
    counts = is_plain(tensor) or is_fake(tensor)
    if counts and storage_key(tensor.untyped_storage()) not in known:
        storage = tensor.untyped_storage()
        found[StorageWeakRef(storage)] = storage.nbytes()


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor is strided memory of its own, so that its bytes can be counted and copied."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def model_storages(model: ShardedModel) -> frozenset[int]:
    """The memory of a model's parameters; a bucket has the same one until a numpy array shares it."""
    return storage_keys(bucket.flat for bucket in model.buckets)


def storage_keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Keys by which the memory of living tensors is known."""
    return frozenset(storage_key(tensor.untyped_storage()) for tensor in tensors)


class HostBlock:
    """Host memory for some bytes, and the last copy from or to it.

    Attributes:
        memory: The memory.
        last: The event of that copy; None: there was none, or it was over at once.
    """

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.last: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes that are taken, whole pages."""
        return self.memory.nbytes

    @property
    def unused(self) -> bool:
        """True if no copy can be under way, as far as the host knows without waiting."""
        return self.last is None or bool(self.last.query())


class HostBlocks:
    """Gives and takes back blocks; those that a whole pass did without are given up.

    Args:
        pinned: Page-lock them for copies from and to a CUDA device.

    Attributes:
        taken: Bytes of all blocks, whole pages.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[tuple[int, HostBlock]]] = {}
        self._pass = self._lent = 0
        self.taken = 0

    def take(self, nbytes: int) -> HostBlock:
        """A block for `nbytes`, with whatever is in it; an earlier copy from or to it may still be under way."""
        if not self._lent:
            self._begin_pass()
        self._lent += 1
        rounded = HostMemory.rounded(nbytes)
        free = self._free.get(rounded)
        if free:
            return free.pop()[1]
        memory = HostMemory(nbytes, pinned=self._pinned)
        if self._pinned and not memory.pinned:
            # A limit on locked memory would refuse the next ones, too.
            self._pinned = False
            warnings.warn(
                f"offload.activations: copies wait for pageable memory: {memory.reason} (see `ulimit -l`)",
                stacklevel=2,
            )
        self.taken += memory.nbytes
        return HostBlock(memory)

    def give_back(self, block: HostBlock) -> None:
        """A block that nobody needs any longer; the device's copies from and to it may still be under way."""
        self._lent -= 1
        self._free.setdefault(block.nbytes, []).append((self._pass, block))

    def _begin_pass(self) -> None:
        """Nothing is lent: drop what the pass before did not need.

        Memory is not unmapped under a copy, and the host does not wait for one: such a block stays for one more pass.
        """
        self._pass += 1
        for size, blocks in list(self._free.items()):
            used = [each for each in blocks if each[0] >= self._pass - 1 or not each[1].unused]
            self.taken -= size * (len(blocks) - len(used))
            self._free[size] = used
            if not used:
                del self._free[size]


class ActivationStore:
    """Place of units' activations while they wait.

    Args:
        device: Where the module computes.
        parameters: Memory that never moves.

    Attributes:
        blocks: The host memory.
        fetched: How many blocks were brought back ahead of their use, and on demand.
    """

    def __init__(self, device: torch.device, parameters: frozenset[int]) -> None:
        self.blocks = HostBlocks(pinned=device.type == "cuda")
        self.parameters = parameters
        self.fetched = {"ahead": 0, "on demand": 0}
        self.copies = _Copies(streams_of(device))
        self.moved: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], _Moved] = weakref.WeakValueDictionary()
        self._last: weakref.ref[_UnitMemory] | None = None

    def unit(self, module: nn.Module) -> AbstractContextManager[object]:
        """Inside, one forward of a unit runs."""
        self.copies.begin_unit()
        before = None if self._last is None else self._last()
        memory = _UnitMemory(self, self.parameters | storage_keys(module.buffers()), before)
        self._last = weakref.ref(memory)
        return saved_tensors_hooks(memory.pack, memory.unpack)


class _Kept(NamedTuple):
    """A tensor that autograd keeps: how it lies in memory that has moved; and its unit's, which lives as long."""

    unit: _UnitMemory
    moved: _Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _UnitMemory:
    """The memory of one forward of a unit. It lives as long as something of it is kept."""

    def __init__(self, store: ActivationStore, stays: frozenset[int], before: _UnitMemory | None) -> None:
        self.store, self._stays = store, stays
        # A graph does not keep the one before it alive.
        self._before = None if before is None else weakref.ref(before)
        self._moved: weakref.WeakSet[_Moved] = weakref.WeakSet()
        self._fetched = False

    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Called by autograd for each tensor that it keeps."""
        # A parameter stays itself, since its data may be another tensor by then (stage 3). A result that is kept as
        # itself would hold itself, and all that leads to it, where no backward follows.
        here = tensor if tensor.is_leaf else tensor.detach()
        if not is_plain(tensor) or tensor.is_meta:
            return here
        storage = tensor.untyped_storage()
        # A block on the host takes at least a page.
        if storage.nbytes() < PAGE or storage_key(storage) in self._stays:
            return here
        # What is changed in place afterwards is other memory.
        key = (StorageWeakRef(storage), version_of(tensor))
        moved = self.store.moved.get(key)
        if moved is None:
            moved = self.store.moved[key] = _Moved(self.store, tensor)
        self._moved.add(moved)
        return _Kept(self, moved, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """Called by autograd when it needs one."""
        if isinstance(kept, Tensor):
            return kept
        # First, as it is needed at once: copies back have one stream.
        kept.moved.fetch("on demand")
        self.fetch_ahead()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch_ahead()
        memory = kept.moved.back()
        return torch.empty(0, dtype=kept.dtype, device=memory.device).set_(
            memory.untyped_storage(), kept.offset, kept.size, kept.stride
        )

    def fetch_ahead(self) -> None:
        """Begin to bring all of it back."""
        if not self._fetched:
            self._fetched = True
            self.store.copies.begin_return()
            for moved in list(self._moved):
                moved.fetch("ahead")


class _Moved:
    """Memory that is on the host. It is given back with the last tensor that is kept of it."""

    def __init__(self, store: ActivationStore, tensor: Tensor) -> None:
        self._fetches, self._copies, self._device = store.fetched, store.copies, tensor.device
        self._nbytes = tensor.untyped_storage().nbytes()
        self._block = store.blocks.take(self._nbytes)
        weakref.finalize(self, store.blocks.give_back, self._block)
        self._here: Tensor | None = None
        self._source: Tensor | None = None  # that of `here`, if it never went
        self._arriving: HeldCopy | None = None
        original = tensor.detach()  # has the same version counter
        self._version = version_of(original)
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(original.untyped_storage())
        self._leaving = self._copies.take_out(flat, self._block, keeps=original)

    def fetch(self, how: str) -> None:
        """Begin to bring it back, unless that has begun, or it has not gone yet."""
        if self._source is not None and version_of(self._source) != self._version:
            self._source = self._here = None  # changed in place since: the host has what it was
        if self._here is not None:
            return
        source = None if self._leaving is None else self._leaving.tensor
        if source is not None and version_of(source) == self._version:
            self._source = source
            self._here = torch.empty(0, dtype=torch.uint8, device=self._device).set_(source.untyped_storage())
            return
        self._fetches[how] += 1
        self._here = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._arriving = self._copies.bring_back(self._block, self._here)

    def back(self) -> Tensor:
        """The memory on the device, (bytes,), once it is there."""
        assert self._here is not None
        if self._arriving is not None:
            self._copies.await_return(self._arriving, self._here)
        elif self._leaving is not None:
            self._copies.await_departure(self._leaving, self._here)
        return self._here


_LEAVING = 2
"""Units whose memory is on the device in a forward: the one that computes, and the one before it, which goes."""


class _Copies:
    """Two streams of a device, to the host and back; without streams copies are made at once.

    The computing stream has taken all memory of the device, and waits for each copy before the last reference goes.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        # One each way, as a device can copy both ways at the same time.
        self._out: Any = None if streams is None else streams.new()
        self._in: Any = None if streams is None else streams.new()
        self._leaving = None if streams is None else HeldForCopies(streams)
        self._returning = None if streams is None else HeldForCopies(streams)

    def begin_unit(self) -> None:
        """A unit's forward begins: let go of the memory of those before the last one."""
        if self._leaving is not None and self._returning is not None:
            self._leaving.begin_group(_LEAVING)
            self._returning.end_all()  # of a backward that did not use all of it

    def begin_return(self) -> None:
        """A unit's memory begins to come back: the one after it is what computes."""
        if self._returning is not None:
            self._returning.begin_group(_LEAVING)

    def take_out(self, memory: Tensor, block: HostBlock, *, keeps: Tensor) -> HeldCopy | None:
        """Begin to copy bytes to a block; `keeps` holds them on the device until the copy is waited for."""
        target = block.memory.bytes[: memory.numel()]
        if self._streams is None or self._leaving is None:
            target.copy_(memory)
            return None
        # What computes may still be writing this memory.
        self._out.wait_stream(self._streams.current())
        if block.last is not None:
            self._out.wait_event(block.last)  # an earlier copy out of it, on its way back
        with self._streams.within(self._out):
            target.copy_(memory, non_blocking=True)
        block.last = self._out.record_event()
        return self._leaving.hold(keeps, block.last)

    def bring_back(self, block: HostBlock, memory: Tensor) -> HeldCopy | None:
        """Begin to copy a block's bytes to new memory of the computing stream."""
        source = block.memory.bytes[: memory.numel()]
        if self._streams is None or self._returning is None:
            memory.copy_(source)
            return None
        self._in.wait_event(block.last)  # what computes has waited for it, too, if it is one stream throughout
        self._in.wait_stream(self._streams.current())  # which may have used the memory for something else before
        with self._streams.within(self._in):
            memory.copy_(source, non_blocking=True)
        block.last = self._in.record_event()
        return self._returning.hold(memory, block.last)

    def await_return(self, copy: HeldCopy, memory: Tensor) -> None:
        """Let what is queued from now on see what has come back."""
        assert self._returning is not None
        self._returning.use(copy, memory)

    def await_departure(self, copy: HeldCopy, memory: Tensor) -> None:
        """Backward uses memory that has not gone yet; the queue need hold neither that nor what is older any more."""
        assert self._leaving is not None
        self._leaving.end_through(copy)
        self._leaving.use(copy, memory)
