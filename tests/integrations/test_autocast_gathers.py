"""Gathers in autocast's dtype under the Trainer, Fabric and Accelerate, whose settings ask for autocast."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from tests.engine.float8 import Net, batches, error_of, optimizer_of, plain_net
from tests.integrations.accelerate.training import fresh_state
from tests.integrations.lightning.trainers import join, trainer, weights, zero
from tests.launcher import Launcher
from zero_strategy import ZeroEngine, engine_of
from zero_strategy.integrations import fabric as fabrics
from zero_strategy.integrations.accelerate import ZeroAccelerator

Found = tuple[list[float], dict[str, Tensor], int]
"""Losses, weights, and the bytes that this rank sent in gathers."""


class Module(pl.LightningModule):
    """The net of the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()
        self.losses: list[float] = []
        self.sent = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = error_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        self.sent = sent_by(self.trainer.strategy.engine)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def sent_by(engine: ZeroEngine | None) -> int:
    assert engine is not None
    return engine.counters.bytes["all_gather"]


def in_trainer(gathers: str) -> Found:
    module = Module()
    loader: Any = DataLoader(batches(dist.get_rank()), batch_size=None)  # type: ignore[arg-type]
    strategy = zero(3, fused_optimizers=False, communication={"parameters": gathers})
    trainer(strategy, precision="bf16-mixed").fit(module, loader)
    return module.losses, weights(module.net), module.sent


def in_fabric(gathers: str) -> Found:
    join()
    settings: dict[str, Any] = {"units": {"min_numel": 0}, "communication": {"parameters": gathers}}
    strategy = fabrics.ZeroStrategy(stage=3, fused_optimizers=False, **settings)
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-mixed")
    run.launch()
    net, losses = plain_net(), []
    model, optimizer = run.setup(net, optimizer_of(net))
    for x in batches(dist.get_rank()):
        loss = error_of(model, x)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sent = sent_by(engine_of(net))
    return losses, weights(net), sent


def in_accelerate(gathers: str) -> Found:
    config: dict[str, Any] = {"stage": 3, "units": {"min_numel": 0}, "fused_optimizers": False}
    config["communication"] = {"parameters": gathers}
    with fresh_state():
        accelerator = ZeroAccelerator(zero_config=config, cpu=True, mixed_precision="bf16")
        model: Any = plain_net()
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        losses = []
        for x in batches(dist.get_rank()):
            loss = error_of(model, x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        sent = sent_by(accelerator.engine(model))
        return losses, accelerator.get_state_dict(model), sent


def of_one_process(*, whole_step: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and weights, of plain torch on the micro-batches of both ranks.

    Args:
        whole_step: Autocast includes the error, as around a Trainer's step; else the forward alone.
    """
    model: Net = plain_net()
    optimizer, losses = optimizer_of(model), [[], []]  # type: tuple[Any, list[list[float]]]
    for micro in zip(batches(0), batches(1), strict=True):
        for rank, x in enumerate(micro):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                out = model(x)
                loss = (out - x.cos()).square().mean() if whole_step else None
            if loss is None:  # Fabric and Accelerate give outputs in float32
                loss = (out.float() - x.cos()).square().mean()
            (loss / 2).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("face", [in_trainer, in_fabric, in_accelerate])
def test_faces_gather_in_autocasts_dtype(ranks: Launcher, face: Any) -> None:
    losses, expected = of_one_process(whole_step=face is in_trainer)
    values, casts = ranks(2)(face, "values"), ranks(2)(face, "autocast")
    for rank, ((_, _, of_values), (found, state, sent)) in enumerate(zip(values, casts, strict=True)):
        assert found == losses[rank]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)
        assert sent < 0.56 * of_values, "all but norms in 16 bits"
