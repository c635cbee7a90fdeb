"""Checks of the ops' arguments, which name the argument before any memory is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

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
    """Whether it can be told in little time that no two of them share memory at all; False says nothing."""
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
