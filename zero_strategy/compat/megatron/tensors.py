"""Megatron's tensor utilities: wrapped and viewless ones, scratch and symmetric memory, those sharded in checkpoints.

    wrapped = WrappedTensor(logits)
    del logits                          # the wrapper holds the only reference now
    loss = head(wrapped)                # head: x = wrapped.unwrap(); ...; del x  frees the memory half-way

A caller's argument lives until the call returns, however early the callee is done with it; what is inside the wrapper
belongs to whoever unwraps it.

    scratch = GlobalMemoryBuffer()
    scratch.get_tensor((most, width), torch.bfloat16, "gathered")      # pre-sized: from now on the pointer is stable
    part = scratch.get_tensor((rows, width), torch.bfloat16, "gathered")

A buffer belongs to a name, a dtype and a device, and grows when more is asked for than it has. Nothing is cleared.
Two users of one name at one time share its memory, so they take names of their own.

A view keeps a reference to its base (`_base`), also after its `.data` was replaced. A pipeline that wants to free an
output's memory and keep its place in the graph (`tensor.data = empty`) needs one without a base.

    hidden = make_viewless_tensor(layer_output.transpose(0, 1), requires_grad=True, keep_graph=True)
    send(hidden)
    safely_set_viewless_tensor_data(hidden, torch.empty(1))     # the memory is free, hidden.grad_fn is not

Symmetric memory is there on GPUs that reach each other (NVLink). Elsewhere callers get None, and take ordinary memory.

`ShardedTensor` describes a rank's part of a tensor for a checkpoint:

    global_shape             of the full tensor
    axis_fragmentations      into how many equal parts each of its axes is cut
    global_offset            where this part begins
    replica_id               which copy of the part this is; the one of all zeros is written
    prepend_axis_num         leading axes that the rank's own tensor does not have (a layer's number, say)

Two functions build one:

    make_tp_sharded_tensor_for_checkpoint    one axis is divided among tensor-parallel ranks
    make_sharded_tensor_for_checkpoint       every rank has all of it

Data- and context-parallel ranks have copies, of which the first is written. A DTensor is divided along its mesh, too:
inside of what its tensor-parallel rank has.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.compat.megatron.groups import ParallelGroups, get_pg_rank, get_pg_size
from zero_strategy.fsdp.dtensor import get_data_parallel_group_if_dtensor, is_dtensor, to_local_if_dtensor
from zero_strategy.runtime.torch_private import base_of, symmetric_memory


class WrappedTensor:
    """One reference to a tensor, to be taken out once.

    Args:
        tensor: What is handed on.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def unwrap(self) -> Tensor:
        """The tensor, of which this object keeps nothing.

        Raises:
            RuntimeError: If it was taken out before.
        """
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            raise RuntimeError("this WrappedTensor was unwrapped before; it hands its tensor out once, to one owner")
        return tensor


Key = tuple[str, torch.dtype, torch.device]


