"""Ops over lists of tensors, each in one pass: statistics, scaled copies, sums; Megatron's applier.

Tensors are float32, bfloat16 or float16, contiguous and on one device; arithmetic is float32 and results are rounded to
nearest where they are stored.

    norm, each = local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [gradients], True)

Source: core.utils of Megatron's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_strategy.ops import foreach
from zero_strategy.ops.library import check_apart, check_tensors, define, lacks_kernels, norm_order

Tensors = Sequence[Tensor]
_CHUNK = 1 << 16
"""Elements that the reference turns to float64 at a time: they stay in the cache, and malloc need not ask for pages."""


def grad_stats(tensors: Tensors, norm_type: float | str = 2.0) -> tuple[Tensor, Tensor]:
    """Norm and non-finite elements of every tensor, in one pass.

    Sums are float64 in an order that depends on the tensors' sizes only, not on threads or processor, so a repeated
    call gives the same bits. A non-finite element shows in the count and, as in any sum, in the sum; use the count.

    Args:
        tensors: What to look at.
        norm_type: Any p > 0, or inf, also as the string "inf".

    Returns:
        (tensors,) float64: sum of |x|^p (for inf: the largest |x|); (tensors,) int64: how many are infinite or NaN.

    Raises:
        TypeError, ValueError: Naming the argument.
    """
    check_tensors({"tensors": tensors}, {})
    order = norm_order(norm_type)
    if not len(tensors):
        return torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    sums, counts = _grad_stats(tensors, order)
    return sums, counts


def stats_on_host(tensors: Tensors, norm_type: float | str = 2.0) -> tuple[Tensor, Tensor]:
    """The results of `grad_stats` in host memory, from a device in one wait."""
    check_tensors({"tensors": tensors}, {})
    order = norm_order(norm_type)
    if len(tensors) and lacks_kernels(tensors[0].device):
        return foreach.stats_on_host(tensors, order)
    return stats_to_host(*grad_stats(tensors, order))


def sums_and_flags(tensors: Tensors, norm_type: float | str = 2.0) -> tuple[Tensor, Tensor, bool]:
    """The results of `grad_stats` where the tensors are, and whether counts are exact.

    On a GPU without the kernels a count takes a further pass over the tensor, so there it is 1 where a sum is not
    finite, which elements may be the reason of, or the size of their powers.
    """
    check_tensors({"tensors": tensors}, {})
    order = norm_order(norm_type)
    if len(tensors) and lacks_kernels(tensors[0].device):
        sums = foreach.power_sums(tensors, order)
        return sums, sums.isfinite().logical_not().to(torch.int64), False
    return *grad_stats(tensors, order), True


def stats_to_host(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 sums and integer counts on the CPU; from another device by one copy, for which the host waits."""
    if sums.is_cpu:
        return sums, counts.to(torch.int64)
    both = torch.stack([sums, counts.double()]).cpu()  # counts below 2^53 are exact
    return both[0], both[1].to(torch.int64)


def l2norm(tensors: Tensors, per_tensor: bool = False) -> tuple[Tensor, Tensor | None]:
    """Euclidean norm of all elements, and of each tensor.

    Returns:
        0-d float32; (tensors,) float32 or None.
    """
    sums, _ = grad_stats(tensors)
    return sums.sum().sqrt().float(), sums.sqrt().float() if per_tensor else None


def scale_(inputs: Tensors, outputs: Tensors, factor: float = 1.0) -> Tensor:
    """outputs = inputs * factor, with a cast where dtypes differ; an output may be its own input.

    Returns:
        0-d int64: how many results are infinite or NaN (before rounding to the output's dtype).
    """
    check_tensors({"outputs": outputs, "inputs": inputs}, {})
    _check_results({"inputs": inputs}, outputs)
    if not len(outputs):
        return torch.zeros((), dtype=torch.int64)
    count: Tensor = _scale(inputs, outputs, float(factor))
    return count


def axpby_(x: Tensors, y: Tensors, outputs: Tensors, a: float, b: float) -> Tensor:
    """outputs = a*x + b*y; an output may be its own x or y.

    Returns:
        0-d int64: how many results are infinite or NaN (before rounding to the output's dtype).
    """
    check_tensors({"outputs": outputs, "x": x, "y": y}, {})
    _check_results({"x": x, "y": y}, outputs)
    if not len(outputs):
        return torch.zeros((), dtype=torch.int64)
    count: Tensor = _axpby(x, y, outputs, float(a), float(b))
    return count


