"""The plain twin's optimizer step: by the engine's formula, for its bits, and by torch's, to hold that against.

The engine takes the steps of torch's Adam, AdamW, SGD and Adagrad in fused ops, whose last bit is not torch's. The twin
does the same to whole parameters, so that all else can be compared by bits; and takes each step once more by the
optimizer's own code, from the same state, which may differ by roundings only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy import ops
from zero_strategy.config import ZeroConfig
from zero_strategy.optim.fused import FusedOptimizer
from zero_strategy.optim.update_rules import Segment, UpdateRule, in_memory_order, rule_for, rule_in_memory

ROUNDINGS = 32.0
"""Units in the last place of a tensor's largest value by which the two formulas may differ in one step."""


def engine_rule(
    optimizer: Optimizer, config: ZeroConfig, parameters: Iterable[nn.Parameter], masters: bool = False
) -> UpdateRule | None:
    """The rule by which the engine takes this optimizer's steps; None where it is left to the optimizer's own code.

    Args:
        optimizer: The optimizer.
        config: The sharded side's settings.
        parameters: What it updates.
        masters: Whether some of them are master weights of low-precision parameters.
    """
    parameters = list(parameters)
    if any(parameter.requires_grad and parameter.dtype != torch.float32 for parameter in parameters):
        return None
    if config.offload.optimizer != "none":
        return rule_for(optimizer, any_implementation=True)
    devices = {parameter.device.type for parameter in parameters}
    return rule_in_memory(optimizer, fused_optimizers=config.fused_optimizers, devices=devices, masters=masters)


@torch.no_grad()
def take_step(optimizer: Optimizer, rule: UpdateRule | None, names: dict[int, str]) -> dict[str, str]:
    """Take a step of an optimizer over whole parameters that hold their gradients.

    Args:
        optimizer: The optimizer.
        rule: What takes the step, None for the optimizer itself.
        names: Of the parameters, by id.

    Returns:
        In what way the rule's step and the optimizer's own differ by more than roundings, by name.
    """
    if rule is None or isinstance(optimizer, FusedOptimizer):
        optimizer.step()
        return {}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = copy.deepcopy(optimizer)
    copies = [parameter for group in own.param_groups for parameter in group["params"]]
    for parameter, other in zip(held, copies, strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone()
    own.step()
    for device in {parameter.device.type for parameter in held}:
        ops.ensure(device)
    rule.update([_segment(optimizer, group, p) for group in optimizer.param_groups for p in group["params"] if _has(p)])
    found: dict[str, str] = {}
    for parameter, other in zip(held, copies, strict=True):
        state, theirs = optimizer.state.get(parameter, {}), own.state.get(other, {})
        pairs = {"": (parameter, other)} | {f"{key} of ": (state.get(key), theirs.get(key)) for key in theirs}
        for key, (mine, wanted) in pairs.items():
            if isinstance(mine, Tensor) and isinstance(wanted, Tensor) and (how := _far(mine, wanted)):
                found[f"{key}{names[id(parameter)]}"] = how
    return found


def _has(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None


def _segment(optimizer: Optimizer, group: dict[str, object], parameter: nn.Parameter) -> Segment:
    assert parameter.grad is not None
    gradient = torch.empty_like(parameter, dtype=parameter.grad.dtype).copy_(parameter.grad)
    state = optimizer.state[parameter]
    param, grad = in_memory_order(parameter), in_memory_order(gradient)
    return Segment(group, param, grad, state, like=parameter, owner=parameter)


def _far(mine: Tensor, wanted: Tensor) -> str:
    if mine.numel() == 0:
        return ""
    a, b = mine.double(), wanted.double()
    gap = float((a - b).abs().nan_to_num(0.0 if torch.equal(a.isnan(), b.isnan()) else float("inf")).max())
    bound = ROUNDINGS * torch.finfo(torch.float32).eps * float(b.abs().nan_to_num(0.0).max())
    if gap <= bound:
        return ""
    return f"the fused step and the optimizer's own differ by up to {gap:.3g}, roundings explain {bound:.3g}"
