"""The op namespace `torch.ops.zero_strategy`: schemas, references, native libraries, and checks of arguments by name.

Every op has a schema and a reference in plain torch. The reference is what runs on any device without a kernel of its
own, the oracle of the kernels' tests, and the definition of an op's numerics. A shared library registers kernels for
the CPU or for CUDA, which the dispatcher then prefers. It is loaded at the first use or on request, once per process,
and never a requirement: `ZERO_STRATEGY_NATIVE=0` leaves it out; `ZERO_STRATEGY_NATIVE=cached` loads a built one and
builds nothing.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from zero_strategy.ops.build import BuildError, obtain
from zero_strategy.runtime import torch_private

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Tensors = Sequence[Tensor]


def check_tensors(
    arguments: Mapping[str, Tensors], dtypes: Mapping[str, Sequence[torch.dtype]], optional: Iterable[str] = ()
) -> None:
    """Lists of tensors that belong together, entry by entry.

    Args:
        arguments: By argument name; the first one sets length, sizes and device.
        dtypes: Allowed dtypes by argument name; default: float32, bfloat16, float16.
        optional: Arguments that may be empty lists.

    Raises:
        TypeError: If an entry is no tensor, or of another dtype.
        ValueError: If lengths, sizes or devices differ, or an entry is not contiguous.
    """
    leader, first = next(iter(arguments.items()))
    for name, tensors in arguments.items():
        if len(tensors) != len(first) and not (name in optional and not len(tensors)):
            raise ValueError(f"{name} has {len(tensors)} tensors, but {leader} has {len(first)}")
        allowed = dtypes.get(name, FLOATS)
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}[{index}] must be a tensor, not {type(tensor).__name__}")
            if tensor.dtype not in allowed:
                raise TypeError(f"{name}[{index}] must be {' or '.join(map(str, allowed))}, not {tensor.dtype}")
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{name}[{index}], shape {tuple(tensor.shape)}, strides {tensor.stride()}, must be contiguous"
                )
            if tensor.numel() != first[index].numel():
                raise ValueError(
                    f"{name}[{index}] has {tensor.numel()} elements, but {leader}[{index}] has {first[index].numel()}"
                )
            if tensor.device != first[0].device:
                raise ValueError(f"{name}[{index}] is on {tensor.device}, but {leader}[0] is on {first[0].device}")


def norm_order(norm_type: float | str) -> float:
    """The p of a norm, which torch's own functions take as a string as well, such as "inf".

    Raises:
        ValueError: If there is no such norm.
    """
    try:
        order = float(norm_type)
    except ValueError:
        order = math.nan
    if not order > 0:
        raise ValueError(f"norm_type must be positive or inf, not {norm_type}")
    return order


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype] = FLOATS,
    shape: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> None:
    """One tensor of any strides.

    Args:
        name: What the caller calls it.
        tensor: What to look at.
        dtypes: Allowed dtypes.
        shape: The shape it must have; default: any.
        device: Where it must lie; default: anywhere.

    Raises:
        TypeError: If it is no tensor, or of another dtype.
        ValueError: If its shape or device is another.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, not {tensor.dtype}")
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, not {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {device}")


def check_probability(name: str, value: float) -> None:
    """A probability of dropping.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {value}")


def check_apart(written: Mapping[str, Tensors], read: Mapping[str, Tensors]) -> None:
    """No written tensor shares memory with another one.

    Raises:
        ValueError: Naming two that overlap.
    """
    if _lie_apart([*written.values(), *read.values()]):
        return
    spans: list[tuple[int, int, bool, str, int]] = []
    for group, writes in ((written, True), (read, False)):
        for name, tensors in group.items():
            for index, tensor in enumerate(tensors):
                if tensor.numel() and not _is_traced(tensor):
                    start = tensor.data_ptr()
                    spans.append((start, start + tensor.nbytes, writes, name, index))
    spans.sort(key=lambda span: span[:2])
    end, holder, at, holder_writes = -1, "", 0, False
    for start, stop, writes, name, index in spans:
        if start < end and (writes or holder_writes):
            raise ValueError(f"{name}[{index}] overlaps {holder}[{at}] in memory, and one of them is written")
        if stop > end:
            end, holder, at, holder_writes = stop, name, index, writes


def _lie_apart(lists: Iterable[Tensors]) -> bool:
    """True if it can be told in little time that no two of them share memory at all; False says nothing."""
    if torch.compiler.is_compiling():  # traced ones have no memory
        return True
    spans: list[tuple[int, int]] = []
    for tensors in lists:
        if not {type(tensor) for tensor in tensors} <= {Tensor, nn.Parameter}:
            return False  # fake ones have no memory
        spans += [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    spans.sort()
    return all([start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans)])


def check_table(name: str, table: Tensor, rows: int, columns: Sequence[str]) -> None:
    """Hyper-parameters: one row per tensor.

    Raises:
        TypeError: If it is not a float64 tensor.
        ValueError: If its shape is wrong or it is not on the CPU.
    """
    if not isinstance(table, Tensor) or table.dtype != torch.float64:
        raise TypeError(f"{name} must be a float64 tensor with columns {', '.join(columns)}")
    if tuple(table.shape) != (rows, len(columns)) or table.device.type != "cpu" or not table.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, on the CPU and of shape ({rows}, {len(columns)}): {', '.join(columns)}; it is "
            f"{tuple(table.shape)} on {table.device}"
        )


def _is_traced(tensor: Tensor) -> bool:
    """Fake tensors have no memory."""
    return type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


NAMESPACE = "zero_strategy"
_library = Library(NAMESPACE, "DEF")
_names: list[str] = []


def define(schema: str, reference: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Add an op.

    Args:
        schema: `name(arguments) -> results` in torch's schema language.
        reference: Its definition in plain torch.
        fake: Makes empty results from fake arguments; not needed by ops that only write to their arguments.

    Returns:
        The op, which checks nothing but what its schema says.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _no_result, lib=_library)
    _names.append(name)
    op: Callable[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def differentiate(
    op: Callable[..., Any], setup: Callable[..., None], derivative: Callable[..., Any], backward_op: Callable[..., Any]
) -> None:
    """Give a functional op a derivative. A second one is refused by name, instead of being left out of a sum.

    Args:
        op: What `define` returned.
        setup: Called with `ctx`, `inputs` and `output` after the forward, to save what the backward needs.
        derivative: Called with (ctx, *gradients of the results); returns one gradient or None per argument.
        backward_op: The op that `derivative` calls.
    """

    def refuse(ctx: Any, *gradients: Any) -> None:
        raise RuntimeError(f"{op} has no second derivative")

    torch.library.register_autograd(_name_of(op), derivative, setup_context=setup, lib=_library)
    torch.library.register_autograd(_name_of(backward_op), refuse, lib=_library)


def _name_of(op: Any) -> str:
    return f"{op.namespace}::{torch_private.op_name(op)}"


def op_names() -> list[str]:
    """Names of all ops."""
    return list(_names)


def has_kernel(name: str, key: str) -> bool:
    """True if op `name` has a native kernel under dispatch key `key` ("CPU", "CUDA")."""
    return torch_private.has_kernel(f"{NAMESPACE}::{name}", key)


def lacks_kernels(device: torch.device) -> bool:
    """True on a device whose native library is not loaded: torch's own multi-tensor kernels stand in (`ops.foreach`).

    On the CPU the references do, which keep the bits.
    """
    return device.type != "cpu" and not (device.type in _KEYS and has_kernel("adam_", _KEYS[device.type]))


def _no_result(*args: Any, **kwargs: Any) -> None:
    return None


# ---- native libraries ----

NATIVE_VARIABLE = "ZERO_STRATEGY_NATIVE"
_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@dataclass(frozen=True)
class Status:
    """State of one library in this process.

    Attributes:
        name: "cpu" or "cuda".
        path: Where it was loaded from, or None.
        reason: Why it was not loaded, or "".
    """

    name: str
    path: Path | None
    reason: str = ""


class NativeLibraries:
    """The libraries of this process. There is one object (`libraries`), as there is one dispatcher."""

    def __init__(self) -> None:
        self._status: dict[str, Status] = {}
        self._lock = threading.Lock()

    def ensure(self, device_type: str) -> Status:
        """Load the library for tensors on "cpu" or "cuda", building it if need be; cheap from the second call on.

        Without a compiler, or if it fails, one line says so and the references run.
        """
        name = device_type if device_type in _KEYS else "cpu"
        with self._lock:
            if name not in self._status:
                self._status[name] = self._load(name)
            return self._status[name]

    def status(self, name: str) -> Status | None:
        """State of a library; None if nobody asked for it."""
        return self._status.get(name)

    def _load(self, name: str) -> Status:
        mode = os.environ.get(NATIVE_VARIABLE, "1").lower()
        if mode in ("0", "false", "no", "off"):
            return _reference(name, f"{NATIVE_VARIABLE}={mode}", say=False)
        if name == "cuda" and not torch.cuda.is_available():
            return _reference(name, "this torch sees no CUDA device", say=False)
        try:
            path = obtain(name, mode)
            torch.ops.load_library(str(path))
        except (BuildError, OSError) as error:
            return _reference(name, str(error).splitlines()[0] if str(error) else type(error).__name__)
        return Status(name, path)


def _reference(name: str, reason: str, *, say: bool = True) -> Status:
    if say:
        print(f"zero_strategy: no native {name} ops ({reason}); plain torch runs instead", file=sys.stderr, flush=True)
    return Status(name, None, reason)


libraries = NativeLibraries()


def ops_report(device_type: str) -> list[tuple[str, str]]:
    """For every op: its name, and "native" or why the reference runs on that device type."""
    status = libraries.ensure(device_type)
    key = _KEYS[status.name]
    return [
        (name, "native" if has_kernel(name, key) else f"reference: {status.reason or 'no kernel for ' + key}")
        for name in op_names()
    ]