def accumulate_(targets: Tensors, sources: Tensors, factor: float = 1.0) -> None:
    """targets += sources * factor in float32, whatever the dtypes."""
    check_tensors({"targets": targets, "sources": sources}, {})
    check_apart({"targets": targets}, {"sources": sources})
    if len(targets):
        _accumulate(targets, sources, float(factor))


def flatten_(
    tensors: Tensors, flat: Tensor, offsets: Sequence[int], *, factor: float = 1.0, accumulate: bool = False
) -> None:
    """Copy tensors into a flat buffer at element offsets: with a factor, a cast, and a sum if `accumulate`."""
    _check_flat(tensors, flat, offsets)
    check_apart({"flat": [flat]}, {"tensors": tensors})
    if len(tensors):
        _flatten(tensors, flat, list(offsets), float(factor), accumulate)


def unflatten_(flat: Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    """Copy parts of a flat buffer, beginning at element offsets, into tensors, with a cast."""
    _check_flat(tensors, flat, offsets)
    check_apart({"tensors": tensors}, {"flat": [flat]})
    if len(tensors):
        _unflatten(flat, tensors, list(offsets))


def _check_flat(tensors: Tensors, flat: Tensor, offsets: Sequence[int]) -> None:
    check_tensors({"tensors": tensors}, {})
    check_tensors({"flat": [flat]}, {})
    if flat.dim() != 1:
        raise ValueError(f"flat must have one dimension, not {flat.dim()}")
    if len(offsets) != len(tensors):
        raise ValueError(f"offsets has {len(offsets)} entries, but there are {len(tensors)} tensors")
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        if tensor.device != flat.device:
            raise ValueError(f"tensors[{index}] is on {tensor.device}, but flat is on {flat.device}")
        if offset < 0 or offset + tensor.numel() > flat.numel():
            raise ValueError(
                f"tensors[{index}] with {tensor.numel()} elements at offset {offset} lies outside of flat, which has "
                f"{flat.numel()}"
            )


def _check_results(inputs: dict[str, Tensors], outputs: Tensors) -> None:
    """An output may be one of its inputs exactly; any other overlap is refused."""
    others = {
        name: [
            tensor
            for tensor, output in zip(tensors, outputs, strict=True)
            if tensor.data_ptr() != output.data_ptr() or tensor.dtype != output.dtype
        ]
        for name, tensors in inputs.items()
        if not torch.compiler.is_compiling()
    }
    check_apart({"outputs": outputs}, others)


# ------------------------------------------------------------------------------------------------ references


def _nonfinite(value: Tensor) -> Tensor:
    return value.isfinite().logical_not().sum()


@torch.no_grad()
def _grad_stats_reference(tensors: Tensors, norm_type: float) -> tuple[Tensor, Tensor]:
    if lacks_kernels(tensors[0].device):
        counted = [foreach.count_nonfinite(tensor) for tensor in tensors]
        return foreach.power_sums(tensors, norm_type), torch.stack(counted)
    sums, counts = [], []
    for tensor in tensors:
        chunks = tensor.reshape(-1).split(_CHUNK)
        parts = torch.stack([_power_sum(chunk.double(), norm_type) for chunk in chunks])
        sums.append(parts.max() if math.isinf(norm_type) else parts.sum())
        if math.isfinite(sums[-1]):  # of finite elements: no second pass
            counts.append(torch.zeros((), dtype=torch.int64, device=tensor.device))
        else:
            counts.append(torch.stack([_nonfinite(chunk) for chunk in chunks]).sum())
    return torch.stack(sums), torch.stack(counts)


def _power_sum(values: Tensor, norm_type: float) -> Tensor:
    if norm_type == 2:
        return torch.dot(values, values)
    values = values.abs()
    if math.isinf(norm_type):
        return values.max() if values.numel() else values.new_zeros(())
    return (values if norm_type == 1 else values.pow(norm_type)).sum()


def _grad_stats_fake(tensors: Tensors, norm_type: float) -> tuple[Tensor, Tensor]:
    like = tensors[0]
    return like.new_empty(len(tensors), dtype=torch.float64), like.new_empty(len(tensors), dtype=torch.int64)


@torch.no_grad()
def _scale_reference(inputs: Tensors, outputs: Tensors, factor: float) -> Tensor:
    counts = []
    for source, output in zip(inputs, outputs, strict=True):
        value = source.to(torch.float32) * factor
        counts.append(_nonfinite(value))
        output.copy_(value.view_as(output))
    return torch.stack(counts).sum()


@torch.no_grad()
def _axpby_reference(x: Tensors, y: Tensors, outputs: Tensors, a: float, b: float) -> Tensor:
    counts = []
    for left, right, output in zip(x, y, outputs, strict=True):
        value = left.to(torch.float32) * a + right.to(torch.float32).view_as(left) * b
        counts.append(_nonfinite(value))
        output.copy_(value.view_as(output))
    return torch.stack(counts).sum()


def _count_fake(tensors: Tensors, *rest: Any) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.int64)