class GlobalMemoryBuffer:
    """Scratch memory by name.

    Args:
        device: Where; default: the current CUDA device at each call, the CPU where there is none.

    Attributes:
        buffer: The whole 1-D buffers, by name, dtype and device.
    """

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self.buffer: dict[Key, Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """The beginning of the buffer of this name, in the asked-for shape; contiguous, with whatever it held before.

        Args:
            tensor_shape: Any shape, also of no elements.
            dtype: Of the elements; buffers of one name and two dtypes do not share memory.
            name: Whose buffer.
            mem_alloc_context: Makes a context to allocate in (a memory pool, say); entered only when memory is taken.

        Raises:
            ValueError: If a dimension is negative.
        """
        shape = tuple(tensor_shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"tensor_shape {list(shape)} of scratch buffer {name!r} has a negative dimension")
        needed = prod(shape)
        device = self._where()
        key = (name, dtype, device)
        held = self.buffer.get(key)
        if held is None or held.numel() < needed:
            # Given up first: the old and the new one would otherwise be there at the same time.
            held = None
            self.buffer.pop(key, None)
            with nullcontext() if mem_alloc_context is None else mem_alloc_context():
                held = self.buffer[key] = torch.empty(needed, dtype=dtype, device=device)
        return held[:needed].view(shape)

    def clear(self) -> None:
        """Give all buffers up; their memory is free once nobody holds a tensor of it."""
        self.buffer.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(held.numel() * held.element_size() for held in self.buffer.values())

    def _where(self) -> torch.device:
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


T = TypeVar("T")


def _kernel_make_viewless_tensor(inp: Tensor, requires_grad: bool) -> Tensor:
    """A leaf of the same memory, shape and strides as `inp`, which is no view of it.

    Args:
        inp: Any tensor.
        requires_grad: Of the result.
    """
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


class MakeViewlessTensor(torch.autograd.Function):
    """A viewless tensor with the graph of its input: gradients pass through as they are."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        """See `_kernel_make_viewless_tensor`."""
        return _kernel_make_viewless_tensor(inp, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """The gradient itself; the flag has none."""
        return grad_output, None


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """`inp` if it is no view, else a tensor of the same memory that is none.

    Args:
        inp: Any tensor.
        requires_grad: Of the result, where it is a new leaf.
        keep_graph: Gradients of the result reach `inp`; otherwise it is a leaf.
    """
    if base_of(inp) is None:
        return inp
    if keep_graph:
        out: Tensor = MakeViewlessTensor.apply(inp, requires_grad)
        return out
    return _kernel_make_viewless_tensor(inp, requires_grad)


def assert_viewless_tensor(tensor: T, extra_msg: str | None = None) -> T:
    """`tensor` itself, if it is no view; each element of a list likewise, and anything else unchecked.

    Args:
        tensor: A tensor, a list, or another object.
        extra_msg: Ends the message.

    Raises:
        AssertionError: If it is a view.
    """
    if isinstance(tensor, list):
        for element in tensor:
            assert_viewless_tensor(element, extra_msg)
    elif isinstance(tensor, Tensor) and (base := base_of(tensor)) is not None:
        raise AssertionError(
            f"this tensor of shape {list(tensor.shape)} is a view of one of shape {list(base.shape)}, whose "
            "memory it would keep; make_viewless_tensor() makes it one that is none"
            + (f". {extra_msg}" if extra_msg else "")
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """`tensor.data = new_data_tensor`, which frees memory only where `tensor` is no view.

    Args:
        tensor: Keeps its place in the graph.
        new_data_tensor: What it shows from now on.

    Raises:
        AssertionError: If `tensor` is a view; nothing has changed then.
    """
    assert_viewless_tensor(
        tensor, f"Its data cannot be replaced by a tensor of shape {list(new_data_tensor.shape)} to free memory"
    )
    tensor.data = new_data_tensor


logger = logging.getLogger(__name__)


class GlobalSymmetricMemoryBuffer:
    """One such buffer, of which tensors are the beginning; one tensor is in use at a time. A collective.

    Args:
        size_in_mb: Its size in units of 2**20 bytes.
        process_group: The ranks, all of which make it.

    Attributes:
        symm_buffer: The bytes (1-D uint8), or None where there is no symmetric memory.
        symm_mem_hdl: torch's handle, for collectives; or None.
        reason: Why there is none.

    Raises:
        ValueError: If the size is not positive.
    """

    def __init__(self, size_in_mb: float, process_group: dist.ProcessGroup | None) -> None:
        if not size_in_mb > 0:
            raise ValueError(f"size_in_mb must be positive, not {size_in_mb}")
        self.symm_buffer: Tensor | None = None
        self.symm_mem_hdl: Any = None
        self.reason = _unavailable(process_group)
        if self.reason is None:
            try:
                self._open(int(size_in_mb * 2**20), process_group)
            except (RuntimeError, ImportError) as error:  # the driver's word: no fabric, no access between peers
                self.symm_buffer = self.symm_mem_hdl = None
                self.reason = f"{type(error).__name__}: {error}"
        if self.reason is not None:
            logger.info("no symmetric memory: %s", self.reason)

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The beginning of the buffer in the asked-for shape; None if it is too small, or there is none."""
        numel = prod(tensor_shape)
        if not self._can_allocate(numel, dtype):
            return None
        return self._allocate(numel, dtype).view(tuple(tensor_shape))

    def _can_allocate(self, numel: int, dtype: torch.dtype) -> bool:
        """True if so many elements fit."""
        return self.symm_buffer is not None and numel * dtype.itemsize <= self.symm_buffer.numel()

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first so many elements, 1-D; ask `_can_allocate` first."""
        assert self.symm_buffer is not None
        return self.symm_buffer[: numel * dtype.itemsize].view(dtype)

    def _open(self, nbytes: int, group: dist.ProcessGroup | None) -> None:
        symmetric = symmetric_memory()
        device = torch.device("cuda", torch.cuda.current_device())
        buffer = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self.symm_mem_hdl = symmetric.rendezvous(buffer, group or dist.group.WORLD)
        self.symm_buffer = buffer


def _unavailable(group: dist.ProcessGroup | None) -> str | None:
    """Guess before anything is tried; the same on all ranks of one kind of machine."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not dist.is_initialized():
        return "torch.distributed is not initialized"
    if "nccl" not in dist.get_backend(group):
        return f"the group's backend is {dist.get_backend(group)}"
    return None


ReplicaId = int | tuple[int, ...]


class AxisOffset(NamedTuple):
    """One axis of the full tensor that is divided evenly."""

    axis: int
    place: int
    """This rank's, of so many:"""
    parts: int


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """See above.

    Attributes:
        key: The tensor's name in the checkpoint.
        data: This rank's part, without the prepended axes; None: its description alone.
        dtype: Of its elements.
        local_shape: Shape of `data`.
        global_shape: With the prepended axes.
        global_offset: Likewise.
        axis_fragmentations: Likewise.
        replica_id: An integer, or several.
        prepend_axis_num: Number of prepended axes.
        allow_shape_mismatch: The full tensor may have another shape in the checkpoint (a padded vocabulary).
    """

    key: str
    data: Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
    ) -> ShardedTensor:
        """The part of a rank, from its places along the divided axes.

        Args:
            key: The tensor's name.
            data: This rank's part.
            rank_offsets: (axis of the full tensor, this rank's place, places), once per axis at most.
            replica_id: Which copy.
            prepend_axis_num: Leading axes that `data` does not have; each needs an offset.
            allow_shape_mismatch: See above.

        Raises:
            ValueError: If an axis is not there, is named twice, or a place lies outside.
        """
        local = (1,) * prepend_axis_num + tuple(data.shape)
        places = {offset.axis: offset for offset in _checked(key, rank_offsets, len(local), prepend_axis_num)}
        ones = [places.get(axis, AxisOffset(axis, 0, 1)) for axis in range(len(local))]
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(size * place.parts for size, place in zip(local, ones, strict=True)),
            tuple(size * place.place for size, place in zip(local, ones, strict=True)),
            tuple(place.parts for place in ones),
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
        )

    @property
    def is_main_replica(self) -> bool:
        """True if this copy is the one that is written."""
        return self.replica_id == 0 if isinstance(self.replica_id, int) else not any(self.replica_id)

    def global_slice(self) -> tuple[slice | int, ...]:
        """Place of the part: `whole[part.global_slice()]` has the shape of `data`."""
        places: list[slice | int] = list(self.global_offset[: self.prepend_axis_num])
        lengths = zip(self.global_offset[self.prepend_axis_num :], self.local_shape, strict=True)
        return (*places, *(slice(start, start + length) for start, length in lengths))

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """The part as runs of neighbouring elements of the whole, which is what writers of files take.

        Yields:
            (first element in the flattened whole, one past the last, first element in the flattened part).
        """
        local = (1,) * self.prepend_axis_num + self.local_shape
        if not prod(local):
            return
        whole = len(local)
        while whole > 0 and local[whole - 1] == self.global_shape[whole - 1]:
            whole -= 1  # trailing axes that are all there
        outer, axis = max(whole - 1, 0), max(whole - 1, 0)
        inner = prod(self.global_shape[axis + 1 :])
        length = (local[axis] if local else 1) * inner
        strides = [prod(self.global_shape[dim + 1 :]) for dim in range(len(local))]
        begin = sum(offset * stride for offset, stride in zip(self.global_offset, strides, strict=True))
        for number, place in enumerate(itertools.product(*(range(size) for size in local[:outer]))):
            start = begin + sum(index * stride for index, stride in zip(place, strides))
            yield start, start + length, number * length


