"""Refusals of a pipeline under the Trainer, on all ranks, and the division of batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import zero_strategy
from tests.integrations.lightning.pipelines import LENGTH, Module, Plain, layers, loader, pipeline
from tests.integrations.lightning.trainers import join, raises, trainer
from tests.launcher import Launcher
from zero_strategy.integrations.lightning.namespaces import strategy_class
from zero_strategy.pipeline.building import LayerSpec
from zero_strategy.pipeline.module import PipelineModule, join_parts, split_batch
from zero_strategy.pipeline.transport import PipelineError


class Outside(Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoPipeline(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> None: ...


class Doubled(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2 * self.pipeline.loss(batch)


class Forgot(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)


class Unpaired(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline.loss(batch[0])


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("in a layer")


class Broken(Module):
    def configure_pipeline(self) -> Any:
        return [*layers()[:-1], LayerSpec(Breaks)]


class Ends(IterableDataset[Any]):
    """Batches of rank 0, one less on rank 1."""

    def __iter__(self) -> Any:
        rows = torch.zeros(3 - dist.get_rank(), 8, LENGTH, dtype=torch.long)
        return iter([(row, row) for row in rows])


def refusals() -> None:
    def fails(module: pl.LightningModule, data: Any, kind: type[Exception], *parts: str, **settings: Any) -> None:
        with raises(kind, *parts):
            trainer(pipeline(**{"timeout_seconds": 8.0, **settings})).fit(module, data)

    rank = dist.get_rank()
    fails(Outside(), loader(), ValueError, "Outside", "scale", "configure_pipeline")
    fails(Manual(), loader(), ValueError, "automatic_optimization")
    fails(NoPipeline(), loader(), TypeError, "NoPipeline has no configure_pipeline()")
    fails(Doubled(), loader(), RuntimeError, "2 times as fast", "pipeline_loss")
    fails(Forgot(), loader(), RuntimeError, "did not call self.pipeline.loss")
    fails(Unpaired(), loader(), TypeError, "pipeline_batch", "Tensor")
    fails(Module(), loader(batch=3), ValueError, "3 row(s)", "4 micro-batches")
    fails(Module(), loader(), ValueError, "pipeline.stages is 9", stages=9)
    fails(Module(), loader(rows=16 + 8 * rank), ValueError, "train_dataloader", "rank 0: [2], rank 1: [3]")
    fails(Module(), loader(seed=rank), ValueError, "same batches", "rank 1: 8 rows")
    fails(Module(), DataLoader(Ends(), None), ValueError, "rank(s) [1] end after 2 batches")
    if rank == 1:
        fails(Broken(), loader(), ZeroDivisionError, "in a layer")
    else:
        fails(Broken(), loader(), PipelineError, "stage 1", "ZeroDivisionError: in a layer")


def test_refusals(ranks: Launcher) -> None:
    ranks(2)(refusals)


def whole_engine() -> None:
    join()
    strategy = strategy_class("lightning.fabric")(pipeline={"stages": 2})
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    module = nn.Linear(2, 2)
    with raises(ValueError, "pipeline.stages is 2", "PipelineModule"):
        fabric.setup(module, torch.optim.SGD(module.parameters()))
    with raises(ValueError, "pipeline.stages is 2", "PipelineModule"):
        trainer(zero_strategy.ZeroStrategy(pipeline={"stages": 2})).fit(Plain(), loader())


def test_other_strategies_say_what_takes_pipelines(ranks: Launcher) -> None:
    ranks(2)(whole_engine)


def test_division_of_batches() -> None:
    x, y = torch.arange(20).reshape(10, 2), torch.arange(10)
    parts = split_batch({"x": x, "pair": [y, 3, "text"]}, 4)
    assert [len(part["x"]) for part in parts] == [3, 3, 2, 2]
    assert all(part["pair"][1:] == [3, "text"] for part in parts)
    joined = join_parts([(part["x"], part["pair"][0].sum()) for part in parts])
    assert torch.equal(joined[0], x) and joined[1].tolist() == [3, 12, 13, 17]
    with pytest.raises(ValueError, match=r"batch\[0\] has 10.*batch\[1\] has 9"):
        split_batch((y, y[:9]), 2)
    with pytest.raises(ValueError, match=r"no tensor"):
        split_batch("text", 2)


def test_module_without_strategy() -> None:
    torch.manual_seed(0)
    module = PipelineModule(layers(), 2, loss_fn=Module().pipeline_loss, rank=0)
    with pytest.raises(ValueError, match=r"all 2 stages"):
        module.loss((torch.zeros(1, 2), torch.zeros(1, 2)))
