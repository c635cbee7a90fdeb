"""Distributed trainings that are right, and must not be told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.verify import hand_written as hand
from tests.verify import parallel_model as models
from tests.verify import subjects
from zero_strategy.verify.ready_runs import AveragedRun, DDPRun, FSDP2Run
from zero_strategy.verify.subject import Subject, VerifySettings

STYLES: dict[str, Any] = {
    f"layers.{number}.{name}": style()
    for number in range(2)
    for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))
}


class TorchTensorParallel(AveragedRun):
    """`parallelize_module` on the MLPs; all ranks have the same batches."""

    data_rank, data_ranks = 0, 1

    def wrap(self, module: nn.Module) -> nn.Module:
        parallelize_module(self.model, init_device_mesh("cpu", (dist.get_world_size(),)), STYLES)
        return module

    def reduce(self) -> None:
        """Every rank has the same gradients of what is whole."""


class TensorAndFSDP(FSDP2Run):
    """Pairs of ranks divide MLPs, and `fully_shard` divides all over the pairs."""

    def __init__(self, subject: Subject, settings: VerifySettings) -> None:
        self.data_rank, self.data_ranks = dist.get_rank() // 2, 2
        super().__init__(subject, settings)

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(self.model, mesh["tensor"], STYLES)
        for layer in self.model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh["data"])
        return fully_shard(module, mesh=mesh["data"])  # type: ignore[return-value]


class Hybrid(FSDP2Run):
    """Sharded inside of pairs, copied across them."""

    def wrap(self, module: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in self.model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)  # type: ignore[return-value]


class DDPByBuckets(DDPRun):
    """Small buckets, of which gradients are views."""

    def wrap(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1, gradient_as_bucket_view=True)


class DDPWithoutBroadcast(DDPRun):
    """Every rank keeps its buffers."""

    shares_buffers = False

    def wrap(self, module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)


class ReducedEachMicroBatch(FSDP2Run):
    """Gradients are summed over ranks after every micro-batch."""

    def before_micro_batch(self, last: bool) -> Any:
        return super().before_micro_batch(True)


class Case(NamedTuple):
    run: type
    factory: Callable[[], Any]
    settings: dict[str, Any]
    ranks: int = 2


PLAIN: dict[str, Any] = {}
SEVERAL: dict[str, Any] = {"accumulation": 2, "clip_norm": 0.3}
LONG: dict[str, Any] = {"accumulation": 3}
BF16: dict[str, Any] = {"accumulation": 2, "compute_dtype": torch.bfloat16}
CAST: dict[str, Any] = {"accumulation": 2, "clip_norm": 0.3, "autocast": torch.bfloat16}

CASES: list[Case] = [
    *(Case(DDPRun, factory, settings) for factory, settings in (
        (subjects.tiny, SEVERAL), (models.net, PLAIN), (models.net, CAST), (models.net_sgd, LONG),
        (models.net_dropout, SEVERAL), (models.net_float64, SEVERAL), (models.net_bf16, PLAIN),
        (models.mixture, SEVERAL), (models.images, SEVERAL), (models.series, LONG), (models.net_adagrad, PLAIN),
        (models.net_groups, SEVERAL),
    )),
    *(Case(FSDP2Run, factory, settings) for factory, settings in (
        (models.net, SEVERAL), (models.net, BF16), (models.net, CAST), (models.net_sgd, LONG), (models.net_sgd, BF16),
        (models.net_dropout, SEVERAL), (models.net_dropout, {**BF16, "clip_norm": 0.3}), (models.net_float64, SEVERAL),
        (models.net_bf16, PLAIN), (models.mixture, SEVERAL), (models.images, SEVERAL), (models.series, LONG),
        (models.net_adagrad, PLAIN), (models.net_groups, SEVERAL),
    )),
    *(Case(run, models.net, SEVERAL) for run in (
        AveragedRun, DDPByBuckets, ReducedEachMicroBatch, hand.TensorParallel, hand.SequenceParallel,
        hand.ContextParallel, hand.PipelineParallel, hand.Monolithic,
    )),
    *(Case(run, models.net_sgd, LONG) for run in (
        hand.TensorParallel, hand.SequenceParallel, hand.ContextParallel, hand.PipelineParallel, TorchTensorParallel,
    )),
    Case(TorchTensorParallel, models.net, PLAIN),
    Case(TorchTensorParallel, models.net_dropout, LONG),
    Case(hand.TensorParallel, models.net_dropout, SEVERAL),
    Case(hand.TensorParallel, models.net_float64, SEVERAL),
    Case(hand.ExpertParallel, models.mixture, SEVERAL),
    Case(hand.ExpertParallel, models.mixture, LONG),
    Case(hand.TokenWeighted, models.padded, SEVERAL),
    Case(hand.TokenWeighted, models.padded, LONG),
    Case(AveragedRun, subjects.tiny, {**SEVERAL, "steps": 5}),
    Case(DDPWithoutBroadcast, models.images, LONG),
    Case(DDPRun, models.net_dropout, {"seed": 7, "clip_norm": 1.0}, 4),
    Case(FSDP2Run, models.net, {**BF16, "clip_norm": 0.3}, 4),
    Case(Hybrid, models.net, SEVERAL, 4),
    Case(Hybrid, models.net_sgd, BF16, 4),
    Case(TensorAndFSDP, models.net, PLAIN, 4),
    Case(TensorAndFSDP, models.net_sgd, LONG, 4),
]  # fmt: skip