def assemble(parts: Iterable[ShardedTensor]) -> Tensor:
    """The full tensor from the parts of all ranks; other copies than the main ones are passed over.

    Raises:
        ValueError: If parts are of different tensors, overlap, or leave elements out.
    """
    main = [part for part in parts if part.is_main_replica]
    if not main:
        raise ValueError("there is no part with a replica_id of zeros")
    first = main[0]
    whole = torch.empty(first.global_shape, dtype=first.dtype)
    seen = torch.zeros(first.global_shape, dtype=torch.bool)
    for part in main:
        if (part.key, part.global_shape, part.dtype) != (first.key, first.global_shape, first.dtype):
            raise ValueError(
                f"a part of {part.key!r}, {part.dtype} {list(part.global_shape)}, among those of {first.key!r}, "
                f"{first.dtype} {list(first.global_shape)}"
            )
        if part.data is None:
            raise ValueError(f"{part.key!r}: a part has no data")
        place = part.global_slice()
        if bool(seen[place].any()):
            raise ValueError(f"{part.key!r}: elements at {list(part.global_offset)} are in two parts")
        whole[place] = part.data.detach().to(whole.device)
        seen[place] = True
    if not bool(seen.all()):
        raise ValueError(f"{first.key!r}: {int((~seen).sum())} of {seen.numel()} elements are in no part")
    return whole


