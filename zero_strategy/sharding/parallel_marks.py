"""What scripts have written on a parameter about model parallelism, read and never written here.

    tensor_model_parallel, _mcore_tp, model_parallel     it is divided among the ranks of a model-parallel group
    partition_dim, _tp_partition_dim                     along this dimension
    _tensor_parallel_mode = "column" or "row"            both: it is divided, along dimension 0 or 1
    _tp_duplicated                                       every rank of such a group has all of it
    allreduce = False                                    it belongs to an expert, of which other ranks have others

The marks are Megatron's and DeepSpeed's; a parameter without any is on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_DIVIDED = ("tensor_model_parallel", "_mcore_tp")
_MODE = "_tensor_parallel_mode"
_DIM_OF_MODE = {"column": 0, "row": 1}


def is_mcore_tensor_model_parallel(param: Tensor) -> bool:
    """Whether Megatron has divided this parameter among tensor-parallel ranks."""
    return any(bool(getattr(param, mark, False)) for mark in _DIVIDED) or getattr(param, _MODE, None) in _DIM_OF_MODE


def is_mcore_tensor_parallel_duplicated(param: Tensor) -> bool:
    """Whether this parameter of a tensor-parallel layer is whole on each of its ranks."""
    return bool(getattr(param, "_tp_duplicated", False))


def get_mcore_tensor_parallel_partition_dim(param: Tensor) -> int | None:
    """The dimension along which the parameter is divided; None if it is not.

    Raises:
        ValueError: If it is marked as divided, and nothing says along which dimension.
    """
    if not is_mcore_tensor_model_parallel(param):
        return None
    for mark in ("_tp_partition_dim", "partition_dim"):
        if hasattr(param, mark):
            return int(getattr(param, mark))
    mode = getattr(param, _MODE, None)
    if mode in _DIM_OF_MODE:
        return _DIM_OF_MODE[mode]
    raise ValueError(
        f"a parameter of shape {list(param.shape)} is marked as tensor-parallel, but has no partition_dim; layers that "
        "divide their weights set it beside tensor_model_parallel"
    )


def is_model_parallel_parameter(p: Tensor) -> bool:
    """Whether this parameter is divided among model-parallel ranks, by DeepSpeed's mark or Megatron's."""
    return bool(getattr(p, "model_parallel", False)) or is_mcore_tensor_model_parallel(p)


def is_expert_parameter(p: Tensor) -> bool:
    """Whether it is an expert's, which ranks of an expert-parallel group do not share."""
    return getattr(p, "allreduce", True) is False


_RANKS = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
"""By which names units have told it: newer Megatron, DeepSpeed's pipelines, older Megatron."""


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This process in its tensor-parallel group, whatever the unit calls that; 0 without a unit.

    Raises:
        TypeError: If the unit has none of the methods.
    """
    if mpu is None:
        return 0
    for method in _RANKS:
        if hasattr(mpu, method):
            return int(getattr(mpu, method)())
    raise TypeError(f"mpu must have one of {', '.join(f'{name}()' for name in _RANKS)}; {type(mpu).__name__} has none")
