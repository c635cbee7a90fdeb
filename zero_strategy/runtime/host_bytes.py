"""Host memory at aligned addresses, and reads of files into flat tensors in bounded memory.

A write with O_DIRECT needs its memory, its file offset and its length at multiples of the page size (open(2)). Memory
whose address is congruent to the file offset lets all whole pages of a range be written without another copy.

A CPU tensor is read into its own memory. Any other device goes through one host buffer
of `chunk_bytes`, made at first use and kept for the next tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import xxhash

from zero_strategy.runtime.compute_device import on

PAGE = 4096
"""Bytes; a multiple of the logical block size of any disk in use."""


class HeldBytes(Protocol):
    """Memory of the host, which lasts as long as this object."""

    bytes: torch.Tensor


class AlignedArena:
    """One reusable stretch of host memory that hands out views at addresses congruent to given offsets.

    Args:
        make: Gives memory of so many bytes, such as page-locked memory for copies from a device; None: plain memory.
    """

    def __init__(self, make: Callable[[int], HeldBytes] | None = None) -> None:
        self._make = make
        self._block: HeldBytes | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._at = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.numel()

    def reserve(self, nbytes: int) -> None:
        """Begins anew with room for `nbytes`; all earlier views are given up. It never shrinks."""
        self._at = 0
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._block = None
            if self._make is None:
                self._memory = _in_large_pages(nbytes)
            else:
                self._block = self._make(nbytes)
                self._memory = self._block.bytes

    def take(self, nbytes: int, offset: int) -> torch.Tensor:
        """The next `nbytes` whose address is congruent to `offset` modulo a page.

        Returns:
            uint8, 1-D; its content is whatever was there.
        """
        lead = (offset - self._memory.data_ptr() - self._at) % PAGE
        begin = self._at + lead
        assert begin + nbytes <= self._memory.numel(), "reserve more"
        self._at = begin + nbytes
        return self._memory[begin : begin + nbytes]


def _in_large_pages(nbytes: int) -> torch.Tensor:
    """Memory that the kernel may keep in large pages: a write past the page cache looks every page up and holds it."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def is_aligned(memory: torch.Tensor, offset: int) -> bool:
    """True if CPU memory lies as bytes at `offset` of a file do."""
    return (memory.data_ptr() - offset) % PAGE == 0


if sys.byteorder != "little":
    raise ImportError("checkpoints are little-endian, and this machine is not")

Seen = Callable[[memoryview], object]
# https://docs.python.org/3/c-api/memoryview.html; an array type of ctypes per length would cost 20 times as much.
_VIEW: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_VIEW.argtypes, _VIEW.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object
_WRITABLE = 0x200


class Transfer:
    """Positional reads.

    Args:
        chunk_bytes: most bytes moved in one system call, and the size of the host buffer.
    """

    def __init__(self, chunk_bytes: int = 32 << 20) -> None:
        if chunk_bytes <= 0:
            raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
        self.chunk_bytes = chunk_bytes
        self._buffer: torch.Tensor | None = None

    def read(self, fd: int, out: torch.Tensor, offset: int, seen: Seen | None = None) -> None:
        """Fills a flat tensor.

        Args:
            fd: descriptor open for reading.
            out: 1-D, contiguous.
            offset: byte offset in the file of the first element.
            seen: is given all bytes in their order.

        Raises:
            EOFError: if the file ends too early.
        """
        flat = as_bytes(out)
        for begin in range(0, flat.numel(), self.chunk_bytes):
            chunk = flat[begin : begin + self.chunk_bytes]
            host = chunk if _on_host(chunk) else self._staging(chunk)
            _read_all(fd, memory_of(host), offset + begin)
            if seen is not None:
                seen(memory_of(host))
            if host is not chunk:
                chunk.copy_(host)

    def _staging(self, chunk: torch.Tensor) -> torch.Tensor:
        if self._buffer is None:
            with on(chunk.device):
                pinned = chunk.device.type == "cuda"
                self._buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[: chunk.numel()]


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a flat tensor: uint8, 1-D."""
    assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type != "meta"
    return tensor.detach().view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a CPU byte tensor, which the caller must keep alive."""
    assert tensor.dtype == torch.uint8 and tensor.device.type == "cpu" and tensor.is_contiguous()
    if tensor.numel() == 0:
        return memoryview(b"")
    view: memoryview = _VIEW(tensor.data_ptr(), tensor.numel(), _WRITABLE)
    return view


def _read_all(fd: int, memory: memoryview, offset: int) -> None:
    while memory:
        done = os.preadv(fd, [memory], offset)
        if done == 0:
            raise EOFError(f"the file ends {len(memory)} bytes too early")
        memory, offset = memory[done:], offset + done


def checksum_of(content: bytes | memoryview) -> str:
    """The checksum of some bytes."""
    return str(xxhash.xxh3_64_hexdigest(content))
