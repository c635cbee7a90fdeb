"""A small language model as a pipeline under the Trainer, the same without one, and its data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy
from zero_strategy.pipeline.building import LayerSpec, TiedLayerSpec
from zero_strategy.pipeline.module import PipelineModule

VOCABULARY, LENGTH, WIDTH = 23, 6, 12
CLOSE = 2e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def layers() -> list[Any]:
    first = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)
    last = TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=head)
    return [first, *(LayerSpec(Block) for _ in range(6)), LayerSpec(nn.LayerNorm, WIDTH), last]


class Module(pl.LightningModule):
    """A tied language model, its steps as without a pipeline."""

    pipeline: PipelineModule

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_pipeline(self) -> Any:
        torch.manual_seed(0)
        return layers()

    def pipeline_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.pipeline.loss(batch)
        self.losses.append(float(loss))
        self.log("train_loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert isinstance(self, Plain) or all(p.grad is None for p in self.parameters())

    def on_after_backward(self) -> None:
        assert all(p.grad is not None for p in self.parameters())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.pipeline.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.pipeline.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.pipeline.outputs(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plain(Module):
    """The same without this package's strategy."""

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.pipeline = PipelineModule(layers(), 1, loss_fn=self.pipeline_loss, rank=0)


def loader(rows: int = 32, batch: int = 8, seed: int = 0, copies: int = 1, shuffle: bool = False) -> DataLoader[Any]:
    """Batches of all copies together; a rank gets the rows of its copy."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    tokens = tokens[dist.get_rank() % copies :: copies]
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch // copies, shuffle=shuffle)


def pipeline(stages: int | None = 2, zero: int = 1, **settings: Any) -> Any:
    return zero_strategy.PipelineStrategy(stages=stages, zero_stage=zero, **{"micro_batches": 4, **settings})
