"""Writes checkpoints of model-parallel DeepSpeed runs from full tensors, as the formats say; no DeepSpeed needed.

Every full tensor is divided by the rules among tensor-parallel ranks, layers among stages, and each rank's optimizer
state among data-parallel ranks (ZeRO 1, with padding).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_strategy.convert.megatron import MergeRules, split

Tensors = Mapping[str, torch.Tensor]
KINDS = ("exp_avg", "exp_avg_sq")


def value(kind: str, name: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, kind + name)))
    return torch.randn(tuple(shape), generator=generator)


def shard(name: str, whole: torch.Tensor, rules: MergeRules, tp: int, degree: int) -> torch.Tensor:
    return split(name, whole, rules.rule(name), degree)[tp].contiguous() if degree > 1 else whole


def save_optimizer(path: Path, mp: int, groups: Sequence[Mapping[str, Tensors]], dp: int, step: int = 5) -> None:
    """The optimizer files of one model-parallel rank: per group, kind -> name -> tensor."""
    for rank in range(dp):
        slices: dict[str, list[torch.Tensor]] = {"fp32": [], **{kind: [] for kind in KINDS}}
        paddings = []
        for group in groups:
            for kind in slices:
                flat = torch.cat([tensor.flatten().float() for tensor in group[kind].values()])
                padding = -flat.numel() % (2 * dp)
                padded = torch.cat([flat, torch.full((padding,), 99.0)])
                size = padded.numel() // dp
                kept = max(0, min(size, flat.numel() - rank * size))
                part = padded[rank * size : (rank + 1) * size]
                slices[kind].append((part[:kept] if kind == "fp32" else part).clone())
            paddings.append(size - kept)
        state = {g: {"step": step, **{kind: slices[kind][g] for kind in KINDS}} for g in range(len(groups))}
        inner = {
            "single_partition_of_fp32_groups": slices["fp32"],
            "base_optimizer_state": {
                "state": state,
                "param_groups": [{"lr": 0.1 * (g + 1), "params": [g]} for g in range(len(groups))],
            },
            "group_paddings": paddings, "partition_count": [dp] * len(groups), "zero_stage": 1, "ds_version": "0.19.8",
        }  # fmt: skip
        file = path / f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}, file)


def save_model(path: Path, mp: int, groups: Sequence[Tensors], pp: int, tp: int, dp: int, **more: Any) -> None:
    state = {
        "module": None, "buffer_names": [], "optimizer": None, "frozen_param_shapes": None,
        "param_shapes": [OrderedDict((name, t.shape) for name, t in group.items()) for group in groups],
        "shared_params": {}, "lr_scheduler": None, "dp_world_size": dp, "mp_world_size": pp * tp, "global_steps": 5,
        "global_samples": 40, "skipped_steps": 0, "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": "0.19.8", "checkpoint_parallel_dimensions": {"pp_degree": pp, "tp_degree": tp}, **more,
    }  # fmt: skip
    torch.save(state, path / f"mp_rank_{mp:02d}_model_states.pt")


def save_rank(
    path: Path, mp: int, names: Mapping[str, str], parts: Tensors, degrees: Sequence[int], **more: Any
) -> None:
    """Model and optimizer files of one rank.

    Args:
        path: The tag's directory.
        mp: Which rank.
        names: Parameter -> group, "a" or "b".
        parts: This rank's shards: name -> fp32 weight, and "kind:name" -> moment.
        degrees: pp, tp, dp.
        more: Further entries of the model file.
    """
    weights = [{n: parts[n] for n, g in names.items() if g == group} for group in "ab"]
    weights = [group for group in weights if group]
    states = [{"fp32": g, **{k: {n: parts[f"{k}:{n}"] for n in g} for k in KINDS}} for g in weights]
    save_model(path, mp, weights, *degrees, **more)
    save_optimizer(path, mp, states, degrees[2])


def shards_of(whole: Mapping[str, Sequence[int]], rules: MergeRules, tp: int, degree: int) -> dict[str, torch.Tensor]:
    """Weights under their names and moments under "kind:name", of one tensor-parallel rank."""
    made = {}
    for name, shape in whole.items():
        made[name] = shard(name, value("w", name, shape), rules, tp, degree)
        for kind in KINDS:
            made[f"{kind}:{name}"] = shard(name, value(kind, name, shape), rules, tp, degree)
    return made