def _checked(key: str, offsets: Iterable[tuple[int, int, int]], axes: int, prepended: int) -> Iterator[AxisOffset]:
    named = set[int]()
    for given in offsets:
        offset = AxisOffset(*given)
        if not 0 <= offset.axis < axes or offset.axis in named:
            what = "twice" if offset.axis in named else f"but it has axes 0 to {axes - 1}"
            raise ValueError(f"{key!r}: an offset is for axis {offset.axis}, {what}")
        if not 0 <= offset.place < offset.parts:
            raise ValueError(f"{key!r}: place {offset.place} of {offset.parts} along axis {offset.axis}")
        named.add(offset.axis)
        yield offset
    if missing := set(range(prepended)) - named:
        raise ValueError(f"{key!r}: prepended axes {sorted(missing)} have no offsets")


Offsets = tuple[tuple[int, int, int], ...]


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    *,
    groups: ParallelGroups | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """This rank's part of a tensor whose axis `tp_axis` is divided among tensor-parallel ranks.

    Args:
        tensor: The part, without prepended axes; a DTensor is the part, and divided once more.
        key: The tensor's name.
        tp_axis: The axis of `tensor`.
        replica_id: Which copy it is; default: (0, 0, data-parallel rank), the last 0 for a DTensor.
        prepend_offsets: (axis, place, places) of new leading axes.
        groups: The run's groups, taken where these are not given:
        kwargs: `tp_group` and `dp_cp_group`, and options of `ShardedTensor.from_rank_offsets`.

    Raises:
        ValueError: See `ShardedTensor.from_rank_offsets`; or a DTensor is divided unevenly.
    """
    tp_group, dp_group, options = _groups(groups, kwargs)
    axis = tp_axis % tensor.dim() if tensor.dim() else tp_axis
    places = {axis: (get_pg_rank(tp_group), get_pg_size(tp_group))}
    return _build(tensor, key, places, prepend_offsets, replica_id, (0, 0), dp_group, options)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    groups: ParallelGroups | None = None,
    **kwargs: Any,
) -> ShardedTensor:
    """A tensor that every tensor- and data-parallel rank has all of.

    Args:
        tensor: All of it; of a DTensor, what its mesh has together.
        key: The tensor's name.
        prepend_offsets: (axis, place, places) of new leading axes.
        replica_id: Which copy it is; default: (0, tensor-parallel rank, data-parallel rank), the last 0 for a DTensor.
        groups: The run's groups, taken where these are not given:
        kwargs: `tp_group` and `dp_cp_group`, and options of `ShardedTensor.from_rank_offsets`.

    Raises:
        ValueError: See `ShardedTensor.from_rank_offsets`; or a DTensor is divided unevenly.
    """
    tp_group, dp_group, options = _groups(groups, kwargs)
    return _build(tensor, key, {}, prepend_offsets, replica_id, (0, get_pg_rank(tp_group)), dp_group, options)


def _build(
    tensor: Tensor,
    key: str,
    places: dict[int, tuple[int, int]],
    prepend: Offsets,
    replica_id: ReplicaId | None,
    replica: tuple[int, int],
    dp_group: Any,
    options: dict[str, Any],
) -> ShardedTensor:
    copy = get_pg_rank(dp_group)
    if is_dtensor(tensor):
        copy = 0 if (axis := _dtensor_axis(tensor, key)) is not None else copy
        group = get_data_parallel_group_if_dtensor(tensor)
        if axis is not None:
            index, parts = places.get(axis, (0, 1))
            size = get_pg_size(group)
            places[axis] = (index * size + get_pg_rank(group), parts * size)
    offsets = [(axis + len(prepend), index, parts) for axis, (index, parts) in places.items()]
    return ShardedTensor.from_rank_offsets(
        key,
        to_local_if_dtensor(tensor),
        *prepend,
        *offsets,
        replica_id=(*replica, copy) if replica_id is None else replica_id,
        prepend_axis_num=len(prepend),
        **options,
    )


def _dtensor_axis(tensor: Any, key: str) -> int | None:
    """The axis along which a DTensor is divided; None if its ranks have copies."""
    shards = [placement for placement in tensor.placements if placement.is_shard()]
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{key!r}: a DTensor with placements {list(tensor.placements)} is a sum that is not taken yet")
    if not shards:
        return None
    group = get_data_parallel_group_if_dtensor(tensor)
    axis = int(shards[0].dim)
    if tensor.shape[axis] % get_pg_size(group):
        raise ValueError(
            f"{key!r}: axis {axis} of a DTensor of shape {list(tensor.shape)} is not divided evenly among "
            f"{get_pg_size(group)} ranks; gather it (get_full_tensor_if_necessary, full_tensor) first"
        )
    return axis


def _groups(groups: ParallelGroups | None, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The tensor-parallel group, that of copies, and what is left."""
    found, options = groups or ParallelGroups(), dict(kwargs)
    tensor, data = options.pop("tp_group", None), options.pop("dp_cp_group", None)
    return tensor or found.tensor, data or found.data_context, options
