"""Norms of gradients that ranks of model- and expert-parallel groups hold parts of, and clipping by them.

                                     counted on                     added up over
    whole on all ranks of a group    its first rank                 the model-parallel group
    divided among them               every rank                     the model-parallel group
    an expert's, whole               the group's first rank         model-parallel and expert-parallel group
    an expert's, divided             every rank                     model-parallel and expert-parallel group

So every element counts once, and all ranks get the same number. Data-parallel ranks hold averaged gradients, which are
alike. Gradients of an engine's are sharded: it has its own norm (`ZeroEngine.clip_grad_norm_`).

All tensors are looked at in one call of an op (`ops.grad_stats`), so the host does not wait for the device once per
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_strategy.distributed.script_groups import ScriptCommunicator
from zero_strategy.ops.arguments import norm_order
from zero_strategy.optim.norm import global_norm as norm_over
from zero_strategy.runtime.torch_private import foreach_mul_
from zero_strategy.sharding.parallel_marks import (
    bwc_tensor_model_parallel_rank,
    is_expert_parameter,
    is_model_parallel_parameter,
)

_MODEL_GROUPS = ("get_model_parallel_group", "get_tensor_model_parallel_group", "get_slice_parallel_group")
_EXPERT_GROUPS = ("get_expert_parallel_group", "get_expert_model_parallel_group")


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float | str = 2, mpu: Any = None) -> float:
    """The norm of all gradients together; see above for who counts what. A collective of the unit's groups.

    Args:
        parameters: Those with gradients count; one or many.
        norm_type: Any positive p, or inf, also as the string "inf".
        mpu: A unit with `get_model_parallel_group()` and `get_model_parallel_rank()`, or their tensor-parallel
            namesakes, and perhaps `get_expert_parallel_group()`; None: nothing is divided.

    Returns:
        The norm; inf or nan if a gradient is.

    Raises:
        ValueError: If `norm_type` is not positive.
        TypeError: If the unit has none of the methods.
    """
    norm_type = norm_order(norm_type)
    first = mpu is None or bwc_tensor_model_parallel_rank(mpu) == 0
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    for parameter in _with_gradients(parameters):
        if first or is_model_parallel_parameter(parameter):
            assert parameter.grad is not None
            (experts if is_expert_parameter(parameter) else dense).append(_flat(parameter.grad))
    group, expert_group = _group(mpu, _MODEL_GROUPS), _group(mpu, _EXPERT_GROUPS, optional=True)
    parts = [norm_over(dense, norm_type, _communicators(group)).value]
    # Also by ranks without experts: the others wait for them.
    parts.append(norm_over(experts, norm_type, _communicators(group, expert_group)).value)
    return _joined(parts, norm_type)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2, mpu: Any = None
) -> float:
    """Scale gradients in place so that their norm is at most `max_norm`.

    Args:
        parameters: See `get_grad_norm`.
        max_norm: The bound.
        norm_type: Any positive p, or inf, also as the string "inf".
        mpu: See `get_grad_norm`.

    Returns:
        The norm before. As with torch's own clipping, gradients are no numbers any more if it is none, and 0 or nan
        if it is infinite.

    Raises:
        ValueError: If `max_norm` is negative, or `norm_type` not positive.
    """
    _check_bound(max_norm)
    chosen = _with_gradients(parameters)
    total = get_grad_norm(chosen, norm_type, mpu)
    _scale([parameter.grad for parameter in chosen if parameter.grad is not None], total, max_norm)
    return total


def get_global_norm_of_tensors(
    input_tensors: Iterable[Tensor],
    norm_type: float | str = 2,
    mpu: Any = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Norm of tensors of which every rank of a group holds its own part; -1 never stands for an overflow.

    Args:
        input_tensors: This rank's tensors, any shape and floating dtype.
        norm_type: Any positive p, or inf, also as the string "inf".
        mpu: A unit with `get_model_parallel_group()`, or a namesake of it.
        group: The ranks to sum over, instead of a unit's. Without either: this rank alone.

    Raises:
        ValueError: If `norm_type` is not positive, or there are both a unit and a group.
    """
    if mpu is not None and group is not None:
        raise ValueError("pass mpu or group, not both")
    flat = [_flat(tensor) for tensor in input_tensors]
    return norm_over(flat, norm_type, _communicators(group or _group(mpu, _MODEL_GROUPS))).value


def clip_tensors_by_global_norm(
    input_tensors: Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: float | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
    *,
    norm_type: float | str = 2,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Scale tensors in place so that their norm over the ranks is at most `max_norm`; returns the norm before.

    Args:
        input_tensors: This rank's.
        max_norm: The bound.
        global_norm: The norm, if it is known already.
        mpu: See `get_global_norm_of_tensors`.
        eps: Is added to the norm.
        norm_type: Any positive p, or inf, also as the string "inf".
        group: See `get_global_norm_of_tensors`.

    Raises:
        ValueError: If `max_norm` is negative; and see `get_global_norm_of_tensors`.
    """
    _check_bound(max_norm)
    tensors = list(input_tensors)
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(tensors, norm_type, mpu, group=group)
    _scale(tensors, global_norm, max_norm, eps)
    return global_norm


def _check_bound(max_norm: float) -> None:
    if max_norm < 0:
        raise ValueError(f"max_norm must not be negative, not {max_norm}")


@torch.no_grad()
def _scale(tensors: Sequence[Tensor], norm: float, max_norm: float, eps: float = 1e-6) -> None:
    coefficient = math.nan if math.isnan(norm) else max_norm / (norm + eps)
    if tensors and not coefficient >= 1.0:
        foreach_mul_(list(tensors), coefficient)


def _with_gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    chosen = [parameters] if isinstance(parameters, Tensor) else parameters
    return [parameter for parameter in chosen if parameter.grad is not None]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


def _joined(norms: Sequence[float], norm_type: float) -> float:
    """The norm of what has these norms, part by part."""
    largest = max(norms)
    if largest == 0 or not all(map(math.isfinite, norms)):
        return float(sum(norms))
    parts = torch.tensor(norms, dtype=torch.float64) / largest  # whose powers cannot overflow
    return largest * float(torch.linalg.vector_norm(parts, norm_type))


def _communicators(*groups: dist.ProcessGroup | None) -> list[ScriptCommunicator]:
    return [ScriptCommunicator(group) for group in groups if group is not None]


def _group(mpu: Any, names: Sequence[str], *, optional: bool = False) -> dist.ProcessGroup | None:
    """What a unit answers to the first of these methods that it has."""
    if mpu is None:
        return None
    for name in names:
        if hasattr(mpu, name):
            found: dist.ProcessGroup | None = getattr(mpu, name)()
            return found
    if optional:
        return None
    raise TypeError(f"mpu must have one of {', '.join(f'{name}()' for name in names)}; {type(mpu).__name__} has none")
