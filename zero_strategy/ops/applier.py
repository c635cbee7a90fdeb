"""The multi-tensor applier and its two ops, with the arguments of Megatron's namesakes and of `amp_C`.

    norm, each = local_multi_tensor_applier(local_multi_tensor_l2_norm, flag, [gradients], True)

Source: core.utils of Megatron's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from zero_strategy.ops.multi_tensor import l2norm, scale_

_CHUNK = 2048 * 32
"""What is handed to ops that divide their work by it; ours choose for themselves."""


def local_multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor | None, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """Call `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
    return op(_CHUNK, noop_flag_buffer, tensor_lists, *args)


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
