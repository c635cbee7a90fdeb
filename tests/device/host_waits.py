"""Reads by the host of what a device has computed, which make it wait for all that is queued there.

Calls that reach the dispatcher (`item`, boolean indexing, copies) are the recorder's. Here are those that do not,
since on the CPU, where the device is pretended, they have nothing to do: `cpu()`, `to("cpu")`, `tolist()`, `numpy()`.

Memory is the host's where the code that makes it names no device, as it is on a machine that has one. So a tensor that
is made by `torch.zeros(3)` may be read, and one by `torch.zeros(3, device=model.device)` may not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FACTORIES = {
    torch.tensor, torch.as_tensor, torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.eye,
    torch.linspace, torch.rand, torch.randn, torch.randint, torch.randperm,
}  # fmt: skip
_READS: dict[Any, str] = {Tensor.cpu: "cpu()", Tensor.tolist: "tolist()", Tensor.numpy: "numpy()"}


INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
"""Their places may come from lists, by ways that nobody sees; where the values are the host's, they are, too."""


class Device(Protocol):
    """Knows whose memory is whose; see `Recorder`."""

    def is_host(self, tensor: Tensor) -> bool:
        """True if its memory is the host's."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if it is memory of the host that a device copies to and from while the host goes on."""

    def make_host(self, tensor: Tensor) -> None:
        """Its memory is the host's, and not pinned."""

    def host_waits(self, what: str) -> None:
        """The host waits for all that is queued on the current stream."""


class HostReads(TorchFunctionMode):
    """Tells a device on paper of memory that the host makes, and of reads that nobody else sees."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry a call out; what is copied to the host becomes memory of the host."""
        kwargs = kwargs or {}
        if func in _FACTORIES:
            found = func(*args, **kwargs)
            if kwargs.get("device") is None and not (func is torch.as_tensor and isinstance(args[0], Tensor)):
                self._device.make_host(found)
            return found
        read = _READS.get(func) or ('to("cpu")' if func is Tensor.to and _names_host(args, kwargs) else None)
        if read is None or self._device.is_host(args[0]):
            return func(*args, **kwargs)
        self._device.host_waits(read)
        with torch.utils._python_dispatch._disable_current_modes():
            found = func(*args, **kwargs)
            if isinstance(found, Tensor) and found.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                found = found.clone()
        if isinstance(found, Tensor):
            self._device.make_host(found)
        return found


@contextmanager
def host_reads(device: Device) -> Iterator[None]:
    """Inside, the device is told of what `HostReads` sees, in hooks of a backward as well.

    A mode is off while it carries a call out, and a backward is one of those.
    """
    mode, run = HostReads(device), torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    with patch.object(torch.autograd, "_engine_run_backward", run_backward), mode:
        yield


def _names_host(args: Any, kwargs: Any) -> bool:
    """Not by an object that may stand for the pretended device."""
    return any(isinstance(one, str) and one == "cpu" for one in (*args[1:2], kwargs.get("device")))


def blocks_host(func: Any, args: Any, kwargs: Any, given: list[Tensor], device: Device) -> str:
    """Why an operation makes the host wait for the device; "": it does not.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Likewise.
        given: The tensors among them.
        device: Whose they are.
    """
    hosts = [device.is_host(tensor) for tensor in given]
    if all(hosts):
        return ""
    if _tells_values(func, args, kwargs):
        return str(func)
    if func is torch.ops.aten.copy_.default:
        to_host, from_host = hosts[:2]
        non_blocking = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))
        waits = to_host != from_host and not (non_blocking and (from_host or device.is_pinned(given[0])))
        return "a blocking copy" if waits else ""
    # Torch has no such operation, apart from numbers: the code has another way there, by copies, on a real device.
    is_torch, mixed = func.namespace == "aten", zip(given, hosts, strict=True)
    if is_torch and any(on_host and tensor.dim() for tensor, on_host in mixed):
        return f"{func} of both the host's memory and the device's"
    return ""


def _tells_values(func: Any, args: Any, kwargs: Any) -> bool:
    """True if the result has a size, or is a number, that only the values tell."""
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