@torch.no_grad()
def _accumulate_reference(targets: Tensors, sources: Tensors, factor: float) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(target.to(torch.float32) + source.to(torch.float32).view_as(target) * factor)


@torch.no_grad()
def _flatten_reference(tensors: Tensors, flat: Tensor, offsets: Sequence[int], factor: float, accumulate: bool) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        part = flat[offset : offset + tensor.numel()]
        value = tensor.to(torch.float32).reshape(-1) * factor
        part.copy_(part.to(torch.float32) + value if accumulate else value)


@torch.no_grad()
def _unflatten_reference(flat: Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    for tensor, offset in zip(tensors, offsets, strict=True):
        tensor.copy_(flat[offset : offset + tensor.numel()].to(torch.float32).view_as(tensor))


_grad_stats = define(
    "grad_stats(Tensor[] tensors, float norm_type) -> (Tensor, Tensor)", _grad_stats_reference, _grad_stats_fake
)
_scale = define("scale_(Tensor[] inputs, Tensor(a!)[] outputs, float factor) -> Tensor", _scale_reference, _count_fake)
_axpby = define(
    "axpby_(Tensor[] x, Tensor[] y, Tensor(a!)[] outputs, float a, float b) -> Tensor", _axpby_reference, _count_fake
)
_accumulate = define("accumulate_(Tensor(a!)[] targets, Tensor[] sources, float factor) -> ()", _accumulate_reference)
_flatten = define(
    "flatten_(Tensor[] tensors, Tensor(a!) flat, int[] offsets, float factor, bool accumulate) -> ()",
    _flatten_reference,
)
_unflatten = define("unflatten_(Tensor flat, Tensor(a!)[] tensors, int[] offsets) -> ()", _unflatten_reference)

_APPLIER_CHUNK = 2048 * 32
"""What is handed to ops that divide their work by it; ours choose for themselves."""


def local_multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """Call `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
    return op(_APPLIER_CHUNK, noop_flag_buffer, tensor_lists, *args)


def local_multi_tensor_l2_norm(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], per_tensor: bool, *args: Any
) -> tuple[Tensor, Tensor | None]:
    """Euclidean norm of a list of contiguous tensors.

    Args:
        chunk_size: Has no effect: the kernel's chunks are fixed, so that the result is.
        noop_flag: Left alone.
        tensor_lists: One list.
        per_tensor: Each tensor's norm too.
        args: Have no effect.

    Returns:
        (1,) float32 norm of all; (tensors,) float32 norms, or None.

    Raises:
        ValueError: If there is not exactly one list.
    """
    tensors = _lists(tensor_lists, 1)[0]
    norm, each = l2norm(tensors, per_tensor)
    return norm.reshape(1), each


def local_multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], scale: float
) -> None:
    """outputs = inputs * scale, with casts.

    Args:
        chunk_size: Has no effect.
        noop_flag: One element, set to 1 if a result is infinite or NaN; or None.
        tensor_lists: Inputs and outputs; an output may be its own input.
        scale: The factor.

    Raises:
        ValueError: If there are not exactly two lists, or they do not fit.
    """
    inputs, outputs = _lists(tensor_lists, 2)
    nonfinite = scale_(inputs, outputs, scale)
    if noop_flag is not None:
        noop_flag.masked_fill_((nonfinite > 0).to(noop_flag.device), 1)


def _lists(tensor_lists: Sequence[Sequence[Tensor]], count: int) -> Sequence[Sequence[Tensor]]:
    if len(tensor_lists) != count:
        raise ValueError(f"tensor_lists has {len(tensor_lists)} lists, but must have {count}")
    return tensor_lists
