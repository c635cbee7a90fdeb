"""Parameters, gradients and optimizer states of sharded parameters: full, or this rank's part.

All ranks call these together. Names and meaning are DeepSpeed's `safe_get_full_*` and `safe_set_full_*`.

Put together in the order of the ranks, the parts are the full tensor. Their sizes differ from rank to rank, and a
small parameter may lie on one of them. Names are DeepSpeed's `safe_get_local_*` and `safe_set_local_*`, which all ranks
call together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero_strategy.fsdp.dtensor import local_values
from zero_strategy.fsdp.grad_view import assemble_segment
from zero_strategy.fsdp.model import ShardedModel, sharded_model_of
from zero_strategy.fsdp.param_bucket import ParameterBucket
from zero_strategy.optim.coded_state import SCALES, gathered, spread, value_of
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.runtime.nested_state import flattened, nested


def full_states(model: ShardedModel, sharded: ShardedOptimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Whole optimizer state, on the host, of every parameter that has any. A collective, bucket by bucket.

    State that has no value per element is its owner's, and is sent to all ranks as objects.
    """
    held = {id(parameter) for parameter in sharded.parameters()}
    for bucket in model.buckets:
        local: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(bucket.parameters):
            if id(parameter) in held and (state := sharded.state_of(parameter)):
                local[index] = {
                    key: _by_element(key, value, sharded.piece(parameter)) for key, value in flattened(state).items()
                }
        pieces = {index: sharded.piece(bucket.parameters[index]) for index in local}
        summary = {
            index: {key: _describe(value, pieces[index]) for key, value in state.items()}
            for index, state in local.items()
        }
        merged: dict[int, dict[str, Any]] = {}
        # A rank may hold no piece of a parameter, and takes part in gathering its state all the same.
        for part in model.mesh.control.all_gather_objects(summary):
            for index, keys in part.items():
                merged.setdefault(index, {}).update(keys)
        whole: dict[int, dict[str, Any]] = {index: {} for index in merged}
        # Sorted, since each is a collective, and all ranks need the same order.
        for key, dtype in sorted({(k, d) for keys in merged.values() for k, (d, _) in keys.items() if d}, key=str):
            mine = {index: state[key] for index, state in local.items() if summary[index].get(key, ("",))[0]}
            flat = model.assemble(bucket, mine, getattr(torch, dtype))
            for index, keys in merged.items():
                if keys.get(key, ("",))[0]:
                    segment = bucket.layout.segments[index]
                    values = flat[segment.offset : segment.stop].view(segment.shape)
                    found = bucket.whole_of(index, values).to("cpu", copy=True)
                    whole[index][key] = gathered(found) if key in SCALES else found
        for index, keys in merged.items():
            whole[index].update({key: value for key, (dtype, value) in keys.items() if not dtype})
            order = list(keys)
            yield bucket.parameters[index], nested({key: whole[index][key] for key in order})


def _by_element(key: str, value: Any, piece: Tensor | None) -> Any:
    """A state, with a value for each element of the piece where it has one for each block."""
    if key in SCALES and isinstance(value, Tensor) and piece is not None:
        return spread(value, piece.numel()).view(piece.shape)
    return value


