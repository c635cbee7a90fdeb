"""The check that an optimizer's states can have the bits that the config, or one of its param groups, asks for."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from zero_strategy.fsdp.layout import BucketLayout, wants_master
from zero_strategy.fsdp.layout import Segment as ParameterSpan
from zero_strategy.fsdp.model import ShardedModel
from zero_strategy.fsdp.state_bits import is_coded, may_be_coded
from zero_strategy.ops.dynamic_codes import BLOCK
from zero_strategy.optim.fused import rule_of_class

SETTING = "optimizer: {state_bits: 8}"
"""The line of a config that lets states have 8 bits."""


def wants_codes(optimizer: Optimizer, model: ShardedModel) -> bool:
    """True if states of 8 bits are asked for, of whichever parameters."""
    if model.config.optimizer.state_bits == 8:
        return True
    return any(group.get("state_bits") == 8 for group in optimizer.param_groups)


def check_state_bits(optimizer: Optimizer, model: ShardedModel) -> None:
    """Raise if states of 8 bits are asked for that no update rule keeps, or whose blocks the layout divides.

    The answer is the same on all ranks.

    Raises:
        ValueError: Naming the optimizer or the parameter, and the way out.
    """
    if not wants_codes(optimizer, model):
        return
    name, rule = type(optimizer).__name__, rule_of_class(optimizer)
    asked = "optimizer.state_bits is 8" if model.config.optimizer.state_bits == 8 else "state_bits is 8"
    options = [each for group in optimizer.param_groups if rule is not None and (each := rule.refuses(group))]
    if rule is None or not rule.coded_states or options:
        raise ValueError(
            f"{asked}, and {name}{f' with {options[0]}' if options else ''} keeps states that have no form of 8 bits: "
            "AdamW, Adam and SGD of torch.optim, FusedAdamW, FusedAdam, FusedLion and FusedSGD have one, without "
            "amsgrad, capturable or differentiable; or leave optimizer.state_bits out"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            place = model.place(parameter)
            if place is None or not parameter.requires_grad:
                continue
            bucket, index = place
            label = bucket.names[index]
            updated = torch.float32 if wants_master(bucket.dtype, model.config.precision) else bucket.dtype
            if updated != torch.float32:
                raise ValueError(
                    f"{asked}, and {label!r} is updated in {updated}: steps on states of 8 bits are of float32 "
                    "numbers; leave precision.master_weights on, or optimizer.state_bits out"
                )
            part, bits = bucket.parts[index], model.config.optimizer.state_bits
            setting = bits if may_be_coded(model.config, label, math.prod(part.shape)) else 32
            if part.dim is not None and is_coded(group.get("state_bits"), setting, math.prod(part.shape)):
                raise ValueError(
                    f"{asked}, and ranks have parts of {label!r} (mesh.tensor, mesh.expert): blocks "
                    "of states are those of whole parameters; leave optimizer.state_bits out"
                )
            if bits != 8 and is_coded(group.get("state_bits"), bits, parameter.numel()):
                _check_cuts(name, model, bucket.layout, bucket.layout.segments[index])


def _check_cuts(name: str, model: ShardedModel, layout: BucketLayout, segment: ParameterSpan) -> None:
    """Raise if a piece, or a tier's chunk, of a parameter begins inside of a block."""
    ranks = range(model.mesh.shard_size) if model.placement.shard_optimizer else range(1)
    begins = [layout.slice_bounds(rank)[0] for rank in ranks]
    inside = any(segment.offset < at < segment.stop and (at - segment.offset) % BLOCK for at in begins)
    if inside or model.optimizer_store is not None:
        raise ValueError(
            f"{name} has state_bits=8, and {'ranks' if inside else 'chunks of offloaded states'} would divide "
            f"{segment.name!r} inside of a block of {BLOCK} elements, which share a scale: add the line `{SETTING}` to "
            "the config, which lays parameters out in whole blocks"
        )
