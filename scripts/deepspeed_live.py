"""State of a live DeepSpeed engine, in whole tensors by name; gathered without DeepSpeed's conversion tools.

Each optimizer wrapper keeps flat fp32 partitions; their order is taken from the wrapper's own lists of parameter
objects, never from names or from what a checkpoint says. Every gathered fp32 weight is compared with the parameter that
forward uses (rounded to its dtype), so a wrong order cannot pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

Flat = list[tuple[list[str], torch.Tensor]]


def live_state(engine: Any) -> dict[str, Any]:
    """Weights, fp32 weights, optimizer state, hyper-parameters and counters; every rank calls it."""
    wrapper, names = engine.optimizer, {id(p): name for name, p in engine.module.named_parameters()}
    weights = _weights(engine)
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        fp32, states, groups = _stage3(wrapper, names)
    elif hasattr(wrapper, "round_robin_bit16_groups"):
        groups_of = wrapper.round_robin_bit16_groups
        fp32, states, groups = _flat(wrapper, names, groups_of, wrapper.single_partition_of_fp32_groups)
    elif hasattr(wrapper, "fp32_groups_flat_partition"):
        fp32, states, groups = _flat(wrapper, names, wrapper.bf16_groups, wrapper.fp32_groups_flat_partition)
    else:
        fp32, states, groups = _whole(wrapper, names)
    for name, tensor in fp32.items():
        if not torch.equal(tensor.to(weights[name].dtype).reshape(weights[name].shape), weights[name]):
            raise AssertionError(f"the gathered {name} is not what forward uses")
    scaler = getattr(wrapper, "loss_scaler", None)
    scale = getattr(scaler, "cur_scale", None) or getattr(wrapper, "cur_scale", None)
    return {
        "weights": weights,
        "fp32": fp32,
        "states": states,
        "groups": groups,
        "loss_scale": None if engine.fp16_enabled() is False else float(wrapper.loss_scale if scale is None else scale),
        "counters": {k: getattr(engine, k) for k in ("global_steps", "global_samples", "skipped_steps")},
        "lr_scheduler": engine.lr_scheduler.state_dict(),
    }


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    parameters = list(engine.module.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
    with deepspeed.zero.GatheredParameters(parameters):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def _gathered(part: torch.Tensor) -> list[torch.Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach().clone())
    return parts


def _flat(wrapper: Any, names: dict[int, str], groups_of: Any, partitions: Any) -> Any:
    """Stages 1 and 2: per group one flat tensor, sliced evenly."""
    fp32: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for parameters, part, group in zip(groups_of, partitions, wrapper.optimizer.param_groups, strict=True):
        flat = {"": torch.cat(_gathered(part))}
        state = wrapper.optimizer.state.get(group["params"][0], {})
        scalars = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                flat[key] = torch.cat(_gathered(value))
            elif value is not None:
                scalars[key] = float(value)
        offset, members = 0, []
        for p in parameters:
            name = names[id(p)]
            members.append(name)
            whole = {key: v[offset : offset + p.numel()].view(p.shape).clone() for key, v in flat.items()}
            fp32[name] = whole.pop("")
            states[name] = {**whole, **scalars}
            offset += p.numel()
        groups.append({"params": members, **_plain(group)})
    return fp32, states, groups


def _stage3(wrapper: Any, names: dict[int, str]) -> Any:
    """Stage 3: per sub-group, each parameter divided among the ranks by itself."""
    fp32: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = [{"params": [], **_plain(group)} for group in wrapper.optimizer.param_groups]
    for number, parameters in enumerate(wrapper.fp16_groups):
        with_state = wrapper.fp32_partitioned_groups_flat[number]
        swapped = with_state.numel() == 0
        if swapped:
            wrapper._optimizer_states_and_gradient_swap_in(number)
        flat = {"": _gathered(with_state)}
        scalars = {}
        for key, value in wrapper.optimizer.state.get(with_state, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                flat[key] = _gathered(value)
            elif value is not None:
                scalars[key] = float(value)
        if swapped:
            wrapper._optimizer_states_and_gradient_swap_out(number)
        offset = 0
        for p in parameters:
            name, part = names[id(p)], p.partition_numel()
            whole = {
                key: torch.cat([v[offset : offset + part] for v in parts])[: p.ds_numel].view(p.ds_shape).clone()
                for key, parts in flat.items()
            }
            fp32[name] = whole.pop("")
            states[name] = {**whole, **scalars}
            groups[wrapper.sub_group_to_group_id[number]]["params"].append(name)
            offset += part
    return fp32, states, groups


def _whole(wrapper: Any, names: dict[int, str]) -> Any:
    """Stage 0: every rank has everything; fp32 copies in the order of the low-precision groups."""
    inner = getattr(wrapper, "optimizer", None)
    inner = inner if isinstance(inner, torch.optim.Optimizer) else wrapper
    fp32: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    groups = []
    fp16_groups = getattr(wrapper, "fp16_groups", None)
    for number, group in enumerate(inner.param_groups):
        originals = group["params"] if fp16_groups is None else fp16_groups[number]
        if fp16_groups is not None and len(group["params"]) != len(originals):
            flat = {"": group["params"][0].detach(), **inner.state.get(group["params"][0], {})}
            _cut(flat, originals, names, fp32, states)
        else:
            for p, copy in zip(originals, group["params"], strict=True):
                name = names[id(p)]
                fp32[name] = copy.detach().clone()
                states[name] = {
                    k: v.clone() if isinstance(v, torch.Tensor) and v.dim() else float(v)
                    for k, v in inner.state.get(copy, {}).items()
                    if v is not None
                }
        groups.append({"params": [names[id(p)] for p in originals], **_plain(group)})
    return fp32, states, groups


def _cut(flat: Any, originals: Any, names: Any, fp32: Any, states: Any) -> None:
    tensors = {k: v for k, v in flat.items() if isinstance(v, torch.Tensor) and v.dim()}
    scalars = {k: float(v) for k, v in flat.items() if k not in tensors and v is not None}
    offset = 0
    for p in originals:
        whole = {k: v[offset : offset + p.numel()].view(p.shape).clone() for k, v in tensors.items()}
        fp32[names[id(p)]] = whole.pop("")
        states[names[id(p)]] = {**whole, **scalars}
        offset += p.numel()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, (bool, int, float, tuple, list, type(None)))
            and key not in ("params", "param_names")}  # fmt: skip
