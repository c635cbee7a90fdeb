"""Lightning in ranks that exist already: environment, small modules and data, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

import lightning.pytorch as pl  # noqa: E402

import zero_strategy  # noqa: E402

WIDTH = 16
PLAIN = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def join(world: int | None = None) -> None:
    """Make Lightning see the ranks of a test pool as processes that torchrun started."""
    world = dist.get_world_size() if world is None else world
    rank = dist.get_rank()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29400",
        TORCHELASTIC_RUN_ID="test",
    )


def trainer(strategy: Any = "zero3", **flags: Any) -> pl.Trainer:
    """A quiet Trainer over the ranks of the pool."""
    join()
    settings: dict[str, Any] = {
        **PLAIN,
        "devices": dist.get_world_size(),
        "max_epochs": 1,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, **(settings | flags))


def train(module: pl.LightningModule, stage: int | None, **flags: Any) -> dict[str, Tensor]:
    """Train on the same batches sharded, or (stage None) in one plain process; the weights.

    Plain Lightning on one device sees at once what the ranks see each a part of.
    """
    if stage is None:
        flags = {**flags, "devices": 1}
        trainer("auto", **flags).fit(module, loader(batch=4 * dist.get_world_size(), split=False))
    else:
        trainer(zero(stage), **flags).fit(module, loader())
    return weights(module)


def zero(stage: int, **settings: Any) -> Any:
    """The strategy with units small enough for the tests' models."""
    return zero_strategy.ZeroStrategy(stage=stage, units={"min_numel": 0}, **settings)


class Net(nn.Module):
    """Blocks that become units, parameters of the root used inside and outside of modules, a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.out(self.norm(x))
        return out


class Module(pl.LightningModule):
    """Regression with two param groups; `scale` is used by training_step itself."""

    def __init__(self, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Net()
        self.scale = nn.Parameter(torch.ones(()))
        self.lr = lr
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss((self.net(x) * self.scale).squeeze(-1).float(), y.float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        others = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=self.lr
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(rows: int = 32, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=generator)
    return TensorDataset(x, x.sum(1).sin())


def loader(rows: int = 32, batch: int = 4, seed: int = 0, split: bool = True) -> DataLoader[Any]:
    """Batches in order; with `split` every rank has rows of its own, as many as the others."""
    dataset = data(rows, seed)
    if split and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        dataset = TensorDataset(*(tensor[rank::world] for tensor in dataset.tensors))
    return DataLoader(dataset, batch)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The full state dict; all ranks call it."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference; the names must be the same."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], *parts: str) -> Iterator[None]:
    """Like pytest.raises, for ranks: the message must hold all `parts`."""
    try:
        yield
    except kind as caught:
        missing = [part for part in parts if part not in str(caught)]
        assert not missing, f"{missing} not in: {caught}"
    else:
        raise AssertionError(f"no {kind} was raised")
