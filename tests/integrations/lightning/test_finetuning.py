"""Runs that stop after a finetuning callback has unfrozen a backbone, and go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

from tests.integrations.lightning.trainers import Module, error, loader, trainer, weights, zero
from tests.launcher import Launcher


class Transfer(Module):
    """A backbone with batch norm, and a head; the optimizer takes what is trainable when it is made."""

    def __init__(self, kind: str = "SGD") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = nn.Linear(8, 16, bias=False)
            self.backbone = nn.Sequential(first, nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh())
            self.net = nn.Linear(16, 1)  # type: ignore[assignment]
        self.kind = kind

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.kind == "SGD":
            return torch.optim.SGD(trained, lr=0.02, momentum=0.9)
        return torch.optim.Adam(trained, lr=0.01)


class PartByPart(BaseFinetuning):
    """Unfreezes a layer at epoch 1 and another at epoch 2; has a hook of its own where the base restores groups."""

    def __init__(self) -> None:
        super().__init__()
        self.starts = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.starts += 1
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        parts = {1: pl_module.backbone[2], 2: pl_module.backbone[:2]}
        if epoch in parts:
            self.unfreeze_and_add_param_group(parts[epoch], optimizer, lr=0.005 * epoch)


def callback(kind: str) -> Any:
    if kind == "SGD":
        return BackboneFinetuning(1, lambda epoch: 1.5)
    return PartByPart()


class HeadFirst(Transfer):
    """Its optimizer takes the head alone; the callback leaves the backbone's batch norm trainable."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)


def parameters(module: Module) -> dict[str, Tensor]:
    """The weights without running statistics, which are each rank's own."""
    return {name: value for name, value in weights(module).items() if name in dict(module.named_parameters())}


def stopped_and_resumed(tmp: str, stage: int, kind: str) -> dict[str, Any]:
    """In one form of checkpoints: each occurs at every stage and with both callbacks."""
    found: dict[str, Any] = {}
    forms: list[tuple[str, dict[str, Any]]] = [("directory", {}), ("file", {"plugins": [TorchCheckpointIO()]})]
    form, flags = forms[(stage + (kind == "SGD")) % 2]
    kept = ModelCheckpoint(f"{tmp}/{form}", "{epoch}", save_top_k=-1)
    whole = Transfer(kind)
    made = trainer(zero(stage), max_epochs=4, callbacks=[callback(kind), kept], enable_checkpointing=True, **flags)
    made.fit(whole, loader())
    for epoch in range(3):
        module, again = Transfer(kind), callback(kind)
        run = trainer(zero(stage), max_epochs=4, callbacks=[again], **flags)
        path = f"{tmp}/{form}/epoch={epoch}.ckpt"
        assert os.path.isdir(path) == (form == "directory")
        run.fit(module, loader(), ckpt_path=path)
        assert all(parameter.requires_grad for parameter in module.parameters())
        assert getattr(again, "starts", 1) == 1
        groups = [[group["lr"] for group in t.optimizers[0].param_groups] for t in (run, made)]
        assert groups[0] == groups[1] and len(groups[0]) == (2 if kind == "SGD" else 3)
        found[f"{form} {epoch}"] = error(parameters(module), parameters(whole))
        found[f"{form} {epoch} losses"] = module.losses == whole.losses[-len(module.losses) :]
    found["sum"] = sum(float(tensor.double().sum()) for tensor in parameters(whole).values())
    return found


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(0, "SGD"), (0, "Adam"), (1, "SGD"), (1, "Adam"), (2, "SGD"), (2, "Adam"), (3, "SGD"), (3, "Adam")],
)
def test_a_run_goes_on_after_unfreezing(ranks: Launcher, tmp_path: Path, stage: int, kind: str) -> None:
    """Bit by bit as the run that never stopped, from before, between and after the epochs of unfreezing."""
    first, second = ranks(2)(stopped_and_resumed, str(tmp_path), stage, kind)
    assert first.pop("sum") == second.pop("sum")
    for found in (first, second):
        assert set(found.values()) == {0, True}, found


def head_first(stage: int | None) -> dict[str, Tensor]:
    module = HeadFirst()
    trainer("auto" if stage is None else zero(stage), max_epochs=3, callbacks=[callback("SGD")]).fit(module, loader())
    return parameters(module)


def test_a_batch_norm_that_comes_to_the_optimizer_later_trains_as_in_plain_torch(ranks: Launcher) -> None:
    """On one rank: DDP reduces no gradients of parameters that were frozen when it was made."""
    (expected,) = ranks(1)(head_first, None)
    for stage in (1, 3):
        (found,) = ranks(1)(head_first, stage)
        assert error(found, expected) < 1e-7
