"""Megatron's tensor utilities: wrapped and viewless tensors, named scratch and symmetric memory.

`WrappedTensor`.

    wrapped = WrappedTensor(logits)
    del logits                          # the wrapper holds the only reference now
    loss = head(wrapped)                # head: x = wrapped.unwrap(); ...; del x  frees the memory half-way

A caller's argument lives until the call returns, however early the callee is done with it; what is inside the wrapper
belongs to whoever unwraps it.

`GlobalMemoryBuffer`.

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

torch offers it on GPUs that reach each other (NVLink). Everywhere else there is none, and whoever asks gets None and
takes ordinary memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
    """The same, with the graph of its input: gradients pass through as they are."""

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
