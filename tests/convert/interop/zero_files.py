"""Directories in DeepSpeed's layout for cases that it cannot produce on a processor: many ranks, NVMe, odd shapes.

A second description of the formats, from the side of the writer; the real files in the archive hold the two together.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Shapes = dict[str, tuple[int, ...]]


@dataclass
class Truth:
    """Contents of a directory, by name.

    Attributes:
        groups: Parameter shapes of each param group, in the order of the data.
        frozen: Shapes of frozen parameters.
        weights: fp32 values of all of them.
        moments: Kind -> name -> values.
    """

    groups: list[Shapes]
    frozen: Shapes = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        trained = {name: shape for group in self.groups for name, shape in group.items()}
        self.weights = {n: torch.randn(s, generator=generator) for n, s in {**trained, **self.frozen}.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            self.moments[kind] = {name: torch.randn(s, generator=generator) for name, s in trained.items()}

    def of(self, kind: str) -> dict[str, torch.Tensor]:
        """The values of one kind; "" for the weights."""
        return self.moments[kind] if kind else self.weights


def model_states(truth: Truth, world: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {
        "module": OrderedDict((name, value.to(dtype)) for name, value in truth.weights.items()),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in truth.groups],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 70,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        **more,
    }


def _hyper(number: int, params: list[int]) -> dict[str, Any]:
    return {"lr": 0.1 + number, "betas": (0.9, 0.99), "weight_decay": 0.01 * number, "step": 7, "params": params}


def write_stage2(
    tag: Path, truth: Truth, world: int, dtype: torch.dtype = torch.bfloat16, *, gaps: int = 0, prefix: str = "bf16_"
) -> Path:
    """Stages 1 and 2: slices without their padding; `gaps` elements after each parameter, as newer versions align."""
    tag.mkdir(parents=True)
    torch.save(model_states(truth, world, dtype), tag / "mp_rank_00_model_states.pt")
    flats: dict[str, list[torch.Tensor]] = {}
    for kind in ("", *truth.moments):
        for group in truth.groups:
            values = [torch.cat([truth.of(kind)[n].reshape(-1), torch.full((gaps,), 9.0)]) for n in group]
            flats.setdefault(kind, []).append(torch.cat(values))
    for rank in range(world):
        slices: list[torch.Tensor] = []
        state: dict[int, dict[str, Any]] = {}
        for number, whole in enumerate(flats[""]):
            size = -(-whole.numel() // (2 * world)) * 2
            begin = rank * size
            slices.append(whole[begin : begin + size].clone())
            state[number] = {"step": 7}
            for kind in truth.moments:
                padded = torch.full((size,), 5.0)
                values = flats[kind][number][begin : begin + size]
                padded[: values.numel()] = values
                state[number][kind] = padded
        content = {
            "zero_stage": 2,
            "partition_count": [world] * len(truth.groups),
            "single_partition_of_fp32_groups": slices,
            "base_optimizer_state": {"state": state, "param_groups": [_hyper(n, [n]) for n in range(len(slices))]},
            "param_alignment_paddings": [[gaps] * len(group) for group in truth.groups],
        }
        path = tag / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_config": {}, "ds_version": "0.19.8"}, path)
    return tag


def write_stage3(
    tag: Path, truth: Truth, world: int, dtype: torch.dtype = torch.bfloat16, *, nvme: bool = False
) -> Path:
    """Stage 3, a sub-group per param group: padded pieces; on NVMe, the buffers lie in raw files, too long ones."""
    tag.mkdir(parents=True)
    for rank in range(world):
        fragments = OrderedDict((name, _piece(truth.weights[name], rank, world).to(dtype)) for name in truth.frozen)
        empty = OrderedDict((name, torch.empty(0, dtype=dtype)) for name in truth.weights)
        shapes = OrderedDict((name, torch.Size(shape)) for name, shape in truth.frozen.items())
        more = {"module": empty, "frozen_param_shapes": shapes, "frozen_param_fragments": fragments}
        torch.save(model_states(truth, world, dtype, **more), tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flats, state, first = [], {}, 0
        for number, group in enumerate(truth.groups):
            buffers = {
                kind: torch.cat([_piece(truth.of(kind)[name], rank, world) for name in group])
                for kind in ("", *truth.moments)
            }
            key, first = f"{first}_{first + len(group) - 1}", first + len(group)
            if nvme:
                buffers = {kind: _swapped(tag, rank, kind, key, buffer) for kind, buffer in buffers.items()}
            flats.append(buffers.pop(""))
            state[number] = {"step": torch.tensor(7.0), **buffers}
        inner = {"state": state, "param_groups": [_hyper(n, [n]) for n in range(len(flats))]}
        content = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": flats, "optimizer_state_dict": inner}
        path = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": content, "ds_config": {}, "ds_version": "0.19.8"}, path)
    return tag


def _piece(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    size = -(-value.numel() // world)
    piece = torch.full((size,), float("nan"))  # DeepSpeed leaves there what was in memory
    values = value.reshape(-1)[rank * size : (rank + 1) * size]
    piece[: values.numel()] = values
    return piece


def _swapped(tag: Path, rank: int, kind: str, key: str, buffer: torch.Tensor) -> torch.Tensor:
    folder = tag / "offloaded_tensors" / f"rank{rank:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    aligned = torch.cat([buffer, torch.full((-buffer.numel() % 256,), 3.0)])  # files are multiples of a block
    aligned.numpy().tofile(folder / (f"{kind}-{key}.tensor.swp" if kind else f"{key}.tensor.swp"))
    empty = torch.empty(0)
    empty.ds_id = key  # type: ignore[attr-defined]
    return empty
