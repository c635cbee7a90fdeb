"""This rank's part of sharded parameters, gradients and optimizer states, flat; all of it where nothing is divided.

Put together in the order of the ranks, the parts are the whole tensor. Their sizes differ from rank to rank, and a
small parameter may lie on one of them. Names are DeepSpeed's `safe_get_local_*` and `safe_set_local_*`, which all ranks
call together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_strategy.optim.full_state import _find, _holder
from zero_strategy.sharding.parameters import ParameterBucket


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's part of the parameter, of its fp32 master copy where there is one; (numel of the part,).

    Raises:
        ValueError: If no engine shards `param`.
    """
    _, bucket, index = _find(param)
    bucket.follow_edits()
    piece = bucket.piece_of.get(index)
    if piece is None:
        return torch.empty(0, dtype=bucket.master_dtype, device=param.device)
    return bucket.read_master(piece.offset, piece.offset + piece.numel).detach().clone()


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the parameter and its master copy.

    Raises:
        ValueError: If `value` is not of the part's size.
    """
    model, bucket, index = _find(param)
    _check_size(bucket, index, value)
    model.moved.check("safe_set_local_fp32_param()")
    bucket.follow_edits()
    model.let_go([bucket])
    piece = bucket.piece_of.get(index)
    if piece is not None:
        bucket.write_master(piece.offset, value.detach().reshape(-1))
    bucket.publish().wait()
    model.forget_gathered([bucket])


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the mean gradient; None if the parameter holds none."""
    model, bucket, index = _find(param)
    model.reducer.settle()
    gradients = model.gradient_of(bucket)
    if index not in gradients.live:
        return None
    part = gradients.reduced_part(index)
    return torch.empty(0, dtype=gradients.dtype, device=param.device) if part is None else part.detach().clone()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part of the gradient.

    Raises:
        ValueError: If `value` is not of the part's size.
    """
    model, bucket, index = _find(param)
    _check_size(bucket, index, value)
    model.moved.check("safe_set_local_grad()")
    model.reducer.settle()
    segment = bucket.layout.segments[index]
    whole = torch.zeros(segment.stop - segment.offset, dtype=value.dtype, device=param.device)
    piece = bucket.piece_of.get(index)
    if piece is not None:  # `replace` takes this rank's part of it
        whole[piece.start : piece.stop].copy_(value.detach().reshape(-1))
    model.gradient_of(bucket).replace_local(index, whole)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of the optimizer state `optim_state_key` ("exp_avg", ...); None before the first step.

    Raises:
        ValueError: If no attached optimizer holds `param`.
    """
    model, bucket, index = _find(param)
    value = _holder(model, param).state_of(param).get(optim_state_key)
    if value is None:
        return None if bucket.piece_of.get(index) is not None else torch.empty(0, device=param.device)
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part of the optimizer state `optim_state_key`.

    Raises:
        ValueError: If the optimizer has no such state for the parameter yet, or `value` is not of the part's size.
    """
    model, bucket, index = _find(param)
    _check_size(bucket, index, value)
    if bucket.piece_of.get(index) is not None:
        _holder(model, param).write_state_of(param, optim_state_key, value.detach().reshape(-1))


def _check_size(bucket: ParameterBucket, index: int, value: Tensor) -> None:
    piece = bucket.piece_of.get(index)
    numel = 0 if piece is None else piece.numel
    if value.numel() != numel:
        raise ValueError(f"value has {value.numel()} elements; this rank's part of the parameter has {numel}")
