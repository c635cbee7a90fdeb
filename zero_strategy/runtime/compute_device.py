"""The device that this process computes on: named with its index, current in the thread, asked for in one place.

CUDA has a current device per thread, 0 until somebody sets it. Calls that name no device mean that one: a stream that
is waited for, an event, the context that registering host memory opens, the GPU by which NCCL sends an object. In a
process whose model is on `cuda:3` each of them would silently be about another device. So

- an engine calls `occupy` when it is built, as `init_distributed` does: its device has an index, and is current;
- all code names the device that it means, by tensors or by what is below; a test finds calls that name none;
- work in other threads, where the current device is 0 again, goes by the same names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


def with_index(device: torch.device | str) -> torch.device:
    """The device as tensors there name it: a GPU with its index (default: the current one), the CPU without one.

    `torch.device("cuda")` is not equal to `torch.device("cuda:0")`, nor `cpu` to `cpu:0`, where tensors are the same.
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    return current_gpu() if device.type == "cuda" and device.index is None else device


def current_gpu() -> torch.device:
    """The current device of this thread."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_of_local_rank(local_rank: int) -> torch.device:
    """The GPU of a rank of this host, of those that it sees: `srun --gpus-per-task=1` shows each rank one, number 0."""
    return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))


def occupy(device: torch.device | str, group: Any = None) -> torch.device:
    """Compute on a device from now on: it becomes the current one of this thread.

    Args:
        device: Any; nothing is set for one that is no GPU.
        group: The default process group, if there is one.

    Returns:
        The device with its index.

    Raises:
        ValueError: If there is no such GPU, or the process group was made for another one.
    """
    device = with_index(device)
    if device.type != "cuda":
        return device
    seen = torch.cuda.device_count()
    if device.index >= seen:
        raise ValueError(
            f"the module is to be on {device}, and this process sees {seen} GPU(s), from 0 on; take the rank's own, "
            'counted modulo what is visible: torch.device("cuda", int(os.environ["LOCAL_RANK"]) % '
            "torch.cuda.device_count())"
        )
    bound = bound_device(group)
    if bound not in (None, device):
        raise ValueError(
            f"the process group was made for {bound} (init_process_group(device_id=...)), and the module is on "
            f'{device}; add model.to("{bound}") before, or make the group with device_id=torch.device("{device}")'
        )
    torch.cuda.set_device(device)
    return device


def bound_device(group: Any) -> torch.device | None:
    """The GPU that a process group was made for with `device_id`; None: it was not said."""
    return getattr(group, "bound_device_id", None)


def gpu_of_group(group: Any) -> torch.device:
    """The GPU by which a group of GPUs sends what is on the host: its own if that was said, else the current one."""
    return bound_device(group) or current_gpu()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, the device is the current one."""
    inside: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return inside


def where_memory_is_held() -> AbstractContextManager[Any]:
    """Inside, a GPU is current on which this process holds memory already, if there is one.

    Page-locking opens a context on the current GPU, hundreds of megabytes: in a thread where nobody has set one that
    would be GPU 0, for every rank of the host.
    """
    current = torch.cuda.current_device()
    devices = [current, *(index for index in range(torch.cuda.device_count()) if index != current)]
    held = (index for index in devices if torch.cuda.memory_reserved(index))
    return on(torch.device("cuda", next(held, current)))


def synchronize(device: torch.device | None = None) -> None:
    """Return when a GPU has done all that was queued.

    Args:
        device: Nothing is waited for where it is no GPU. None: the current one, if this process uses any.
    """
    if device is None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(current_gpu())
    elif device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def beside_captures() -> Iterator[None]:
    """Inside, this thread may ask events of a GPU while another thread captures a CUDA graph.

    A capture begins in the mode "global" unless it is told otherwise: an unsafe call of any thread meanwhile, such as
    `Event.query`, fails, and breaks the capture. No thread can see another's. But one may say that its own calls are
    harmless, as torch does for those of NCCL's watchdog: they touch no stream that is captured.
    """
    exchange = _exchange_of_capture_modes() if torch.cuda.is_initialized() else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # takes the one before
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


_RELAXED = 2
"""`cudaStreamCaptureModeRelaxed`."""


@cache
def _exchange_of_capture_modes() -> Callable[[Any], int] | None:
    """CUDA's function, in the runtime that torch has loaded; None: it was linked otherwise."""
    try:
        return cast("Callable[[Any], int]", ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode)
    except AttributeError:
        return None


def bytes_beside_torch(device: torch.device) -> int:
    """Memory of a GPU that is taken, but not by torch's allocator in this process: contexts, NCCL, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def gpus_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """GPUs on which these are, each once."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))
