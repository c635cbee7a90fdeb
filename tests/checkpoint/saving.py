"""Saves checkpoints from several virtual ranks, run one after the other in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from zero_strategy.checkpoint import CheckpointPlan, CheckpointWriter, FileKind, Piece, TensorSpec
from zero_strategy.checkpoint.layout import DTYPES

Tensors = Mapping[str, torch.Tensor]
States = Mapping[str, Mapping[str, Tensors]]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of any dtype; floats may be NaN or infinite."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


def all_dtypes() -> dict[str, torch.Tensor]:
    return {name.lower(): random_tensor(dtype, (3, 6), seed) for seed, (name, dtype) in enumerate(DTYPES.items())}


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's content, which compares equal also where it has NaN."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))


def specs(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


def plan_of(weights: Tensors, states: States | None = None, **options: Any) -> CheckpointPlan:
    state_specs = {o: {kind: specs(t) for kind, t in kinds.items()} for o, kinds in (states or {}).items()}
    return CheckpointPlan.build(specs(weights), state_specs, **options)


def slices(tensors: Tensors, rank: int, world_size: int) -> Iterable[Piece]:
    """Rank r's r-th slice of all elements, laid end to end as a flat buffer would be."""
    total = sum(tensor.numel() for tensor in tensors.values())
    begin, end = total * rank // world_size, total * (rank + 1) // world_size
    at = 0
    for name, tensor in tensors.items():
        start, stop = max(begin - at, 0), min(end - at, tensor.numel())
        if start < stop:
            yield Piece(name, start, tensor.reshape(-1)[start:stop])
        at += tensor.numel()


def save(
    directory: Path,
    weights: Tensors,
    states: States | None = None,
    *,
    world_size: int = 2,
    extra_files: Mapping[str, bytes] | None = None,
    manifest: Mapping[str, Any] | None = None,
    **options: Any,
) -> CheckpointPlan:
    plan = plan_of(weights, states, **options)
    writers = [CheckpointWriter(directory, rank=r, world_size=world_size) for r in range(world_size)]
    for writer in writers:
        writer.prepare(plan)
    kinds: dict[FileKind, Tensors] = {"model": weights}
    kinds |= {(o, kind): tensors for o, by_kind in (states or {}).items() for kind, tensors in by_kind.items()}
    for rank, writer in enumerate(writers):
        for kind, tensors in kinds.items():
            writer.write(kind, slices(tensors, rank, world_size))
    described = plan.manifest(**{"world_size": 1, "stage": 0, **(manifest or {})})
    for writer in writers:
        writer.commit(described, extra_files)
    return plan