def _describe(value: Any, piece: Tensor | None) -> tuple[str, Any]:
    """(dtype name, None) of a per-element state, ("", value) of another one."""
    if isinstance(value, Tensor) and value.dim() and piece is not None and value.shape == piece.shape:
        return str(value.dtype).removeprefix("torch."), None
    return "", value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """The full parameter from its fp32 master copy where there is one, of `param`'s shape.

    Raises:
        ValueError: If no engine shards `param`.
    """
    _, bucket, index = _find(param)
    # User code may have written to the full parameter since: that counts.
    bucket.follow_edits()
    piece = bucket.piece_of.get(index)
    value = None if piece is None else bucket.master.read(piece.offset, piece.offset + piece.numel)
    return _whole(bucket, index, value, bucket.master.dtype)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the parameter and its master copy from a whole `value`, the same on all ranks."""
    model, bucket, index = _find(param)
    _check_shape(value, bucket.parts[index].shape)
    model.moved.check("safe_set_full_fp32_param()")
    bucket.follow_edits()
    model.invalidate_unsharded([bucket])
    bucket.set_master(index, value)
    _show_value(model, bucket, param)


def _show_value(model: ShardedModel, bucket: ParameterBucket, param: nn.Parameter) -> None:
    """Carry what was set in the master copy to a parameter. A collective."""
    bucket.publish().wait()
    torch.autograd.graph.increment_version([param])  # a backward through the old value is an error
    bucket.writes.note()  # after that, or it would count as a write of the user's
    model.forget_unsharded([bucket])


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole mean gradient, or None if the parameter holds none (as `p.grad` in plain torch)."""
    model, bucket, index = _find(param)
    model.reducer.settle()
    gradients = model.gradient_of(bucket)
    if index not in gradients.live:
        return None
    return _whole(bucket, index, gradients.reduced_part(index), gradients.dtype)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the parameter's gradient by a whole `value`, the same on all ranks."""
    model, bucket, index = _find(param)
    _check_shape(value, bucket.parts[index].shape)
    model.moved.check("safe_set_full_grad()")
    model.reducer.settle()
    model.gradient_of(bucket).replace(index, value.detach().to(param.device))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The full optimizer state `optim_state_key` ("exp_avg", ...), or None before the first step.

    A state of 8 bits is given as the float32 numbers that its codes stand for; codes and scales have keys of their own.

    Raises:
        ValueError: If no attached optimizer holds `param`.
    """
    model, bucket, index = _find(param)
    holder = _holder(model, param)
    value = _by_element(optim_state_key, value_of(holder.state_of(param), optim_state_key), holder.piece(param))
    mine = None if value is None else _describe(value, holder.piece(param))
    known = [found for found in model.mesh.control.all_gather_objects(mine) if found is not None]
    if not known:
        return None
    dtype, scalar = known[0]
    if not dtype:
        return scalar if isinstance(scalar, Tensor) else torch.tensor(scalar)
    found = _whole(bucket, index, None if value is None else value.reshape(-1), getattr(torch, dtype))
    return gathered(found) if optim_state_key in SCALES else found


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace the optimizer state `optim_state_key` by a whole `value`, the same on all ranks.

    Raises:
        ValueError: If the optimizer has no such state for the parameter yet.
    """
    model, bucket, index = _find(param)
    _check_shape(value, bucket.parts[index].shape)
    mine = local_values(bucket.parts[index], param, value)
    piece = bucket.piece_of.get(index)
    if piece is None:
        return
    part = mine.reshape(-1)[piece.start : piece.stop]
    _holder(model, param).write_state_of(param, optim_state_key, part)


def _find(param: nn.Parameter) -> tuple[ShardedModel, ParameterBucket, int]:
    model = sharded_model_of(param)
    place = None if model is None else model.place(param)
    if model is None or place is None:
        raise ValueError(f"no engine shards this parameter of shape {tuple(param.shape)}")
    return model, *place


def _holder(model: ShardedModel, param: nn.Parameter) -> ShardedOptimizer:
    for sharded in model.optimizers:
        if isinstance(sharded, ShardedOptimizer) and any(param is held for held in sharded.parameters()):
            return sharded
    raise ValueError(f"no attached optimizer holds this parameter of shape {tuple(param.shape)}")


def _whole(bucket: ParameterBucket, index: int, value: Tensor | None, dtype: torch.dtype) -> Tensor:
    mine = assemble_segment(bucket, index, value, dtype).view(bucket.layout.segments[index].shape)
    return bucket.whole_of(index, mine)


def _check_shape(value: Tensor, whole: tuple[int, ...]) -> None:
    if value.shape != whole:
        raise ValueError(f"value has shape {tuple(value.shape)}, the parameter {whole}")


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor:
    """This rank's part of the parameter, of its fp32 master copy where there is one; (numel of the part,).

    Raises:
        ValueError: If no engine shards `param`.
    """
    _, bucket, index = _find(param)
    bucket.follow_edits()
    piece = bucket.piece_of.get(index)
    if piece is None:
        return torch.empty(0, dtype=bucket.master.dtype, device=param.device)
    return bucket.master.read(piece.offset, piece.offset + piece.numel).detach().clone()


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
    model.invalidate_unsharded([bucket])
    piece = bucket.piece_of.get(index)
    if piece is not None:
        bucket.master.write(piece.offset, value.detach().reshape(-1))
    _show_value(model, bucket, param)


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
    value = value_of(_holder(model, param).state_of(param), optim_state_key)
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
