"""Megatron's gradient utilities: norms over model-parallel groups, deferred embedding gradients.

                                     counted on                     added up over
    whole on all ranks of a group    its first rank                 the model-parallel group
    divided among them               every rank                     the model-parallel group
    an expert's, whole               the group's first rank         model-parallel and expert-parallel group
    an expert's, divided             every rank                     model-parallel and expert-parallel group

So every element counts once, and all ranks get the same number. Data-parallel ranks hold averaged gradients, which are
alike. Gradients of an engine's are sharded: it has its own norm (`ZeroEngine.clip_grad_norm_`).

All tensors are looked at in one call of an op (`ops.grad_stats`), so the host does not wait for the device once per
tensor.

The last stage's projection onto the vocabulary is its largest matrix product. While other stages wait for its backward
it computes the gradient of the input only and keeps, per micro-batch, the layer's input and the gradient of its output:

    micro-batch 0, 1, ...        embedding_activation_buffer[i], grad_output_buffer[i]
    the drain                    weight.main_grad += grad_output[i]^T @ input[i], micro-batch by micro-batch

With sequence parallelism each tensor-parallel rank has a part of the input's rows. The whole input of micro-batch i + 1
is gathered while the product of micro-batch i is computed, in two scratch buffers that take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_strategy.comm.collectives import CommunicationCounters, Communicator, PendingWork
from zero_strategy.compat.megatron.models import (
    bwc_tensor_model_parallel_rank,
    is_expert_parameter,
    is_model_parallel_parameter,
)
from zero_strategy.compat.megatron.tensors import GlobalMemoryBuffer
from zero_strategy.ops.library import norm_order
from zero_strategy.optim.grad_norm import global_norm as norm_over
from zero_strategy.runtime.torch_private import foreach_mul_

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


def _communicators(*groups: dist.ProcessGroup | None) -> list[Communicator]:
    return [Communicator(group, CommunicationCounters()) for group in groups if group is not None]


def _group(mpu: Any, names: Sequence[str], *, optional: bool = False) -> dist.ProcessGroup | None:
    """Answer of a unit to the first of these methods that it has."""
    if mpu is None:
        return None
    for name in names:
        if hasattr(mpu, name):
            found: dist.ProcessGroup | None = getattr(mpu, name)()
            return found
    if optional:
        return None
    raise TypeError(f"mpu must have one of {', '.join(f'{name}()' for name in names)}; {type(mpu).__name__} has none")


class DrainConfig(Protocol):
    """Part of a model's configuration that the drain looks at."""

    sequence_parallel: bool
    """Each rank's inputs are a part of the rows."""
    gradient_accumulation_fusion: bool
    """Gradients are added to `weight.main_grad`, and not handed to autograd."""


def prepare_input_tensors_for_wgrad_compute(grad_output: Tensor, all_gathered_input: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors as contiguous matrices: (rows, output features) and (rows, input features).

    Args:
        grad_output: (sequence, batch, output features) or (rows, output features); any strides.
        all_gathered_input: The same with input features.

    Raises:
        ValueError: If they have different numbers of rows.
    """
    gradients = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    inputs = all_gathered_input.reshape(-1, all_gathered_input.shape[-1]).contiguous()
    if len(gradients) != len(inputs):
        raise ValueError(
            f"grad_output of shape {list(grad_output.shape)} has {len(gradients)} rows, but the input of shape "
            f"{list(all_gathered_input.shape)} has {len(inputs)}"
        )
    return gradients, inputs


@torch.no_grad()
def drain_embedding_wgrad_compute(
    config: DrainConfig,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: nn.Parameter,
    tp_group: dist.ProcessGroup | None,
    *,
    scratch: GlobalMemoryBuffer | None = None,
) -> None:
    """Add the gradients of all micro-batches to `weight.main_grad`, and empty both lists. A collective of the group.

    Args:
        config: With `sequence_parallel` and `gradient_accumulation_fusion`.
        embedding_activation_buffer: Inputs of the layer, one per micro-batch.
        grad_output_buffer: Gradients of its outputs, one per micro-batch.
        weight: (output features, input features), with a `main_grad` of that shape that gradients are added to.
        tp_group: The ranks that have parts of the inputs, if `sequence_parallel`; None: this rank alone.
        scratch: Where whole inputs are gathered; default: a buffer that ends with the call.

    Raises:
        ValueError: If gradients are not accumulated in `main_grad`, or the lists have different lengths.
    """
    main_grad = _main_grad(config, weight)
    if len(embedding_activation_buffer) != len(grad_output_buffer):
        raise ValueError(
            f"{len(embedding_activation_buffer)} inputs in embedding_activation_buffer, but {len(grad_output_buffer)} "
            "gradients in grad_output_buffer; there must be one of each per micro-batch"
        )
    gathers = _Gathers(Communicator(tp_group if config.sequence_parallel else None, CommunicationCounters()), scratch)
    coming = gathers.begin(embedding_activation_buffer)
    while coming is not None:
        work, whole = coming
        work.wait()
        coming = gathers.begin(embedding_activation_buffer)  # under way while this product is computed
        _accumulate(main_grad, *prepare_input_tensors_for_wgrad_compute(grad_output_buffer.pop(0), whole))


class _Gathers:
    """Whole inputs, one micro-batch after the other, in two buffers that take turns."""

    def __init__(self, ranks: Communicator, scratch: GlobalMemoryBuffer | None) -> None:
        self._ranks, self._scratch = ranks, scratch
        self._turn = 0

    def begin(self, inputs: list[Tensor]) -> tuple[PendingWork, Tensor] | None:
        """Take the first input out of the list and begin to gather it; None if there is none."""
        if not inputs:
            return None
        part = inputs.pop(0)
        if self._ranks.size == 1:
            return PendingWork([]), part
        if self._scratch is None:
            self._scratch = GlobalMemoryBuffer(device=part.device)
        shape = (part.shape[0] * self._ranks.size, *part.shape[1:])
        whole = self._scratch.get_tensor(shape, part.dtype, f"embedding-drain-{self._turn}")
        self._turn = 1 - self._turn
        flat = whole.view(-1)
        flat.chunk(self._ranks.size)[self._ranks.rank].copy_(part.reshape(-1))
        return self._ranks.all_gather(flat), whole


def _main_grad(config: DrainConfig, weight: nn.Parameter) -> Tensor:
    if not config.gradient_accumulation_fusion:
        raise ValueError(
            "drain_embedding_wgrad_compute adds to weight.main_grad, which config.gradient_accumulation_fusion=False "
            "says is not in use; leave the weight's gradient to autograd then"
        )
    found = getattr(weight, "main_grad", None)
    if not isinstance(found, Tensor) or found.shape != weight.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else "none"
        raise ValueError(f"weight of shape {list(weight.shape)} needs a main_grad of that shape; it has {shape}")
    return found


def _accumulate(main_grad: Tensor, gradients: Tensor, inputs: Tensor) -> None:
    """main_grad += gradients^T @ inputs, in the precision of `main_grad`, whatever that of the others is."""
    if gradients.dtype == main_grad.dtype:
        main_grad.addmm_(gradients.t(), inputs)
    elif gradients.is_cuda and main_grad.dtype == torch.float32:
        main_grad.add_(torch.mm(gradients.t(), inputs, out_dtype=torch.float32))  # no copies in float32
    else:
        main_grad.addmm_(gradients.t().to(main_grad.dtype), inputs.to(main_grad.dtype))
